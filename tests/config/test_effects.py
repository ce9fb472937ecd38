"""An option that does nothing is told where a user gave it, and one that cannot be meant so is refused."""

from __future__ import annotations

import re
import shlex
from contextlib import redirect_stderr
from dataclasses import fields, replace
from functools import reduce
from io import StringIO
from itertools import chain, product
from pathlib import Path
from typing import Any

import click
import pytest
import torch

from pipeal.cli import entry, text, vision
from pipeal.config import (
    BatchingConfig,
    LanguageConfig,
    RunConfig,
    TextConfig,
    VisionConfig,
    check_effects,
    find_config,
    load_config,
)
from pipeal.config.effects import IDLE, IDLE_IN_ONE_PROCESS
from pipeal.config.text import KINDS
from pipeal.core.errors import ConfigError
from pipeal.core.modules import module_of
from pipeal.run import train
from pipeal.run.build_text import text_experiment
from pipeal.run.opening import new_layers
from tests.cli.running import run_command, told_one_line

ROOT = Path(__file__).parents[2]
SCHEMAS = (TextConfig, VisionConfig, LanguageConfig)


def rows() -> list[tuple[type[RunConfig], str, Any, str]]:
    """Each kind of run with each entry that is of it: where, value, and one option."""
    tables = {**IDLE, RunConfig: (*IDLE[RunConfig], *IDLE_IN_ONE_PROCESS)}
    return [
        (schema, idle.where, value, option)
        for schema, kind in product(SCHEMAS, tables)
        if issubclass(schema, kind)
        for idle in tables[kind]
        for value, option in product(idle.values, idle.options)
    ]


def nested(key: str, value: Any) -> dict[str, Any]:
    return reduce(lambda inner, name: {name: inner}, reversed(key.split(".")), value)


@pytest.mark.parametrize(("schema", "where", "value", "option"), rows())
def test_each_entry_is_of_options_that_there_are_and_told_where_it_holds(
    schema: type[RunConfig], where: str, value: Any, option: str
) -> None:
    counts = {"processes": 1}
    if where in counts:
        config, counts = schema(), {**counts, where: value}
    else:
        config = load_config(schema, values=nested(where, value))
    lines = [line for line in check_effects(config, {option}, **counts) if where in line or where in counts]
    reason = {"processes": "there is one process"}.get(where, f"{where} is {value}")
    (line,) = lines
    assert line.startswith(f"{option} ")
    assert line.endswith(f": without effect, since {reason}")
    assert not check_effects(config, set(), **counts), "only what was given is told"


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("predsim", ("std=false", "decoder=2")),
        ("scpl", ("cells=1", "hidden=3", "width=5")),
        ("deinforeg", ("cells=1", "width=3")),
    ],
)
def test_texts_are_trained_alike_whatever_is_asked_for_images(method: str, options: tuple[str, ...]) -> None:
    """Symptom: ``--set methods.deinforeg.width=256`` with texts changed nothing, and no line said so."""
    settings = ("dataset=toynews", "model.name=lstm", f"train.mode={method}")
    given = [f"methods.{method}.{option}" for option in options]
    plain, other = (load_config(TextConfig, overrides=more) for more in (settings, (*settings, *given)))
    layers = [list(new_layers(text_experiment(one), one, 1)) for one in (plain, other)]
    for one, same in zip(*layers, strict=True):
        weights, others = (module_of(layer).state_dict() for layer in (one, same))
        assert weights.keys() == others.keys()
        assert all(map(torch.equal, weights.values(), others.values()))
    said = " ".join(check_effects(other, {option.partition("=")[0] for option in given}))
    assert all(f"{option.replace('=', ' ')}" in said.replace("False", "false") for option in given)
    assert said.count("without effect") == (2 if method == "scpl" else 1)
    images = load_config(VisionConfig, overrides=(f"train.mode={method}", *given))
    assert not check_effects(images, {option.partition("=")[0] for option in given})


@pytest.mark.parametrize("labels", ["codes", "one-hot"])
def test_maps_of_bridges_have_a_width_whatever_the_labels_are(labels: str) -> None:
    config = load_config(VisionConfig, values={"model": {"labels": labels, "bridges": "mlp"}})
    assert not check_effects(config, {"model.x_hid"})


@pytest.mark.parametrize("option", ["bridges=pooled", "ahead.depth=2", "ahead.width=0.5", "ahead.shared=true"])
def test_the_only_part_is_the_same_however_far_bridges_look_ahead(option: str) -> None:
    assert all(map(torch.equal, only_part(), only_part(f"model.{option}")))


def test_its_head_is_another_where_bridges_begin_as_the_network_does() -> None:
    same_start = "model.ahead.same_start=true"
    assert not all(map(torch.equal, only_part(same_start), only_part(same_start, "model.bridges=pooled")))
    for schema in (TextConfig, LanguageConfig):
        config = load_config(schema, overrides=("model.parts=1", "model.bridges=lookahead", same_start))
        assert not check_effects(config, {"model.bridges", "model.ahead.same_start"})


