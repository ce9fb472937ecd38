"""``pipeal memory``: from a model to a table, a picture and figures; mistakes in one line."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from torch import Tensor

from pipeal.cli import memory
from pipeal.core.errors import Interrupted
from pipeal.core.options import DEFAULTS
from pipeal.core.protocols import TrainableLayer
from pipeal.planning.pure.memory import WAYS, BlockMemory, Form, Model, Parts
from pipeal.run.memory_rows import Measured, measure
from tests.cli.running import run_command, told_one_line

MIB = 2**20


def looked_at(monkeypatch: pytest.MonkeyPatch, layers: int = 4) -> None:
    """Takes blocks as given, instead of looking at a model's."""

    def blocks(samples: int) -> list[BlockMemory]:
        kept = samples * MIB
        block = BlockMemory(MIB, MIB, 2 * MIB, graph=kept, forward=kept, backward=kept // 4, backward_whole=kept // 2)
        return [block] * layers

    model = Model((32, 64), (blocks(32), blocks(64)), (blocks(32), blocks(64)))
    monkeypatch.setattr("pipeal.run.memory.forecast", lambda *_: model)


@pytest.mark.draws
def test_a_table_a_picture_and_what_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at(monkeypatch)
    found = Measured(Parts(4 * MIB, MIB, 8 * MIB, 70 * MIB, 80 * MIB, 85 * MIB), 99 * MIB, 500 * MIB)
    asked: list[tuple[str, int]] = []
    monkeypatch.setattr("pipeal.run.memory.measured_alone", lambda _, way, n: asked.append((way, n)) or found)
    folder = tmp_path / "memory"
    arguments = ["--batch", "64", "--memory", "0.25", "--measure", "--out", str(folder)]
    code, out, _ = run_command(memory.command, capsys, *arguments)
    assert code == 0
    assert asked == [(way, 64) for way in WAYS]
    figures = json.loads((folder / "memory.json").read_text())
    assert (folder / "memory.png").read_bytes().startswith(b"\x89PNG")
    assert figures["forecast"]["AL by layer"]["gradients"] == MIB
    assert figures["forecast"]["BP"]["gradients"] == 4 * MIB
    assert figures["measured"]["BP"]["resident_kept"] == 99 * MIB
    assert figures["fits"]["AL by layer"]["depth"] > 10 * figures["fits"]["AL by stage"]["depth"]
    assert figures["fits"]["AL by layer"]["batch"] >= 3 * figures["fits"]["BP"]["batch"]
    assert figures["depths"] == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
    rows = [line for line in out.splitlines() if line.startswith("|")]
    assert len({len(row) for row in rows}) == 1  # the columns line up
    assert len(rows) == 2 + 2 * len(WAYS)


def test_as_if_the_layers_were_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at(monkeypatch)
    code, out, _ = run_command(memory.command, capsys, "--layers", "40", "--out", str(tmp_path / "memory"))
    assert code == 0
    assert "40 layers" in out
    assert "as if the layers after the first came again" in out
    assert json.loads((tmp_path / "memory" / "memory.json").read_text())["forecast"]["BP"]["weights"] == 40 * MIB


@pytest.mark.slow
def test_a_small_model_is_looked_at_and_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = [f"model.{key}={value}" for key, value in (("x_hid", 8), ("y_hid", 8), ("embedding_dim", 12))]
    options = [part for key in [*small, "train.precision=fp32"] for part in ("--set", key)]
    arguments = [*options, "--batch", "8", "--measure", "--out", str(tmp_path / "memory")]
    code, _, err = run_command(memory.command, capsys, *arguments)
    assert code == 0
    assert "USDT" not in err
    figures = json.loads((tmp_path / "memory" / "memory.json").read_text())
    for way in WAYS:
        for part in ("weights", "gradients", "optimizer"):
            assert figures["forecast"][way][part] == figures["measured"][way]["parts"][part]
        assert figures["measured"][way]["parts"]["resident"] > 0


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--model", ""], "unknown model ''"),
        (["--dataset", ""], "unknown data set ''"),
        (["--model", "transfomer"], "unknown model 'transfomer'; did you mean 'transformer'"),
        (["--model", "charml", "--preset", "cpu"], "unknown model 'charml'; did you mean 'charlm'"),
        (["--dataset", "agnew"], "did you mean 'agnews'"),
        (["--model", "charlm"], "charlm has no embedded data; expected shakespeare"),
        (["--preset", "cpu"], "transformer has none; they are for charlm"),
        (["--batch", "0"], "--batch"),
        (["--layers", "0"], "--layers"),
        (["--layers", "9" * 30], "--layers"),
        (["--memory", "0"], "--memory: found 0, expected GiB, a number above 0"),
        (["--memory", "nan"], "--memory: found nan"),
        (["--memory", "1e-9"], "GiB hold no layer of this model, even on one sample"),
        (["--measure", "--layers", "8"], "--measure: found it beside --layers"),
        (["--set", "engine.within_stage=layer"], "engine.within_stage, which pipeal memory chooses by itself"),
        (["--set", "engine.recompute=blocks"], "engine.recompute, which pipeal memory chooses"),
        (["--set", "engine.devices=cpu*2"], "expected none: it is one device"),
        (["--set", "train.accumulate=4"], "train.accumulate: found 4; expected 1"),
        (["--set", "engine.compile=static"], "engine.compile: found static; expected none"),
        (["--set", "model.x_hid=none"], "model.x_hid"),
        (["--out", "file"], "--out file: file is no folder; choose another"),
        pytest.param(["--out", "n" * 300], "--out n+: File name too long", id="a long name"),
    ],
)
def test_a_mistake_is_told_in_one_line_and_nothing_is_written(
    arguments: list[str],
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    looked_at(monkeypatch)
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    told_one_line(line, *run_command(memory.command, capsys, *arguments))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_model_of_one_layer_cannot_be_deepened(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at(monkeypatch, layers=1)
    arguments = ["--layers", "2", "--out", str(tmp_path / "memory")]
    told_one_line("--layers: 2 of a model of 1", *run_command(memory.command, capsys, *arguments))
    assert not (tmp_path / "memory").exists()


class Endless:
    """A subject whose process waits for ever."""

    device = "cpu"
    options = DEFAULTS

    def layers(self, form: Form) -> Sequence[TrainableLayer]:
        raise AssertionError(form)

    def batch(self) -> tuple[Tensor, Tensor]:
        threading.Event().wait()
        raise AssertionError


def test_what_ends_the_command_ends_the_process_that_measures() -> None:
    """Symptom: after its one line, a command that a signal or a dead loader worker ended waited for the measurement."""

    def end(*_: object) -> None:
        raise Interrupted("", 143)

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        with pytest.raises(Interrupted):
            measure(Endless(), "BP", 2)
    finally:
        signal.signal(signal.SIGALRM, before)
