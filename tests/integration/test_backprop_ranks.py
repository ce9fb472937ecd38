"""Pipelined backpropagation over processes leaves what one process leaves, up to rounding."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from time import sleep
from typing import Any

import pytest
import torch
from left_behind import left_behind
from torch import Tensor, nn

from pipeal.cli import text
from pipeal.core.errors import ConfigError
from pipeal.engine import Pipeline, Window
from pipeal.engine.distributed import window
from pipeal.engine.distributed.world import World
from pipeal.engine.schedule import Action
from pipeal.engine.state.layer_state import layer_state, load_layer_state
from pipeal.methods.bp import BP
from pipeal.models import CharLM, TokenCrossEntropy
from pipeal.models.charlm import CharDims
from pipeal.models.text import LSTM, TextDims, Transformer
from tests.engine.distributed.processes import run, started
from tests.integration.processes import many
from tests.integration.test_distributed import ONE_F_ONE_B, one_process, texts

Batches = list[tuple[Tensor, Tensor]]
SIZES = {
    "transformer": [1, 2, 2],
    "draws": [2, 1, 2],
    "lstm": [2, 1, 2],
    "charlm": [1, 2, 2],
    "wide": [1, 1, 1],
    "pair": [2, 1],
}
ROWS = (13, 16, 5, 24, 16)
"""Twelve micro-batches have one sample each or two, and of the smallest batch most have none."""


class Pair(nn.Module):
    """Hands on a tensor of whole numbers beside one with a gradient, as no model of pipeal's does."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """``(B, 6)`` to a pair."""
        return self.map(x), {"place": x.argmax(-1)}


class Joined(nn.Module):
    """Takes what :class:`Pair` hands on."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 6)

    def forward(self, given: tuple[Tensor, dict[str, Tensor]]) -> Tensor:
        """``(B, 6)``."""
        x, more = given
        return torch.tanh(x) + self.table(more["place"])


def network(name: str) -> BP:
    """In float64, where what only rounding changes is told from what is wrong."""
    torch.manual_seed(3)
    criterion: nn.Module = nn.CrossEntropyLoss()
    dims = TextDims(embedding=8, hidden=6, heads=2, blocks=3, dropout=0.2 if name == "draws" else 0.0)
    if name == "charlm":
        model: nn.Module = CharLM(7, dims=CharDims(block=6, width=8, heads=2, layers=3, dropout=0.0))
        criterion = TokenCrossEntropy()
    elif name in ("wide", "pair"):
        model = nn.Sequential(Pair(), Joined(), nn.Linear(6, 4))
    else:
        model = (LSTM if name == "lstm" else Transformer)(20, 4, dims=dims)
    # Adam would make much of the noise that is the gradient of a bias of attention's keys.
    optimizer = None if name in ("wide", "pair", "draws") else partial(torch.optim.SGD, momentum=0.9)
    return BP(model.double(), criterion, lr=0.1, optimizer=optimizer)


def batches(name: str) -> Batches:
    """Of several sizes, and texts of several lengths."""
    draw = torch.Generator().manual_seed(5)
    found = []
    for rows in ROWS:
        if name == "charlm":
            row = torch.randint(7, (rows, 7), generator=draw)
            found.append((row[:, :-1], row[:, 1:]))
        elif name == "wide":
            found.append((torch.randn(rows, 6, generator=draw).double(), torch.randint(4, (rows,), generator=draw)))
        else:
            x = torch.randint(1, 20, (rows, rows), generator=draw)
            x[1, rows // 2 :] = 0
            found.append((x, torch.randint(4, (rows,), generator=draw)))
    return found


def scale(batch: int) -> float:
    return 1.0 / (batch + 1)


def opened(world: World, name: str, schedule: str, state: Any = None, device: str = "cpu") -> Any:
    """Rank 0's pipeline, which goes on with a state; on another rank serves it."""
    from pipeal.run.backprop_pipeline import PipelinedBackprop
    from pipeal.run.backprop_ranks import Follower, Leader

    settings: dict[str, Any] = {"sizes": SIZES[name], "schedule": schedule, "micro_batches": 12, "precision": "fp32"}
    traced = Window(1, 24)
    if world.rank:
        return Follower(network(name), world, device, traced=traced, **settings).serve(threads=1)
    pads, layer = 0 if name in ("lstm", "transformer", "draws") else None, network(name)
    if state is not None:
        load_layer_state(layer, state)
    own = {"threads": 1, "stall_timeout_s": 300.0, "pad_index": pads, "longest": 21}
    leader = Leader(layer, world, device, traced=traced, **own, **settings)
    return PipelinedBackprop(leader, schedule="sequential", threads=1)


