"""Greedy layers: their losses by hand; and what the layers of every method with exits can do: gradients that stay at
home, answers, every schedule."""

from __future__ import annotations

import json
import re
from itertools import product
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from torch import Tensor, nn

from pipeal import ALPackage, Pipeline
from pipeal.cli import generate, report, text, vision
from pipeal.core.errors import ConfigError, ScheduleError
from pipeal.core.methods import METHODS
from pipeal.core.names import form_told
from pipeal.engine import SCHEDULES
from pipeal.methods.greedy import Greedy
from pipeal.models import (
    CharDims,
    TextDims,
    VisionDims,
    build_language,
    build_text,
    build_vision,
    group_layers,
)
from pipeal.training.exit_costs import exit_costs
from tests.cli.running import run_command, told_one_line
from tests.integration.law import NEEDS_FP16, left_behind
from tests.integration.test_resume import FEW, IMAGES, SMALL, Stopping, assert_same
from tests.methods.refusing import PIPEALS, skipped_where_refused

ROOT = Path(__file__).parents[2]
TEXT = TextDims(embedding=12, hidden=10, code=8, heads=2, dropout=0.3)
VISION = VisionDims(size=16, hidden=10, code=8, width=0.05)
CHARACTERS = CharDims(block=6, width=12, heads=3, layers=4, dropout=0.3, per_layer=2)
NAMES = ("lstm", "transformer", "vgg", "resnet", "charlm")
CASES = [(name, method) for name in NAMES for method in METHODS]
PLAIN = [(name, method) for name, method in CASES if METHODS[method].has_exits and not METHODS[method].has_labels]
"""Without AL, of which the other tests are."""
NARROW: dict[str, dict[str, object]] = {"scpl": {"hidden": 16, "width": 12}, "deinforeg": {"width": 16}}
"""Options of methods whose published sizes take long."""

pytestmark = pytest.mark.usefixtures("one_thread", "cheap_runs")


def built(name: str, method: str = "greedy") -> ALPackage:
    torch.manual_seed(0)
    how: dict[str, Any] = {"lr": 1e-2, "method_options": NARROW.get(method)}
    with skipped_where_refused(method):
        if name in ("vgg", "resnet"):
            return build_vision(name, method, classes=5, dims=VISION, **how)
        if name == "charlm":
            return build_language(name, method, characters=20, dims=CHARACTERS, **how)
        return build_text(name, method, vocab_size=50, classes=4, dims=TEXT, **how)


def batches(name: str, count: int = 4) -> list[tuple[Tensor, Tensor]]:
    """The last one is smaller; texts are padded."""
    random = torch.Generator().manual_seed(1)
    made = []
    for rows in (6,) * (count - 1) + (3,):
        if name in ("vgg", "resnet"):
            made.append((torch.randn(rows, 3, 16, 16, generator=random), torch.randint(5, (rows,), generator=random)))
        elif name == "charlm":
            x = torch.randint(20, (rows, 7), generator=random)
            made.append((x[:, :-1], x[:, 1:]))
        else:
            x = torch.randint(2, 50, (rows, 5), generator=random)
            x[0, 2:] = 0
            made.append((x, torch.randint(4, (rows,), generator=random)))
    return made


@pytest.mark.parametrize("method", PIPEALS)
def test_a_method_refuses_no_model_that_it_is_for(method: str) -> None:
    """Where one refuses, all tests of it skip."""
    for name in ("vgg", "resnet") if method == "infopro" else NAMES:
        try:
            built(name, method)
        except pytest.skip.Exception as refused:
            pytest.fail(f"{name}: {refused}")


def test_its_loss_is_that_of_its_own_answer_and_its_gradients_stay_at_home() -> None:
    torch.manual_seed(0)
    f, head = nn.Linear(3, 4), nn.Linear(4, 2)
    layer = Greedy(f, head, lr=0.5, optimizer=torch.optim.SGD)
    x, y = torch.randn(5, 3, requires_grad=True), torch.tensor([0, 1, 1, 0, 1])
    out, after = layer(x, y)
    assert after is y
    assert not out.requires_grad
    assert torch.equal(out, f(x))
    logits = head(f(x))
    by_hand = -torch.stack([row.log_softmax(0)[wanted] for row, wanted in zip(logits, y, strict=True)]).mean()
    (loss,) = layer.loss() or ()
    torch.testing.assert_close(loss, by_hand.detach())
    wanted = torch.autograd.grad(by_hand, list(layer.parameters()))
    layer.backward()
    before = [weights.detach().clone() for weights in layer.parameters()]
    torch.testing.assert_close([weights.grad for weights in layer.parameters()], list(wanted))
    layer.update()
    for weights, old, gradient in zip(layer.parameters(), before, wanted, strict=True):
        torch.testing.assert_close(weights.detach(), old - 0.5 * gradient)
    assert torch.equal(layer.inference(out, "b"), head(out))
    assert layer.inference(out, "h") is out
    with pytest.raises(ConfigError, match="unknown inference path 'g'"):
        layer.inference(out, "g")  # type: ignore[arg-type]
    with pytest.raises(ScheduleError, match="without a forward"):
        layer.backward()


