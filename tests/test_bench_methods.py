"""The table of methods: equal tries, equal budgets, paired differences, and a file that goes on where it was left."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from statistics import NormalDist
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeal.core.errors import ConfigError, DataError
from pipeal.engine import Pipeline
from pipeal.models import CharDims, CharLMAL
from pipeal.run.form_costs import COUNTING
from pipeal.training.metric import MeanSd
from tests.benches import BENCH, Benches

SMALL = [
    *("--model", "lstm", "--parts", "2", "--threads", "1", "--precision", "fp32", "--limit-train", "40"),
    *("--set", "model.embedding_dim=4", "--set", "model.x_hid=4", "--set", "model.y_hid=4"),
    *("--epochs", "2", "--try-epochs", "1", "--tries", "1e-3,3e-3", "--methods", "al,bp,greedy"),
]


def kept(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


COUNTED = {"training_flops_per_sample": 1.0, "counting": COUNTING}


class Off(Exception):
    """The machine went off."""


@pytest.fixture
def faked(bench: Benches, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """In place of trainings, rows; gives what was to be trained. The eighth finds the machine off."""
    done: list[Any] = []

    def trained(experiment: Any, training: Any, **_: Any) -> Any:
        if len(done) == 7:
            raise Off
        kind, name, parts, setting, seed, epochs, batches = training
        done.append((kind, name, parts, setting["train.lr.base"], seed, epochs))
        held = 0.9 if setting["train.lr.base"] == 3e-3 else 0.1  # better with the higher rate
        measured = [(held, None if kind == "try" else 0.5)]
        what = (kind, name, parts, dict(setting), seed, epochs, batches, measured, 0)
        return bench["methods_rows"].Row(*what, samples=1, seconds=float(len(done)))

    monkeypatch.setattr(bench["methods"], "trained", trained)
    monkeypatch.setattr(bench["methods"], "counted", lambda *_: COUNTED)
    return done


def test_a_table_goes_on_with_the_rows_that_it_has_not(
    bench: Benches, tmp_path: Path, faked: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    path, main = tmp_path / "found.json", bench["methods"].main
    options = [*SMALL, "--seeds", "2", "--json", str(path)]
    with pytest.raises(Off):
        main(options)
    before = kept(path)["rows"]
    assert len(before) == 7
    first = faked.copy()
    faked[:] = [None]
    main(options)
    assert first + faked[1:] == [
        *(("try", "al", 2, rate, 1000, 1) for rate in (1e-3, 3e-3)),
        *(("try", "bp", None, rate, 1000, 1) for rate in (1e-3, 3e-3)),
        *(("try", "greedy", 2, rate, 1000, 1) for rate in (1e-3, 3e-3)),
        *(("seed", name, parts, 3e-3, 0, 2) for name, parts in (("al", 2), ("bp", None), ("greedy", 2))),
        *(("seed", name, parts, 3e-3, 1, 2) for name, parts in (("al", 2), ("bp", None), ("greedy", 2))),
    ]
    rows = kept(path)["rows"]
    assert [row for row in before if row not in rows] == []  # as they were, seconds and all

    faked[:] = [None] * 7  # nothing is left to do
    main(options)
    elsewhere = tmp_path / "elsewhere.json"
    main([*options, "--json", str(elsewhere), "--merge", str(path)])
    assert kept(path)["rows"] == kept(elsewhere)["rows"] == rows
    faked.clear()
    main([*options, "--parts", "2", "3", "--seeds", "1", "--methods", "bp,greedy"])
    assert {(name, parts) for _, name, parts, *_ in faked} == {("greedy", 3)}  # BP is in no parts
    for option, told in (("model.dropout=0.1", "0.1"), ("engine.packet=int8", "int8")):
        with pytest.raises(SystemExit, match="2"):
            main([*options, "--set", option])
        key = option.partition("=")[0]
        assert f"has {key} None, where {told} is wanted" in capsys.readouterr().err


@pytest.mark.usefixtures("faked")
def test_costs_that_were_counted_by_other_rules_are_counted_again(
    bench: Benches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Symptom: a method that takes as many operations as BP had 1.11 times as many. Cause: BP's had been counted by
    rules that changed since. One that stops halfway, or merges an older file, mixes them no more."""
    path, main, names, goes_off_at = tmp_path / "found.json", bench["methods"].main, list[str](), [99]
    options = [*SMALL, "--seeds", "2", "--json", str(path)]
    with pytest.raises(Off):
        main(options)
    old = kept(path)
    for cost in old["costs"].values():
        cost["counting"] -= 1

    def counted(_: Any, form: Any) -> dict[str, float]:
        if len(names) == goes_off_at[0]:
            raise Off
        names.append(form.contestant.name)
        return {**COUNTED, "training_flops_per_sample": 2.0}

    monkeypatch.setattr(bench["methods"], "counted", counted)
    other = tmp_path / "other.json"
    for source, more in ((path, []), (other, ["--merge", str(other)])):
        path.unlink()
        source.write_text(json.dumps(old), encoding="utf-8")
        names.clear()
        for goes_off_at[0] in (1, 2, 99):
            with pytest.raises(Off):  # at last as the first training begins
                main([*options, *more, "--methods", "bp"])
        assert sorted(names) == ["al", "bp", "greedy"]
        assert [cost["training_flops_per_sample"] for cost in kept(path)["costs"].values()] == [2.0] * 3
    old["of"]["budget"] = "flops"
    other.write_text(json.dumps(old), encoding="utf-8")
    with pytest.raises(SystemExit, match="2"):
        main([*SMALL, "--json", str(other), "--budget", "flops"])
    assert "its budgets go by FLOPs counted by other rules; name another file with --json" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.draws
