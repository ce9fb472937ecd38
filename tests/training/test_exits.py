"""Early exits: thresholds that are the cheapest safe ones, costs that are counted, a table that is measured."""

from __future__ import annotations

import io
import json
import warnings
from dataclasses import dataclass, replace
from functools import cache
from math import inf, isnan, nan
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib import image
from rich.console import Console
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from pipeal import AE, AL, BP, ENC, ALPackage, ConfigError, DataError, LabelAE, Pipeline
from pipeal.core.errors import CountingError
from pipeal.core.flops import counting
from pipeal.core.protocols import DOWN, TURN, UP
from pipeal.core.tree import batch_size
from pipeal.models.text import LSTMAL, TextDims, TransformerAL
from pipeal.reporting.exits import draw_exits, print_exits
from pipeal.training.calibration import _sweep, _temperature, _thresholds
from pipeal.training.evaluation import accuracy
from pipeal.training.exit_costs import training_flops
from pipeal.training.exits import Calibration, ExitCosts, ExitTable, calibrate, exit_costs, exit_table
from tests.engine.cases import Case, cases

FEATURES, CLASSES, WIDE, CODE = 12, 4, 24, 8


@dataclass
class Batch:
    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.y)


class Batches(list[Batch]):
    def set_epoch(self, epoch: int) -> None: ...


def blobs(samples: int, seed: int, size: int = 50) -> Batches:
    """Classes around centres, with as much noise again for every second sample: some are easy, some are not."""
    draw = torch.Generator().manual_seed(seed)
    centres = torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(0))
    y = torch.randint(CLASSES, (samples,), generator=draw)
    noise = 1.0 + 1.5 * (torch.rand(samples, 1, generator=draw) > 0.5)
    x = centres[y] + noise * torch.randn(samples, FEATURES, generator=draw)
    return Batches(Batch(*part) for part in zip(x.split(size), y.split(size), strict=True))


pytestmark = pytest.mark.usefixtures("one_thread")


def mlp(layers: int = 3) -> ALPackage:
    torch.manual_seed(0)
    built, wide, code = [], FEATURES, CLASSES
    for number in range(layers):
        g, h = nn.Linear(code, CODE), nn.Linear(CODE, code)
        side = AE(g, h) if number else LabelAE(g, h, CLASSES)
        f = nn.Sequential(nn.Linear(wide, WIDE), nn.BatchNorm1d(WIDE), nn.ReLU())
        built.append(AL(ENC(f, nn.Linear(WIDE, CODE)), side, 0.005))
        wide, code = WIDE, CODE
    return ALPackage(built)


@cache
def trained() -> Pipeline:
    with Pipeline(mlp(), ["cpu"] * 2, threads=1) as pipe:
        for epoch in range(3):
            pipe.run(blobs(2000, seed=10 + epoch))
    return pipe


def test_the_policy_keeps_its_promise_on_the_held_out_samples_and_costs_less() -> None:
    held_out = blobs(1000, seed=1)
    found = calibrate(trained(), held_out, tolerance=0.01, margin=0)
    assert found.accuracies == tuple(accuracy(trained(), held_out, depth) for depth in (1, 2, 3))
    assert found.accuracy >= found.accuracies[-1] - 0.01
    assert found.cost < found.costs.alone(3)
    assert found.samples == 1000


@pytest.mark.parametrize(("tolerance", "margin"), [(0.0, 0.0), (0.0, 1.0), (0.005, 1.0), (0.02, 0.5), (1.0, 1.0)])
def test_what_was_weighed_is_what_the_pipeline_does(tolerance: float, margin: float) -> None:
    """The policy, carried out on the held-out samples, has the accuracy and the cost that it was chosen for."""
    held_out = blobs(700, seed=2)
    found = calibrate(trained(), held_out, tolerance=tolerance, margin=margin)
    answers = list(trained().predict_each((batch.x for batch in held_out), policy=found.policy))
    right = [(answer.logits.argmax(-1) == batch.y) for answer, batch in zip(answers, held_out, strict=True)]
    assert float(torch.cat(right).double().mean()) == pytest.approx(found.accuracy, abs=1e-9)
    price = dict(zip(found.policy.tried, found.costs.on_the_way(found.policy.tried), strict=True))
    paid = [price[depth] for answer in answers for depth in answer.exits.tolist()]
    assert sum(paid) / 700 == pytest.approx(found.cost)