@pytest.mark.parametrize(("name", "method"), PLAIN)
def test_a_layers_loss_reaches_no_other_layer(name: str, method: str) -> None:
    package = built(name, method)
    assert len(package) == {"vgg": 4, "resnet": 5, "charlm": 2}.get(name, 4)
    ((x, y),) = batches(name, 1)
    for trained in range(len(package)):
        package(x, y)
        package[trained].backward()
        for number, layer in enumerate(package):
            has_gradient = [weights.grad is not None for weights in layer.parameters()]
            assert all(has_gradient) if number == trained else not any(has_gradient)
        package.zero_grad()


@pytest.mark.parametrize(("name", "method"), PLAIN)
def test_it_starts_with_the_blocks_of_the_network_and_answers_at_every_exit(name: str, method: str) -> None:
    package = built(name, method).eval()
    ((x, _),) = batches(name, 1)
    answers = (len(x), *x.shape[1:], 20) if name == "charlm" else (len(x), 5 if x.dim() == 4 else 4)
    with torch.no_grad():
        for exit_at in range(1, len(package) + 1):
            found = package.infer(x, exit_at)
            assert found.shape == answers
            assert torch.equal(package.to_bp(exit_at)(x), found)
    assert package.effective_parameters() + package.affiliated_parameters() == sum(
        weights.numel() for weights in package.parameters()
    )
    costs = exit_costs(package, x)
    assert all(cost > 0 for cost in (*costs.climb[1:], *costs.descent))
    assert str(package.summary(x))


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("transformer", "fp32"),
        ("resnet", "fp32"),
        pytest.param("charlm", "fp32", marks=pytest.mark.slow),
        pytest.param("lstm", "fp16", marks=[NEEDS_FP16, pytest.mark.slow]),
        pytest.param("vgg", "fp16", marks=[NEEDS_FP16, pytest.mark.slow]),
    ],
)
@pytest.mark.parametrize("method", dict.fromkeys(method for _, method in PLAIN))
def test_every_schedule_leaves_what_sequential_leaves(name: str, method: str, precision: str) -> None:
    expected = left_behind(built(name, method), batches(name), "sequential", 1, precision=precision)
    assert all(tensor.isfinite().all() for tensor in expected)
    for schedule, stages in product(SCHEDULES, (1, 2)):
        found = left_behind(built(name, method), batches(name), schedule, stages, precision=precision)
        assert len(found) == len(expected)
        assert all(map(torch.equal, found, expected)), (schedule, stages)


@NEEDS_FP16
def test_in_fp16_each_layer_scales_its_loss() -> None:
    package = built("transformer")
    with Pipeline(package, "cpu*2", precision="fp16", threads=1) as pipe:
        pipe.run(batches("transformer"))
        assert all(layer.scaler is not None and layer.scaler.overflows() == 0 for layer in package)
    package[0].scale_losses(False)
    assert package[0].scaler is None


@pytest.mark.parametrize(("name", "method"), CASES)
def test_every_method_trains_every_model(name: str, method: str) -> None:
    package = built(name, method)
    before = [weights.detach().clone() for weights in package.parameters()]
    with Pipeline(package, "cpu", "sequential", threads=1) as pipe:
        report = pipe.run(batches(name))
    # The last layer may have the first of them alone: that of its answer.
    *hidden, last = [losses.shape[1] for losses in report.losses]
    assert set(hidden) <= {len(METHODS[method].losses)}
    assert last in (1, len(METHODS[method].losses))
    moved = [not torch.equal(old, new) for old, new in zip(before, package.parameters(), strict=True)]
    assert all(moved)


def test_its_layers_compute_in_groups_of_similar_length() -> None:
    package = built("lstm").eval()
    ((x, _),) = batches("lstm", 1)
    with torch.no_grad():
        plain = package.infer(x)
        torch.testing.assert_close(group_layers(package, [3]).infer(x), plain)


def test_it_has_one_learning_rate() -> None:
    with pytest.raises(ConfigError, match="the greedy form has no sides: give one learning rate"):
        build_vision("vgg", "greedy", classes=2, dims=VISION, lr={"enc": 1.0, "ae": 1.0})
    with pytest.raises(ConfigError, match="is the AL form, but the mode is 'greedy'"):
        build_vision("VGGAL", "greedy", classes=2, dims=VISION)
    assert form_told(("vgg", None), "greedy") == (
        "training the greedy form (a classifier per layer) of vgg; --mode al trains the AL form"
    )


