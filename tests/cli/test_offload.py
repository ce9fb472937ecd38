"""Commands on layers that are offloaded: nothing holds all of them, and what comes of it is the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeal.cli import text
from pipeal.config import TextConfig, check_effects, load_config
from pipeal.core.errors import ConfigError, DataError
from pipeal.core.modules import module_of
from pipeal.methods.layer import LocalLayer
from pipeal.planning import planner
from pipeal.planning.planner import fit, place
from pipeal.run.build import Models
from pipeal.run.build_text import text_experiment
from pipeal.run.choices import choose
from pipeal.run.remembered import PlacementCache
from pipeal.training.checkpoint.store import CheckpointStore
from tests.cli.running import run_command, told_one_line

ROOT = Path(__file__).parents[2]
LAYERS = 10

WATCHED = """
import json, sys
import matplotlib.backends.backend_agg, tensorboard, torch._dynamo  # which a run imports on the way
from pipeal.core.host_memory import status_bytes
from pipeal.cli import entry
from pipeal.cli.text import command
from pipeal.engine.pipeline import Pipeline
from pipeal.methods.layer import LocalLayer
from pipeal.run import opening, training
from pipeal.run.build_language import LanguageExperiment
from pipeal.training.checkpoint import store

found, after = {"layer": 0}, []

def watch(step, owner, name):
    inner = getattr(owner, name)
    def outer(*args, **more):
        after.extend([step] if step == "costs" else [])
        before = status_bytes("RssAnon")
        result = inner(*args, **more)
        found.setdefault("costs" if after else step, []).append((before, status_bytes("RssAnon")))
        return result
    setattr(owner, name, outer)

ready = opening.make_ready
def made(layers, precision):  # of each layer of a run, when it has been made
    (layer,) = layers
    if not next(layer.parameters()).is_meta:
        found["layer"] = max(found["layer"], sum(weight.nbytes for weight in layer.parameters()))
    ready(layers, precision)
opening.make_ready = made

watch("build", Pipeline, "__init__")
watch("load", opening, "load_layer_state")
watch("train", LocalLayer, "update")
watch("copy", store, "write_layer")
watch("costs", training, "form_costs")
LanguageExperiment.afterword = lambda *_: ()  # which takes long
try:
    entry.run(command, sys.argv[2:])
finally:
    open(sys.argv[1], "w").write(json.dumps(found))
"""


def watched(folder: Path, name: str, *arguments: str) -> dict[str, Any]:
    """Anonymous memory before and after each step of a run, and the bytes of the weights of its largest layer."""
    told = folder / f"{name}.json"
    sizes = {"model.width": 256, "model.heads": 4, "model.layers": LAYERS, "data.batch_size": 2, "data.steps": 2}
    sets = [f"--set={key}={value}" for key, value in {**sizes, "data.estimate_batches": 1}.items()]
    asked = [
        "text",
        "charlm",
        f"--text={folder / 'text'}",
        "--devices=cpu",
        f"--out={folder / name}",
        *sets,
        *arguments,
    ]
    subprocess.run(
        [sys.executable, "-c", WATCHED, str(told), *asked],
        check=True,
        capture_output=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    found: dict[str, Any] = json.loads(told.read_text())
    return found


def growth(found: dict[str, Any]) -> dict[str, float]:
    """By step, how much more memory there was at most than before it, in layers."""
    steps = {step: moments for step, moments in found.items() if step != "layer"}
    before = {step: moments[0][0] for step, moments in steps.items()}
    before["copy"] = found["train"][-1][1]  # copies for a checkpoint are made before its first file is written
    most = {step: max(end for _, end in moments) for step, moments in steps.items()}
    return {step: (most[step] - before[step]) / found["layer"] for step in steps}


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="resident memory is counted on Linux")
def test_a_run_never_has_all_of_a_model_in_memory_and_learns_the_same(tmp_path: Path) -> None:
    """It was made whole, and taken up with all states, before a layer went into its file."""
    (tmp_path / "text").write_text("to be or not to be that is the question " * 400)
    grown, layers = {}, []
    for name in ("disk", "none"):
        offload = f"--set=engine.offload={name}"
        first = growth(watched(tmp_path, name, offload, "--set=train.epochs=1"))
        (run,) = (tmp_path / name).iterdir()
        again = growth(watched(tmp_path, name, offload, "--set=train.epochs=2", f"--resume={run}"))
        grown[name] = {**first, "load": again["load"]}
        saved = CheckpointStore(run / "checkpoints").newest(pytest.fail)  # type: ignore[arg-type]
        assert saved is not None
        assert saved.position["epoch"] == 2
        layers.append([torch.utils._pytree.tree_flatten(saved.layers()[number])[0] for number in range(LAYERS)])
    for one, other in zip(*layers, strict=True):
        same = [torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in zip(one, other, strict=True)]
        assert all(same)
    # In weights of a layer, which has twice as much more when it has learnt; libraries that wake up take some, too.
    assert grown["disk"].keys() == {"build", "train", "copy", "load", "costs"}
    assert all(layers < LAYERS for layers in grown["disk"].values()), grown
    grown["none"].pop("build")  # in memory that choosing threads had left
    grown["none"].pop("costs")  # which are counted on one layer at a time, whatever is offloaded
    assert all(layers > 1.5 * LAYERS for layers in grown["none"].values()), grown


def toynews(folder: Path, *keys: str) -> Any:
    small = ["dataset=toynews", "model.x_hid=8", "model.y_hid=8", "model.embedding_dim=12", "engine.offload=disk"]
    config = load_config(TextConfig, None, overrides=[*small, *keys], values={})
    return text_experiment(replace(config, out=str(folder)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the stages are a CPU's")
@pytest.mark.parametrize(
    ("keys", "sizes", "told"),
    [
        (["engine.devices=auto"], [4], "by the weights of layers: those that are offloaded are not tried"),
        (["engine.devices=cpu*2"], [1, 3], "by the weights of layers"),
        (["engine.devices=cpu*2", "engine.sizes=[2,2]"], [2, 2], "as named"),
        (["engine.devices=cpu"], [4], "as named"),
    ],
)
def test_layers_that_are_offloaded_are_not_tried(
    keys: list[str], sizes: list[int], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    """Trials held a copy of all layers, and had their files in the system's folder."""
    seen: list[LocalLayer] = []

    def watched(layers: Any, *args: Any, **more: Any) -> Any:
        seen.extend(layers)
        return inner(layers, *args, **more)

    inner = planner.estimate
    monkeypatch.setattr(planner, "estimate", watched)
    monkeypatch.setattr(planner, "Search", lambda *_, **__: pytest.fail("it is tried"))
    chosen = choose(toynews(tmp_path, *keys), "al", cache=PlacementCache(tmp_path))
    assert list(chosen.engine.sizes or ()) == sizes
    assert len(chosen.engine.devices) == len(sizes)
    assert any(told in line for line in said)
    assert len(seen) == 4
    assert all(weight.is_meta for layer in seen for weight in module_of(layer).parameters())


