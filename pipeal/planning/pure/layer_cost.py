"""What layers cost, as plain data: measured once, saved, and given to placement and forecast anywhere."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain, cycle, islice
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar

from pydantic import Field, NonNegativeInt, TypeAdapter, ValidationError

from pipeal.core.atomic import write_whole
from pipeal.core.checked import misfit
from pipeal.core.errors import ConfigError, DataError
from pipeal.engine.schedule import Action

FORMAT = "pipeal-costs-3"

_LEAST_S = 1e-9
"""No model is faster."""

_Amount: TypeAlias = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Times: TypeAlias = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Count: TypeAlias = Annotated[int, Field(gt=0)]


@dataclass(frozen=True, slots=True)
class LayerCost:
    """One layer on one batch, alone on its device.

    Attributes:
        forward_s: Seconds of its forward.
        backward_s: Seconds of its backward.
        update_s: Seconds of its optimizer's step.
        out_bytes: The packet that it hands on, in bytes, of the largest batch: what may wait before the next stage.
        parameter_bytes: Its weights; their gradients take as much again.
        optimizer_bytes: What its optimizers keep.
        activation_bytes: What its graph holds from the forward to the end of the backward.
        mean_out_bytes: The packet in the mean over the batches, in bytes: what a link has to carry for each. Where it
            is not given, all are as large as the largest.
    """

    forward_s: _Amount
    backward_s: _Amount
    update_s: _Amount = 0.0
    out_bytes: NonNegativeInt = 0
    parameter_bytes: NonNegativeInt = 0
    optimizer_bytes: NonNegativeInt = 0
    activation_bytes: NonNegativeInt = 0
    mean_out_bytes: int = -1

    def __post_init__(self) -> None:
        if self.mean_out_bytes < 0:
            object.__setattr__(self, "mean_out_bytes", self.out_bytes)

    @property
    def seconds(self) -> float:
        """All three actions."""
        return self.forward_s + self.backward_s + self.update_s

    @property
    def resident_bytes(self) -> int:
        """Weights, gradients and what optimizers keep: there whatever runs."""
        return 2 * self.parameter_bytes + self.optimizer_bytes

    def durations(self) -> dict[Action, float]:
        """The seconds by action."""
        return {Action.FORWARD: self.forward_s, Action.BACKWARD: self.backward_s, Action.UPDATE: self.update_s}


Row = TypeVar("Row")

CostsByKind: TypeAlias = Mapping[str, Sequence[LayerCost]]
"""By kind of device, the cost of every layer."""


@dataclass(frozen=True)
class Costs:
    """The layers of a model on one kind of device.

    Attributes:
        kind: The kind of device, such as ``cpu``.
        layers: Of the AL form, in order.
        backprop: The same network cut for backpropagation, block by block: by the number of micro-batches that a batch
            is cut into, the costs of one of them, alone: to add its gradients to those of the others comes on top,
            and is not counted. Empty where it was not measured.
        crowding: How many times as long an action takes while so many stages on this machine's cores work at once,
            measured; empty for a kind whose devices do not share.
        samples: The samples of a batch, in the mean.
        facts: Where and on what it was measured.
    """

    kind: str
    layers: tuple[LayerCost, ...]
    backprop: Mapping[_Count, tuple[LayerCost, ...]] = field(default_factory=dict)
    crowding: Mapping[_Count, _Times] = field(default_factory=dict)
    samples: _Amount = 0.0
    facts: Mapping[str, Any] = field(default_factory=dict)


def repeated(rows: Sequence[Row], layers: int, *, of: int) -> tuple[Row, ...]:
    """As if a model had so many layers: those after the first come again and again.

    Args:
        rows: One for each layer, and then those of a head, which comes once.
        layers: How many there are to be.
        of: How many layers the model has.

    >>> "".join(repeated("abc-", 6, of=3)), "".join(repeated("abc-", 2, of=3))
    ('abcbcb-', 'ab-')

    Raises:
        ConfigError: There is nothing to repeat.
    """
    if of < 2 and layers > of:
        raise ConfigError(f"--layers: {layers} of a model of {of}; expected one with a layer to repeat")
    return (*islice(chain(rows[:1], cycle(rows[1:of])), layers), *rows[of:])


def takes_no_time(costs: Costs) -> bool:
    """Whether the layers, or the blocks for backpropagation, are faster all together than any model is."""
    return any(sum(row.seconds for row in rows) < _LEAST_S for rows in (costs.layers, *costs.backprop.values()))


def save_costs(costs: Costs, path: str | Path) -> None:
    """Writes costs as JSON, whole or not at all.

    Raises:
        DataError: The system refused to write.
    """
    write_whole(path, json.dumps({"format": FORMAT, **asdict(costs)}, indent=1, allow_nan=False) + "\n")


def load_costs(path: str | Path) -> Costs:
    """Reads what :func:`save_costs` wrote.

    Raises:
        DataError: There is no such file, or it holds something else.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        found = json.loads(text)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}; expected a file written by pipeal plan") from error
    except ValueError as error:
        raise DataError(f"{path}: no JSON ({error}); expected a file written by pipeal plan") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise DataError(f"{path}: expected the format {FORMAT!r}, as pipeal plan writes it; measure again")
    try:
        costs = TypeAdapter(Costs).validate_json(text, strict=True)
    except ValidationError as error:
        raise DataError(f"{path}: {misfit(error)}; expected a file written by pipeal plan, measure again") from error
    wrong = _contradiction(costs)
    if wrong is not None:
        raise DataError(f"{path}: {wrong}; measure again")
    return costs


def _contradiction(costs: Costs) -> str | None:
    """What is wrong with costs that are well formed."""
    if not costs.layers or not all(costs.backprop.values()):
        return "it holds no layer"
    if takes_no_time(costs):
        return "its layers take no time, all of them together"
    if costs.backprop and (1 not in costs.backprop or len({len(rows) for rows in costs.backprop.values()}) > 1):
        return "of backpropagation it holds no whole batch, or other blocks than of parts"
    return None