def test_rows_are_trainings(
    bench: Benches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("pipeal.run.plan_costs.BATCHES", 1)
    monkeypatch.setattr("pipeal.run.plan_costs.MICRO_BATCHES", (2,))
    paths = [tmp_path / name for name in ("one.json", "other.json")]
    options = [*SMALL, "--budget", "time", "--seeds", "2"]
    bench["methods"].main([*options, "--json", str(paths[0]), "--plot", str(tmp_path / "found.png")])
    out = capsys.readouterr().out
    assert (tmp_path / "found.png").stat().st_size > 1000
    assert re.search(r"^\| greedy +\| +2 \|.*\| .*×", out, re.MULTILINE)
    found = kept(paths[0])
    assert len(found["rows"]) == 3 * 2 + 3 * 2
    assert len(found["costs"]) == len(found["times"]) == 3
    for row in found["rows"]:
        assert len(row["measured"]) == row["epochs"]
        assert {test is not None for _, test in row["measured"]} == {row["kind"] == "seed"}  # no try sees them
    # The same again, but for times: made again where only they are known, and in processes of their own.
    paths[1].write_text(json.dumps({**found, "rows": []}), encoding="utf-8")
    bench["methods"].main([*options, "--jobs", "2", "--json", str(paths[1])])
    assert [row | {"seconds": 0} for row in kept(paths[1])["rows"]] == [row | {"seconds": 0} for row in found["rows"]]


@pytest.mark.slow
def test_test_samples_can_be_measured_once(bench: Benches, tmp_path: Path) -> None:
    """The weights of the best epoch, of which few are the last, are there again; batch norm's means are."""
    options = ["--model", "resnet", "--width", "0.125", "--parts", "2", "--threads", "1", "--precision", "fp32"]
    options += ["--limit-train", "200", "--epochs", "4", "--try-epochs", "1", "--tries", "3e-2", "--methods", "al,bp"]
    found = []
    for flags in ([], ["--test-once"]):
        path = tmp_path / f"found{len(flags)}.json"
        bench["methods"].main([*options, *flags, "--json", str(path)])
        found.append([row for row in kept(path)["rows"] if row["kind"] == "seed"])
    for each, once in zip(*found, strict=True):
        assert each["best"] == once["best"]
        assert once["measured"] == [
            [held, test if epoch == each["best"] else None] for epoch, (held, test) in enumerate(each["measured"])
        ]
    assert any(row["best"] < 3 for row in found[0])


def test_one_process_writes_a_table(bench: Benches, tmp_path: Path) -> None:
    Table = bench["methods_rows"].Table
    path = tmp_path / "found.json"
    with Table(path, {"budget": "steps"}) as table:
        with pytest.raises(DataError, match="another process writes it"):
            Table(path, {"budget": "steps"})
        table.write()
    with pytest.raises(DataError, match="has budget steps, where flops is wanted"), Table(path, {"budget": "flops"}):
        pass
    path.write_text("{}", encoding="utf-8")
    with pytest.raises(DataError, match="expected a file that"):
        bench["methods_report"].report([path], None)


def test_budgets_of_time_go_by_the_times_of_one_machine(bench: Benches, tmp_path: Path) -> None:
    Table = bench["methods_rows"].Table
    here, there = tmp_path / "here.json", tmp_path / "there.json"
    for path, seconds in ((here, 1.0), (there, 2.0)):
        with Table(path, {"budget": "time"}) as table:
            table.times["al"] = {"batch_s": seconds}
            table.write()
    with Table(here, {"budget": "time"}) as table, pytest.raises(DataError, match="begin there with a copy"):
        table.merge(there)


def config_of(bench: Benches, *more: str) -> Any:
    return bench["methods"].opened(bench["methods"].parsed([*SMALL, *more])).config


def test_all_have_as_many_tries(bench: Benches) -> None:
    methods, of = bench["methods"], bench["methods_rows"].Contestant.of
    config = config_of(bench)
    contestants = [of("al"), of("al model.dropout=0.1"), of("bp")]
    own = [["al", "train.lr.base=1e-3,3e-3", "model.y_hid=4,8"]]
    found = methods.tries_of(contestants, "1e-4,3e-4,1e-3,3e-3", own, config)
    assert [form.setting for form in found["al"]] == [
        {"train.lr.base": rate, "model.y_hid": wide} for rate in (1e-3, 3e-3) for wide in (4, 8)
    ]
    assert {len(forms) for forms in found.values()} == {4}
    assert all(form.setting["model.dropout"] == 0.1 for form in found["al model.dropout=0.1"])
    with pytest.raises(ConfigError, match=r"unequal numbers of tries \(al 4, al model.dropout=0.1 3, bp 3\)"):
        methods.tries_of(contestants, "1e-4,3e-4,1e-3", own, config)
    with pytest.raises(ConfigError, match="--tries-of 'greedy': expected a contestant"):
        methods.tries_of(contestants, "1e-3", [["greedy", "train.lr.base=1e-3"]], config)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--methods", "al,best"], "unknown method 'best'"),
        (
            ["--methods", "bp,al model.foo=1"],
            "methods.py: --methods 'al model.foo=1': model.foo: unknown key; expected",
        ),
        (["--tries", "fast"], "methods.py: --tries train.lr.base: found 'fast', expected a number above 0"),
        (["--tries-of", "bp", "train.lr.base=fast"], "methods.py: --tries-of train.lr.base: found 'fast', expected"),
        (["--parts", "9"], "al in 9 parts: parts is 9; expected 1 to"),
        (["--try-seed", "0"], "--try-seed: found 0, which is one to report"),
        (["--set", "data.held_out=0"], "held_out is 0"),
        (["--set", "model={parts: 2}"], "found model.parts, which methods.py sets by itself; expected --parts"),
        (["--set", "train.methods=[al]"], "found train.methods, which methods.py sets by itself; expected --methods"),
    ],
)
def test_mistakes_are_told_before_anything_is_trained(
    bench: Benches,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    message: str,
) -> None:
    with pytest.raises(SystemExit, match="2"):
        bench["methods"].main([*SMALL, *options, "--json", str(tmp_path / "found.json")])
    assert message in capsys.readouterr().err
    assert not (tmp_path / "found.json").exists()