def in_one(name: str, parts: Batches, state: Any = None) -> tuple[Any, list[Tensor], Tensor]:
    layer = network(name)
    first = 0
    if state is not None:
        load_layer_state(layer, state)
        first = len(ROWS) - len(parts)
    with Pipeline([layer], "cpu", schedule="sequential", threads=1, first_batch=first) as pipe:
        losses = pipe.run(parts, scale).losses
        answer = pipe.predict(parts[0][0])
    return layer_state(layer), losses, answer


def far_apart(found: Any, wanted: Any) -> float:
    """The largest difference of the tensors of two states."""
    if isinstance(wanted, Tensor):
        return float((found.double() - wanted.double()).abs().max()) if wanted.numel() else 0.0
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        return max((far_apart(found[key], wanted[key]) for key in wanted), default=0.0)
    if isinstance(wanted, list | tuple):
        assert len(found) == len(wanted)
        return max(map(far_apart, found, wanted), default=0.0)
    assert found == wanted
    return 0.0


def hard(world: World) -> None:
    """Room for one message at a time, buffers for two shapes of five, and a stage that tells late how busy it was."""
    from pipeal.run import backprop_ranks, backprop_stage

    window._MOST_UNDER_WAY = 1
    backprop_stage.SHAPES = 2
    report = backprop_ranks.Follower.report

    def late(follower: Any) -> dict[str, Any]:
        found = report(follower)
        sleep(0.3)
        return {**found, "busy": {**found["busy"], "U": 1000.0}}

    if world.rank == 1:
        backprop_ranks.Follower.report = late  # type: ignore[method-assign]


def every_model(world: World) -> list[Any]:
    """How far what three ranks have learnt is from what one process has."""
    hard(world)
    told = []
    for name, schedule in (("transformer", "gpipe"), ("transformer", ONE_F_ONE_B), ("lstm", ONE_F_ONE_B),
                           ("charlm", "gpipe"), ("wide", ONE_F_ONE_B)):  # fmt: skip
        pipe = opened(world, name, schedule)
        if pipe is None:
            continue
        parts = batches(name)
        with pipe:
            early = pipe.run(parts[:2], scale).losses
            snapshot = pipe.snapshot().wait(120)
            report = pipe.run(parts[2:], scale)
            answer = pipe.predict(parts[0][0])
            spans = pipe.spans()
        (layer,) = pipe.model
        state, losses, wanted = in_one(name, parts)
        midway, _, _ = in_one(name, parts[2:], snapshot[0].state)
        told.append(
            [
                f"{name} {schedule}",
                far_apart(torch.cat([*early, *report.losses]), torch.cat(losses)),
                far_apart(layer_state(layer), state),
                far_apart(midway, state),
                far_apart(answer, wanted),
                [stage.busy_s > 500 for stage in report.stages],
                all(stage.busy_s > 0 for stage in report.stages),
                sorted({(span.stage, str(span.action)) for span in spans}),
                report.sizes == SIZES[name],
            ]
        )
    return told


def taken_up(world: World) -> list[str]:
    """What differs where three ranks go on with what three ranks have left, with dropout and Adam."""
    parts, states, state = batches("draws"), [], None
    for first, last in ((0, 5), (0, 2), (2, 5)):
        pipe = opened(world, "draws", ONE_F_ONE_B, state if first else None)
        if pipe is not None:
            pipe.skip(first)
            with pipe:
                pipe.run(parts[first:last], scale)
                state = pipe.snapshot().wait(120)[0].state
            states.append(state["module"] | {"optimizer": state["optimizers"]["opt"]["state"]["state"]})
    return [] if world.rank else [name for name in states[0] if far_apart(states[2][name], states[0][name])]


def both(world: World) -> tuple[list[Any], list[str]]:
    """In one start of three processes, which takes longer than the work."""
    return every_model(world), taken_up(world)


@pytest.mark.slow
def test_three_ranks_learn_what_one_process_learns_and_go_on_bit_for_bit(tmp_path: Path) -> None:
    models, differences = run(both, 3, tmp_path)[0]
    assert differences == []
    for name, losses, state, midway, answer, late, busy, spans, sizes in models:
        assert losses < 1e-6, name  # reported in float32
        # The transformer's attention has a softmax in float32.
        bound = 1e-7 if name.startswith("transformer") else 1e-12
        assert max(state, midway, answer) < bound, (name, state, midway, answer)
        assert late == [False, True, False], name
        assert busy, name
        assert sizes, name
        assert spans == sorted((stage, str(action)) for stage in range(3) for action in Action), name


