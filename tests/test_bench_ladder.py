"""The ladder begins with plain PyTorch that is correct, and each rung adds one thing."""

from __future__ import annotations

import json
import re
import sys
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from subprocess import CalledProcessError
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeal import ALPackage, Pipeline
from pipeal.config import LanguageConfig, VisionConfig, load_config
from pipeal.engine.schedule import SCHEDULES, Action
from pipeal.engine.trace import Span
from pipeal.methods.al import TouchedAdam
from pipeal.models import CharDims, TextDims, build_language, build_text
from pipeal.planning.placement import Placement
from pipeal.planning.pure.simulate import simulate
from tests.benches import Benches

TEXT = TextDims(embedding=24, hidden=16, code=8, heads=3)


def model(name: str, form: str, optimizer: type[TouchedAdam] | None = None) -> ALPackage:
    torch.manual_seed(0)
    if name == "charlm":
        return build_language(name, form, characters=40, dims=CharDims(dropout=0.0), optimizer=optimizer)  # type: ignore[arg-type]
    return build_text(name, form, vocab_size=40, classes=4, dims=TEXT, optimizer=optimizer)  # type: ignore[arg-type]


def words() -> Tensor:
    x = torch.randint(1, 40, (5, 9), generator=torch.Generator().manual_seed(1))
    x[1, 4:] = x[3, 1:] = 0
    return x


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("form", ["al", "bp"])
@pytest.mark.parametrize("name", ["charlm", "transformer", "lstm"])
def test_plain_operators_give_the_answers_of_ours(bench: Benches, name: str, form: str, joined: bool) -> None:
    ours, x = model(name, form), words()
    plain = deepcopy(ours)
    bench["plain"].write_plainly(plain, joined=joined)
    assert type(plain[0]) is type(ours[0])
    assert [type(part) for part in plain.modules()] != [type(part) for part in ours.modules()]
    ours.eval()
    plain.eval()
    torch.testing.assert_close(plain.infer(x), ours.infer(x), atol=1e-5, rtol=1e-4)


