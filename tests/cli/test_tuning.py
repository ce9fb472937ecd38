"""``--tune``: the same tries for every form, chosen by held-out samples alone, and the one line for each mistake."""

from __future__ import annotations

import json
import signal
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeal.cli.text import command
from pipeal.config import LrConfig, TextConfig, TuneConfig, load_config
from pipeal.core.errors import ConfigError, DataError, Interrupted
from pipeal.models import TokenCrossEntropy
from pipeal.reporting.attempts import Attempts
from pipeal.run import tuning
from pipeal.run.build_text import TextExperiment, text_experiment
from pipeal.run.duration import at_its_length, at_length
from pipeal.run.forms import Form, Run
from pipeal.run.grid import Value, parse_grid, widen, with_setting
from pipeal.run.site import ONE_PROCESS
from pipeal.run.stopping import StopRequest
from pipeal.run.tuning import Trial, tune
from tests.cli.running import run_command, told_one_line
from tests.cli.test_text import agnews
from tests.messages import messages

leaves = partial(run_command, command)
SMALL = {
    "model": {"name": "lstm", "embedding_dim": 4, "x_hid": 4, "y_hid": 4},
    "engine": {"devices": ["cpu"], "threads": 1},
}


def config(root: Path, *grid: str, **train: Any) -> TextConfig:
    values = {
        **SMALL, "dataset": "agnews",
        "data": {"root": str(root), "held_out": 0.2, "batching": {"budget_tokens": 60}},
        "train": {"epochs": 2, "precision": "fp32", **train}, "tune": {"grid": list(grid)},
    }  # fmt: skip
    return load_config(TextConfig, values=values)


def forms_of(experiment: TextExperiment) -> list[Form]:
    """Both, with every choice made."""
    found = []
    for mode in ("al", "bp"):
        one = experiment.config
        layers = len(experiment.package(mode, 0))
        engine = replace(one.engine, sizes=(layers,), schedule="sequential")
        form = replace(one, engine=engine, train=replace(one.train, mode=mode))  # type: ignore[arg-type]
        found.append(Form(mode, mode.upper(), mode, form))
    return found


def tuned(experiment: TextExperiment, folder: Path, stop: StopRequest | None = None) -> tuple[list[Form], list[str]]:
    kept: Any = SimpleNamespace(path=folder, way_back="the same command")
    with messages() as said:
        return tune(Run(experiment, kept, stop or StopRequest(), Attempts(), ONE_PROCESS), forms_of(experiment)), said


def test_trials_look_at_held_out_samples_alone_and_are_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = agnews(tmp_path / "data", count=10)
    experiment = text_experiment(config(root, "train.lr.base=0.001,0.01,0.1"))

    def looked(_: object) -> None:
        raise AssertionError("a figure that is not to be known")

    monkeypatch.setattr(TextExperiment, "test_evaluation", looked)
    monkeypatch.setattr(TextExperiment, "train_evaluation", looked)
    found, said = tuned(experiment, tmp_path)
    kept = json.loads((tmp_path / "tune.json").read_text())
    assert kept["chosen_by"] == "held-out accuracy"
    assert "test" not in json.dumps(kept)
    tries = Counter(trial["form"] for trial in kept["trials"])
    assert tries["al"] == tries["bp"] == len(kept["tried"]["train.lr.base"]) >= 3
    for trial in kept["trials"]:
        assert {*trial} == {"form", "setting", "seed", "epochs", "best_epoch", "held_out"}
        assert (trial["seed"], trial["epochs"]) == (0, 2)
    for form in found:
        own = [trial for trial in kept["trials"] if trial["form"] == form.name]
        (taken,) = (trial for trial in own if trial["setting"] == kept["chosen"][form.name])
        assert taken["held_out"] == max(trial["held_out"] for trial in own)
        assert form.config.train.lr.base == taken["setting"]["train.lr.base"]
        assert form.config.tune == TuneConfig(), "the configuration of the form, given again, repeats the run"
    assert any("settings tried" in text and "chosen" in text for text in said)
    monkeypatch.setattr(tuning, "_tried", looked)
    assert tuned(experiment, tmp_path)[0] == found


def test_a_trial_is_trained_with_what_it_tries(tmp_path: Path) -> None:
    """The models and batches are those of the trial's configuration, not those that were asked for."""
    experiment = text_experiment(config(agnews(tmp_path / "data", count=10)))
    tried = experiment.under(
        with_setting(experiment.config, {"train.lr.base": 0.5, "model.x_hid": 8, "data.batching.budget_tokens": 30})
    )
    assert {group["lr"] for layer in tried.package("bp", 0) for group in layer.opt.param_groups} == {0.5}  # type: ignore[union-attr]
    assert tried.package("al", 0).effective_parameters() > experiment.package("al", 0).effective_parameters()
    assert len(tried.train_batches(0)) > len(experiment.train_batches(0))