@pytest.mark.parametrize(
    ("command", "arguments", "method", "stop"),
    [
        (text.command, ("toynews", "transformer", *SMALL, *FEW, "--epochs=1"), "greedy", (1, 3)),
        (vision.command, ("toyimages", "vgg", *IMAGES, "--epochs=1"), "greedy", (1, 1)),
        # With more than a label in its targets, and other losses in its last layer.
        (vision.command, ("toyimages", "vgg", *IMAGES, "--epochs=1"), "infopro", (1, 1)),
        # With batch norm beside its blocks.
        pytest.param(
            vision.command,
            ("toyimages", "vgg", *IMAGES, "--epochs=1", "--set=methods.deinforeg.width=16"),
            "deinforeg",
            (1, 1),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_run_is_ended_taken_up_measured_and_reported(
    command: click.Command,
    arguments: tuple[str, ...],
    method: str,
    stop: tuple[int, int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = f"{arguments[0]}-{arguments[1]}-{method}-001"
    arguments = (*arguments, f"--mode={method}", "--devices=cpu*2")
    code, out, err = run_command(command, capsys, *arguments, f"--out={tmp_path / 'untouched'}")
    assert code == 0, err
    assert f"training the {METHODS[method].title} of " in err
    assert re.search(rf"{METHODS[method].label} exits after epoch \d of seed 0, on [\d,]+ test samples", out)
    stopping = Stopping(monkeypatch)
    stopping.at = [stop]
    for wanted in (130, 0):
        code, _, err = run_command(command, capsys, *arguments, f"--out={tmp_path / 'stopped'}")
        assert code == wanted, err
    assert_same(tmp_path / "untouched" / name, tmp_path / "stopped" / name)
    exits = json.loads((tmp_path / "untouched" / name / "exits.json").read_text())
    assert [row["name"] for row in exits["rows"]][-2:] == ["full path", "early exit (calibrated)"]
    assert len(exits["rows"]) == 4 - 1 + 2
    page = tmp_path / "page.html"
    code, _, err = run_command(report.command, capsys, str(tmp_path / "untouched" / name), f"--out={page}")
    assert code == 0, err
    assert all(title.capitalize() in page.read_text() for title in METHODS[method].loss_titles)
    assert "Autoencoder loss" not in page.read_text()


@pytest.mark.slow
def test_a_language_model_is_trained_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("to be, or not to be, that is the question.\n" * 60)
    code, out, err = run_command(
        text.command, capsys, "text", "charlm", "--mode=greedy", f"--text={corpus}", "--epochs=1", "--devices=cpu",
        "--set=data.steps=12", f"--out={tmp_path}",
    )  # fmt: skip
    assert code == 0, err
    assert "exits:    validation loss" in out
    folder = str(tmp_path / "text-charlm-greedy-001")
    code, out, err = run_command(generate.command, capsys, folder, "--length=20", "--exit=1")
    assert code == 0, err
    assert len(out.strip()) > 10


@pytest.mark.parametrize(("spelling", "form"), [("LSTMAL", "AL"), ("LSTM", "BP")])
def test_a_spelling_that_stands_for_another_form_is_refused(
    spelling: str, form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``LSTM``, which is the BP form, was taken for the greedy one."""
    told = run_command(text.command, capsys, "toynews", spelling, "--mode=greedy", f"--out={tmp_path / 'runs'}")
    told_one_line(f"that spelling of the model is its {form} form, but --mode is greedy; ask for 'lstm'", *told)
    options = "--set=train.mode=greedy", f"--out={tmp_path / 'runs'}"  # by which it was trained all the same
    told = run_command(text.command, capsys, "toynews", spelling, *options)
    told_one_line(f"that spelling of the model is its {form} form, but train.mode is greedy; ask for 'lstm'", *told)
    with pytest.raises(ConfigError, match=f"model '{spelling}' is the {form} form, but the mode is 'greedy'; ask for"):
        build_text(spelling, "greedy", vocab_size=50, classes=4, dims=TEXT)


NAMED = re.compile(rf"""["']({"|".join(METHODS)})["']""")
TABLE = "core/methods.py"


def test_nothing_but_methods_and_models_names_a_method() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in sorted((ROOT / "pipeal").rglob("*.py"))
        if path.relative_to(ROOT / "pipeal").parts[0] not in ("methods", "models")
        and path.relative_to(ROOT / "pipeal").as_posix() != TABLE
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if NAMED.search(line)
    ]
    assert not found


def test_nothing_but_methods_spells_the_way_of_an_answer() -> None:
    way = re.compile(r"""inference\([^()]*(\([^()]*\))*[^()]*, ["'][fbh]["']\)|\(["'][fbh]["'], \*""")
    found = [
        str(path.relative_to(ROOT))
        for room in ("engine", "training", "planning", "run", "cli", "reporting")
        for path in (ROOT / "pipeal" / room).rglob("*.py")
        if way.search(path.read_text(encoding="utf-8"))
    ]
    assert not found
