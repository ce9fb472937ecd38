"""Short runs learn: what a command leaves open follows from the number of updates, once in a run's life."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pipeal import ConfigError
from pipeal.cli.text import command
from pipeal.config import (
    LanguageConfig,
    LrConfig,
    RunConfig,
    TextConfig,
    TrainConfig,
    VisionConfig,
    dump_config,
    find_config,
    load_config,
)
from pipeal.run.build_text import text_experiment
from pipeal.run.build_vision import vision_experiment
from pipeal.run.duration import at_its_length, at_length
from pipeal.run.experiment import _of_this_length
from pipeal.run.forms import Form
from pipeal.run.opening import course_of
from pipeal.training.learning_rate import usual_course
from tests.cli.running import run_command
from tests.messages import messages

leaves = partial(run_command, command)

TINY = (
    "--set=model.embedding_dim=8", "--set=model.n_heads=2", "--set=model.x_hid=8", "--set=model.y_hid=8",
    "--set=train.train_accuracy_samples=50", "--set=data.batching.budget_tokens=256", "--devices=cpu",
)  # fmt: skip


def settled(batches: int, lr: LrConfig | None = None, **train: Any) -> tuple[RunConfig, list[str]]:
    with messages() as said:
        return at_length(TextConfig(train=TrainConfig(lr=lr or LrConfig(), **train)), batches), said


def test_a_run_of_54_updates_says_what_it_takes_instead() -> None:
    config, said = settled(54, epochs=1)
    assert (config.train.lr.base, config.train.lr.warmup) == (3e-3, 10)
    assert said == ["a run of 54 updates: train.lr.base 0.003 instead of 0.001, train.lr.warmup 10 instead of 50"]


def ends_update(number: int, batches: int, accumulate: int) -> bool:
    """Whether a layer updates after the batch of that number, from 1."""
    within = (number - 1) % batches + 1
    return within % accumulate == 0 or within == batches


@example(epochs=5, batches=1, accumulate=6)
@given(st.integers(1, 6), st.integers(1, 400), st.integers(1, 9))
def test_an_accumulated_run_has_the_course_of_one_whose_batches_are_as_large(
    epochs: int, batches: int, accumulate: int
) -> None:
    """The updates are counted, not the batches: they are the same, so that the rates should be."""
    parts, _ = settled(batches, epochs=epochs, accumulate=accumulate)
    whole, _ = settled(-(-batches // accumulate), epochs=epochs)
    assert parts.train.lr.base == whole.train.lr.base
    warmup = parts.train.lr.warmup or 0
    # An epoch ends with an update, of fewer batches where they do not divide.
    updated = [number for number in range(1, epochs * batches + 1) if ends_update(number, batches, accumulate)]
    assert sum(number <= warmup for number in updated) == whole.train.lr.warmup
    assert course_of(parts).warmup <= epochs * batches


@given(st.integers(1, 6), st.integers(1, 400), st.none() | st.floats(1e-6, 1), st.none() | st.integers(0, 99))
def test_what_is_given_stays_and_what_was_settled_is_settled(
    epochs: int, batches: int, base: float | None, warmup: int | None
) -> None:
    config, said = settled(batches, epochs=epochs, lr=LrConfig(base=base, warmup=warmup))
    usual = usual_course(epochs * batches)
    assert config.train.lr.base == (usual.rate if base is None else base)
    assert config.train.lr.warmup == (usual.warmup if warmup is None else warmup)
    assert at_length(config, batches) == config
    if epochs * batches >= 250:
        assert not said
    if base is not None and warmup is not None:
        assert all("train.lr.warmup=null" in line for line in said)


def test_a_rate_may_end_at_what_the_length_of_the_run_chooses_and_no_higher() -> None:
    """Symptom: an end below the rate of a short run was refused as above that of a long one."""
    assert settled(70, LrConfig(end=2e-3), epochs=1)[0].train.lr.base > 2e-3  # type: ignore[operator]
    with pytest.raises(ConfigError, match=r"train.lr.end: found 0.002, above train.lr.base, which is 0.001; expected"):
        settled(250, LrConfig(end=2e-3), epochs=1)


@pytest.mark.parametrize("mode", ["al", "bp", "compare"])
def test_the_rule_is_the_same_for_both_forms(mode: str) -> None:
    assert settled(54, epochs=1, mode=mode)[0].train.lr == settled(54, epochs=1)[0].train.lr


@pytest.mark.parametrize(("warmup", "told"), [(28, True), (50, True), (99, True), (27, False), (0, False)])
def test_a_given_warm_up_that_takes_most_of_the_run_is_told_and_left_alone(warmup: int, told: bool) -> None:
    config, said = settled(54, epochs=1, lr=LrConfig(base=1e-3, warmup=warmup))
    assert config.train.lr.warmup == warmup
    assert said == [
        f"the run has 54 batches, {min(54, warmup)} of them warm-up: it will learn little; with --set "
        "train.lr.warmup=null they are 10"
    ] * told  # fmt: skip


@pytest.mark.parametrize(
    ("schema", "dataset", "model", "batches"),
    [
        (TextConfig, "agnews", "lstm", 54),
        (TextConfig, "agnews", "transformer", 54),
        (TextConfig, "toynews", "lstm", 73),
        (TextConfig, "toynews", "transformer", 73),
        (LanguageConfig, "shakespeare", "charlm", 250),
        (VisionConfig, "cifar10", "resnet", 140),
    ],
)
def test_the_shipped_experiments_have_the_course_that_their_figures_were_measured_with(
    schema: type[RunConfig], dataset: str, model: str, batches: int, said: list[str]
) -> None:
    lr = at_length(load_config(schema, find_config(dataset, model)), batches).train.lr
    warmup = 40 if (dataset, model) == ("toynews", "transformer") else 50
    assert (lr.base, lr.warmup, said) == (1e-2 if model == "charlm" else 1e-3, warmup, [])


def news(root: Path) -> Path:
    """A small AG News, of 200 texts, ten batches of 256 tokens at most."""
    home = root / "ag_news_csv"
    home.mkdir(parents=True)
    rows = [f'"{1 + n % 4}","title {n % 4}","word{n % 4} news {n}"' for n in range(200)]
    for name in ("train.csv", "test.csv"):
        (home / name).write_text("\n".join(rows) + "\n")
    return root


@pytest.mark.slow
def test_it_is_written_once_repeated_by_its_file_and_kept_by_a_run_that_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ("agnews", "transformer", "--data-root", str(news(tmp_path / "data")))
    code, _, err = leaves(capsys, *model, *TINY, "--epochs=1", "--out", str(tmp_path / "a"))
    assert code == 0, err
    assert "train.lr.base 0.003 instead of 0.001" in err
    folder = tmp_path / "a" / "agnews-transformer-al-001"
    first = load_config(TextConfig, folder / "config.yaml")
    assert load_config(TextConfig, folder / "asked.yaml").train.lr == LrConfig(), (
        "what was asked for, not what was chosen"
    )
    assert None not in (first.train.lr.base, first.train.lr.warmup)

    code, _, err = leaves(capsys, *model, f"--config={folder / 'config.yaml'}", "--out", str(tmp_path / "b"))
    assert code == 0, err
    assert "updates" not in err
    again = load_config(TextConfig, tmp_path / "b" / folder.name / "config.yaml")
    assert again == replace(first, out=again.out)

    longer = (*model, *TINY, f"--resume={folder}", "--out", str(tmp_path / "a"))
    code, _, err = leaves(capsys, *longer, "--epochs=2", "--set=train.lr.warmup=49")
    assert (code, "train.lr.warmup" in err) == (2, True), "what is given is held against what the run began with"
    code, _, err = leaves(capsys, *longer, "--epochs=2")
    assert code == 0, err
    assert load_config(TextConfig, folder / "config.yaml").train == replace(first.train, epochs=2)
    assert "train.lr.warmup=null" not in err


def test_a_form_that_joins_a_run_later_has_the_course_of_the_others(tmp_path: Path) -> None:
    """Symptom: a comparison went on for longer on two devices, and its third form had another rate and warm-up."""
    asked = TextConfig(out=str(tmp_path))
    begun = replace(
        asked, train=replace(asked.train, precision="fp32", lr=replace(asked.train.lr, base=0.003, warmup=7))
    )
    begun = replace(begun, engine=replace(begun.engine, devices=("cpu",), sizes=(1,), threads=1))
    (tmp_path / "al").mkdir()
    (tmp_path / "al" / "config.yaml").write_text(dump_config(begun))
    found: Any = SimpleNamespace(path=tmp_path)
    forms = [Form(name, name, "bp", asked, is_compared=True) for name in ("bp", "al", "bp-spread")]
    courses = {form.config.train.lr for form in _of_this_length(SimpleNamespace(config=asked), forms, found)}  # type: ignore[arg-type]
    assert courses == {begun.train.lr}


def test_images_are_counted_as_their_batches_are(said: list[str]) -> None:
    config = load_config(VisionConfig, values={"dataset": "toyimages"}, overrides=["data.batch_size=320"])
    one = replace(config, train=replace(config.train, epochs=1))
    experiment = vision_experiment(one)
    assert len(experiment.train_batches(0)) == 6  # of 1,900 images; of those held out as well it would be 7
    at_its_length(experiment, experiment.config)
    assert said[-1].startswith("a run of 6 updates: train.lr.base 0.003 instead of 0.001, train.lr.warmup 1 instead")


def test_texts_are_counted_as_their_batches_are(tmp_path: Path, said: list[str]) -> None:
    news(tmp_path)
    for kind in ("plan", "fixed", "bucket", "size-aware", "token-budget", "stream"):
        values = {"data": {"root": str(tmp_path), "batching": {"kind": kind}}, "train": {"epochs": 2}}
        experiment = text_experiment(load_config(TextConfig, values=values))
        at_its_length(experiment, experiment.config)
        assert f"a run of {2 * len(experiment.train_batches(0))} updates: " in said[-1], kind
