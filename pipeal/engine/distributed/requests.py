"""What rank 0 asks of all stages between two batches: it travels with the packets, and each does it in its turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from pipeal.core.tree import Tree
from pipeal.engine.devices import Ready
from pipeal.engine.distributed.host_transfer import Carrier
from pipeal.engine.distributed.inference import Guide
from pipeal.engine.distributed.io_threads import Handler
from pipeal.engine.schedule import Action
from pipeal.engine.stage import Stage, bring_to_rest
from pipeal.engine.trace import Span, StageClock, StageTimes

if TYPE_CHECKING:
    from pipeal.engine.distributed.rank import Node


@dataclass(frozen=True)
class Order:
    """Something to do on every rank, or one whose kind only another rank knows how to do.

    Attributes:
        kind: Of its message.
        facts: What it needs to know; what JSON can hold.
        does: What is done, in words.
        work: Does it here.
    """

    kind: str
    facts: Mapping[str, Any]
    does: str = "feeding"
    work: Callable[[Stage], None] | None = None

    goes_on = True

    def __call__(self, stage: Stage) -> None:
        """Does it here."""
        assert self.work is not None, "an order for another rank"
        self.work(stage)

    def message(self) -> tuple[str, Mapping[str, Any], Tree, Ready]:
        """For another rank."""
        return self.kind, self.facts, None, None


class Requests:
    """What a rank does for orders.

    Args:
        node: The rank.

    Attributes:
        guide: Its part in predictions.
        samples: How many this rank has fed into the line of its replica since the last report.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self.guide = Guide(node)
        self.samples = 0
        self._orders: dict[str, tuple[str, Callable[[Mapping[str, Any], Stage], None]]] = {
            "begin": ("starting its clock", lambda _, stage: stage.clock.restart()),
            "rest": ("coming to rest", self._rest),
            "report": ("reporting", self._report),
            "predict": ("getting ready to predict", self.guide.begin),
            "end": ("leaving the predictions", lambda *_: self.guide.end()),
        }

    def order(self, what: str, facts: Mapping[str, Any]) -> Order:
        """An order, for this rank first; it is done on the stage's thread.

        Args:
            what: ``begin``, ``rest``, ``report``, ``predict`` or ``end``.
            facts: What it needs to know; what JSON can hold.
        """
        does, work = self._orders[what]
        return Order("order", {"what": what, "facts": facts}, does, partial(work, facts))

    def handlers(self, carrier: Carrier) -> dict[str, Handler]:
        """How requests that come over a wire get into the inbox."""
        return {
            "order": lambda message: self._node.inbox.put(self.order(message.facts["what"], message.facts["facts"])),
            "leg": lambda message: self.guide.receive(message, *carrier.body(message)),
        }

    def _rest(self, facts: Mapping[str, Any], stage: Stage) -> None:
        bring_to_rest([stage])
        self._node.reply("rested", {"token": facts["token"]})

    def _report(self, facts: Mapping[str, Any], stage: Stage) -> None:
        samples, self.samples = self.samples, 0
        found = {
            "token": facts["token"],
            "rank": self._node.rank,
            **facts_of_clock(stage.clock, self._node.seats[self._node.rank].clock),
            "splits": list(stage.take_splits().values()),
            "overflows": list(stage.overflows().values()),
            "samples": samples,
        }
        self._node.reply("report", found, stage.losses.take())


def facts_of_clock(clock: StageClock, shift: float) -> dict[str, Any]:
    """The times of a stage on one device, which end with it, and its spans, for a report.

    Args:
        clock: Of the stage.
        shift: What to add to this process's clock for that of rank 0.
    """
    (times,) = clock.take_all_times()
    return {
        "busy": {action.value: seconds for action, seconds in times.busy.items()},
        "waiting": times.waiting,
        "kernels_s": times.kernels_s,
        "spans": [
            [s.layer, s.action.value, s.batch, *(at if at is None else at + shift for at in (s.begin, s.end, s.given))]
            for s in clock.spans()
        ],
    }


def times_in(facts: Mapping[str, Any]) -> StageTimes:
    """The times in a report."""
    busy = {Action(name): seconds for name, seconds in facts["busy"].items()}
    return StageTimes(busy, dict(facts["waiting"]), facts["kernels_s"])


def spans_in(facts: Mapping[str, Any], stage: int) -> list[Span]:
    """The spans in a report, on rank 0's clock."""
    return [Span(stage, layer, Action(action), *rest) for layer, action, *rest in facts["spans"]]
