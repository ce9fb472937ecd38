"""Which methods a run trains: one by ``--method``, or several side by side by ``--methods``."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeal.cli import report, text, vision
from pipeal.config import TextConfig, load_config
from pipeal.core.errors import ConfigError
from pipeal.core.methods import METHODS
from pipeal.reporting.page import read_runs
from pipeal.reporting.recorders import JsonLinesRecorder
from pipeal.run.team import Team
from pipeal.training.row import EpochRow
from tests.cli.running import run_command, told_one_line
from tests.cli.test_text import varied
from tests.config.test_effects import configured
from tests.integration.processes import many
from tests.integration.test_resume import IMAGES, SMALL, Stopping, assert_same, ended, run, stopping

__all__ = ["stopping"]

COMPARED = ("agnews", "lstm", "--mode=compare", *SMALL, "--devices=cpu")
NAME = "agnews-lstm-compare-001"


def test_a_method_has_a_label_of_its_own() -> None:
    """Tables, legends and ``summary.json`` tell forms apart by it."""
    assert len({method.label for method in METHODS.values()}) == len(METHODS)


@pytest.mark.parametrize(
    ("arguments", "mode", "methods"),
    [
        ([], "al", ("al", "bp")),
        (["--method=greedy"], "greedy", ("al", "bp")),
        (["--mode=greedy", "--method", "greedy"], "greedy", ("al", "bp")),
        (["--mode=compare"], "compare", ("al", "bp")),
        (["--mode=compare", "--methods=bp,al"], "compare", ("bp", "al")),
        (["--method=compare", "--methods", "greedy, al ,bp"], "compare", ("greedy", "al", "bp")),
        (["--mode=compare", "--set=train.methods=[greedy, bp]"], "compare", ("greedy", "bp")),
        (["--set=train.mode=compare", "--set=train.methods=greedy,bp"], "compare", ("greedy", "bp")),
    ],
)
def test_methods_are_chosen_by_name(
    arguments: list[str], mode: str, methods: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, said = configured(monkeypatch, text.command, ["toynews", "lstm", *arguments])
    assert (config.train.mode, config.train.methods) == (mode, methods)
    assert said == []
    assert load_config(TextConfig, values={"train": {"methods": list(methods)}}).train.methods == methods


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--mode=compare", "--methods=al,gredy"], r"train.methods: unknown method 'gredy'; did you mean 'greedy'\?"),
        (["--mode=compare", "--methods=al,,bp"], r"train.methods: unknown method ''"),
        (["--mode=compare", "--methods=al"], r"train.methods: found al, expected two methods or more of al, bp, "),
        (
            ["--mode=compare", "--set=train.methods=[]"],
            r"--set train.methods: found none, expected two methods or more",
        ),
        (["--mode=compare", "--methods=bp,al,bp"], r"train.methods: found bp twice; expected each method once"),
        (["--mode=compare", "--set=train.methods=3"], r"--set train.methods: found 3, expected a list of methods"),
        (["--methods=al,bp"], r"train.methods: found al, bp, but train.mode is al; expected --mode compare"),
        (["--mode=bp", "--methods=al,bp"], r"train.methods: found al, bp, but train.mode is bp; .* or --method with"),
        (["--mode=bp", "--method=al"], r"--method and --mode are one option: found 'bp' and 'al'; expected one name"),
        (["--method="], r"train.mode: unknown method '' \(known: al, "),
        (["--method=gredy"], r"train.mode: unknown method 'gredy'; did you mean 'greedy'\? \(known: al, "),
    ],
)
def test_what_is_no_choice_of_methods_is_refused_in_one_line(
    arguments: list[str], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told_one_line(line, *run_command(text.command, capsys, "toynews", "lstm", *arguments, f"--out={tmp_path / 'runs'}"))
    assert not (tmp_path / "runs").exists()


def test_methods_of_a_file_are_for_its_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "three.yaml"
    path.write_text("train: {mode: compare, methods: [greedy, al]}\n")
    for arguments, mode in (([], "compare"), (["--mode=bp"], "bp")):
        config, _ = configured(monkeypatch, text.command, ["toynews", "lstm", f"--config={path}", *arguments])
        assert (config.train.mode, config.train.methods) == (mode, ("greedy", "al"))


@pytest.mark.parametrize(("key", "found", "named"), [("dataset", "agnews", "toynews"), ("model.name", "VGG", "resnet")])
def test_another_data_set_or_model_than_the_named_one_is_refused(
    key: str, found: str, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``resnet --set model.name=VGG`` took the sizes of the one, trained the other, and said that it was the first."""
    entry, data, model = (text.command, named, "lstm") if key == "dataset" else (vision.command, "toyimages", named)
    told = run_command(entry, capsys, data, model, f"--set={key}={found}", f"--out={tmp_path / 'runs'}")
    told_one_line(f"--set {key}: found {found}, but the command names {named}; name {found} in its place", *told)