def only_part(*settings: str) -> list[torch.Tensor]:
    """The weights of a transformer in one part, whose bridges look ahead unless the settings have others."""
    settings = ("dataset=toynews", "model.name=transformer", "model.parts=1", "model.bridges=lookahead", *settings)
    config = load_config(TextConfig, overrides=settings)
    (layer,) = new_layers(text_experiment(config), config, 1)
    return list(module_of(layer).state_dict().values())


def other_mode(config: RunConfig) -> RunConfig:
    return replace(config, train=replace(config.train, mode="compare"))


@pytest.mark.parametrize("schema", SCHEMAS)
def test_in_a_comparison_the_options_of_one_form_have_an_effect(schema: type[RunConfig]) -> None:
    of_al = {option for kind, where, value, option in rows() if (kind, where, value) == (schema, "train.mode", "bp")}
    assert len(of_al) > 4
    assert not [line for line in check_effects(other_mode(schema()), of_al) if "train.mode" in line]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("option", sorted(set(chain.from_iterable(KINDS.values()))))
def test_an_option_of_another_kind_of_batching_is_refused_even_at_its_default(kind: str, option: str) -> None:
    assert {field.name for field in fields(BatchingConfig)} == {"kind"}.union(*KINDS.values())
    config = load_config(TextConfig, values=nested("data.batching.kind", kind))
    assert not check_effects(config, set())
    if option in KINDS[kind]:
        assert not check_effects(config, {f"data.batching.{option}"})
    else:
        with pytest.raises(ConfigError, match=f"batching.{option}: found .*, but kind {kind} does not have it"):
            check_effects(config, {f"data.batching.{option}"})


def test_the_kinds_of_an_option_are_those_of_its_description() -> None:
    described = dict(
        re.findall(r"^        (\w+): (.*?)(?=^        \w+: |\Z)", BatchingConfig.__doc__ or "", re.S | re.M)
    )
    for option in set(described) - {"kind"}:
        named = re.findall(r"``([\w-]+)``", described[option].rpartition(";")[2])
        assert named == [kind for kind in KINDS if option in KINDS[kind]], option


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["toynews", "lstm", "--set=train.lr.end=1e-2"], r"lr.end: found 0.01, above train.lr.base, which is 0.001; "),
        (["toynews", "lstm", "--set=train.lr={base: 1e-4, end: 2e-4}"], r"lr.end: found 0.0002, above .* is 0.0001; "),
        (["toynews", "lstm", "--set=data.batching={kind: fixed, budget_tokens: 8192}"], r"kind fixed does not have it"),
        (["toynews", "lstm", "--set=data.batching={kind: bucket, budget_tokens: 99}"], r"kind bucket does not have it"),
        (["toynews", "lstm", "--set=data.batching={kind: plan, pad_to: bound}"], r"pad_to: found bound, but kind plan"),
    ],
)
def test_what_cannot_be_meant_so_is_refused(
    arguments: list[str], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told_one_line(line, *run_command(text.command, capsys, *arguments, "--out", str(tmp_path / "runs")))
    assert not (tmp_path / "runs").exists()


def configured(
    monkeypatch: pytest.MonkeyPatch, command: click.Command, arguments: list[str]
) -> tuple[RunConfig, list[str]]:
    """What a command makes of its arguments, and what it tells beside the form; nothing is carried out."""
    found: list[RunConfig] = []
    monkeypatch.setattr(train, "carry_out", lambda _, config, __, **___: found.append(config))
    with redirect_stderr(StringIO()) as said, pytest.raises(SystemExit, match="0"):
        entry.run(command, arguments)
    return found[0], [line for line in said.getvalue().splitlines() if not line.startswith("training the ")]


BP = "train.mode is bp"


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        (
            ["--set=train.exit_tolerance=0.01", "--set=data.held_out=0"],
            ["train.exit_tolerance 0.01: without effect, since data.held_out is 0"],
        ),
        (["--set=train.exit_tolerance=0.01", "--set=data.held_out=0.1"], []),
        (
            ["--set=train.lr={decay: none, end: 1e-2}"],
            ["train.lr.end 0.01: without effect, since train.lr.decay is none"],
        ),
        (["--schedule=al-fm", "--devices=cpu"], []),  # it decides how many graphs are alive
        (["--schedule=al-fm", "--devices=cpu*2"], []),
        (["--schedule=al-fm"], []),
        (["--schedule=sequential", "--devices=cpu"], []),
        (["--schedule=gpipe", "--mode=bp", "--set=engine.micro_batches=8"], []),
        (
            ["--schedule=gpipe", "--mode=bp", "--set=engine.queue_depth=8"],
            [
                "engine.queue_depth 8: without effect, since engine.schedule is gpipe",
                f"engine.queue_depth 8: without effect, since {BP}",
            ],
        ),
        (
            ["--schedule=al-fm", "--set=engine.micro_batches=8"],
            ["engine.micro_batches 8: without effect, since engine.schedule is al-fm"],
        ),
        (["--schedule=al-fm", "--mode=bp"], [f"engine.schedule al-fm: without effect, since {BP}"]),
        (["--set=engine.within_stage=stage", "--mode=bp"], [f"engine.within_stage stage: without effect, since {BP}"]),
        (["--set=engine.packet=int8", "--mode=bp"], [f"engine.packet int8: without effect, since {BP}"]),
        (
            ["--mode=bp", "--set=train.lr.ae=1e-2", "--set=model.y_hid=8"],
            [
                f"train.lr.ae 0.01: without effect, since {BP}",
                f"model.y_hid 8: without effect, since {BP}",
            ],
        ),
        (["--mode=compare", "--set=train.lr.ae=1e-2", "--set=model.y_hid=8", "--schedule=al-fm"], []),
        (
            ["--mode=bp", "--tune=model.y_hid=8,16", "--tune=train.accumulate=1,2"],
            [f"model.y_hid {width}: without effect, since {BP}" for width in (8, 16)],
        ),
        (
            ["--schedule=sequential", "--set=engine.queue_depth=4"],
            ["engine.queue_depth 4: without effect, since engine.schedule is sequential"],
        ),
        (["--mode=bp", "--set=data.batching.kind=fixed"], []),
        (["--mode=bp"], []),
        (["--set=data.cache_dir=here"], ["data.cache_dir here: without effect, since model.pretrained is none"]),
        (["--set=data.cache_dir=here", "--set=model.pretrained=glove"], []),
    ],
)
def test_what_was_given_and_does_nothing_is_told_in_a_line(
    arguments: list[str], lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, said = configured(monkeypatch, text.command, ["agnews", "transformer", *arguments])
    assert said == lines
    assert isinstance(config, TextConfig)


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        (["cifar10"], []),
        (["cifar10", "--set=data.cache=false"], ["data.cache_dir here: without effect, since data.cache is False"]),
        (["cifar10", "--set=data.cache=there"], ["data.cache_dir here: without effect, since data.cache is there"]),
        (["toyimages"], ["data.cache_dir here: without effect, since dataset is toyimages"]),
    ],
)
def test_a_cache_folder_is_of_images_that_are_kept(
    arguments: list[str], lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset, *others = arguments
    _, said = configured(monkeypatch, vision.command, [dataset, "resnet", "--set=data.cache_dir=here", *others])
    assert said == lines


def test_of_many_processes_the_first_tells_and_packets_are_always_on_their_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "29500")
    arguments = ["agnews", "lstm", "--mode=bp", "--set=train.lr.ae=1", "--set=engine.queue_depth=4"]
    for rank, told in (("0", 1), ("1", 0)):
        monkeypatch.setenv("RANK", rank)
        _, said = configured(monkeypatch, text.command, [*arguments, "--devices=cpu"])
        assert len(said) == told