@pytest.mark.parametrize("mode", ["bp", "compare"])
def test_a_form_of_one_layer_is_not_offloaded(mode: str, tmp_path: Path) -> None:
    """It lay in a file all the time that it was at work, and no line told so: see also ``IDLE``."""
    experiment = toynews(tmp_path, "engine.devices=cpu", f"train.mode={mode}")
    assert choose(experiment, "bp").engine.offload == "none"
    assert check_effects(experiment.config, ["engine.offload"]) == (
        ["engine.offload disk: without effect, since train.mode is bp"] if mode == "bp" else []
    )


def test_layers_that_share_weights_are_told_by_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No model of the registry has such layers; one that is added may."""
    inner = Models.layers

    def tied(*args: Any, **more: Any) -> Iterator[Any]:
        before: Any = None
        for layer in inner(*args, **more):
            if before is not None:
                module_of(layer).also = before
            before = before or module_of(layer).enc.f
            yield layer

    monkeypatch.setattr(Models, "layers", tied)
    small = ["model.x_hid=8", "model.y_hid=8", "model.embedding_dim=12", "engine.offload=disk", "engine.devices=cpu"]
    arguments = ["toynews", "lstm", "--out", str(tmp_path), *(f"--set={key}" for key in small)]
    told_one_line(r"layers 0 and 1 share the parameter 'also\.", *run_command(text.command, capsys, *arguments))


def test_a_schedule_that_does_not_go_with_it_is_told_before_anything_is_written(tmp_path: Path) -> None:
    """A run's folder was left, which the same command took for one to go on with."""
    experiment = toynews(tmp_path, "engine.devices=cpu", "engine.schedule=al-fm")
    with pytest.raises(ConfigError, match="offload='disk' needs layers that end one before the next"):
        choose(experiment, "al")


def test_a_folder_that_takes_no_file_is_told_before_anything_is_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    experiment = toynews(tmp_path, "engine.devices=cpu", f"engine.offload_folder={tmp_path / 'file'}")
    with pytest.raises(DataError, match="File exists; expected a folder for offloaded layers"):
        choose(experiment, "al")


def test_stages_of_offloaded_layers_have_about_equally_many_weights() -> None:
    def layers(*widths: int) -> list[Any]:
        with torch.device("meta"):
            return [torch.nn.Linear(width, width) for width in widths]

    options = planner.EngineOptions(offload="disk", threads=1)
    found = fit(layers(64, 8, 8, 8, 64), [], "pipelined", ["cpu"] * 3, options)
    assert (found.sizes, found.threads) == ([1, 3, 1], 1)
    assert place(layers(8, 8), [], "sequential", options, devices=["cpu"]).sizes == [2]