def test_what_is_idle_with_every_method_of_a_comparison_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["toynews", "lstm", "--mode=compare", "--set=train.lr.ae=1e-2"]
    _, said = configured(monkeypatch, text.command, [*arguments, "--methods=greedy,bp"])
    assert said == ["train.lr.ae 0.01: without effect, since train.methods is greedy, bp"]
    assert configured(monkeypatch, text.command, [*arguments, "--methods=greedy,al"])[1] == []


def lines(table: str) -> list[str]:
    """The first cell of each row of the first table, below its head."""
    rows = [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("| ")]
    return rows[2 : rows.index("form", 1)] if "form" in rows[1:] else rows[2:]


def speed_ups(out: str, over: str) -> dict[str, str]:
    """The last cell of each row of the table of costs, by the form."""
    table = out.partition(f"costs, speed-up over {over}\n")[2].partition("counted:")[0]
    rows = [[cell.strip() for cell in line.split("|")] for line in table.splitlines() if line.startswith("| ")]
    assert rows[0][-2] == "speed-up"
    return {cells[1]: cells[-2] for cells in rows[2:]}


@pytest.mark.slow
def test_three_methods_are_trained_in_turns_and_shown_in_the_order_of_their_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[str] = []
    write = JsonLinesRecorder.write

    def noted(recorder: JsonLinesRecorder, row: EpochRow) -> None:
        trained.append(f"{recorder.path.parent.name} {row.epoch}")
        write(recorder, row)

    monkeypatch.setattr(JsonLinesRecorder, "write", noted)
    code, out, err = run_command(
        text.command, capsys, *COMPARED, "--methods=greedy,bp,al", "--epochs=3", "--set=data.held_out=0.2",
        "--tune=train.lr.base=0.001,0.003", "--tune-epochs=1",
        "--data-root", str(varied(tmp_path / "data")), f"--out={tmp_path}",
    )  # fmt: skip
    assert code == 0, err
    assert trained == [
        "greedy 1", "bp 1", "al 1", "bp 2", "al 2", "greedy 2", "al 3", "greedy 3", "bp 3",
    ]  # fmt: skip
    labels = ["Greedy", "BP", "AL"]
    assert lines(out) == labels
    assert list(speed_ups(out, "BP")) == labels
    assert speed_ups(out, "BP")["BP"] == "1.00×"
    assert all(len(line) <= 120 for line in out.splitlines() if line.startswith("|"))
    folder = tmp_path / NAME
    assert list(json.loads((folder / "summary.json").read_text())) == labels
    assert all((folder / form / "timeline.png").is_file() for form in ("greedy", "bp", "al"))
    assert (folder / "curves.png").is_file()
    kept = json.loads((folder / "tune.json").read_text())
    assert list(kept["chosen"]) == ["greedy", "bp", "al"]
    tried = {form: [t["setting"] for t in kept["trials"] if t["form"] == form] for form in kept["chosen"]}
    assert tried["greedy"] == tried["bp"] == tried["al"], "all forms alike"
    for form in kept["chosen"]:
        own = load_config(TextConfig, folder / form / "config.yaml").train
        assert (own.mode, own.methods) == (form, ("greedy", "bp", "al"))
        assert own.lr.base == kept["chosen"][form]["train.lr.base"]
    assert [one.form for one in read_runs(folder)] == labels
    code, _, err = run_command(report.command, capsys, str(folder))
    assert code == 0, err
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert re.findall(r"<h2[^>]*>([^<]*)", page)
    assert all(label in page for label in labels)