def test_a_wider_margin_never_makes_it_cheaper_and_a_tolerance_never_dearer() -> None:
    held_out = blobs(600, seed=3)
    by_margin = [calibrate(trained(), held_out, margin=margin).cost for margin in (0, 0.5, 1, 2, 4)]
    assert by_margin == sorted(by_margin)
    by_tolerance = [calibrate(trained(), held_out, tolerance=tolerance).cost for tolerance in (0, 0.01, 0.05, 1)]
    assert by_tolerance == sorted(by_tolerance, reverse=True)
    assert by_tolerance[-1] == exit_costs(mlp(), held_out[0].x).alone(1)  # nobody minds: all leave at once


def test_where_no_exit_saves_anything_the_policy_is_the_full_path() -> None:
    package = mlp()
    with Pipeline(package, ["cpu"], threads=1) as pipe:
        pipe.run(blobs(3000, seed=4))
    with torch.no_grad():
        for layer in package[:2]:
            layer.enc.b.weight.zero_()  # these exits say the same of every sample
    found = calibrate(pipe, blobs(500, seed=5))
    assert found.policy.thresholds == (inf, inf, inf)
    assert found.policy.tried == [3]
    assert found.accuracy == found.accuracies[-1]
    assert found.cost == found.costs.alone(3)


@given(st.data())
def test_the_threshold_is_the_smallest_from_which_on_all_are_safe(data: st.DataObject) -> None:
    """Against trying every threshold there may be, one sample at a time; ties and zeros included."""
    exits = data.draw(st.integers(1, 4), label="exits")
    samples = data.draw(st.integers(1, 12), label="samples")
    level = st.sampled_from([0.0, 0.25, 0.4, 0.5, 0.9, 1.0])
    row = st.lists(level, min_size=exits, max_size=exits)
    sure = torch.tensor(data.draw(st.lists(row, min_size=samples, max_size=samples), label="sure"))
    mark = st.lists(st.booleans(), min_size=exits, max_size=exits)
    right = torch.tensor(data.draw(st.lists(mark, min_size=samples, max_size=samples), label="right"))
    tolerance = data.draw(st.sampled_from([0.0, 0.1, 0.3]), label="tolerance")
    margin = data.draw(st.sampled_from([0.0, 0.5, 1.0]), label="margin")
    costs = [float(10 * depth) for depth in range(1, exits + 1)]
    found = _sweep(sure, right, range(1, exits + 1), costs, tolerance, margin)

    def under(threshold: float) -> tuple[bool, float]:
        taken = [next((k for k in range(exits - 1) if one[k] >= threshold), exits - 1) for one in sure.tolist()]
        gains = [float(right[i, k]) - float(right[i, -1]) for i, k in enumerate(taken)]
        gain = sum(gains) / samples
        error = (sum((one - gain) ** 2 for one in gains) / samples / samples) ** 0.5
        return gain - margin * error >= -tolerance - 1e-9, sum(costs[k] for k in taken) / samples

    tried = [0.0, 0.1, 0.25, 0.3, 0.4, 0.45, 0.5, 0.7, 0.9, 0.95, 1.0, inf]
    wanted = min(at for at in tried if all(under(above)[0] for above in tried if above >= at))
    assert found.cost == pytest.approx(under(wanted)[1])
    assert under(found.threshold) == (True, pytest.approx(found.cost))


def test_a_lucky_dip_is_not_taken() -> None:
    """Symptom: a policy worse than measured. Cause: the first safe threshold from below, on a course that is noisy."""
    sure = torch.tensor([[0.3, 1.0], [0.5, 1.0], [0.7, 1.0], [0.9, 1.0]])
    right = torch.tensor([[1, 0], [1, 1], [0, 1], [1, 1]]).bool()  # all leaving at once is as good as nobody
    assert _sweep(sure, right, [1, 2], [1.0, 2.0], 0.0, 0.0).threshold > 0.7