@given(epochs=st.floats(0.05, 40), batches=st.integers(20, 500))
def test_a_budget_is_spent(bench: Benches, epochs: float, batches: int) -> None:
    whole, each = bench["methods_rows"].length(epochs, batches)
    assert 1 <= each <= batches
    assert whole <= max(1, epochs + 1)
    wanted = epochs * batches
    assert wanted * (1 - bench["methods_rows"].SPARED) - whole <= whole * each <= wanted + whole / 2 + 1


def test_dearer_methods_train_on_fewer_batches(bench: Benches, tmp_path: Path) -> None:
    methods, rows = bench["methods"], bench["methods_rows"]
    al, bp = (methods.Form(rows.Contestant.of(name), parts, {}) for name, parts in (("al", 2), ("bp", None)))
    for budget, wanted in (("steps", (10, 60)), ("flops", (5, 60)), ("time", (4, 60))):
        with rows.Table(tmp_path / f"{budget}.json", {"budget": budget}) as table:
            table.costs = {al.key: {"training_flops_per_sample": 6.0}, bp.key: {"training_flops_per_sample": 3.0}}
            table.times = {methods.Bench.time_key(al, 2): {"batch_s": 2.5, "bp_batch_s": 1.0}}
            table.times[methods.Bench.time_key(bp, 2)] = {"batch_s": 1.1, "bp_batch_s": 1.1}
            found = methods.Bench(None, table, {}, [2], 60, None)
            assert found.length(al, 10) == wanted
            assert found.length(bp, 10) == (10, 60)