@pytest.mark.slow
def test_without_backpropagation_speed_ups_are_over_what_is_named_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run_command(
        vision.command, capsys, "toyimages", "resnet", "--mode=compare", "--methods=greedy,al", *IMAGES, "--epochs=1",
        "--devices=cpu,cpu", f"--out={tmp_path}",
    )  # fmt: skip
    assert code == 0, err
    assert lines(out) == ["Greedy", "AL"]
    found = speed_ups(out, "Greedy")
    assert (list(found), found["Greedy"]) == (["Greedy", "AL"], "1.00×")
    folder = tmp_path / "toyimages-resnet-compare-001"
    assert {path.name for path in folder.iterdir() if path.is_dir()} == {"greedy", "al"}
    assert list(json.loads((folder / "summary.json").read_text())) == ["Greedy", "AL"]


@pytest.mark.slow
def test_a_comparison_of_three_goes_on_where_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], stopping: Stopping
) -> None:
    arguments = (*COMPARED, "--methods=bp,greedy,al", "--data-root", str(varied(tmp_path / "data")))
    run(text.command, capsys, 0, *arguments, f"--out={tmp_path / 'untouched'}")
    summary = json.loads((tmp_path / "untouched" / NAME / "greedy" / "summary.json").read_text())
    second = int(summary["batches_per_epoch"]) + 2
    # In BP's first epoch, Greedy's first, and in the second epoch, which Greedy begins, in that of AL.
    stopping.at = [(1, 5), (1, 7), (1, second), (1, second)]
    for code in (130, 130, 130, 130, 0):
        run(text.command, capsys, code, *arguments, f"--out={tmp_path / 'stopped'}")
    for form in ("bp", "greedy", "al"):
        assert_same(*(tmp_path / out / NAME / form for out in ("untouched", "stopped")))
    other = run(text.command, capsys, 2, *COMPARED, f"--resume={tmp_path / 'stopped' / NAME}", *arguments[-2:])
    assert "its run has train.methods bp, greedy, al, this command al, bp; give the same" in other


@pytest.mark.slow
def test_a_comparison_of_an_earlier_version_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], stopping: Stopping
) -> None:
    """It knew AL and BP, and its files have no ``train.methods``."""
    arguments = (*COMPARED, "--data-root", str(varied(tmp_path / "data")))
    ended(text.command, capsys, stopping, tmp_path, arguments, (1, 5))
    folder = tmp_path / "stopped" / NAME
    for path in (folder / "asked.yaml", *folder.glob("*/config.yaml")):
        told = path.read_text()
        before = re.sub(r"\n  methods:(\n  - \w+)+| *methods: \[.*\]\n?", "", told)
        assert before != told
        assert "\n  methods" not in before
        path.write_text(before)
    run(text.command, capsys, 0, *arguments, f"--out={tmp_path / 'stopped'}")
    assert [path.name for path in (tmp_path / "stopped").iterdir()] == [NAME]
    for form in ("al", "bp"):
        assert_same(tmp_path / "untouched" / NAME / form, folder / form)


@pytest.mark.parametrize(("methods", "whole"), [("al,bp,greedy", True), ("greedy,al", False)])
def test_over_stages_in_processes_a_model_of_one_layer_is_refused(methods: str, whole: bool) -> None:
    mesh = SimpleNamespace(stages=2, replicas=1, size=2)
    asked = ["train.mode=compare", f"train.methods={methods}", "train.on_non_finite=stop-and-rewind"]
    experiment: Any = SimpleNamespace(config=load_config(TextConfig, overrides=asked))
    line = r"train.methods: found bp, .* one layer, on 2 stages; expected methods of al.*greedy" if whole else "on_non"
    with pytest.raises(ConfigError, match=line):
        Team(SimpleNamespace(mesh=mesh, attempts=None), "cpu").choose(experiment, "al")  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_comparison_over_processes_leaves_what_one_process_leaves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = (*COMPARED, "--methods=al,greedy", "--data-root", str(varied(tmp_path / "data")))
    run(text.command, capsys, 0, *arguments, f"--out={tmp_path / 'alone'}")
    said = many(tmp_path, 2, "nlpmain.py", *arguments, f"--out={tmp_path / 'many'}")
    assert "speed-up over AL\n" in said
    for form in ("al", "greedy"):
        assert_same(*(tmp_path / out / NAME / form for out in ("alone", "many")))
        assert load_config(TextConfig, tmp_path / "many" / NAME / form / "config.yaml").engine.devices == ("cpu",) * 2
