"""What all samplers share: numbered passes that ranks divide, and that resume where the consumer stood."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from struct import pack
from typing import Any
from zlib import crc32

from torch.utils.data import Sampler

from pipeal.core.errors import ConfigError, DataError
from pipeal.data.batching.ranks import even_batches, steps_of
from pipeal.data.checks import at_least, check_rank

__all__ = ["PassSampler"]

_VERSION = 3


class PassSampler(Sampler[list[int]], ABC):
    """A batch sampler whose passes are decided by ``(seed, epoch)`` and can begin anywhere.

    Each iterator is a pass of its own, which begins with its first batch: others, begun before or after, do not disturb
    it. Until :meth:`set_epoch` is called, every new pass counts as the next epoch; from then on the epoch is the
    caller's.

    Several ranks build the same list of batches, each for itself, and rank ``r`` takes batches ``r``, ``r + W``,
    ``r + 2 W`` … of it: each has the same number of steps, without a word between them. It takes one seed and one
    order of samples on all of them. Where ``W`` does not divide the number of batches, some are cut in halves, see
    :func:`pipeal.data.batching.ranks.even_batches`; :attr:`repeated` names the samples that come twice.

    Args:
        seed: At least 0.
        rank: Which part of each step this process takes.
        world_size: How many parts there are.
        largest_first: The first step is the one of the costliest batches: what does not fit fails at once or never.

    Raises:
        ConfigError: A rank that does not exist, a seed below 0.
    """

    def __init__(self, *, seed: int = 0, rank: int = 0, world_size: int = 1, largest_first: bool = False) -> None:
        self.seed = at_least("seed", seed, 0)
        self.rank, self.world_size = check_rank(rank, world_size)
        self.largest_first = bool(largest_first)
        self.epoch = 0
        self._counts_passes = True
        self._latest: _Pass | None = None
        self._restored: dict[str, int] | None = None

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch that the next pass (and ``len``) is for; begun passes go on as they are.

        After :meth:`load_state_dict`, choosing the epoch of the state keeps its position; another one forgets it.

        Raises:
            ConfigError: An epoch below 0.
        """
        self._enter(at_least("epoch", epoch, 0))
        self._counts_passes = False
        if self._restored is not None and self._restored["epoch"] != epoch:
            self._restored = None
        if self._latest is not None and self._latest.epoch != epoch:
            self._latest = None

    def __len__(self) -> int:
        """The number of steps of the next pass, on every rank; a pass that resumes counts as a whole one.

        Raises:
            TypeError: It cannot be known before the pass.
        """
        return steps_of(self._count(self.epoch), self.world_size)

    def __iter__(self) -> Iterator[list[int]]:
        # A generator, as only a first batch is a beginning: a DataLoader with workers asks twice for an iterator and
        # uses the second.
        yield from self._begin()

    def state_dict(self, consumed: int | None = None) -> dict[str, Any]:
        """Where the pass begun last stands: a few numbers, the same on every rank, fit for JSON.

        Args:
            consumed: How many batches of that pass the consumer has had. By default all that were handed out, which
                is too many where a ``DataLoader`` with workers has fetched ahead: say the number there.

        Raises:
            ConfigError: More than were handed out, or fewer than a pass that was restored and has not begun.
        """
        if self._restored is not None:
            epoch, handed = self._restored["epoch"], self._restored["batch"]
            checks: Mapping[int, int] | Sequence[int] = {handed: self._restored["check"]}
        elif self._latest is not None:
            epoch, handed, checks = self._latest.epoch, len(self._latest.checks) - 1, self._latest.checks
        else:
            epoch, handed, checks = self.epoch, 0, [0]
        batch = handed if consumed is None else at_least("consumed", consumed, 0)
        if batch > handed:
            raise ConfigError(f"consumed is {consumed}, but {handed} batches of the pass begun last were handed out")
        if isinstance(checks, Mapping) and batch not in checks:
            raise ConfigError(f"consumed is {consumed}, but the pass resumes after {handed} batches and has not begun")
        return {**self._identity(), "seed": self.seed, "epoch": epoch, "batch": batch, "check": checks[batch]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Lets the next pass go on where ``state`` was taken, with its seed and epoch.

        The pass is drawn up again and the batches before the position are skipped; that they are those which the
        state was taken after is checked there, when the pass begins.

        Raises:
            DataError: The state is of another sampler, version, world size or other options, or not a state at all.
        """
        for key, value in self._identity().items():
            found = state.get(key) if isinstance(state, Mapping) else state
            if found != value:
                raise DataError(
                    f"a state with {key} {found!r}; wanted {value!r}: it was taken by another version of pipeal, from "
                    "another sampler, or from one of other sizes, or with another limit, policy or the like"
                )
        try:
            restored = {key: at_least(key, state.get(key), 0) for key in ("seed", "epoch", "batch", "check")}
        except ConfigError as error:
            raise DataError(f"a state in which {error}") from None
        self.seed = restored["seed"]
        self._enter(restored["epoch"])
        self._restored, self._latest = restored, None

    @property
    def repeated(self) -> list[int]:
        """The samples that the pass begun last repeats to even the steps out; known once its first step is out."""
        return [] if self._latest is None else self._latest.repeated

    def _begin(self) -> _Pass:
        """Begins the next pass, where a state was restored in its middle."""
        epoch, restored = self.epoch, self._restored
        begun = _Pass(epoch, self._batches(epoch), self)
        if restored is not None:
            begun.skip(restored["batch"], restored["check"])
            self._restored = None
        self._latest = begun
        if self._counts_passes:
            self._enter(self.epoch + 1)
        return begun

    def _enter(self, epoch: int) -> None:
        """Takes up an epoch that was chosen."""
        self.epoch = epoch

    def _identity(self) -> dict[str, Any]:
        """What a state and the sampler that takes it must have in common."""
        # Of the options those that decide what the batches are, as far as they have a text of their own.
        options = crc32(repr((self.largest_first, *self._options())).encode())
        kind = type(self).__name__
        return {"version": _VERSION, "sampler": kind, "world_size": self.world_size, "options": options}

    @abstractmethod
    def _options(self) -> tuple[object, ...]:
        """All that decides the batches but seed and epoch, with a stable ``repr``."""

    @abstractmethod
    def _batches(self, epoch: int) -> Iterable[list[int]]:
        """All batches of an epoch, of all ranks; what is not decided by ``epoch`` is settled before this returns."""

    @abstractmethod
    def _count(self, epoch: int) -> int:
        """How many batches :meth:`_batches` will give, or TypeError."""

    @abstractmethod
    def _costs(self, batches: Sequence[list[int]]) -> Sequence[float]:
        """What each of some batches costs, for finding the costliest."""


class _Pass(Iterator[list[int]]):
    """One rank's part of one pass."""

    def __init__(self, epoch: int, batches: Iterable[list[int]], sampler: PassSampler) -> None:
        self.epoch = epoch
        self.rank = sampler.rank
        self.repeated: list[int] = []
        # After each step, a check sum of all batches so far, of all ranks. Kept for every step, since a state may be
        # asked for one that lies back: 8 bytes each.
        self.checks = array("Q", [0])
        whole = sampler.world_size > 1 or sampler.largest_first
        self._steps = self._planned(batches, sampler) if whole else ([batch] for batch in batches)

    def __next__(self) -> list[int]:
        step = next(self._steps)
        check = self.checks[-1]
        for batch in step:
            check = crc32(pack(f"{len(batch) + 1}q", len(batch), *batch), check)
        self.checks.append(check)
        return step[self.rank]

    def skip(self, count: int, check: int) -> None:
        """Passes over what was consumed before.

        Raises:
            DataError: There are not so many, or they are others.
        """
        for done in range(count):
            if next(self, None) is None:
                raise DataError(f"the state stands after batch {count}, but this pass has only {done} batches")
        if self.checks[-1] != check:
            raise DataError(
                f"the first {count} batches are not those that the state was taken after; sizes, limits and options "
                "must be the same, and the order of samples one that set_epoch decides (shuffle=True does)"
            )

    def _planned(self, batches: Iterable[list[int]], sampler: PassSampler) -> Iterator[list[list[int]]]:
        ranks = sampler.world_size
        even = even_batches(list(batches), ranks)
        self.repeated, order = even.repeated, even.batches
        if sampler.largest_first:
            costs = sampler._costs(order)
            first = heapq.nlargest(ranks, range(len(order)), key=costs.__getitem__)
            taken = set(first)
            order = [order[i] for i in first] + [batch for i, batch in enumerate(order) if i not in taken]
        for start in range(0, len(order), ranks):
            yield order[start : start + ranks]
