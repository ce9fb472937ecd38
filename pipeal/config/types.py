"""The types of what a run can be told.

They carry the checks (pydantic applies them in :mod:`pipeal.config.load`) and, as their description, the words for what
is wanted. Scalars are strict: the text ``"3"`` is no number, and ``true`` is not 1.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field

from pipeal.core.errors import ConfigError, check_named
from pipeal.core.methods import METHODS, MODES, with_all
from pipeal.core.options import MOST_THREADS


def _names(listed: object) -> object:
    """As the command line and ``--set`` take them: in one word, with commas between."""
    return [name.strip() for name in listed.split(",")] if isinstance(listed, str) else listed


def one_of(kind: str, names: Iterable[str]) -> AfterValidator:
    """Asks that a text is one of some names, of what kind of thing they are."""

    def check(name: str) -> str:
        check_named(kind, name, names)
        return name

    return AfterValidator(check)


def _check_methods(names: tuple[str, ...]) -> tuple[str, ...]:
    for place, name in enumerate(names):
        check_named("method", name, METHODS)
        if name in names[:place]:
            raise ConfigError(f"found {name} twice; expected each method once")
    if len(names) < 2:
        raise ConfigError(f"found {' '.join(names) or 'none'}, expected two methods or more of {', '.join(METHODS)}")
    return names


Text: TypeAlias = Annotated[str, Field(strict=True, pattern=r"^[^\x00]+$", description="text")]
Flag: TypeAlias = Annotated[bool, Field(strict=True, description="true or false")]
Whole: TypeAlias = Annotated[
    int, Field(strict=True, ge=0, lt=2**31, description="a whole number, at least 0 and below 2^31")
]
Count: TypeAlias = Annotated[
    int, Field(strict=True, ge=1, lt=2**31, description="a whole number, at least 1 and below 2^31")
]
Pixels: TypeAlias = Annotated[
    int, Field(strict=True, ge=16, le=1024, multiple_of=16, description="a multiple of 16, from 16 to 1024 pixels")
]
Threads: TypeAlias = Annotated[
    int, Field(strict=True, ge=1, le=MOST_THREADS, description=f"a whole number from 1 to {MOST_THREADS}")
]
Seed: TypeAlias = Annotated[
    int, Field(strict=True, ge=0, lt=2**63, description="a whole number, at least 0 and below 2^63")
]
Positive: TypeAlias = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False, description="a number above 0")]
Multiple: TypeAlias = Annotated[float, Field(strict=True, gt=0, le=64, description="a number above 0 and at most 64")]
Patience: TypeAlias = Annotated[
    float,
    Field(strict=True, gt=0, le=604_800, allow_inf_nan=False, description="a number above 0, at most 604800 (a week)"),
]
NotNegative: TypeAlias = Annotated[
    float, Field(strict=True, ge=0, allow_inf_nan=False, description="a number, at least 0")
]
Share: TypeAlias = Annotated[float, Field(strict=True, ge=0, lt=1, description="a number, at least 0 and below 1")]
Texts: TypeAlias = Annotated[tuple[Text, ...], Field(min_length=1, description="a list of texts")]
Grid: TypeAlias = Annotated[tuple[Text, ...], Field(description="a list of texts, such as [train.lr.base=1e-3,3e-3]")]
Counts: TypeAlias = Annotated[
    tuple[Count, ...], Field(min_length=1, description="a list of whole numbers, each at least 1 and below 2^31")
]
Mode: TypeAlias = Annotated[str, Field(strict=True, description=with_all(MODES)), one_of("method", MODES)]
Methods: TypeAlias = Annotated[
    tuple[Annotated[str, Field(strict=True)], ...],
    Field(description="a list of methods, such as [al, bp]"),
    BeforeValidator(_names),
    AfterValidator(_check_methods),
]
