"""The epoch plan: with all lengths known, the fewest batches that a budget allows, and the least padding in them.

A plan follows from the lengths, the options, the seed and the epoch, so every rank computes the same one and takes its
share of it without communication, and a position in it is a small number.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from pipeal.core.errors import ConfigError, DataError
from pipeal.data.batching.bounds import length_bounds, round_up
from pipeal.data.batching.budget import BatchCost, fitting
from pipeal.data.batching.cuts import SortedSamples
from pipeal.data.batching.packing import Oversize
from pipeal.data.batching.ranks import check_ranks
from pipeal.data.batching.samplers import EpochSampler, Known, Lengths, Plan, at_least

__all__ = ["PlannedBatchSampler"]

_Ints: TypeAlias = npt.NDArray[np.int64]
_VERSION = 2


class PlannedBatchSampler(EpochSampler):
    """The fewest batches that fit a budget, with the least padding at that number; exact and resumable.

    Without shuffling, the plan is the same in every epoch: the fewest batches, and (without ``shapes``) no other plan
    with so many has less padding. With it three things are drawn again for every epoch: the order of equal lengths, the
    order of the batches and, without ``shapes``, an offset of all cuts within the room that the fewest batches leave
    (least padding is then sought near that offset).

    On several ranks every rank takes as many steps, step ``t`` of rank ``r`` being batch ``t · world_size + r``: the
    number of batches is rounded up to a multiple of the world size, by cutting smaller ones. Only where there are fewer
    samples than that, some are given to two ranks (:attr:`repeated`).

    Args:
        lengths: ``(N,)`` whole numbers, at least 1 each.
        budget: The most that a batch may cost: padded tokens, ``n × longest``, or what ``cost`` counts.
        cost: ``cost(n, longest)``, which falls with neither. Called a few times for each distinct length.
        max_samples: The most samples in a batch.
        shapes: Round lengths up to at most so many bounds, for kernels that are compiled for each shape; see
            :attr:`padded_lengths` and :func:`pipeal.data.batching.bounds.length_bounds`. Batches are then of the same
            shapes in every epoch, and as full as the budget allows: one shape for each bound, and one of what is left
            over (more with ``spare_batches``, which pad less, with a ``world_size`` that takes some batches more, and
            with over-size samples, each of its own length). Only which samples of a bound share a batch is drawn again.
        oversize: What to do with samples that cost more than the budget by themselves: ``raise`` an error, ``drop``
            them (:attr:`dropped`), or make each a ``single`` batch over the budget.
        spare_batches: So many batches more than the fewest: less padding, and more room for an offset.
        largest_first: Begin with the batches (one for each rank) that cost most: what does not fit into memory then
            fails at once.
        shuffle: See above.
        seed: At least 0.
        rank: From 0 to ``world_size - 1``.
        world_size: At least 1.

    Attributes:
        padded_lengths: ``(N,)`` int64: a batch is to be padded to the largest of these among its samples.
        dropped: How many over-size samples no batch has.

    Raises:
        DataError: Bad lengths, an over-size sample under ``raise``, or nothing left under ``drop``.
        ConfigError: An option out of range, or a cost that falls where it should not.

    >>> list(PlannedBatchSampler([3, 9, 2, 8], budget=16, shuffle=False))
    [[1], [3], [0, 2]]
    """

    def __init__(
        self,
        lengths: Lengths,
        budget: float,
        *,
        cost: BatchCost | None = None,
        max_samples: int | None = None,
        shapes: int | None = None,
        oversize: Oversize = "raise",
        spare_batches: int = 0,
        largest_first: bool = False,
        shuffle: bool = True,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        super().__init__(lengths, shuffle=bool(shuffle), seed=seed)
        if int(self.lengths.max()) * len(self.lengths) > np.iinfo(np.int64).max:
            raise DataError(f"{len(self.lengths)} lengths up to {self.lengths.max()}; wanted a padded sum below 2**63")
        self.budget = budget if cost is not None else at_least("budget", budget, 1)  # type: ignore[arg-type]
        self.cost = cost
        self.max_samples = None if max_samples is None else at_least("max_samples", max_samples, 1)
        self.shapes = None if shapes is None else at_least("shapes", shapes, 1)
        if oversize not in get_args(Oversize):
            raise ConfigError(f"oversize is {oversize!r}; wanted one of {', '.join(get_args(Oversize))}")
        self.oversize = oversize
        self.spare_batches = at_least("spare_batches", spare_batches, 0)
        self.largest_first = bool(largest_first)
        check_ranks(rank, world_size, "split")
        self.rank, self.world_size = int(rank), int(world_size)
        self._fit_to_budget()
        self._resume = 0
        self._newest: PlannedBatches | None = None

    def _fit_to_budget(self) -> None:
        """What the lengths and the budget decide for all epochs."""
        # Lengths are far fewer than samples: everything that is costly is done once for each.
        distinct, which = np.unique(self.lengths, return_inverse=True)
        fits = fitting(distinct, self.budget, self.cost, min(self.max_samples or len(which), len(which)))
        alone = fits == 0
        if alone.any() and self.oversize == "raise":
            longest = int(np.argmax(self.lengths))
            raise DataError(
                f"sample {longest} has length {self.lengths[longest]}, which is over the budget of {self.budget:g} by "
                "itself; raise the budget, cut the samples (max_len), or choose oversize drop or single"
            )
        if alone.all() and self.oversize == "drop":
            raise DataError(f"all {len(which)} samples are over the budget of {self.budget:g}; raise the budget")
        padded = distinct.copy()
        if self.shapes is not None and not alone.all():
            counts = np.bincount(which)
            bounds = length_bounds((distinct[~alone], counts[~alone]), self.shapes)
            padded[~alone] = round_up(distinct[~alone], bounds)
            # A bound is itself a length, so what is rounded up to it fits as often as it does.
            fits = fits[np.searchsorted(distinct, padded)]
        self.padded_lengths = padded[which]
        dropping = self.oversize == "drop" and alone.any()
        self._kept = np.flatnonzero(~alone[which]) if dropping else np.arange(len(which))
        self.dropped = len(which) - len(self._kept)
        # Sorted by counting; the narrow type lets numpy sort by radix when a plan is made.
        rising = np.arange(len(distinct)) if self.shapes is None else np.unique(padded, return_inverse=True)[1]
        self._places = (rising[-1] - rising).astype(np.uint16 if len(distinct) < 1 << 16 else np.int64)[which]
        counts = np.bincount(which[self._kept], minlength=len(distinct))[::-1]
        fits = np.maximum(fits, 1)
        self._samples = SortedSamples(np.repeat(padded[::-1], counts), np.repeat(fits[::-1], counts))
        self._fits = fits
        wanted = min(self._samples.fewest() + self.spare_batches, len(self._kept))
        self._steps = -(-wanted // self.world_size)
        self._batches = min(self._total, len(self._kept))
        self._windows = self._samples.windows(self._batches)
        self._cuts: _Ints | None = None  # of every epoch
        if self.shapes is not None:
            least = self._samples.least_padding if self.spare_batches else self._samples.full
            self._cuts = least(self._windows, self._batches)

    @property
    def repeated(self) -> list[int]:
        """The samples that a further rank gets in the chosen epoch, because there are not enough for all."""
        plan, more = self._current(), slice(self._batches, None)
        # Batches are repeated only where each of them is a single sample.
        return plan.order[plan.starts[more]].tolist() if self._batches < self._total else []

    @property
    def _total(self) -> int:
        return self._steps * self.world_size

    def __len__(self) -> int:
        """The number of batches of this rank, the same on every rank and in every epoch."""
        return self._steps

    def __iter__(self) -> PlannedBatches:
        return PlannedBatches(self, self._current(), self._resume)

    def _begun(self, batches: PlannedBatches) -> None:
        """An iterator that gives its first batch becomes the one whose state is saved."""
        if batches.epoch == self.epoch:
            self._resume, self._newest = 0, batches

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch of the next iterator, which begins at its first batch.

        The epoch that is chosen already stays as it is, and with it a position that was loaded.

        Raises:
            ConfigError: An epoch below 0.
        """
        before = self.epoch
        super().set_epoch(epoch)
        if self.epoch != before:
            self._resume, self._newest = 0, None

    def batch_shapes(self) -> _Ints:
        """``(batches, 2)``: samples and padded length of every batch of all ranks in the chosen epoch, in order."""
        plan = self._current()
        return np.stack((plan.ends - plan.starts, self.padded_lengths[plan.order[plan.starts]]), axis=1)

    def state_dict(self, consumed: int | None = None) -> dict[str, Any]:
        """Where the iterator that began last stands: a few numbers that JSON can hold, the same on every rank.

        Args:
            consumed: How many batches of this epoch the consumer has had. By default all that were handed out, which
                is too many where a ``DataLoader`` with workers has fetched ahead: say the number there.

        Raises:
            ConfigError: ``consumed`` below 0 or above the number of batches.
        """
        if consumed is None:
            consumed = self._resume if self._newest is None else self._newest.position
        elif at_least("consumed", consumed, 0) > self._steps:
            raise ConfigError(f"consumed is {consumed}; wanted at most {self._steps}, the number of batches")
        return {
            "version": _VERSION,
            "seed": self.seed,
            "epoch": self.epoch,
            "batch": int(consumed),
            "fingerprint": self._fingerprint,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Lets the next iterator begin where the state was taken; nothing is replayed.

        Raises:
            DataError: A state of another version, of other lengths, or of other options.
        """
        wanted = self.state_dict()
        if not isinstance(state, Mapping) or set(state) != set(wanted) or state["version"] != _VERSION:
            raise DataError(
                f"a state with {state!r:.200}; wanted {', '.join(wanted)} with version {_VERSION}: "
                "this is not the state of an epoch plan of this version"
            )
        if state["fingerprint"] != wanted["fingerprint"]:
            raise DataError(
                f"the state belongs to a plan {state['fingerprint']}, this is plan {wanted['fingerprint']}: the "
                "lengths, the budget, another option or the world size differ; build the sampler as it was"
            )
        seed, epoch, batch = (state[name] for name in ("seed", "epoch", "batch"))
        whole = all(isinstance(number, int) and number >= 0 for number in (seed, epoch, batch))
        if not whole or batch > self._steps:
            raise DataError(
                f"the state stands at batch {batch!r} of epoch {epoch!r} with seed {seed!r}; wanted whole numbers of "
                f"at least 0, and at most {self._steps} batches"
            )
        if seed != self.seed:
            self.seed, self._planned = seed, None
        self.epoch, self._resume, self._newest = epoch, batch, None

    @cached_property
    def _fingerprint(self) -> str:
        """A digest of all that decides the plans but seed and epoch; 16 bytes in hexadecimal."""
        full = self.shapes is not None
        flags = [full, self.oversize, self.spare_batches, self.largest_first, self.shuffle, self.world_size]
        digest = hashlib.blake2b(json.dumps(flags).encode(), digest_size=16)
        for array in (self.lengths, self.padded_lengths, self._fits):
            digest.update(array.astype("<i8").tobytes())
        return digest.hexdigest()

    def _plan(self, random: np.random.Generator) -> Plan:
        order, cuts, windows = self._kept, self._cuts, self._windows
        if self.shuffle:
            order = random.permutation(order)
        # A stable sort keeps the order of equal lengths.
        order = order[np.argsort(self._places[order], kind="stable")]
        if cuts is None:
            windows = self._samples.drawn(windows, random) if self.shuffle else windows
            cuts = self._samples.least_padding(windows, self._batches)
        plan = Plan(order, cuts[:-1], cuts[1:])
        if self.shuffle:
            plan = plan.shuffled(random)
        if self.largest_first:
            plan = self._with_largest_first(plan)
        return Plan(order, np.resize(plan.starts, self._total), np.resize(plan.ends, self._total))

    def _with_largest_first(self, plan: Plan) -> Plan:
        sizes, longest = plan.ends - plan.starts, self.padded_lengths[plan.order[plan.starts]]
        if self.cost is None:
            costs = sizes * longest
        else:
            costs = np.array([self.cost(*shape) for shape in zip(sizes.tolist(), longest.tolist(), strict=True)])
        largest = np.argsort(-costs, kind="stable")[: self.world_size]
        turn = np.concatenate((largest, np.delete(np.arange(len(costs)), largest)))
        return Plan(plan.order, plan.starts[turn], plan.ends[turn])


class PlannedBatches(Iterator[list[int]]):
    """One rank's batches of one epoch.

    Attributes:
        epoch: The epoch.
        position: How many of them have been given, those before a resumed position included.
    """

    def __init__(self, sampler: PlannedBatchSampler, plan: Plan, position: int) -> None:
        self.epoch = sampler.epoch
        self.position = position
        # A DataLoader with workers makes two iterators and uses one: only that one may count.
        self._sampler: PlannedBatchSampler | None = sampler
        self._order = plan.order
        self._starts = plan.starts[sampler.rank :: sampler.world_size]
        self._ends = plan.ends[sampler.rank :: sampler.world_size]

    def __next__(self) -> list[int]:
        if self._sampler is not None:
            self._sampler._begun(self)
            self._sampler = None
        at = self.position
        if at >= len(self._starts):
            raise StopIteration
        self.position = at + 1
        indices: list[int] = self._order[self._starts[at] : self._ends[at]].tolist()
        return indices


def make_sampler(known: Known, *, budget_tokens: int, **options: Any) -> PlannedBatchSampler:
    """The sampler that ``data.batching`` asks for; its other options are the sampler's own."""
    return PlannedBatchSampler(known.lengths, budget_tokens, seed=known.seed, **options)