def test_padding_reaches_no_plain_answer(bench: Benches) -> None:
    for name in ("transformer", "lstm"):
        plain, x = model(name, "bp"), words()
        bench["plain"].write_plainly(plain)
        plain.eval()
        alone = plain.infer(x[1:2, :4])
        torch.testing.assert_close(plain.infer(x)[1:2], alone, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("form", ["al", "bp"])
@pytest.mark.parametrize("fused", [False, True])
def test_the_plain_loop_learns_what_the_engine_learns(bench: Benches, form: str, fused: bool) -> None:
    """All parameters; those of the heads' own maps once stayed as they were, in optimizers that held others.

    In float64, where the bias of the keys, which no answer depends on, is not rounded into a gradient.
    """
    ours = model("charlm", form)
    plain = deepcopy(ours)
    bench["plain"].write_plainly(plain)
    bench["plain"].answer_everywhere(plain)
    for package in (ours, plain):
        package.double()
    start = deepcopy(ours)
    bench["plain"].adam_anew(plain, fused=fused)
    x = torch.randint(0, 40, (3, 16), generator=torch.Generator().manual_seed(1))
    batches = [(x, x.roll(-1, 1)), (x.flip(0), x)]
    bench["plain"].train_plainly(plain, batches, torch.device("cpu"), scales=[0.5, 1.0])
    with Pipeline(ours, ["cpu"], "sequential", threads=1) as pipe:
        pipe.run(batches, lambda number: (0.5, 1.0)[number])
    found, wanted, before = weights_of(plain), weights_of(ours), weights_of(start)
    assert found.keys() == wanted.keys() == before.keys()
    for name, weight in wanted.items():
        torch.testing.assert_close(found[name], weight, atol=1e-8, rtol=1e-6, msg=lambda text, name=name: name + text)
        assert name.endswith("qkv.bias") or not torch.equal(weight, before[name])


def weights_of(package: ALPackage) -> dict[str, Tensor]:
    """By name, with the maps of heads put together as ours are."""
    found = dict(package.named_parameters())
    for place, attention in package.named_modules():
        if type(attention).__name__ == "Heads":
            for kind in ("weight", "bias"):
                parts = [found.pop(f"{place}.heads.{h}.{n}.{kind}") for n in "qkv" for h in range(len(attention.heads))]
                found[f"{place}.qkv.{kind}"] = torch.cat(parts)
    return found


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("operators", ["plain", "joined", "ours"])
@pytest.mark.parametrize(("name", "touched"), [("charlm", False), ("transformer", True), ("lstm", True)])
def test_optimizers_hold_all_weights_of_a_rung(
    bench: Benches, monkeypatch: pytest.MonkeyPatch, name: str, touched: bool, operators: str, fused: bool
) -> None:
    """With fused Adam on plain heads they held maps that were not there any more. Touched rows need their own Adam."""

    def package(form: str, seed: int) -> ALPackage:
        return model(name, form, TouchedAdam if touched else None)

    task = bench["rung_data"].Task(name, torch.device("cpu"), None, [])
    monkeypatch.setattr(bench["rung_data"].Task, "of", lambda self, setting: SimpleNamespace(package=package))
    for layer in task.package(bench["rungs"].Setting("al", operators=operators, fused=fused, touched=touched), 0):
        for optimizer, side in ((layer.enc_opt, layer.enc), (layer.ae_opt, layer.ae)):
            held = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
            assert held == {id(weight) for weight in side.parameters()}
            assert optimizer.param_groups[0]["initial_lr"] == 1e-3
            assert bool(optimizer.param_groups[0]["fused"]) is (fused or touched)
            assert isinstance(optimizer, TouchedAdam) is touched


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
@pytest.mark.parametrize("form", ["al", "bp"])
@pytest.mark.parametrize("name", ["charlm", "transformer", "lstm", "resnet"])
def test_each_rung_changes_one_thing(
    bench: Benches, monkeypatch: pytest.MonkeyPatch, name: str, form: str, device: str
) -> None:
    """What was compiled had left the plain loop for the engine as well."""
    monkeypatch.setattr(bench["rungs"], "cores", lambda: 2)
    monkeypatch.setattr(bench["rungs"], "fastest_precision", lambda _: "bf16")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    ladder = bench["rungs"].rungs_of(name, form, torch.device(device))
    assert ladder[0].setting == bench["rungs"].Setting(form)
    below = asdict(ladder[0].setting)
    for rung in ladder[1:]:
        setting = asdict(rung.setting)
        if not setting["staged"]:
            below["processes"] = 1  # of a stage each, before
        changed = {key for key in setting if setting[key] != below[key]}
        if rung.setting.processes > 1 or rung.setting.threads:
            left_out = changed & {"staged"}  # which does not go with it
            assert not any(setting[key] for key in left_out)
            changed -= left_out | {"batch"}  # that both rungs have: tests/test_bench_replicas.py
        assert len(changed) == 1, rung.name
        if not rung.aside:
            below = setting
    assert len({rung.setting for rung in ladder}) == len(ladder)
    used = {key for key in below if any(getattr(rung.setting, key) for rung in ladder)}
    assert used >= {"processes", "engine"} | ({"threads"} if device == "cpu" else {"ahead", "tf32"})


def test_the_plain_form_makes_batches_when_they_are_wanted(bench: Benches) -> None:
    """On a GPU it had the thread, or the processes, that make them ahead."""
    for name, schema, dataset, key in (
        ("charlm", LanguageConfig, "shakespeare", "prefetch"),
        ("resnet", VisionConfig, "cifar10", "workers"),
    ):
        config = load_config(schema, None, overrides=[f"dataset={dataset}", f"data.{key}=3"], values={})
        task = bench["rung_data"].Task(name, torch.device("cpu"), Configured(config), [])
        for ahead, expected in ((False, 0), (True, 3)):
            setting = bench["rungs"].Setting("al", ahead=ahead)
            assert getattr(task.of(setting).config.data, key) == expected


@dataclass
class Configured:
    """As much of an experiment as settings change."""

    config: Any

    def under(self, config: Any) -> Configured:
        return Configured(config)


@pytest.mark.parametrize("name", ["charlm", "resnet"])
def test_batches_of_a_size_that_is_asked_for_are_those_of_every_rung(
    bench: Benches, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Processes had their own; texts, which are not all as long, are refused."""
    monkeypatch.setattr(bench["rungs"], "cores", lambda: 2)
    ladder = bench["rungs"].rungs_of(name, "al", torch.device("cpu"), batch=96)
    assert {rung.setting.batch for rung in ladder} == {96}
    assert {rung.setting.processes for rung in ladder} == {1, 2}
    with pytest.raises(SystemExit, match="2"):
        bench["ladder"].main(["--model=lstm", "--device=cpu", "--batch=96"])


@pytest.mark.parametrize(
    ("word", "key", "left"),
    [
        ("fused attention", "operators", {"plain", "joined"}),
        ("heads", "operators", {"plain", "ours"}),
        ("fused Adam", "fused", {False}),
        ("stages", "staged", {False}),
        ("compiled", "compile", {"none"}),
        ("engine", "engine", {False}),
    ],
)
def test_what_one_does_without_is_in_no_rung(bench: Benches, word: str, key: str, left: set[object]) -> None:
    """Its row was left out, and the rungs above still had it."""
    whole, found = (bench["rungs"].rungs_of("charlm", "al", torch.device("cpu"), words) for words in ([], [word]))
    assert {getattr(rung.setting, key) for rung in whole} > left
    assert {getattr(rung.setting, key) for rung in found} == left
    assert not any(word in rung.name for rung in found)


@pytest.mark.parametrize(("name", "top"), [("charlm", "+ compiled"), ("lstm", "+ engine, in one stage")])
@pytest.mark.parametrize("form", ["al", "bp"])
def test_the_ends_are_the_plain_form_and_all_that_one_stage_does(
    bench: Benches, name: str, top: str, form: str
) -> None:
    rungs = bench["rungs"]
    ends = rungs.ends_of(rungs.rungs_of(name, form, torch.device("cpu")))
    assert [rung.name for rung in ends] == ["plain", top]


def test_nobody_does_without_what_all_are_held_against(bench: Benches, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench["ladder"].main(["--model=charlm", "--without", "plain"])
    assert "--without: found 'plain', which is in 'plain', what all rungs are held against" in capsys.readouterr().err
    with pytest.raises(ValueError, match="found 'plain'"):
        bench["rungs"].rungs_of("charlm", "al", torch.device("cpu"), ["plain"])


def test_what_all_gpus_do_is_held_against_what_all_could(bench: Benches, tmp_path: Path) -> None:
    """Data parallel on four of them was held against one, and came to more than a matrix product."""
    rungs = bench["rungs"]
    alone, staged = rungs.Setting("bp"), rungs.Setting("bp", staged=True)
    parallel = rungs.Setting("bp", processes=4)
    turn = bench["rung_training"].Measured(1.0, 10.0, 100.0, None, 1.0)
    placement = Placement(["cuda:0", "cuda:1", "cuda:1"], [1, 2, 1], 1)
    ladder = [rungs.Rung("plain", alone), rungs.Rung("+ stages", staged), rungs.Rung("+ data parallel", parallel)]
    facts = {"title": "", "matrix_rates": {"fp32": 500.0, "bf16": 1000.0}}
    for device, wanted in (("cuda:0", ["20.0%", "10.0%", "5.0%"]), ("cpu", ["20.0%"] * 3)):
        task = bench["rung_data"].Task("charlm", torch.device(device), None, [], {staged: placement})
        task.__dict__["work"] = {"bp": 2.0}
        found = {rung.setting: [turn] for rung in ladder}
        kept = bench["ladder_report"].Results(task, [ladder], found, facts).write(tmp_path / "ladder.json")
        assert [row[8] for row in kept["table"]] == wanted


def test_a_rung_is_held_against_what_was_measured_beside_it(
    bench: Benches, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A median of one turn was held against that of another, between which the machine had slowed down by half."""
    rates = {
        "plain": (100, 50, 50),
        "+ fused Adam": (200, 125, 100),
        "(compiled)": (100, 100, 200),
        "+ stages": (400, 250),
    }
    rungs = [
        {
            "name": name,
            "aside": name.startswith("("),
            "setting": {"form": "al", "processes": 1, "staged": name == "+ stages"},
            "devices": 1,
            "turns": [asdict(bench["rung_training"].Measured(1.0, 10.0, float(rate), None, 1.0)) for rate in turns],
        }
        for name, turns in rates.items()
    ]
    kept = {"title": "charlm", "matrix_rates": {"fp32": 1e3}, "work_per_token_or_image": {"al": 1.0}, "rungs": rungs}
    figures = tmp_path / "ladder-charlm-cpu.json"
    kept = bench["ladder_report"].keep(figures, kept)
    assert [(row[5], row[6], row[7]) for row in kept["table"]] == [
        ("1.00×", "1.00–1.00", "1.00×"),
        ("2.00×", "2.00–2.50", "2.00×"),
        ("2.00×", "1.00–4.00", "0.80×"),
        ("4.50×", "4.00–5.00", "2.00×"),  # of the turns that both have; brackets are not stood on
    ]
    monkeypatch.setattr(sys, "argv", ["ladder_report.py", str(figures)])
    bench["ladder_report"].main()
    assert "4.00–5.00" in capsys.readouterr().out
    assert figures.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_the_work_of_an_lstm_is_counted(bench: Benches, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch counts none of it in texts of one length, so that it was said to use a thousandth of the machine."""
    x = words()
    batch = SimpleNamespace(x=x, y=torch.zeros(len(x), dtype=torch.int64), tokens=int(x.ne(0).sum()))
    experiment = SimpleNamespace(package=lambda form, seed: model("lstm", form))
    monkeypatch.setattr(bench["rung_data"].Task, "of", lambda self, setting: experiment)
    alike = SimpleNamespace(x=x[:1, :4], y=batch.y[:1], tokens=4)
    monkeypatch.setattr(bench["rung_data"].Task, "batches", lambda _, s, *__: iter([alike if s.by_length else batch]))
    work = bench["rung_data"].Task("lstm", torch.device("cpu"), None, []).work
    for form in ("al", "bp"):
        lstms = [part for part in model("lstm", form).modules() if isinstance(part, torch.nn.LSTM)]
        recurrent = 6 * sum(weight.numel() for lstm in lstms for weight in lstm.parameters() if weight.dim() == 2)
        assert 0.7 * recurrent < work[form] < 1.2 * recurrent  # of what is trained first, no gradient is passed down


@pytest.mark.parametrize(
    ("device", "devices", "sizes", "threads", "name"),
    [
        ("cpu", ["cpu", "cpu"], [1, 3], 1, "+ stages 1+3, 1 thread each"),
        ("cpu", ["cpu"], [4], 2, "+ stages (all layers in one), 2 threads each"),
        ("cuda:0", ["cuda:0", "cuda:1"], [2, 2], 1, "+ stages 2+2, cuda:0, cuda:1"),
    ],
)
def test_the_row_of_stages_says_which(
    bench: Benches, device: str, devices: list[str], sizes: list[int], threads: int, name: str
) -> None:
    rung = bench["rungs"].Rung("+ stages", bench["rungs"].Setting("al", staged=True))
    placements = {rung.setting: Placement(devices, sizes, threads)}
    task = bench["rung_data"].Task("charlm", torch.device(device), None, [], placements)
    assert bench["ladder_report"].named(task, rung) == name


@pytest.mark.parametrize(("device", "wanted"), [("cpu", ["cpu"]), ("cuda:0", None)])
def test_stages_are_on_what_the_other_rungs_compute_on(
    bench: Benches, monkeypatch: pytest.MonkeyPatch, device: str, wanted: list[str] | None
) -> None:
    """A ladder of a CPU had its stages on the GPU that was there, too."""
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(
        bench["rung_data"], "place", lambda *given, **options: asked.append({"options": given[-1], **options})
    )
    monkeypatch.setattr(bench["rung_data"].Task, "package", lambda *_: None)
    monkeypatch.setattr(bench["rung_data"].Task, "batches", lambda *_: iter([]))
    setting = bench["rungs"].Setting("al", compile="static")
    bench["rung_data"].Task("charlm", torch.device(device), None, []).placement(setting)
    assert [options["devices"] for options in asked] == [wanted]
    assert [options["options"].compile for options in asked] == ["static"]


@pytest.mark.parametrize("changes", [{"compile": "static"}, {"precision": "fp16"}, {"accumulate": 4}])
def test_what_the_plain_loop_cannot_do_is_done_without_the_engine_rung_too(
    bench: Benches, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    """With ``--without engine``, such a rung was the one before it under another name."""

    class Opened(Exception):
        pass

    def opened(*_: object, **options: Any) -> None:
        assert all(options[key] == value for key, value in changes.items() if key != "accumulate")
        raise Opened

    monkeypatch.setattr(bench["rung_data"].Task, "package", lambda *_: None)
    monkeypatch.setattr(bench["rung_data"].Task, "batches", lambda *_: iter([]))
    monkeypatch.setattr(bench["rung_training"], "Pipeline", opened)
    task = bench["rung_data"].Task("charlm", torch.device("cpu"), None, [])
    with pytest.raises(Opened):
        bench["rung_training"].train(task, bench["rungs"].Setting("al", **changes), 0, 4)


@pytest.mark.parametrize("stage_s", [(1.0, 1.0, 1.0), (1.0, 1.0, 3.0), (3.0, 0.5, 0.5), (0.5, 2.0, 1.0)])
@pytest.mark.parametrize("steps", [6, 40])
def test_stages_are_measured_while_all_have_work(bench: Benches, stage_s: tuple[float, ...], steps: int) -> None:
    """Filling and running empty were half of a turn of six batches: it says what a training of thousands would."""
    costs = [{Action.FORWARD: s / 4, Action.BACKWARD: s / 2, Action.UPDATE: s / 4} for s in stage_s]
    done = simulate(SCHEDULES["pipelined"], costs, steps + 4 * len(costs))
    spans = [Span(span.stage, span.stage, span.action, span.batch, span.begin, span.end) for span in done.spans]
    step_s, samples, tokens = bench["rung_training"].in_flow(spans, [(8, 100)] * (steps + 4 * len(costs)))
    assert step_s == pytest.approx(max(stage_s), rel=0.05)
    assert samples == pytest.approx(8 / step_s)
    assert tokens == pytest.approx(100 / step_s)


def test_memory_is_that_of_all_gpus(bench: Benches, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = {0: [10, 30], 1: [1, 6]}
    for number, name in enumerate(("memory_allocated", "max_memory_allocated")):
        monkeypatch.setattr(torch.cuda, name, lambda gpu, number=number: taken[gpu.index][number])
    for name in ("empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    gpus = [torch.device("cuda", index) for index in (0, 1, 1)]
    assert bench["memory_taken"].Memory(gpus, keep=False).peak() == 25


@pytest.mark.data
@pytest.mark.slow
def test_processes_learn_what_one_process_learns(
    bench: Benches, real_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They could not even begin, of an option that had gone."""
    monkeypatch.setattr(bench["rung_training"], "cores", lambda: 1)
    task = bench["rung_data"].task_of("charlm", torch.device("cpu"), str(real_data))
    setting = bench["rungs"].Setting("bp", operators="ours", fused=True, engine=True)
    together = bench["ladder_ranks"].in_processes(task, replace(setting, processes=2), 1, 3)
    alone = bench["rung_training"].train(task, setting, 1, 3)
    assert together.loss == pytest.approx(alone.loss, abs=1e-4)
    assert min(together.step_s, together.samples_per_s, together.tokens_per_s) > 0


@pytest.mark.data
@pytest.mark.slow
def test_stages_in_processes_learn_what_one_process_learns(
    bench: Benches, real_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, cores in (("rung_training", 1), ("rung_data", 2)):
        monkeypatch.setattr(bench[module], "cores", lambda cores=cores: cores)
    task = bench["rung_data"].task_of("charlm", torch.device("cpu"), str(real_data))
    setting = bench["rungs"].Setting("al", operators="ours", fused=True, engine=True)
    stages = replace(setting, staged=True, processes=2)
    one = bench["ladder_ranks"].in_processes(task, stages, 1, 4)
    assert one.loss == bench["rung_training"].train(task, setting, 1, 4).loss
    assert min(one.step_s, one.samples_per_s, one.tokens_per_s, one.peak_bytes) > 0
    rung = bench["rungs"].Rung("+ stages in 2 processes", stages)
    sizes = task.placement(stages).sizes
    assert len(sizes) == 2
    assert sum(sizes) == len(task.package(setting, 0))
    assert bench["ladder_report"].named(task, rung) == f"+ stages in 2 processes {sizes[0]}+{sizes[1]}, 1 thread each"


@pytest.mark.data
@pytest.mark.slow
def test_a_ladder_is_climbed_and_kept(
    bench: Benches,
    real_data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With all that there was, but for rungs whose processes failed in some turn."""
    for module in ("rung_training", "ladder"):  # a machine with other things to do is no place for threads that wait
        monkeypatch.setattr(bench[module], "cores", lambda: 1)
    monkeypatch.setattr(bench["rungs"], "cores", lambda: 2)
    monkeypatch.setattr(bench["rung_data"], "_EVALUATED", 48)
    placement = Placement(["cpu", "cpu"], [1, 3], 1)
    monkeypatch.setattr(bench["rung_data"], "place", lambda *_, **__: placement)
    monkeypatch.setattr(bench["ladder"], "matrix_rates", lambda _: {"fp32": 1e11})

    def fail(_: object, setting: Any, turn: int, __: int) -> Any:
        if turn or not setting.staged:
            raise CalledProcessError(7, "torchrun")
        return bench["rung_training"].Measured(1.0, 12.0, 768.0, None, 3.0)

    monkeypatch.setattr(bench["ladder"], "in_processes", fail)
    arguments = [*("--model=charlm", "--device=cpu", f"--data-root={real_data}", f"--out={tmp_path}", "--turns=2")]
    left_out = ("compiled", "heads", "freed", "one thread")
    told = [
        re.escape(f"al + {name}: exit code 7")
        for name in ("data parallel × 2, batches of 64, turn 1", "stages in 2 processes, turn 2")
    ]
    with pytest.raises(SystemExit, match="^{}.*\n{}".format(*told)):
        bench["ladder"].main([*arguments, *("--steps=4", "--forms", "al", "--without", *left_out)])
    kept = json.loads((tmp_path / "ladder-charlm-cpu.json").read_text())
    names = [rung["name"] for rung in kept["rungs"]]
    assert (names[0], names[-1]) == ("plain", "+ stages 1+3, 1 thread each")
    assert kept["rungs"][-1]["placement"]["sizes"] == [1, 3]
    for rung in kept["rungs"]:
        assert [0 < turn["loss"] < 5 for turn in rung["turns"]] == [True, True]
        assert rung["turns"][0]["loss"] != rung["turns"][1]["loss"]  # of another seed
    losses = {rung["name"]: rung["turns"][0]["loss"] for rung in kept["rungs"]}
    assert losses["plain"] == pytest.approx(losses["+ fused attention"], abs=1e-2)
    assert losses["(4 batches to an update)"] > losses["+ engine, in one stage"]  # after one update of four
    assert losses["+ engine, in one stage"] == losses[names[-1]]  # of as many batches, though it trained on more
    assert (tmp_path / "ladder-charlm-cpu.png").read_bytes().startswith(b"\x89PNG")
    assert "× plain" in capsys.readouterr().out
