"""What rank 0 asks of all stages between two batches: it travels with the packets, and each does it in its turn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeal.core.tree import Tree
from pipeal.engine.devices import Ready
from pipeal.engine.distributed.channel import Message
from pipeal.engine.distributed.host_transfer import Carrier
from pipeal.engine.distributed.inference import Guide
from pipeal.engine.distributed.io_threads import Handler
from pipeal.engine.schedule import Action
from pipeal.engine.stage import Stage, bring_to_rest
from pipeal.engine.trace import Span, StageTimes

if TYPE_CHECKING:
    from pipeal.engine.distributed.rank import Node

DOES = {
    "begin": "starting its clock",
    "rest": "coming to rest",
    "report": "reporting",
    "predict": "getting ready to predict",
    "end": "leaving the predictions",
}


@dataclass(frozen=True)
class Order:
    """One of :data:`DOES`.

    Attributes:
        what: Which.
        facts: What it needs to know; what JSON can hold.
        requests: Those of the rank where it is.
    """

    what: str
    facts: Mapping[str, Any]
    requests: Requests

    goes_on = True

    @property
    def does(self) -> str:
        """In words."""
        return DOES[self.what]

    def __call__(self, stage: Stage) -> None:
        """Does it here."""
        self.requests.carry_out(self, stage)

    def message(self) -> tuple[str, Mapping[str, Any], Tree, Ready]:
        """For the next rank."""
        return "order", {"what": self.what, "facts": self.facts}, None, None


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

    def order(self, what: str, facts: Mapping[str, Any]) -> Order:
        """An order, for this rank first."""
        return Order(what, facts, self)

    def handlers(self, carrier: Carrier) -> dict[str, Handler]:
        """How requests that come over a wire get into the inbox."""

        def order(message: Message) -> None:
            self._node.inbox.put(self.order(message.facts["what"], message.facts["facts"]))

        return {"order": order, "leg": lambda message: self.guide.receive(message, *carrier.body(message))}

    def carry_out(self, order: Order, stage: Stage) -> None:
        """Does what is ordered, on the stage's thread, and lets rank 0 know."""
        facts = order.facts
        if order.what == "begin":
            stage.clock.restart()
        elif order.what == "rest":
            bring_to_rest([stage])
            self._node.reply("rested", {"token": facts["token"]})
        elif order.what == "report":
            found, losses = self._report(stage)
            self._node.reply("report", {"token": facts["token"], "rank": self._node.rank, **found}, losses)
        elif order.what == "predict":
            self.guide.begin(facts, stage)
        else:
            self.guide.end()

    def _report(self, stage: Stage) -> tuple[dict[str, Any], Tree]:
        (times,) = stage.clock.take_all_times()
        samples, self.samples = self.samples, 0
        shift = self._node.seats[self._node.rank].clock
        found = {
            "busy": {action.value: seconds for action, seconds in times.busy.items()},
            "waiting": times.waiting,
            "splits": list(stage.take_splits().values()),
            "overflows": list(stage.overflows().values()),
            "spans": [[s.layer, s.action.value, s.batch, s.begin + shift, s.end + shift] for s in stage.clock.spans()],
            "samples": samples,
        }
        return found, stage.losses.take()


def times_in(facts: Mapping[str, Any]) -> StageTimes:
    """The times in a report."""
    return StageTimes({Action(name): seconds for name, seconds in facts["busy"].items()}, dict(facts["waiting"]))


def spans_in(facts: Mapping[str, Any], stage: int) -> list[Span]:
    """The spans in a report, on rank 0's clock."""
    return [
        Span(stage, layer, Action(action), batch, begin, end) for layer, action, batch, begin, end in facts["spans"]
    ]
