"""``devices: auto``: what was tried is shown in a table, with what each stage takes alone."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeal.cli.text import command
from pipeal.config import TextConfig, load_config
from pipeal.core.errors import ConfigError
from pipeal.core.options import EngineOptions
from pipeal.planning.placement import Placement
from pipeal.planning.pure.trials import TimeLimit
from pipeal.run.build_text import text_experiment
from pipeal.run.choices import choose
from pipeal.run.opening import engine_options
from pipeal.run.remembered import PlacementCache
from tests.cli.running import run_command

TRIED = [(1, "2"), (1, "1"), (2, "1"), (3, "1"), (4, "1")]
"""Stages, and threads of each."""


@pytest.mark.skipif(torch.cuda.is_available(), reason="the candidates are a CPU's")
def test_what_auto_tries_is_told_in_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
    monkeypatch.setattr("pipeal.planning.planner.cores", lambda: 2)
    monkeypatch.setattr("pipeal.run.choices.TRIAL_BATCHES", 4)
    monkeypatch.setattr("pipeal.run.choices.TimeLimit", lambda _: TimeLimit(clock=lambda: 0.0))  # time for all
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    small = ["dataset=toynews", "model.x_hid=8", "model.y_hid=8", "model.embedding_dim=12"]
    config = load_config(TextConfig, None, overrides=[*small, "data.batching.budget_tokens=256"], values={})
    experiment = text_experiment(replace(config, out=str(tmp_path)))
    chosen = choose(experiment, "al")
    table = next(text for text in said if "tried" in text).splitlines()
    assert len({len(line) for line in table[1:]}) == 1
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table[3:]]
    assert [(row[0], row[2]) for row in rows] == [("cpu" if n == 1 else f"cpu*{n}", threads) for n, threads in TRIED]
    assert all(len(row[3].split("+")) == stages for row, (stages, _) in zip(rows, TRIED, strict=True))
    taken = [row for row in rows if row[5] == "taken"]
    assert len(taken) == 1
    assert taken[0][4] == min((row[4] for row in rows), key=float)
    assert taken[0][1] == " + ".join(map(str, chosen.engine.sizes or ()))


def test_auto_tries_with_the_threads_and_the_queue_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They were left out of the trials; and backpropagation was tried with other threads than were asked for."""
    told: list[tuple[int | None, int]] = []

    def place(_: Any, __: Any, ___: Any, options: EngineOptions, **____: Any) -> Placement:
        told.append((options.threads, options.queue_depth))
        return Placement(["cpu"], [1], options.threads or 7)

    monkeypatch.setattr("pipeal.run.choices.place", place)
    keys = ["dataset=toynews", "engine.devices=auto", "engine.threads=3", "engine.queue_depth=5", "train.mode=compare"]
    config = load_config(TextConfig, None, overrides=keys, values={})
    experiment = text_experiment(replace(config, out=str(tmp_path)))
    threads = [choose(experiment, form).engine.threads for form in ("al", "bp")]
    assert (told, threads) == ([(3, 5), (3, 5)], [3, 3])


NAMED = (
    "queue_depth=5",
    "threads=3",
    "compile=static",
    "on_oom=split",
    "within_stage=stage",
    "recompute=blocks",
    "offload=disk",
    "offload_folder=here",
    "packet=int8-stochastic",
    "matmul=high",
    "stall_timeout_s=7.0",
)


@pytest.mark.parametrize("option", NAMED)
def test_an_option_of_the_engine_is_set_by_the_key_of_its_name(option: str) -> None:
    name, value = option.split("=")
    options = engine_options(load_config(TextConfig, overrides=[f"engine.{option}"]), "fp32")
    assert str(getattr(options, name)) == value


def test_no_option_of_the_engine_is_out_of_reach() -> None:
    chosen = {"precision", "on_non_finite", "dump_folder"}  # by the run, after other keys
    assert {field.name for field in fields(EngineOptions)} == chosen | {option.split("=")[0] for option in NAMED}


def test_trials_are_bounded_by_what_all_turns_train_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected: list[int] = []
    monkeypatch.setattr("pipeal.run.choices.place", lambda *_, **__: Placement(["cpu"], [1], 1))
    monkeypatch.setattr("pipeal.run.choices.TimeLimit", expected.append)
    keys = ["dataset=toynews", "engine.devices=auto", "train.epochs=2", "train.repeat=3"]
    experiment = text_experiment(replace(load_config(TextConfig, None, overrides=keys, values={}), out=str(tmp_path)))
    choose(experiment, "al", cache=PlacementCache(tmp_path))
    assert expected == [6 * len(experiment.train_batches(0))]


def test_sizes_of_a_form_that_is_one_layer_are_refused(tmp_path: Path) -> None:
    """They were passed over; those that its own run has written are right."""
    keys = ["dataset=toynews", "engine.devices=cpu", "engine.threads=1", "train.mode=bp", f"out={tmp_path}"]
    for sizes, refused in (("[2,2]", True), ("[1]", False)):
        config = load_config(TextConfig, None, overrides=[*keys, f"engine.sizes={sizes}"], values={})
        experiment = text_experiment(config)
        with (
            pytest.raises(ConfigError, match=r"found \[2, 2\] for the BP form on one device; expected \[1\]")
            if refused
            else nullcontext()
        ):
            assert choose(experiment, "bp").engine.sizes == (1,)


def test_a_method_that_cannot_train_the_model_is_told_before_any_choice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Symptom: a comparison timed placements of its first method for minutes before it refused its second."""
    monkeypatch.setattr("pipeal.run.choices.place", None)
    methods = ["--mode=compare", "--methods=al,infopro"]
    code, _, err = run_command(command, capsys, "toynews", "transformer", *methods, f"--out={tmp_path}")
    assert code == 2
    assert "InfoPro rebuilds the input image" in err
    assert not any(tmp_path.iterdir())