def one_breaks(error: Exception, world: World) -> str:
    """The last stage meets an error in its second batch; what each rank ends with."""
    if world.rank == 2:
        number, criterion = [0], nn.CrossEntropyLoss.forward

        def broken(self: nn.CrossEntropyLoss, answer: Tensor, target: Tensor) -> Tensor:
            number[0] += 1
            if number[0] == 20:
                raise error
            return criterion(self, answer, target)

        nn.CrossEntropyLoss.forward = broken  # type: ignore[method-assign]
    pipe = opened(world, "wide", ONE_F_ONE_B)
    if pipe is not None:
        with pipe:
            pipe.run(batches("wide"))
    return "nothing was raised"


IN_STAGE_2 = "in the forward of stage 2, batch 1, device cpu"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "line", "note"),
    [
        (
            ValueError("the twentieth loss is missing"),
            "ValueError: the twentieth loss is missing",
            f"{IN_STAGE_2}; input (2, 6) float64",
        ),
        (
            torch.OutOfMemoryError("Tried to allocate 1.50 GiB. GPU 0 has 8.00 GiB of which 512.00 MiB is free."),
            f"OutOfMemoryError: out of memory {IN_STAGE_2}: 1.50 GiB were asked for and 512.00 MiB were free, the "
            "input is (2, 6) float64; give it smaller batches ",
            None,
        ),
    ],
    ids=["error", "memory"],
)
def test_an_error_of_one_stage_ends_all_and_is_named(
    error: Exception, line: str, note: str | None, tmp_path: Path
) -> None:
    """The others wait for it in a receive of Gloo's, which has no timeout of its own. Symptom: memory that ran out on
    the last rank was told there without a place, and on the first with a place of that one's own."""
    with started(partial(one_breaks, error), 3, tmp_path) as ranks:
        assert ranks.wait() == [1, 1, 1]
        said = [ranks.said(rank).strip().splitlines() for rank in range(3)]
    last = said[2][-2:] if note else said[2][-1:]
    assert line in last[0]
    assert last[1:] == ([note] if note else [])
    for lines in said[:2]:
        assert "rank 2 (stage 2) on " in lines[-1]
        assert f" ended: {line}" in lines[-1]


@pytest.mark.slow
def test_the_command_trains_and_evaluates_as_in_one_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (*texts(tmp_path, "lstm"), "--mode=bp", "--set=model.dropout=0.0", "--set=train.precision=fp32")
    out = tmp_path / "many"
    alone = one_process(text.command, capsys, tmp_path / "alone", *arguments)
    said = many(tmp_path, 2, "nlpmain.py", *arguments, "--schedule=gpipe", f"--out={out}")
    assert "BP on 2 processes: blocks [" in said
    (layers, rows), (shared_layers, shared_rows) = left_behind(alone), left_behind(out / alone.name)
    for key in ("train_loss", "train_acc", "test_acc", "held_out_acc"):
        found, wanted = ([float(row[key]) for row in each if row.get(key)] for each in (shared_rows, rows))
        assert found == pytest.approx(wanted, rel=1e-4, abs=1e-9), key
    assert far_apart(shared_layers[0]["module"], layers[0]["module"]) < 1e-4
    summary = json.loads((out / alone.name / "summary.json").read_text())
    assert len(summary["stages"]) == 2
    assert all(0 < stage["busy_share"] <= 1 for stage in summary["stages"])


def on_gpus(world: World) -> Any:
    """Two stages, on a GPU each if there are two; the losses, or what is refused."""
    device = f"cuda:{world.rank % torch.cuda.device_count()}"
    parts = batches("wide")
    try:
        pipe = opened(world, "pair", "1f1b", device=device)
    except ConfigError as error:
        return str(error)
    if pipe is None:
        return None
    with pipe:
        losses = pipe.run(parts, scale).losses
        answer = pipe.predict(parts[0][0]).cpu()
    return [losses[0], answer, layer_state(pipe.model[0])["module"]]


@pytest.mark.cuda
def test_stages_on_gpus(tmp_path: Path) -> None:
    """Over NCCL where each rank has its own; two on one are refused, on both."""
    found = run(on_gpus, 2, tmp_path)
    if torch.cuda.device_count() < 2:
        assert "expected a GPU for each rank" in found[0]
        assert found[1] == found[0]
        return
    state, losses, answer = in_one("pair", batches("wide"))
    torch.testing.assert_close(found[0][0], losses[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found[0][1], answer)
    assert far_apart(found[0][2], state["module"]) < 1e-9
