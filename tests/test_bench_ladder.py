"""The ladder begins with plain PyTorch that is correct, and each rung adds one thing."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeal import ALPackage
from pipeal.models import CharDims, TextDims, build_language, build_text

BENCH = Path(__file__).parents[1] / "scripts" / "bench"
BENCHED = ("plain", "rungs", "rung_data", "rung_training", "ladder")
TEXT = TextDims(embedding=24, hidden=16, code=8, heads=3)


@pytest.fixture(scope="module")
def bench() -> Iterator[dict[str, ModuleType]]:
    sys.path.insert(0, str(BENCH))
    threads = torch.get_num_threads()
    try:
        yield {name: import_module(name) for name in BENCHED}
    finally:
        torch.set_num_threads(threads)
        sys.path.remove(str(BENCH))


def model(name: str, form: str) -> ALPackage:
    torch.manual_seed(0)
    if name == "charlm":
        return build_language(name, form, characters=40, dims=CharDims(dropout=0.0))  # type: ignore[arg-type]
    return build_text(name, form, vocab_size=40, classes=4, dims=TEXT)  # type: ignore[arg-type]


def words() -> Tensor:
    x = torch.randint(1, 40, (5, 9), generator=torch.Generator().manual_seed(1))
    x[1, 4:] = x[3, 1:] = 0
    return x


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("form", ["al", "bp"])
@pytest.mark.parametrize("name", ["charlm", "transformer", "lstm"])
def test_plain_operators_give_the_answers_of_ours(
    bench: dict[str, ModuleType], name: str, form: str, joined: bool
) -> None:
    ours, x = model(name, form), words()
    plain = deepcopy(ours)
    bench["plain"].write_plainly(plain, joined=joined)
    assert type(plain[0]) is type(ours[0])
    assert [type(part) for part in plain.modules()] != [type(part) for part in ours.modules()]
    ours.eval()
    plain.eval()
    torch.testing.assert_close(plain.infer(x), ours.infer(x), atol=1e-5, rtol=1e-4)


def test_padding_reaches_no_plain_answer(bench: dict[str, ModuleType]) -> None:
    for name in ("transformer", "lstm"):
        plain, x = model(name, "bp"), words()
        bench["plain"].write_plainly(plain)
        plain.eval()
        alone = plain.infer(x[1:2, :4])
        torch.testing.assert_close(plain.infer(x)[1:2], alone, atol=1e-6, rtol=1e-5)


def test_the_plain_loop_learns_what_the_engine_learns(bench: dict[str, ModuleType]) -> None:
    """All parameters, those that are new among them; without dropout, which draws otherwise."""
    from pipeal import Pipeline

    ours = model("charlm", "bp")
    plain = deepcopy(ours)
    bench["plain"].write_plainly(plain)
    bench["plain"].plain_adam(plain)
    x = torch.randint(0, 40, (3, 16), generator=torch.Generator().manual_seed(1))
    batches = [(x, x.roll(-1, 1)), (x.flip(0), x)]
    bench["plain"].train_plainly(plain, batches, torch.device("cpu"), scales=[0.5, 1.0])
    with Pipeline(ours, ["cpu"], "sequential", threads=1) as pipe:
        pipe.run(batches, lambda number: (0.5, 1.0)[number])
    torch.testing.assert_close(plain.eval().infer(x), ours.eval().infer(x), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("form", ["al", "bp"])
@pytest.mark.parametrize("name", ["charlm", "transformer", "lstm", "resnet"])
def test_each_rung_changes_one_thing(bench: dict[str, ModuleType], name: str, form: str) -> None:
    ladder = bench["rungs"].rungs_of(name, form, torch.device("cpu"))
    assert ladder[0].setting == bench["rungs"].Setting(form)
    below = asdict(ladder[0].setting)
    for rung in ladder[1:]:
        setting = asdict(rung.setting)
        changed = {key for key in setting if setting[key] != below[key]}
        if rung.setting.processes > 1 or rung.setting.threads:
            changed -= {"staged", "touched"}  # which do not go with it
        assert len(changed - {"operators"} or changed) == 1, rung.name
        if not rung.aside:
            below = setting
    assert len({rung.setting for rung in ladder}) == len(ladder)


@pytest.mark.parametrize(
    ("word", "key", "left"),
    [
        ("fused attention", "operators", {"plain", "joined"}),
        ("heads", "operators", {"plain", "ours"}),
        ("fused Adam", "fused", {False}),
        ("stages", "staged", {False}),
        ("compiled", "compile", {"none"}),
    ],
)
def test_what_one_does_without_is_in_no_rung(
    bench: dict[str, ModuleType], word: str, key: str, left: set[object]
) -> None:
    """Its row was left out, and the rungs above still had it."""
    whole, found = (bench["rungs"].rungs_of("charlm", "al", torch.device("cpu"), words) for words in ([], [word]))
    assert {getattr(rung.setting, key) for rung in whole} > left
    assert {getattr(rung.setting, key) for rung in found} == left
    assert not any(word in rung.name for rung in found)


def test_nobody_does_without_what_all_are_held_against(
    bench: dict[str, ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        bench["ladder"].main(["--model=charlm", "--without", "plain"])
    assert "expected no word that is in 'plain'" in capsys.readouterr().err
    with pytest.raises(ValueError, match="found 'plain'"):
        bench["rungs"].rungs_of("charlm", "al", torch.device("cpu"), ["plain"])


def test_what_all_gpus_do_is_held_against_what_all_could(bench: dict[str, ModuleType]) -> None:
    """Data parallel on four of them was held against one, and came to more than a matrix product."""
    rungs = bench["rungs"]
    alone, staged = rungs.Setting("bp"), rungs.Setting("bp", staged=True)
    parallel = rungs.Setting("bp", processes=4)
    turn = bench["rung_training"].Measured(1.0, 10.0, 100.0, None, 1.0)
    placement: Any = SimpleNamespace(devices=["cuda:0", "cuda:1", "cuda:1"])
    for device, wanted in (("cuda:0", ["20.0%", "10.0%", "5.0%"]), ("cpu", ["20.0%"] * 3)):
        task = bench["rung_data"].Task("charlm", torch.device(device), None, [], {staged: placement})
        ladder = [rungs.Rung("plain", alone), rungs.Rung("+ stages", staged), rungs.Rung("+ data parallel", parallel)]
        rows = bench["ladder"].rows_of(task, ladder, {rung.setting: [turn] for rung in ladder}, 2.0, 1000.0)
        assert [row[8] for row in rows] == wanted


@pytest.mark.data
def test_a_ladder_is_climbed_and_kept(
    bench: dict[str, ModuleType],
    real_data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (
        "rungs",
        "rung_training",
        "ladder",
    ):  # a machine with other things to do is no place for threads that wait
        monkeypatch.setattr(bench[module], "cores", lambda: 1)
    monkeypatch.setattr(bench["rung_data"], "_EVALUATED", 48)
    bench["ladder"].main(
        [
            *("--model=charlm", "--device=cpu", f"--data-root={real_data}", f"--out={tmp_path}", "--turns=2"),
            *("--steps=4", "--forms", "bp", "--without", "data parallel", "compiled", "heads", "freed"),
        ]
    )
    kept = json.loads((tmp_path / "ladder-charlm-cpu.json").read_text())
    assert kept["rungs"][0]["name"] == "plain"
    for rung in kept["rungs"]:
        assert [0 < turn["loss"] < 5 for turn in rung["turns"]] == [True, True]
        assert rung["turns"][0]["loss"] != rung["turns"][1]["loss"]  # of another seed
    plain, attention = (kept["rungs"][place]["turns"][0]["loss"] for place in (0, 1))
    assert plain == pytest.approx(attention, abs=1e-2)
    assert (tmp_path / "ladder-charlm-cpu.png").read_bytes().startswith(b"\x89PNG")
    assert "× plain" in capsys.readouterr().out