def test_pairs_are_batches_too() -> None:
    """As for ``Pipeline.run``. Also: layers from an iterator, of which ``pipe.model`` keeps nothing."""
    pipe = Pipeline(iter(mlp()), ["cpu"] * 2, threads=1)
    pairs = [(batch.x, batch.y) for batch in blobs(100, seed=1)]
    calibration = calibrate(pipe, iter(pairs))
    assert len(calibration.costs) == 3
    assert exit_table(pipe, pairs, calibration, rounds=1).samples == 100
    assert 0 <= accuracy(pipe, iter(pairs)) <= 1
    with pytest.raises(DataError, match="2 batches of test samples the first time and 0 the second"):
        exit_table(pipe, iter(pairs), calibration)


def test_timing_looks_at_so_many_samples_and_no_more() -> None:
    """Symptom: the times took longer than the epoch. Cause: they were of 32 batches, however large."""
    pipe = Pipeline(mlp(), threads=1)
    test = blobs(500, seed=7)
    calibration = calibrate(pipe, test)
    seen: list[int] = []
    pipe.stages[0].layers[0][1].enc.f.register_forward_pre_hook(lambda _, given: seen.append(len(given[0])))
    exit_table(pipe, test, calibration, timed_samples=120, rounds=2)
    assert sum(seen) == 2 * 500 + (3 + 1) * 2 * 150


def test_an_exit_whose_trial_costs_more_than_it_saves_is_switched_off() -> None:
    """The first exit is never sure and never right, the second always: the trial of the first alone is left out."""
    sure = torch.tensor([[0.3, 0.9, 0.9]] * 20)
    right = sure > 0.5
    costs = ExitCosts(climb=(10.0, 10.0, 100.0), descent=(5.0, 5.0, 5.0))
    first, second, last = _thresholds(sure, right, costs, 0.0, 0.0)
    assert first == last == inf
    assert second <= 0.9


def test_two_exits_that_only_both_together_are_better_left_out() -> None:
    """Symptom: a policy dearer than the full path. Cause: the search ended where no single exit was worth dropping."""
    sure = torch.tensor([[1.0, 0.5, 1.0], [0.5, 1.0, 0.25], [1.0, 0.5, 0.25], [0.25, 0.75, 1.0]])
    right = torch.tensor([[1, 1, 1], [0, 1, 0], [0, 0, 1], [1, 0, 1]]).bool()
    costs = ExitCosts(climb=(7.0, 5.0, 5.0), descent=(6.0, 10.0, 1.0))
    assert _thresholds(sure, right, costs, 0.0, 0.0) == (inf, inf, inf)


@pytest.mark.parametrize("factor", [0.3, 1.0, 4.0])
def test_a_temperature_undoes_a_factor_on_the_logits(factor: float) -> None:
    draw = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(4000, 5, generator=draw)
    y = torch.multinomial(logits.softmax(-1), 1, generator=draw).flatten()
    assert _temperature(factor * logits, y) == pytest.approx(factor, rel=0.1)


def test_a_temperature_has_the_least_loss() -> None:
    draw = torch.Generator().manual_seed(1)
    logits, y = 3 * torch.randn(200, 4, generator=draw), torch.randint(4, (200,), generator=draw)

    def loss(temperature: float) -> float:
        return float(nn.functional.cross_entropy(logits.double() / temperature, y))

    found = _temperature(logits, y)
    assert all(loss(found) <= loss(found * by) for by in (0.9, 0.99, 1.01, 1.1) if found * by <= 20)


def test_a_temperature_stays_within_bounds() -> None:
    y = torch.tensor([0, 1])
    assert _temperature(torch.eye(2), y) == pytest.approx(0.05)  # never wrong
    assert _temperature(torch.eye(2), 1 - y) == pytest.approx(20)  # never right
    assert 0.05 <= _temperature(torch.full((2, 2), torch.nan), y) <= 20  # diverged
    assert 0.05 <= _temperature(torch.zeros(2, 2), y) <= 20