def test_shortened_epochs_are_the_beginning_of_whole_ones(bench: Benches) -> None:
    experiment = bench["methods"].opened(bench["methods"].parsed([*SMALL, "--set", "data.batching.budget_tokens=64"]))
    whole, short = experiment.train_batches(0), bench["methods"].FirstBatches(experiment.train_batches(0), 3)
    assert len(whole) > 4
    assert len(short) == 3
    for epoch, first in ((0, 0), (1, 2)):
        whole.set_epoch(epoch)
        short.set_epoch(epoch, first)
        assert [batch.indices for batch in short] == [batch.indices for batch in whole][first:3]


@pytest.mark.parametrize(("methods", "is_told"), [("scpl,al", False), ("scpl", False), ("al model.x_hid=5,bp", True)])
def test_an_option_is_without_effect_where_no_contestant_has_it(
    bench: Benches, caplog: pytest.LogCaptureFixture, methods: str, is_told: bool
) -> None:
    """Symptom: a temperature that SCPL trained with was told to be without effect, since the mode was AL."""
    config_of(bench, "--methods", methods, "--set", "methods.scpl.temperature=5")
    assert ("methods.scpl.temperature 5: without effect" in caplog.text) is is_told


def test_a_part_of_the_training_samples_and_nothing_else_is_less(bench: Benches) -> None:
    methods = bench["methods"]
    less = methods.opened(methods.parsed(SMALL))
    whole = methods.opened(methods.parsed([*SMALL, "--limit-train", "100000"]))
    assert len(less.train) == less.facts["train_samples"] == 40 < len(whole.train)
    assert (less.held.fingerprint, less.test.fingerprint) == (whole.held.fingerprint, whole.test.fingerprint)
    assert less.facts["fingerprint"] != whole.facts["fingerprint"]


def made(bench: Benches, kind: str, name: str, seed: int, test: float, rate: float = 1e-3) -> Any:
    parts = None if name == "bp" else 4
    measured = [(0.5, 0.9), (test, test), (0.6, 0.1)]  # the best by held-out samples is the second
    setting = {"train.lr.base": rate}
    return bench["methods_rows"].Row(kind, name, parts, setting, seed, 3, 10, measured, 1, samples=300, seconds=1.0)


def table_of(bench: Benches, rows: list[Any]) -> dict[str, Any]:
    of = {"dataset": "d", "model": "m", "measure": "accuracy", "budget": "steps", "epochs": 3, "limit_train": None}
    costs = {
        bench["methods_rows"].cost_key(name, parts, {}): {
            "training_flops_per_sample": flops,
            "inference_flops_per_sample": 1e6,
            "packet_bytes_per_sample": 2048.0,
            "counted_memory_bytes": {"all": 2**20},
            "inference_parameters": 7,
            "training_only_parameters": 3,
        }
        for name, parts, flops in (("bp", None, 2e9), ("al", 4, 3e9))
    }
    whole = {**of, "batches": 10, "config": {}, "data": {}}
    return {"of": whole, "rows": [asdict(row) for row in rows], "costs": costs, "times": {}}


