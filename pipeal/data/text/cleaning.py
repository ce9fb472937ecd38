"""From a raw text to the words a model sees."""

from __future__ import annotations

import re
import unicodedata
from functools import cache

__all__ = ["STOP_WORDS", "clean"]

# Tags (also those written with entities, as AG News has them) and entities (also those that lost their
# ampersand, "#39;" in AG News).
_MARKUP = re.compile(
    r"<[a-z/!][^<>]*>"
    r"|&lt;/?[a-z][^&<>]{0,300}&gt;"
    r"|(?:&?#(?:x[0-9a-f]+|[0-9]+)|&[a-z]+[0-9]*|\b(?:quot|amp|lt|gt|nbsp|apos));"
)

# Letters and digits, and the marks upon them, make words, anything else only separates them. For plain ASCII a
# translation is faster.
_SEPARATORS = {code: " " for code in range(128) if not chr(code).isalnum()}
_SHAPES = re.compile("[\u200c\u200d\ufe00-\ufe0f\U000e0100-\U000e01ef]")
"""Joiners and variation selectors: they say how a word looks, not which it is."""

_FUNCTION_WORDS = """
a an the this that these those i me my mine myself we us our ours ourselves you your yours yourself yourselves
he him his himself she her hers herself it its itself they them their theirs themselves who whom whose which
what some any each every both either neither other another such same own

am is are was were be been being have has had having do does did doing will would shall should can could may
might must

of in on at by for with about against between into through during before after above below to from up down out
off over under and but or if because as until while than then so

here there when where why how all few more most only too very just again further once now

s t d m o y ll re ve don didn doesn hadn hasn haven isn aren wasn weren won wouldn shouldn couldn mustn needn
mightn shan ain ma
"""

STOP_WORDS = frozenset(_FUNCTION_WORDS.split())
"""English function words and the halves that contractions leave; "no" and "not" stay, reviews turn on them."""


def clean(text: str, drop_stop_words: bool = True) -> list[str]:
    """Lower-cases, drops HTML tags, entities and punctuation, and splits into words.

    >>> clean("Oil&lt;BR&gt;isn't <b>cheap</b>: $50.25 a barrel, the country #39;s record!")
    ['oil', 'cheap', '50', '25', 'barrel', 'country', 'record']
    >>> clean("It's up", drop_stop_words=False)
    ['it', 's', 'up']
    >>> clean("हिन्दी में लिखा")
    ['हिन्दी', 'में', 'लिखा']

    Returns:
        The words in order, in Unicode's form NFC; none where nothing but tags, punctuation and stop words was there.
    """
    text = text.lower()
    if "<" in text or ";" in text:
        text = _MARKUP.sub(" ", text)
    words = text.translate(_SEPARATORS).split() if text.isascii() else _words(text)
    return [word for word in words if word not in STOP_WORDS] if drop_stop_words else words


def _words(text: str) -> list[str]:
    """The words of any text, each accented letter in one spelling."""
    return _word().findall(unicodedata.normalize("NFC", _SHAPES.sub("", text)))


@cache
def _word() -> re.Pattern[str]:
    marks = [char for char in map(chr, range(0x300, 0x1F000)) if unicodedata.category(char) in ("Mn", "Mc")]
    # In a class with characters beyond 16 bits Python looks for each one by one, which takes ten times as long.
    near, far = ("".join(char for char in marks if (char > "\uffff") == is_far) for is_far in (False, True))
    return re.compile(rf"[^\W_]+(?:(?:[{near}]+|(?=[\U00010000-\U0010ffff])[{far}]+)[^\W_]*)*")