def test_a_calibration_finds_the_temperature_of_every_exit() -> None:
    held_out = blobs(400, seed=4)
    y = torch.cat([batch.y for batch in held_out])
    logits = [torch.cat(one) for one in zip(*trained().predict_exits(batch.x for batch in held_out), strict=True)]
    found = calibrate(trained(), held_out).policy.temperatures
    assert found == pytest.approx([_temperature(one, y) for one in logits])
    assert len(set(found)) == 3


def test_costs_of_a_perceptron_are_its_products() -> None:
    found = exit_costs(mlp(), torch.randn(7, FEATURES))
    down = 2 * CODE * CLASSES  # the h of the first layer
    assert found.climb == (2 * FEATURES * WIDE, 2 * WIDE * WIDE, 2 * WIDE * WIDE)
    assert found.descent == tuple(2 * WIDE * CODE + down + k * 2 * CODE * CODE for k in range(3))
    assert found.alone(2) == found.climb[0] + found.climb[1] + found.descent[1]
    assert found.on_the_way([1, 3])[1] == sum(found.climb) + found.descent[0] + found.descent[2]


@given(cases())
@settings(max_examples=10)
def test_a_layer_by_itself_costs_what_it_costs_on_the_way(case: Case) -> None:
    """Layers are looked at one by one, since all of them may not fit into memory; so, too, with an iterator."""
    package, (x, _) = case.build(), case.batches()[0]
    found = exit_costs(iter(list(package)), x)
    assert found == exit_costs(package, x)
    package.eval()
    for depth in range(1, len(package) + 1):
        features, climbed = x, 0
        with torch.no_grad():
            for layer in list(package)[:depth]:
                with counting() as counter:
                    features = layer.inference(features, UP)
                climbed += counter.get_total_flops()
            with counting() as counter:
                code = layer.inference(features, TURN)
                for below in reversed(list(package)[:depth]):
                    code = below.inference(code, DOWN)
        assert found.alone(depth) == pytest.approx((climbed + counter.get_total_flops()) / batch_size(x))


def test_costs_leave_the_model_as_it_was() -> None:
    package = mlp()
    before = {name: value.clone() for name, value in package.state_dict().items()}
    fast = torch.backends.mha.get_fastpath_enabled()
    exit_costs(package, torch.randn(1, FEATURES))  # batch norm in training mode would refuse a single row
    assert all(module.training for module in package.modules())
    assert all(torch.equal(value, before[name]) for name, value in package.state_dict().items())
    assert torch.backends.mha.get_fastpath_enabled() == fast


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.TransformerEncoderLayer(FEATURES, 2, 20, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x)[:, 0]


def test_costs_of_attention_and_of_recurrence_are_counted() -> None:
    """Symptom: 0 FLOPs. Cause: in evaluation both run as one fused operator that PyTorch's counter does not know."""
    rows, steps, hidden = 3, 7, 5
    mixer = AL(ENC(Mixer(), nn.Linear(FEATURES, CODE)), LabelAE(nn.Linear(4, CODE), nn.Linear(CODE, 4), 4))
    products = 2 * steps * FEATURES * (4 * FEATURES + 2 * 20)
    attention = 2 * 2 * steps * steps * FEATURES
    assert exit_costs([mixer], torch.randn(rows, steps, FEATURES)).climb == (products + attention,)

    class Reader(nn.LSTM):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)[0][:, 0]

    lstm = Reader(FEATURES, hidden, num_layers=2, batch_first=True, bidirectional=True)
    reader = AL(ENC(lstm, nn.Linear(2 * hidden, CODE)), LabelAE(nn.Linear(4, CODE), nn.Linear(CODE, 4), 4))
    gates = 2 * 2 * 4 * hidden * ((FEATURES + hidden) + (2 * hidden + hidden))
    assert exit_costs([reader], torch.randn(rows, steps, FEATURES)).climb == (steps * gates,)