def scripted(monkeypatch: pytest.MonkeyPatch, best: dict[str, float]) -> list[tuple[str, Value]]:
    """Trials that are the better the nearer they are to the value that is best for their form."""
    order: list[tuple[str, Value]] = []

    def tried(_: Any, form: Form, setting: dict[str, Any], *__: Any) -> Trial:
        value = setting["train.lr.base"]
        order.append((form.name, value))
        far = abs(value - best[form.name]) / max(value, best[form.name])
        return Trial(form.name, setting, 0, form.config.train.epochs, 1, 1 - far)

    monkeypatch.setattr(tuning, "_tried", tried)
    return order


def test_a_winner_at_the_edge_widens_the_range_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = text_experiment(config(agnews(tmp_path / "data"), "train.lr.base=1e-3,1e-2,1e-1"))
    order = scripted(monkeypatch, {"al": 1e-4, "bp": 1e-2})
    (al, bp), said = tuned(experiment, tmp_path)
    assert (al.config.train.lr.base, bp.config.train.lr.base) == (1e-4, 1e-2)
    values = [1e-3, 1e-2, 1e-1, 1e-4, 1e-5]  # at 1e-4 it was at the edge, at 1e-5 no more
    assert order == [(form, value) for value in values for form in ("al", "bp")]
    assert not any("no more" in text for text in said)


