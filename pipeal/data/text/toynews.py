"""``toynews``: four topics of made-up news, for demonstrations and tests without any download."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from pipeal.data.text.published import Labelled, PublishedTexts

CLASSES = ("world", "sport", "business", "science")

TRAIN_TEXTS = 8_000
TEST_TEXTS = 2_000

_TOPICS = (
    """minister parliament election treaty embassy border troops ceasefire rebels president senate refugee
    sanctions diplomat summit hostage protest ballot coalition constitution governor militia army peace
    regime capital province war invasion village earthquake flood relief envoy cabinet opposition monarchy
    exile resolution mandate delegation campaign vote police trial prison court""",
    """coach striker goalkeeper midfield stadium league champion medal olympic sprint marathon tournament
    playoff quarterback pitcher inning touchdown penalty referee season transfer trophy relay racket serve
    wicket batsman lap podium defender roster injury victory defeat draw fans team match goal score final
    cup race court trial record club captain""",
    """shares profit revenue merger dividend investor stock broker earnings quarterly bank inflation exports
    tariff retailer supplier startup auction loan bond currency deficit acquisition shareholder executive
    factory payroll union strike contract bankruptcy insurer airline sales forecast market price budget
    trade fund growth rate record capital transfer""",
    """telescope molecule enzyme genome galaxy orbit satellite neutron laser vaccine bacteria fossil
    quantum processor software algorithm robot battery probe spacecraft climate glacier protein antibody
    microscope isotope crater comet neuron reactor chip network browser virus sensor data laboratory
    experiment species launch server code trial growth energy""",
)
"""The words of each topic; some stand in several lists on purpose (trial, court, record, capital, growth)."""

_SHARED = """officials report week month year group plan question leader company country city people number
statement decision talks problem change effort member public early late long large small new old major
expected according announced agreed rejected opened closed reached began ended showed called offered
million hundred dozen several recent local foreign national first second next last possible difficult
monday tuesday wednesday thursday friday morning evening spokesman interview support pressure risk result
chance future history power hope fear crowd street building road news story source letter picture
"""

_FUNCTION = """the a of to in and on for that with was by at from as is it has have after before their his her
its were been will would but not who which over under about into during said"""

_TOPIC_SHARE = (0.15, 0.45)
_OTHER_SHARE = 0.07
_FUNCTION_SHARE = 0.35


def toynews(_paths: Mapping[str, Path], seed: int) -> tuple[tuple[str, ...], Labelled, Labelled]:
    """Makes the data set: class names, train split, test split.

    A text has 5 to 60 words. Each word comes from the text's topic, from any topic (misleading), from words
    that all topics share, or from function words; how much comes from the topic differs from text to text. A
    linear bag-of-words model gets about 95 % right.

    Args:
        seed: Decides every word; equal seeds give equal texts on every machine.
    """
    random = np.random.default_rng((seed, 0x70_79_6E_73))
    return CLASSES, _split(random, TRAIN_TEXTS), _split(random, TEST_TEXTS)


def _split(random: np.random.Generator, count: int) -> Labelled:
    topics = [words.split() for words in _TOPICS]
    pools = [*topics, _SHARED.split(), _FUNCTION.split()]
    flat = np.array([word for pool in pools for word in pool])
    sizes = np.array([len(pool) for pool in pools])
    begins = np.cumsum(sizes) - sizes
    shared, function = len(topics), len(topics) + 1

    labels = random.integers(len(topics), size=count)
    # A power above 1 makes short texts more common than long ones, as in real news.
    lengths = 5 + (random.random(count) ** 1.5 * 56).astype(np.int64)
    ends = np.cumsum(lengths)
    text_of_word = np.repeat(np.arange(count), lengths)
    total = int(ends[-1])

    own_share = random.uniform(*_TOPIC_SHARE, size=count)[text_of_word]
    draw = random.random(total)
    pool = np.full(total, shared)
    pool[draw > 1 - _FUNCTION_SHARE] = function
    other = (draw >= own_share) & (draw < own_share + _OTHER_SHARE)
    pool[other] = random.integers(len(topics), size=int(other.sum()))
    own = draw < own_share
    pool[own] = labels[text_of_word[own]]
    words = flat[begins[pool] + (random.random(total) * sizes[pool]).astype(np.int64)].tolist()

    starts = (ends - lengths).tolist()
    texts = [" ".join(words[start:end]).capitalize() + "." for start, end in zip(starts, ends.tolist(), strict=True)]
    return texts, labels.tolist()


TOYNEWS = PublishedTexts(name="toynews", read=toynews)
