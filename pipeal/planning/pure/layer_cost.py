"""What layers cost, as plain data: measured once, saved, and given to placement and forecast anywhere."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from pipeal.core.errors import DataError
from pipeal.engine.schedule import Action

FORMAT = "pipeal-costs-3"

_LEAST_S = 1e-9
"""No model is faster."""

Record = TypeVar("Record")


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

    forward_s: float
    backward_s: float
    update_s: float = 0.0
    out_bytes: int = 0
    parameter_bytes: int = 0
    optimizer_bytes: int = 0
    activation_bytes: int = 0
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
    backprop: Mapping[int, tuple[LayerCost, ...]] = field(default_factory=dict)
    crowding: Mapping[int, float] = field(default_factory=dict)
    samples: float = 0.0
    facts: Mapping[str, Any] = field(default_factory=dict)


def save_costs(costs: Costs, path: str | Path) -> None:
    """Writes costs as JSON."""
    text = json.dumps({"format": FORMAT, **asdict(costs)}, indent=1, allow_nan=False)
    Path(path).write_text(text + "\n", encoding="utf-8")


def load_costs(path: str | Path) -> Costs:
    """Reads what :func:`save_costs` wrote.

    Raises:
        DataError: There is no such file, or it holds something else.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}; expected a file written by pipeal plan") from error
    except ValueError as error:
        raise DataError(f"{path}: no JSON ({error}); expected a file written by pipeal plan") from error
    if not isinstance(found, dict) or found.pop("format", None) != FORMAT:
        raise DataError(f"{path}: expected the format {FORMAT!r}, as pipeal plan writes it; measure anew")
    try:
        costs = Costs(
            kind=_checked(found.pop("kind"), str),
            layers=_layers(found.pop("layers")),
            backprop={_count(count): _layers(rows) for count, rows in found.pop("backprop").items()},
            crowding={_count(count): _above_0(times) for count, times in found.pop("crowding").items()},
            samples=_number(found.pop("samples")),
            facts=_checked(found.pop("facts"), dict),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(
            f"{path}: not as pipeal plan writes it ({type(error).__name__}: {error}); measure anew"
        ) from error
    if not costs.layers or not all(costs.backprop.values()):
        raise DataError(f"{path}: it holds no layer; measure anew")
    if any(sum(row.seconds for row in rows) < _LEAST_S for rows in (costs.layers, *costs.backprop.values())):
        raise DataError(f"{path}: its layers take no time, all of them together; measure anew")
    if costs.backprop and (1 not in costs.backprop or len({len(rows) for rows in costs.backprop.values()}) > 1):
        raise DataError(
            f"{path}: of backpropagation it holds no whole batch, or other blocks than of parts; measure anew"
        )
    return costs


def _layers(rows: Sequence[Mapping[str, Any]]) -> tuple[LayerCost, ...]:
    names = {each.name for each in fields(LayerCost)}
    found = []
    for row in rows:
        if {*row} != names:
            raise ValueError(f"a layer has {sorted(row)}")
        numbers: dict[str, Any] = {name: _number(value) for name, value in row.items()}
        found.append(LayerCost(**{name: int(value) if "bytes" in name else value for name, value in numbers.items()}))
    return tuple(found)


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) > 0):
        raise ValueError(f"found {text!r:.40} where a whole number above 0 is expected")
    return int(text)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"found {value!r} where a number of at least 0 is expected")
    return value


def _above_0(value: Any) -> float:
    number = _number(value)
    if not number:
        raise ValueError("found 0 where a number above 0 is expected")
    return number


def _checked(value: Any, kind: type[Record]) -> Record:
    if not isinstance(value, kind):
        raise TypeError(f"found {value!r} where a {kind.__name__} is expected")
    return value