@pytest.mark.parametrize("view", [False, True])
def test_costs_of_a_map_of_a_weight_are_counted(view: bool) -> None:
    """Symptom: a run of DeBERTa-v2 ended with an AssertionError when all its epochs were behind it. Cause: PyTorch's
    tracker of modules, which asks what a module is given for gradients, that there are none of."""

    class Relative(nn.Linear):
        def __init__(self) -> None:
            super().__init__(FEATURES, FEATURES, bias=False)
            self.table = nn.Parameter(torch.randn(7, FEATURES))
            self.map = nn.Linear(FEATURES, FEATURES, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.map(self.table[:4] if view else self.table).sum(0)

    found = exit_costs([BP(Relative())], torch.randn(1, FEATURES)).climb
    assert found == (2 * FEATURES * FEATURES * (1 + (4 if view else 7)),)


@pytest.mark.parametrize("always", [False, True])
@pytest.mark.parametrize("backward", [False, True])
def test_what_stops_counting_alone_is_told_as_that(always: bool, backward: bool) -> None:
    """A run that is trained goes without these figures; an error that is there without the counter stays what it is."""

    class Odd(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            if backward and self.training:
                out.register_hook(self.stop)
            elif not backward:
                self.stop()
            return out

        def stop(self, *_: Tensor) -> None:
            if always or _get_current_dispatch_mode() is not None:  # of this thread
                raise KeyError("way")

    x, y = torch.randn(1, FEATURES), torch.zeros(1, dtype=torch.long)
    with pytest.raises(KeyError if always else CountingError, match="way"):
        training_flops([BP(Odd(FEATURES, CLASSES))], x, y)
    if not backward:
        with pytest.raises(KeyError if always else CountingError, match="way"):
            exit_costs([BP(Odd(FEATURES, CLASSES))], x)


def test_costs_of_samples_of_many_sizes_are_a_mean_over_them() -> None:
    """Symptom: exits of texts cost two to three times what the table of the run said. Cause: those of the first
    held-out batch, which has the longest texts."""

    class Mean(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).mean(1)

    label_side = LabelAE(nn.Linear(CLASSES, CODE), nn.Linear(CODE, CLASSES), CLASSES)
    reader = AL(ENC(Mean(FEATURES, FEATURES), nn.Linear(FEATURES, CODE)), label_side)
    batches = [(torch.randn(n, length, FEATURES), torch.arange(n) % CLASSES) for n, length in ((2, 9), (6, 3), (4, 5))]
    with Pipeline([reader], devices="cpu") as pipe:
        found = calibrate(pipe, batches).costs
    assert found.climb == pytest.approx((2 * FEATURES * FEATURES * (2 * 9 + 6 * 3 + 4 * 5) / 12,))
    assert found.descent == exit_costs([reader], batches[0][0]).descent  # which no length has a part in


def test_the_table_says_what_was_measured() -> None:
    test = blobs(300, seed=7)
    calibration = calibrate(trained(), blobs(600, seed=6), tolerance=0.01)
    table = exit_table(trained(), test, calibration, timed_samples=100, rounds=1)
    assert [row.name for row in (*table.exits, table.early)] == [
        "exit 1",
        "exit 2",
        "full path",
        "early exit (calibrated)",
    ]
    for depth, row in enumerate(table.exits, 1):
        assert row.accuracy == accuracy(trained(), test, depth)
        assert row.mflops == calibration.costs.alone(depth) / 1e6
        assert row.points == pytest.approx(100 * (row.accuracy - table.full.accuracy))
        assert row.ms > 0
    assert sum(row.share or 0.0 for row in table.exits) == pytest.approx(1)
    answers = list(trained().predict_each((batch.x for batch in test), policy=calibration.policy))
    right = torch.cat([answer.logits.argmax(-1) == batch.y for answer, batch in zip(answers, test, strict=True)])
    assert table.early.accuracy == pytest.approx(float(right.double().mean()))
    left = [depth for answer in answers for depth in answer.exits.tolist()]
    assert [row.share for row in table.exits] == pytest.approx([left.count(depth) / 300 for depth in (1, 2, 3)])
    price = dict(zip(calibration.policy.tried, calibration.costs.on_the_way(calibration.policy.tried), strict=True))
    assert table.early.mflops == pytest.approx(sum(price[depth] for depth in left) / 300 / 1e6)
    assert table.early.mflops != pytest.approx(calibration.cost / 1e6), "that is of the held-out samples"
    assert table.full.relative_cost == 1
    assert table.saving == pytest.approx(1 - table.early.mflops / table.full.mflops)
    assert table.samples == 300
    kept = json.loads(json.dumps(table.summary(), allow_nan=False))
    assert kept["saving"] == table.saving
    assert len(kept["rows"]) == 4


def test_the_table_is_shown_with_a_line_for_every_way() -> None:
    calibration = calibrate(trained(), blobs(600, seed=6), tolerance=0.01)
    table = exit_table(trained(), blobs(100, seed=7), calibration, timed_samples=1, rounds=1)
    out = io.StringIO()
    print_exits(table, "exits", console=Console(file=out, width=200))
    lines = out.getvalue().splitlines()
    assert len(lines) == 3 + 4
    assert f"{table.early.accuracy:.4f}" in lines[-1]


@pytest.mark.parametrize("model", [LSTMAL, TransformerAL])
def test_texts_have_exits_as_well(model: type[LSTMAL] | type[TransformerAL]) -> None:
    torch.manual_seed(0)
    package = model(20, 2, dims=TextDims(embedding=8, hidden=6, code=4, heads=2, blocks=2))
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, 20, (60, 6), generator=draw)
    tokens[::2, 3:] = 0
    batches = Batches(Batch(*part) for part in zip(tokens.split(16), (tokens[:, 0] > 9).long().split(16), strict=True))
    with Pipeline(package, threads=1) as pipe:
        pipe.run(batches)
        calibration = calibrate(pipe, batches, tolerance=0.1)
        table = exit_table(pipe, batches, calibration, timed_samples=1, rounds=1)
    assert 0 < table.early.mflops <= table.full.mflops
    assert table.exits[0].mflops < table.exits[1].mflops < table.exits[2].mflops


def test_backpropagation_has_only_the_full_path() -> None:
    torch.manual_seed(0)
    pipe = Pipeline([BP(nn.Linear(FEATURES, CLASSES))], threads=1)
    calibration = calibrate(pipe, blobs(100, seed=1), tolerance=1)
    table = exit_table(pipe, blobs(100, seed=2), calibration, timed_samples=1, rounds=1)
    assert calibration.policy.thresholds == (inf,)
    assert [row.name for row in table.exits] == ["full path"]
    assert table.early.accuracy == table.full.accuracy
    assert table.saving == 0


def test_a_model_that_diverged_takes_the_full_path() -> None:
    package = mlp()
    with torch.no_grad():
        package[0].enc.f[0].weight.fill_(torch.nan)
    pipe = Pipeline(package, threads=1)
    found = calibrate(pipe, blobs(60, seed=1))
    assert found.policy.tried == [3]
    assert all(map(isnan, (*found.accuracies, found.accuracy))), "they were those of the first class"
    table = exit_table(pipe, blobs(60, seed=2), found, timed_samples=1, rounds=1)
    assert all(isnan(row.accuracy) for row in (*table.exits, table.early))


def test_an_exit_that_breaks_on_some_samples_is_switched_off() -> None:
    package = mlp()
    package[0].enc.b.register_forward_hook(lambda _, x, made: made.where(x[0][:, :1] > 0, torch.nan))
    found = calibrate(Pipeline(package, threads=1), blobs(60, seed=1), tolerance=1)
    assert list(map(isnan, found.accuracies)) == [True, False, False]
    assert found.policy.tried == [2, 3]


def test_without_samples_there_is_nothing_to_go_by() -> None:
    with pytest.raises(DataError, match="no held-out samples"):
        calibrate(trained(), Batches())
    calibration = calibrate(trained(), blobs(60, seed=1))
    with pytest.raises(DataError, match="no test samples"):
        exit_table(trained(), Batches(), calibration)


def test_a_calibration_takes_class_numbers_of_any_kind_and_nothing_else() -> None:
    """Symptom: errors of gather() and of an index; of a tolerance that is no number, the full path."""
    pipe, batches = trained(), blobs(60, seed=1)
    wanted = calibrate(pipe, batches)
    assert calibrate(pipe, [(each.x, each.y.to(torch.uint8)) for each in batches]) == wanted
    for change, told in (
        (
            lambda y: nn.functional.one_hot(y, CLASSES).float(),
            r"targets \(60, 4\) float32 for answers \(60, 4\) float32",
        ),
        (lambda y: y.float(), r"expected class numbers, whole numbers of shape \(60,\)"),
        (lambda y: y + 1, "found class numbers from 1 to 4; expected 0 to 3"),
    ):
        with pytest.raises(DataError, match=told):
            calibrate(pipe, [(each.x, change(each.y)) for each in batches])
    for wrong in ({"tolerance": torch.nan}, {"tolerance": 5}, {"margin": -1}, {"margin": inf}):
        with pytest.raises(ConfigError, match=r"(tolerance|margin) is .*; expected"):
            calibrate(pipe, batches, **wrong)


def a_table(accuracies: tuple[float, ...], early: float, mflops: float = 1.0) -> ExitTable:
    calibration: Calibration = calibrate(trained(), blobs(60, seed=1))
    real = exit_table(trained(), blobs(60, seed=2), calibration, timed_samples=1, rounds=1)
    rows = tuple(
        replace(real.full, name=f"exit {k}", accuracy=value, mflops=k * mflops) for k, value in enumerate(accuracies, 1)
    )
    return replace(real, exits=rows, early=replace(real.early, accuracy=early, mflops=mflops))


@pytest.mark.parametrize(
    "table",
    [
        *(((0.6, 0.8, 0.9), 0.89), ((0.9, 0.8), 0.9), ((0.5,), 0.5), ((0.0,) * 12, 0.0), ((1.0, 1.0), 1.0, 0.0)),
        *(((0.6, nan, 0.9), 0.89), ((nan, nan), nan)),
    ],
    ids=["rising", "falling", "one", "dead", "free", "diverged amid", "diverged"],
)
def test_any_table_gives_a_picture_without_a_warning(table: tuple[tuple[float, ...], float], tmp_path: Path) -> None:
    path = tmp_path / "new" / "exits.png"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draw_exits(a_table(*table), path, "50 $ a_b $ and more")
    height, width, _ = image.imread(path).shape
    assert width > height > 500
    assert list(path.parent.iterdir()) == [path]


def test_a_training_step_costs_its_forward_and_its_backward() -> None:
    """Of each product two more, for the gradients of its weights and of its input; the input itself has none."""
    x, y = torch.randn(6, 5), torch.randint(3, (6,))
    network = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
    assert training_flops([BP(network)], x, y) == 2 * (5 * 7 * 2 + 7 * 3 * 3)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_a_training_step_through_a_recurrent_network_is_counted(kind: type[nn.Module]) -> None:
    """Of fused operators PyTorch's counter knows nothing: a training seemed to cost a third."""

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.inner, self.out = nn.Linear(4, 5), kind(5, 6, batch_first=True), nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(self.inner(self.before(x))[0][:, -1])

    gates = 4 if kind is nn.LSTM else 3
    x, y = torch.randn(2, 7, 4), torch.randint(3, (2,))
    forward = exit_costs([BP(Last())], x).alone(1)
    assert forward == 2 * (7 * 4 * 5 + 7 * gates * 6 * (5 + 6) + 6 * 3)
    found = training_flops([BP(Last())], x, y)
    # Fused, every step counts whole; step by step the first one's state, of zeros, has no gradient.
    assert 3 * forward - 2 * (7 * 4 * 5 + gates * 6 * 6) <= found <= 3 * forward - 2 * 7 * 4 * 5


def test_training_flops_are_of_all_losses() -> None:
    """An AL layer's bridge, label encoder and decoder learn as well."""
    model = ALPackage([AL(ENC(nn.Linear(4, 4), nn.Linear(4, 4)), AE(nn.Linear(3, 4), nn.Linear(4, 3)))])
    x, y = torch.randn(5, 4), torch.randn(5, 3)
    found = training_flops(model, x, y)
    assert found >= 3 * exit_costs(model, x).alone(1) - 2 * 4 * 4
    with pytest.raises(DataError, match="empty batch"):
        training_flops(model, x[:0], y[:0])
