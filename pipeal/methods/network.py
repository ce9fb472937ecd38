"""A network as every method takes it: units in order, grouped into the parts that learn by themselves, and the task.

::

    units   stem │ block │ block │ block │ block │ …      the smallest pieces that may be a part each
    parts   stem │ block   block │ block   block │ …      what one layer trains, by losses of its own
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from pipeal.core.errors import ConfigError
from pipeal.core.rng import keyed
from pipeal.core.tree import Tree

if TYPE_CHECKING:
    from pipeal.methods.al import AE, ENC

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Unit:
    """The smallest piece of a network that may be a part by itself.

    Attributes:
        make: Makes its modules, in order, with weights of their own.
        features: What it gives for one sample, on the meta device.
        fresh: Of features of the same kind, and a multiple of its own width: a copy of it with weights of its own that
            reads such features, and what that gives. None for the unit that reads the network's input.
        same: As ``fresh``, but a copy that begins with the weights that the unit begins with, where it can read such
            features with them; None where both draw them.
    """

    make: Callable[[], Sequence[nn.Module]]
    features: Tree
    fresh: Callable[[Tree, float], tuple[nn.Module, Tree]] | None = None
    same: Callable[[Tree, float], tuple[nn.Module, Tree]] | None = None


@dataclass(frozen=True)
class Part:
    """Neighbouring units of a network that are one layer.

    Attributes:
        f: From what the part before gives to features.
        number: Its place, from 0.
        features: What ``f`` gives for one sample, on the meta device.
        picks: What picks from features what a head looks at.
        seen: What it looks at: of several values that ``f`` hands on, the first, and a mask.
        width: Of the vectors that ``pool`` gives.
        pool: From features to vectors that a linear map can answer from: ``(B, width)``, or one per place.
        ahead: The units of each part still to come, of which a head may take fresh copies.
        alike: Within it, what heads draw is the same in all parts, if they start alike.
        linear: As :attr:`Network.linear`.
    """

    f: nn.Module
    number: int
    features: Tree
    picks: Sequence[nn.Module]
    seen: Tree
    width: int
    pool: nn.Module
    ahead: Sequence[Sequence[Unit]]
    alike: Callable[[], AbstractContextManager[object]] = nullcontext
    linear: Callable[[int, int], nn.Module] = nn.Linear

    def linear_head(self, outputs: int) -> nn.Module:
        """From features to answers ``outputs`` wide by one linear map: what the last part of a network has."""
        return nn.Sequential(self.pool, self.linear(self.width, outputs))


def in_a_row(modules: Sequence[nn.Module]) -> nn.Module:
    """Modules as one; a single one is itself."""
    return modules[0] if len(modules) == 1 else nn.Sequential(*modules)


def _all_of_it(features: Tree) -> tuple[Sequence[nn.Module], Tree]:
    return (), features


@dataclass(frozen=True)
class Network:
    """What a model gives to a method. Nothing is made, and no weight drawn, before a method asks for it.

    Attributes:
        units: In order.
        sizes: How many of them each part has.
        pool: Of features, what makes vectors of them, and their width.
        pick: Of features, what picks from them what a head looks at, and that.
        sides: Makes the encoder side, around ``f``, and the label side of a part, for a method with label sides.
        whole: Makes the network from end to end, with a head that gives answers.
        outputs: The width of an answer: classes, or characters.
        criterion: Makes the loss of an answer: ``(answer, y) -> scalar``.
        per_place: Whether there is an answer at every place of a text or an image, and ``y`` says what is right at
            each: below zero where there is none.
        has_classes: Whether ``y`` is classes; else it is numbers to come near to, by which no samples can be told
            apart.
        reads: The input of one sample, on the meta device; None where no method asks for it.
        join: Makes one module of those of a part.
        linear: Makes the linear map of an answer, of what goes in and what comes out.
        is_given: Whether units begin with weights that they are given, of a file or of a user's network, and draw none.
        drawn_first: Whether all parts are drawn before anything that a method makes of the first; else each is when it
            is asked for.
        same_start: Of the parts that ``sides`` gets: see :meth:`parts`.
    """

    units: Sequence[Unit]
    sizes: Sequence[int]
    pool: Callable[[Tree], tuple[nn.Module, int]]
    sides: Callable[[Part], tuple[ENC, AE]]
    whole: Callable[[], nn.Module]
    outputs: int
    criterion: Callable[[], nn.Module] = nn.CrossEntropyLoss
    per_place: bool = False
    has_classes: bool = True
    reads: Tree = None
    pick: Callable[[Tree], tuple[Sequence[nn.Module], Tree]] = _all_of_it
    join: Callable[[Sequence[nn.Module]], nn.Module] = in_a_row
    linear: Callable[[int, int], nn.Module] = nn.Linear
    is_given: bool = False
    drawn_first: bool = False
    same_start: bool = False

    def is_image(self, features: Tree) -> bool:
        """Whether such features, or what a head sees of them, are images, ``(B, C, H, W)``, that are answered as a
        whole."""
        is_one = isinstance(features, Tensor) and features.is_floating_point() and features.dim() == 4
        return is_one and not self.per_place

    def parts(self, *, same_start: bool = False) -> Iterator[Part]:
        """The parts, in order; those to come may be drawn after what a method makes of the ones before.

        Args:
            same_start: Whether fresh copies start with the weights of the units that they stand for, if they read
                features of the same width, and the heads of all parts alike.
        """
        units = self.units
        alike: Callable[[], AbstractContextManager[object]] = nullcontext
        if same_start:
            # On the CPU, so that it is drawn, and the same, where other parts than the first are real.
            seed = int(torch.randint(2**62, (), device="cpu"))
            units = [_starting_alike(unit, seed, number) for number, unit in enumerate(units)]
            alike = partial(keyed, seed, len(units), whole_default=True)
        groups = grouped(units, self.sizes)
        made = (self.join([module for unit in group for module in unit.make()]) for group in groups)
        for number, f in enumerate(list(made) if self.drawn_first else made):
            features = groups[number][-1].features
            pool, width = self.pool(features)
            ahead = groups[number + 1 :]
            yield Part(f, number, features, *self.pick(features), width, pool, ahead, alike, self.linear)


def _starting_alike(unit: Unit, seed: int, number: int) -> Unit:
    """The same, but what it makes and fresh copies of it start with the same weights."""

    def alike(draw: Callable[P, T]) -> Callable[P, T]:
        def drawn(*args: P.args, **kwargs: P.kwargs) -> T:
            with keyed(seed, number, whole_default=True):
                return draw(*args, **kwargs)

        return drawn

    copied = unit.fresh if unit.same is None else unit.same
    return replace(unit, make=alike(unit.make), fresh=None if copied is None else alike(copied))


def grouped(units: Sequence[Unit], sizes: Sequence[int]) -> list[Sequence[Unit]]:
    """Neighbouring units, as many of each group as its size says."""
    ends = [*accumulate(sizes)]
    return [units[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def part_sizes(units: int, parts: int | None, usual: Sequence[int] | None = None) -> list[int]:
    """How many units each part has: as even as can be, with the larger ones first.

    Args:
        units: How many there are.
        parts: How many parts are wanted; None for the usual ones.
        usual: Their sizes; None for a part of each unit.

    Raises:
        ConfigError: There are fewer units than that.

    >>> part_sizes(9, 4), part_sizes(4, None)
    ([3, 2, 2, 2], [1, 1, 1, 1])
    """
    if parts is None:
        return [1] * units if usual is None else list(usual)
    if not 1 <= parts <= units:
        raise ConfigError(f"parts is {parts}; expected 1 to {units}: the network has {units} blocks")
    size, more = divmod(units, parts)
    return [size + 1] * more + [size] * (parts - more)