@pytest.mark.draws
def test_a_picture_has_a_panel_of_each_table_in_the_order_of_the_files(
    bench: Benches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(bench["methods_report"], "save", lambda figure, _: drawn.append(figure))
    rows = [made(bench, kind, "bp", 0, 0.7) for kind in ("try", "seed")]
    of_al = [made(bench, kind, "al", 0, 0.7) for kind in ("try", "seed")]
    paths = []
    for model, some in (("b", [*rows, *of_al]), ("c", rows), ("a", [*rows, *of_al])):
        table = table_of(bench, some)
        paths.append(tmp_path / f"{model}.json")
        paths[-1].write_text(json.dumps({**table, "of": {**table["of"], "model": model}}), encoding="utf-8")
    for some in (paths, paths[1:2]):
        bench["methods_report"].main([*map(str, some), "--plot", "found.png"])
    other = json.loads(paths[1].read_text(encoding="utf-8"))
    other["of"]["config"] = {"model.dropout": 0.5}
    paths.append(tmp_path / "other.json")
    paths[-1].write_text(json.dumps(other), encoding="utf-8")
    bench["methods_report"].main([*map(str, paths[1:]), "--plot", "found.png"])
    titles = [[panel.get_title(loc="left") for panel in one.axes if panel.get_visible()] for one in drawn]
    assert titles == [
        ["d b, 4 parts, 3 epochs", "d c, 3 epochs", "d a, 4 parts, 3 epochs"],
        ["d c, 3 epochs"],
        ["d c, 3 epochs", "d a, 4 parts, 3 epochs", "d c, 3 epochs, model.dropout=0.5"],
    ]


def test_the_report_has_the_best_try_and_pairs_of_seeds(
    bench: Benches, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        made(bench, "try", "al", 9, 0.7, 1e-3),
        made(bench, "try", "al", 9, 0.8, 3e-3),
        made(bench, "try", "bp", 9, 0.8),
        *(made(bench, "seed", "al", seed, test, 3e-3) for seed, test in ((0, 0.71), (1, 0.74), (2, 0.62))),
        made(bench, "seed", "al", 0, 0.99, 1e-3),  # not what was chosen
        *(made(bench, "seed", "bp", seed, test) for seed, test in ((0, 0.70), (1, 0.70))),
    ]
    path = tmp_path / "found.json"
    path.write_text(json.dumps(table_of(bench, rows)), encoding="utf-8")
    bench["methods_report"].main([str(path)])
    out = capsys.readouterr().out
    (al,) = (line for line in out.splitlines() if line.startswith("| al") and "0.003" in line)
    # 1 and 4 points: 2.5 ± 12.706 · (3 / √2) / √2; the third seed of AL has no partner.
    cells = [cell.strip() for cell in al.strip("| ").split("|")]
    assert cells == ["al", "4", "0.003", "", "2, edge", "3", "3", "0.6900 ± 0.0624", "+2.50 (-16.56 to +21.56)",
                     "0.9000"]  # fmt: skip
    (bp,) = (line for line in out.splitlines() if line.startswith("| bp") and "0.7000 ± 0.0000" in line)
    assert "| 1 " in bp  # tries
    (cost,) = (line for line in out.splitlines() if line.startswith("| al") and "1.50×" in line)
    assert [cell.strip() for cell in cost.strip("| ").split("|")][:10] == [
        "al", "4", "3000", "1.50×", "1.000", "7", "3", "1.000", "-", "2.000",
    ]  # fmt: skip


def test_files_of_the_same_are_joined_and_others_stand_apart(bench: Benches) -> None:
    one = table_of(bench, [made(bench, "seed", "al", 0, 0.5)])
    other = table_of(bench, [made(bench, "seed", "al", 0, 0.6), made(bench, "seed", "al", 1, 0.7)])
    apart = table_of(bench, [])
    apart["of"] = {**apart["of"], "epochs": 4}
    joined = bench["methods_rows"].joined([one, apart, other])
    assert sorted(len(table["rows"]) for table in joined) == [0, 2]
    rows = [bench["methods_rows"].row_of(row) for table in joined for row in table["rows"]]
    assert {row.test for row in rows} == {0.5, 0.7}  # the first file's, where both have it


def test_a_try_that_diverged_is_not_chosen(bench: Benches) -> None:
    rows, nan = bench["methods_rows"], float("nan")
    assert rows.best_epoch([nan, 0.2, nan], is_loss=True) == 1
    assert rows.best_epoch([3.0, 2.0, 2.0], is_loss=True) == 1
    broken = replace(made(bench, "try", "al", 9, 0.9), best=None, failed="diverged")
    good = made(bench, "try", "al", 9, 0.7, 3e-3)
    assert rows.best_try([broken, good], "al", 4, is_loss=False) == good
    assert rows.best_try([broken], "al", 4, is_loss=False) is None
    low = made(bench, "try", "al", 9, 0.2, 1e-2)
    assert rows.best_try([good, low], "al", 4, is_loss=True) == low


@given(freedom=st.integers(1, 60), sure=st.sampled_from([0.5, 0.9, 0.95, 0.99]))
def test_student_t_holds_as_often_as_it_says(bench: Benches, freedom: int, sure: float) -> None:
    """Its density, summed up between the two sides."""
    t = bench["methods_report"].student_t(freedom, sure)
    x = torch.linspace(0, t, 200_001, dtype=torch.float64)
    half = torch.tensor(freedom / 2, dtype=torch.float64)
    scale = torch.exp(torch.lgamma(half + 0.5) - torch.lgamma(half)) / (freedom * torch.pi) ** 0.5
    density = scale * (1 + x * x / freedom) ** (-(freedom + 1) / 2)
    assert float(2 * torch.trapezoid(density, x)) == pytest.approx(sure, abs=1e-6)
    assert t > NormalDist().inv_cdf(0.5 + sure / 2)


def test_the_loss_of_a_text_is_that_of_all_its_characters(bench: Benches) -> None:
    torch.manual_seed(0)
    dims = CharDims(block=8, width=8, heads=2, layers=2, dropout=0.0)
    model = CharLMAL(5, dims=dims)
    text = torch.randint(5, (8 * 70 + 6,), dtype=torch.uint8)  # more blocks than a batch has, and a shorter one
    with Pipeline(model, ["cpu"], "sequential") as pipe:
        found = bench["methods"].text_loss(pipe, text, 8)
        losses = []
        for first in range(0, len(text) - 1, 8):
            x, y = text[first : first + 8].long(), text[first + 1 : first + 9].long()
            (logits,) = pipe.predict_each([x[: len(y)].unsqueeze(0)])
            losses += torch.nn.functional.cross_entropy(logits[0], y, reduction="none").tolist()
    assert len(losses) == len(text) - 1
    assert found == pytest.approx(sum(losses) / len(losses), abs=1e-5)


def test_the_share_of_a_gain_is_unsure_where_its_pairs_are(bench: Benches) -> None:
    """Fieller's interval: at its sides r the differences ``gain - r * whole`` are just so far from zero as t allows."""
    report = bench["methods_report"]
    gains, whole = [0.031, 0.024, 0.035, 0.028], [0.036, 0.030, 0.033, 0.039]
    share, sides = report.share_of(gains, whole)
    assert share == pytest.approx(sum(gains) / sum(whole))
    assert sides[0] < share < sides[1]
    for side in sides:
        mean, (low, high) = report.paired(
            [gain - side * all_of_it for gain, all_of_it in zip(gains, whole, strict=True)]
        )
        assert min(abs(low), abs(high)) == pytest.approx(0.0, abs=1e-12), mean
    assert report.share_of(gains[:1], whole[:1])[1] is None
    assert report.share_of([1.0, 2.0], [-1.0, 2.0])[1] is None, "the divisor may be zero"


def test_the_report_shows_shares_of_a_gain(bench: Benches, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = {"bp": (0.70, 0.72, 0.74), "al": (0.68, 0.70, 0.71), "bp model.layers=1": (0.60, 0.62, 0.63)}
    rows = [made(bench, "try", name, 9, 0.7) for name in figures]
    rows += [
        made(bench, "seed", name, seed, test) for name, tests in figures.items() for seed, test in enumerate(tests)
    ]
    path = tmp_path / "found.json"
    path.write_text(json.dumps(table_of(bench, rows)), encoding="utf-8")
    bench["methods_report"].main([str(path), "--gain-over", "bp model.layers=1"])
    (al,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("| al") and "0.001" in line)
    assert " 77% (" in al  # (0.08 + 0.08 + 0.08) / (0.10 + 0.10 + 0.11)
    with pytest.raises(SystemExit) as ended:
        bench["methods_report"].main([str(path), "--gain-over", "bp-1"])
    assert ended.value.code == 2
    assert "bp model.layers=1" in capsys.readouterr().err


def test_the_report_holds_against_the_form_of_bp_that_is_asked_for(
    bench: Benches, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that is equal in every seed has all of the gain, and no seed differs."""
    same = "bp methods.bp.same_start=true"
    figures = {"bp": (0.70, 0.72), same: (0.74, 0.76), "al": (0.74, 0.76), "bp model.layers=1": (0.6, 0.62)}
    rows = [made(bench, "try", name, 9, 0.7) for name in figures]
    rows += [
        made(bench, "seed", name, seed, test) for name, tests in figures.items() for seed, test in enumerate(tests)
    ]
    path = tmp_path / "found.json"
    path.write_text(json.dumps(table_of(bench, rows)), encoding="utf-8")

    def shown(*options: str) -> str:
        bench["methods_report"].main([str(path), *options])
        return next(
            line for line in capsys.readouterr().out.splitlines() if line.startswith("| al") and "0.001" in line
        )

    assert "+4.00 (+4.00 to +4.00)" in shown()
    found = shown("--over", same, "--gain-over", "bp model.layers=1")
    assert "+0.00 (+0.00 to +0.00)" in found
    assert "100% (100% to 100%)" in found
    with pytest.raises(SystemExit) as ended:
        shown("--over", "bp-2")
    assert ended.value.code == 2
    assert same in capsys.readouterr().err


TEXT_ROW = ("bp", "al", "al model.bridges=lookahead", "deinforeg")
MLP = "al model.labels=one-hot model.bridges=mlp"
AHEAD = "al model.bridges=lookahead model.ahead.depth=9 model.ahead.same_start=true model.labels=one-hot"
WIDE = "deinforeg methods.deinforeg.width=1024 methods.deinforeg.classifier=1"
README_ROWS = {
    "AG News, transformer": ("agnews-transformer", ("bp", "al", "", "auglocal")),
    "AG News, lstm": ("agnews-lstm", TEXT_ROW),
    "DBpedia, transformer": ("dbpedia-transformer", TEXT_ROW),
    "DBpedia, lstm": ("dbpedia-lstm", TEXT_ROW),
    "IMDb, 5,000 texts, transformer": ("imdb-transformer-4096", TEXT_ROW),
    "IMDb, 5,000 texts, lstm": ("imdb-lstm-4096", TEXT_ROW),
    "CIFAR-10, resnet of half width": ("cifar10-resnet-xeon", ("bp", MLP, f"{MLP} model.x_hid=1400", WIDE)),
    "CIFAR-10, vgg of half width": ("cifar10-vgg-xeon", ("bp", "al", f"{MLP} model.x_hid=1000", "auglocal")),
    "Shakespeare, charlm *cpu*, 4,000 steps": ("charlm-4000-rates", ("bp", "", AHEAD, "")),
}
"""By the first cell of a row of the README's table, the kept file and the contestants of the others."""


def test_the_table_of_the_readme_is_of_kept_files(bench: Benches) -> None:
    text = (BENCH.parents[1] / "README.md").read_text(encoding="utf-8")
    lines = [line for line in text.partition("### Accuracy")[2].splitlines() if line.startswith("|") and "±" in line]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert [row[0] for row in rows] == list(README_ROWS)
    for first, *cells in rows:
        file, names = README_ROWS[first]
        found = bench["methods_report"].Found(kept(BENCH / "results" / f"methods-{file}.json"))
        by_name = {line.name: line for line in found.lines}
        for name, cell in zip(names, cells, strict=True):
            if not cell:
                continue
            line = by_name[name]
            assert str(MeanSd.of(line.figures.values())) in cell, (first, name)
            flops, bp = (found.cost(one)["training_flops_per_sample"] for one in (line, by_name["bp"]))
            assert name == "bp" or f"({flops / bp:.2f}×)" in cell, (first, name)


@pytest.mark.parametrize(
    ("page", "begin", "end"),
    [
        ("docs/benchmarks", "### Other local methods", "## Speed"),
        ("docs/benchmarks", "## Vision", "Earlier, with what"),
        ("docs/language-model", "### With backpropagation's depth", "Three seeds of both forms"),
    ],
)
def test_figures_of_the_pages_are_printed_from_kept_files(
    bench: Benches, page: str, begin: str, end: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (BENCH.parents[1] / f"{page}.md").read_text(encoding="utf-8")
    text = text[text.index(begin) : text.index(end)].replace("−", "-")
    files = [str(path) for path in sorted((BENCH / "results").glob("methods-*.json"))]
    for options in ([], ["--seeds", "3"], ["--over", "bp methods.bp.same_start=true"]):
        bench["methods_report"].main([*files, *options])
    printed = capsys.readouterr().out
    sd, interval = r"\d\.\d{4} ± \d\.\d{4}", r"[+-]\d+\.\d\d \([+-]\d+\.\d\d to [+-]\d+\.\d\d\)"
    figures = re.findall(f"{sd}|{interval}", text)
    assert len(figures) >= 6
    assert [one for one in figures if one not in printed] == []

    def pairs(lines: str) -> set[tuple[str, str]]:
        """Accuracies and the differences that stand beside them in a row."""
        return {
            pair
            for line in lines.splitlines()
            if line.startswith("|")
            for pair in product(re.findall(sd, line), re.findall(interval, line))
        }

    assert pairs(text) <= pairs(printed)