def test_a_file_describes_an_experiment_in_every_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run's own ``config.yaml`` holds every key: to repeat it in another form would have told of dozens."""
    path = find_config("cifar10", "resnet")
    assert path is not None
    own = tmp_path / "own.yaml"
    own.write_text(path.read_text() + "engine: {queue_depth: 5, schedule: al-fm}\n")
    for mode in ("al", "bp"):
        config, said = configured(
            monkeypatch, vision.command, ["cifar10", "resnet", f"--config={own}", f"--mode={mode}", "--devices=cpu"]
        )
        assert (config.engine.queue_depth, said) == (5, [])


COMMANDS = [
    (page.name, name, line)
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    for name, line in re.findall(r"\b(nlpmain|cvmain)\.py ([^\n`#…]+)", page.read_text(encoding="utf-8"))
    if "<" not in line and "drawn" not in line  # a method that the reader writes
]


def test_the_commands_of_the_docs_have_only_options_with_an_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = 0
    for page, name, line in COMMANDS:
        arguments = shlex.split(line)
        if len(arguments) < 2 or "DIR" in arguments[:2] or "hf:" in arguments[1]:  # folders that are not here
            continue
        _, said = configured(monkeypatch, {"nlpmain": text.command, "cvmain": vision.command}[name], arguments)
        assert said == [], (page, line)
        tried += 1
    assert tried >= 15


@pytest.mark.parametrize("key", ["engine.replicas=2", "train.accumulate=3", "engine.on_oom=split"])
def test_a_loss_over_pairs_of_samples_is_told_to_be_another_one_in_parts(key: str) -> None:
    """It is no mean over samples, so that parts of a batch do not add up to the batch."""
    for mode, told in (("scpl", True), ("greedy", False)):
        config = load_config(TextConfig, overrides=[key], values=nested("train.mode", mode))
        lines = [line for line in check_effects(config, set()) if "compare the samples" in line]
        assert len(lines) == told
    config = load_config(
        TextConfig, overrides=[key], values={"train": {"mode": "compare", "methods": ["al", "predsim"]}}
    )
    (line,) = [line for line in check_effects(config, set()) if "compare the samples" in line]
    assert line.startswith(f"{key.replace('=', ' ')}: PredSim compare")
    assert not check_effects(load_config(TextConfig, values=nested("train.mode", "scpl")), set())