def test_the_table_says_how_long_its_own_trials_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Symptom: a run that was taken up with other epochs told of the length that its first trials had had."""
    root = agnews(tmp_path / "data")
    scripted(monkeypatch, {"al": 1e-2, "bp": 1e-2})
    for epochs in (1, 3):
        _, said = tuned(text_experiment(config(root, "train.lr.base=1e-3,1e-2,1e-1", epochs=epochs)), tmp_path)
        assert any(f"with seed 0 and of so many epochs: {epochs}\n" in text for text in said)


def test_of_language_models_the_lowest_loss_is_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = text_experiment(config(agnews(tmp_path / "data"), "train.lr.base=1e-3,1e-2,1e-1"))
    monkeypatch.setattr(TextExperiment, "criterion", property(lambda _: TokenCrossEntropy()))
    losses = {1e-3: 2.0, 1e-2: 1.5, 1e-1: 1.75}

    def tried(_: Any, form: Form, setting: dict[str, Any], *__: Any) -> Trial:
        return Trial(form.name, setting, 0, 2, 1, losses.get(setting["train.lr.base"], 3.0))

    monkeypatch.setattr(tuning, "_tried", tried)
    forms, _ = tuned(experiment, tmp_path)
    assert [form.config.train.lr.base for form in forms] == [1e-2, 1e-2]
    assert json.loads((tmp_path / "tune.json").read_text())["chosen_by"] == "held-out loss"


@pytest.mark.slow
def test_a_range_is_widened_twice_and_then_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = text_experiment(config(agnews(tmp_path / "data"), "train.lr.base=1e-2,1e-1"))
    order = scripted(monkeypatch, {"al": 1e-9, "bp": 1e9})
    _, said = tuned(experiment, tmp_path)
    assert sorted({value for _, value in order}) == [1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0]  # type: ignore[type-var]
    assert Counter(form for form, _ in order) == {"al": 6, "bp": 6}
    bounds = [text for text in said if "widened twice, no more" in text]
    assert [text.partition(", ")[2].split(":")[0] for text in bounds] == ["0.0001", "10"]
    assert json.loads((tmp_path / "tune.json").read_text())["notes"] == bounds


@pytest.mark.parametrize("when", ["advance", "begin_epoch"])
def test_a_trial_under_way_ends_at_its_next_batch(when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no checkpoint: what it did is not kept, what was done before is."""
    experiment = text_experiment(config(agnews(tmp_path / "data", count=10), "train.lr.base=0.001,0.01"))
    stop, calls = StopRequest(), []

    def then_stop(*_: Any, **__: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            stop.signal = signal.SIGTERM

    monkeypatch.setattr(tuning._TrialProgress, when, then_stop)
    with pytest.raises(Interrupted, match="in a trial of --tune; the same command goes on with it") as ended:
        tuned(experiment, tmp_path, stop)
    assert ended.value.code == 143
    assert len(calls) == 2


def test_what_is_no_range_of_numbers_is_not_widened() -> None:
    words = {"model.embedding_updates": ("dense", "touched"), "train.lr.base": (1e-3,)}
    best = [{"model.embedding_updates": "touched", "train.lr.base": 1e-3}]
    assert widen(words, [best], lambda _: True, Counter()) == (words, [])  # type: ignore[arg-type]
    grid: dict[str, tuple[Value, ...]] = {"model.dropout": (0.3, 0.9)}
    assert widen(grid, [[{"model.dropout": 0.9}]], lambda _: False, Counter()) == (
        grid,
        ["the best model.dropout is at the edge of what was tried, 0.9: there is no further value"],
    )


def test_what_others_are_as_good_as_does_not_widen_a_range(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Symptom: up to four more trials of each form, where all values score alike, or an inner one is as good."""
    experiment = text_experiment(config(agnews(tmp_path / "data"), "train.lr.base=1e-4,1e-3,1e-2,1e-1"))
    values = [1e-4, 1e-3, 1e-2, 1e-1]
    scores = {"al": [0.5, 0.5, 0.5, 0.5], "bp": [0.7, 0.6, 0.7, 0.6]}

    def tried(_: Any, form: Form, setting: dict[str, Any], *__: Any) -> Trial:
        return Trial(form.name, setting, 0, 2, 1, scores[form.name][values.index(setting["train.lr.base"])])

    monkeypatch.setattr(tuning, "_tried", tried)
    forms, _ = tuned(experiment, tmp_path)
    assert len(json.loads((tmp_path / "tune.json").read_text())["trials"]) == 8
    assert [form.config.train.lr.base for form in forms] == [1e-3, 1e-2], "of equals the first inner one"
    grid: dict[str, tuple[Value, ...]] = {"model.x_hid": (8, 16), "model.y_hid": (8, 16)}
    best = [{"model.x_hid": 16, "model.y_hid": 8}, {"model.x_hid": 16, "model.y_hid": 16}]
    assert widen(grid, [best], lambda _: True, Counter())[0] == {**grid, "model.x_hid": (8, 16, 32)}


@pytest.mark.parametrize("edge", [5, 8])
def test_a_range_does_not_grow_by_what_the_model_cannot_be_made_with(edge: int, tmp_path: Path) -> None:
    """Symptom: "3 heads do not divide 40 features" after the trials before, and at each resume again."""
    asked = config(agnews(tmp_path / "data"), "model.n_heads=5,8")
    model = replace(asked.model, name="transformer", embedding_dim=40, n_heads=5)
    experiment = text_experiment(replace(asked, model=model))
    run: Any = SimpleNamespace(experiment=experiment)
    fits = tuning._Search(run, forms_of(experiment), {}, []).fits
    grid: dict[str, tuple[Value, ...]] = {"model.n_heads": (5, 8)}
    assert fits(grid)
    assert widen(grid, [[{"model.n_heads": edge}]], fits, Counter())[1] == [
        f"the best model.n_heads is at the edge of what was tried, {edge}: there is no further value"
    ]


@pytest.mark.slow
def test_a_setting_without_the_memory_for_it_is_not_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = config(agnews(tmp_path / "data", count=10), "model.x_hid=4,8", epochs=1)
    experiment, new_layers = text_experiment(asked), tuning.new_layers

    def too_small(models: Any, config: TextConfig, turn: int, **given: Any) -> Any:
        if config.model.x_hid > 4:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return new_layers(models, config, turn, **given)

    monkeypatch.setattr(tuning, "new_layers", too_small)
    forms, said = tuned(experiment, tmp_path)
    assert all(form.config.model.x_hid < 8 for form in forms)  # type: ignore[attr-defined]
    assert any("x_hid=8: RuntimeError: DefaultCPUAllocator: can't allocate memory" in text for text in said)
    monkeypatch.setattr(tuning, "new_layers", lambda *_, **__: pytest.fail("tried again"))
    tuned(experiment, tmp_path)


@pytest.mark.slow
def test_what_is_left_open_follows_from_the_length_of_each_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Symptom: trials of one epoch warmed up for as long as the run of 30, and stayed at chance; all settings of
    train.accumulate had the warm-up of the first."""
    root = agnews(tmp_path / "data", count=40)
    asked = config(root, "train.accumulate=1,3", "data.batching.budget_tokens=60,120", epochs=30)
    asked = replace(asked, tune=replace(asked.tune, epochs=1))
    trained: list[TextConfig] = []

    def course_of(found: TextConfig) -> Any:
        trained.append(found)
        raise MemoryError("nothing is trained here")

    monkeypatch.setattr(tuning, "course_of", course_of)
    experiment = text_experiment(asked)
    with pytest.raises(ConfigError, match="AL came to no figure with any of the 4 settings"):
        tuned(experiment, tmp_path)
    assert len({one.train.lr.warmup for one in trained}) > 2
    for one in trained:
        batches = len(experiment.under(one).train_batches(0))
        open_again = replace(one, train=replace(one.train, lr=LrConfig()))
        assert (one.train.epochs, one) == (1, at_length(open_again, batches))

    def tried(_: Any, form: Form, setting: dict[str, Any], *__: Any) -> Trial:
        return Trial(form.name, setting, 0, 1, 1, float(setting["train.accumulate"] == 3))

    monkeypatch.setattr(tuning, "_tried", tried)
    (tmp_path / "tune.json").unlink()
    for form in tuned(experiment, tmp_path)[0]:
        whole = replace(form.config, train=replace(form.config.train, lr=LrConfig()))
        assert (form.config.train.accumulate, form.config.train.epochs) == (3, 30)
        assert form.config == at_its_length(experiment, whole)
        assert form.config.train.lr.warmup not in {one.train.lr.warmup for one in trained}


def test_a_value_may_be_what_the_length_of_the_training_decides(tmp_path: Path) -> None:
    asked = config(agnews(tmp_path / "data", count=10), "train.lr.base=null,1e-6", epochs=1)
    forms, _ = tuned(text_experiment(asked), tmp_path)
    assert all(form.config.train.lr.base in (3e-3, 1e-6) for form in forms)


@pytest.mark.slow
def test_a_run_that_is_ended_keeps_the_trials_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = agnews(tmp_path / "data", count=10)
    experiment = text_experiment(config(root, "train.lr.base=0.001,0.01", epochs=1))
    stop, took, tried = StopRequest(), list[str](), tuning._tried

    def then_stop(*arguments: Any) -> Trial:
        found = tried(*arguments)
        took.append(found.form)
        if len(took) == 3:
            stop.signal = signal.SIGTERM
        return found

    monkeypatch.setattr(tuning, "_tried", then_stop)
    with pytest.raises(Interrupted, match="goes on with the trials"):
        tuned(experiment, tmp_path, stop)
    assert len(json.loads((tmp_path / "tune.json").read_text())["trials"]) == 3
    tuned(experiment, tmp_path)
    whole = json.loads((tmp_path / "tune.json").read_text())
    other = tmp_path / "other"
    other.mkdir()
    tuned(experiment, other)
    assert json.loads((other / "tune.json").read_text()) == whole
    (tmp_path / "tune.json").write_text('{"trials": [{"form": 3}]}')
    with pytest.raises(DataError, match=r"tune.json is not as the run wrote it .*; put it back, or remove it"):
        tuned(experiment, tmp_path)


def test_a_classifier_whose_answers_are_no_numbers_is_not_chosen(tmp_path: Path) -> None:
    """Symptom: its accuracy was that of the first class, and where all had diverged, one was taken."""
    data = agnews(tmp_path / "data", count=4)
    asked = config(data, "train.lr.base=1e30,1e31", epochs=1, lr={"warmup": 0}, on_non_finite="skip")
    with pytest.raises(ConfigError, match="AL came to no figure with any of the 2 settings tried"):
        tuned(text_experiment(asked), tmp_path)


@pytest.mark.slow
def test_a_setting_that_diverges_is_not_chosen(tmp_path: Path) -> None:
    root = agnews(tmp_path / "data", count=10)
    asked = config(root, "train.lr.base=0.001,1e38", epochs=2, lr={"warmup": 0})
    experiment = text_experiment(asked)
    found, said = tuned(experiment, tmp_path)
    kept = json.loads((tmp_path / "tune.json").read_text())
    diverged = [trial for trial in kept["trials"] if trial["setting"]["train.lr.base"] == 1e38]
    assert [trial["held_out"] for trial in diverged] == [None, None]
    assert all(form.config.train.lr.base < 1 for form in found)
    assert any("diverged" in text for text in said)


def test_a_run_trains_each_form_with_what_was_chosen_for_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = agnews(tmp_path / "data", count=20)
    arguments = (
        "agnews", "lstm", "--mode=compare", "--epochs=2", "--tune=train.lr.base=0.001,0.03", "--tune-epochs=1",
        "--devices=cpu", "--set=engine.threads=1", f"--data-root={root}", f"--out={tmp_path}", "--set=model.x_hid=4",
        "--set=model.y_hid=4", "--set=model.embedding_dim=4", "--set=data.held_out=0.2",
    )  # fmt: skip
    code, _, err = leaves(capsys, *arguments)
    assert code == 0, err
    folder = tmp_path / "agnews-lstm-compare-001"
    kept = json.loads((folder / "tune.json").read_text())
    assert {trial["epochs"] for trial in kept["trials"]} == {1}
    for form in ("al", "bp"):
        own = load_config(TextConfig, folder / form / "config.yaml")
        assert own.train.lr.base == kept["chosen"][form]["train.lr.base"]
        assert (own.tune, own.train.epochs) == (TuneConfig(), 2)
    trial = next(line for line in err.splitlines() if line.startswith("trial 1/4  AL train.lr.base=0.001"))
    assert "held-out accuracy" in trial
    assert "test" not in trial


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--tune=train.lr.bse=1e-3"], r"--tune train.lr.bse: unknown key; did you mean 'train.lr.base'\?"),
        (["--tune=train.lr.base=fast,1e-3"], r"--tune train.lr.base: found 'fast', expected a number above 0"),
        (["--tune=train.lr.base="], r"--tune train.lr.base: found '', expected values with commas"),
        (["--tune=train.lr.base"], r"--tune 'train.lr.base': expected a key, '=' and values"),
        (["--tune=train.lr.base=1e-3,,1e-2"], r"--tune train.lr.base: found '1e-3,,1e-2', expected values"),
        (["--tune=train.lr.base=1e-3,0.001"], r"--tune train.lr.base: found 0.001 twice"),
        # Words of which YAML makes what JSON cannot hold ended in a TypeError.
        (["--tune=model.dropout=2024-01-01,0.1"], r"--tune model.dropout: found '2024-01-01', expected a number"),
        (["--tune=model.dropout=!!binary aGk=,0.1"], r"--tune model.dropout: found '!!binary aGk=', expected a number"),
        (["--tune=model.x_hid=8", "--tune=model.x_hid=16"], r"--tune model.x_hid: given twice"),
        (["--tune=train.epochs=1,2"], r"--tune train.epochs: .* expected a key of model, methods, train.lr"),
        (["--tune=model.name=lstm"], r"--tune model.name: it says which data is read"),
        (["--tune=train.lr.base=1e-3", "--set=data.held_out=0"], r"--tune: .* but data.held_out is 0"),
        (["--tune-epochs=3"], r"--tune-epochs: found without --tune"),
        (
            ["--tune=train.lr.base=1e-5,1e-3", "--set=train.lr.end=5e-4"],
            r"train.lr.end: found 0.0005, above train.lr.base, which is 1e-05",
        ),
        (["--tune=train.lr.end=0,1e-2"], r"--tune train.lr.end=0.01: train.lr.end: found 0.01, above train.lr.base"),
        (["--tune=data.batching.bucket_width=10,20"], r"bucket_width: found 10, but kind plan does not have it"),
    ],
)
def test_a_mistake_is_one_line(
    options: list[str], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told_one_line(line, *leaves(capsys, "toynews", "lstm", *options, f"--out={tmp_path / 'runs'}"))
    assert not (tmp_path / "runs").exists()


def test_what_the_model_cannot_be_made_with_is_told_before_anything_is_tried(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--tune=model.n_heads=5,7", "--set=model.embedding_dim=40", "--set=model.n_heads=5", "--devices=cpu")
    told_one_line(
        r"--tune model.n_heads=7: .*7 heads",
        *leaves(capsys, "toynews", "transformer", *options, f"--out={tmp_path / 'runs'}"),
    )
    assert not (tmp_path / "runs").exists()


def test_every_setting_diverging_is_a_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = text_experiment(config(agnews(tmp_path / "data"), "train.lr.base=1e-2,1e-1"))
    monkeypatch.setattr(tuning, "_tried", lambda _, form, setting, *__: Trial(form.name, setting, 0, 2, None, None))
    with pytest.raises(ConfigError, match="AL came to no figure with any of the 2 settings tried"):
        tuned(experiment, tmp_path)


def test_values_are_what_yaml_makes_of_them() -> None:
    asked = replace(TextConfig(), tune=TuneConfig(("model.embedding_updates=dense, touched", "train.accumulate=1,2")))
    assert parse_grid(asked) == {"model.embedding_updates": ("dense", "touched"), "train.accumulate": (1, 2)}
