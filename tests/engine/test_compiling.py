"""``torch.compile`` per layer: schedules still never change the result, and nothing compiles beside anything else.

Where a test is about what is compiled when, and not about its kernels, :func:`tracing_only` takes the place of the
compiler's back end, which needs seconds for every graph.
"""

from __future__ import annotations

import copy
import io
import threading
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from bench.virtual import VirtualLayer
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from pipeal import AE, AL, ENC, ALPackage, ConfigError, Dropout, LabelAE, Pipeline, ScheduleError
from pipeal.core.options import EngineOptions
from pipeal.engine import SCHEDULES, Schedule
from pipeal.engine.runner.compile_gate import Abandoned, CompileGate
from pipeal.engine.runner.compiling import _check_compiler, _numerics, check_compile
from pipeal.engine.runner.regions import CompileWarning, Region, compiler_settings, installed, regions
from pipeal.planning.measure.layers import WARM_UP, layer_costs
from pipeal.planning.planner import place

from .cases import CLASSES, FEATURES, ORDERS, Outcome, PublishedAL, cosine, cuts, outcome
from .test_failures import notes_of
from .traps import LookedAt

WAIT_S = 120.0


@pytest.fixture
def tracing_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of the compiler but its back end: graphs run operator by operator."""
    compile = torch.compile

    def traced(function: Callable[..., Any], *, backend: object, **keywords: Any) -> Callable[..., Any]:
        return compile(function, **keywords, backend="eager")

    monkeypatch.setattr(torch, "compile", traced)


# The gate


def test_nobody_is_inside_beside_one_that_is_alone() -> None:
    """Random visitors on four threads, some of which fail inside; all are let in, and the gate is free at the end."""

    @given(plans=st.lists(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=8), min_size=4, max_size=4))
    @settings(max_examples=25)
    def visit(plans: list[list[tuple[bool, bool]]]) -> None:
        gate, inside, lock, wrong = CompileGate(), {True: 0, False: 0}, threading.Lock(), []

        def work(plan: list[tuple[bool, bool]]) -> None:
            for alone, fails in plan:
                try:
                    with gate.alone() if alone else gate.shared():
                        with lock:
                            inside[alone] += 1
                            if inside[True] > 1 or (inside[True] and inside[False]):
                                wrong.append(dict(inside))
                        time.sleep(1e-4)
                        with lock:
                            inside[alone] -= 1
                        if fails:
                            raise LookupError
                except LookupError:
                    assert fails

        threads = [threading.Thread(target=work, args=(plan,), daemon=True) for plan in plans]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        assert not any(thread.is_alive() for thread in threads)
        assert wrong == []
        with gate.alone():
            assert gate.busy()
        assert not gate.busy()

    visit()


def test_those_that_compile_nothing_are_inside_together() -> None:
    gate, both = CompileGate(), threading.Barrier(2)

    def meet() -> None:
        with gate.shared():
            both.wait(WAIT_S)  # breaks unless the other is inside as well

    threads = [threading.Thread(target=meet, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert not both.broken
    assert not any(thread.is_alive() for thread in threads)


def test_one_that_wants_to_be_alone_does_not_wait_for_those_that_come_later() -> None:
    """Two others come and go so that one of them is always inside, and would be for ever."""
    gate, stop, began = CompileGate(), threading.Event(), threading.Barrier(3)

    def come_and_go() -> None:
        began.wait(WAIT_S)
        while not stop.is_set():
            with gate.shared():
                time.sleep(0.005)

    threads = [threading.Thread(target=come_and_go, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    began.wait(WAIT_S)
    entered = threading.Event()

    def compile_alone() -> None:
        for _ in range(10):
            with gate.alone():
                pass
        entered.set()

    alone = threading.Thread(target=compile_alone, daemon=True)
    alone.start()
    assert entered.wait(WAIT_S)
    stop.set()
    for thread in (*threads, alone):
        thread.join(WAIT_S)
        assert not thread.is_alive()


@pytest.mark.parametrize("way", ["alone", "shared"])
def test_a_wait_ends_when_the_pipeline_stops(way: str) -> None:
    gate, abandoned, ended = CompileGate(), threading.Event(), threading.Event()

    def wait() -> None:
        with pytest.raises(Abandoned), getattr(gate, way)(abandoned):
            pass
        ended.set()

    with gate.alone():
        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        assert not ended.wait(0.2)
        abandoned.set()
        assert ended.wait(WAIT_S)
    thread.join(WAIT_S)
    with gate.alone(), pytest.raises(Abandoned), gate.shared(abandoned):  # nobody is left in the queue
        pass


def test_a_compilation_is_busy_until_it_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = CompileGate()
    with gate.alone():
        assert gate.busy()
        monkeypatch.setattr("pipeal.engine.runner.compile_gate.COMPILE_TIMEOUT_S", 0.0)
        assert not gate.busy()


@pytest.mark.slow
@pytest.mark.usefixtures("tracing_only")
def test_compiling_is_not_a_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first forward and backward, which may compile, take longer than the limit each."""
    clock = LookedAt(monkeypatch)
    with Pipeline([VirtualLayer(3.0, 3.0), VirtualLayer(0, 0)], compile="static", stall_timeout_s=2.0) as pipe:
        pipe.run([(None, None)])
    assert clock.now == 6.0


# Exactness


class TwoBackwards(PublishedAL):
    """The published style: two losses, each with a backward of its own."""

    draws_from_default = False


class Speaks(nn.Sequential):
    """A user's block that cannot be one graph."""

    draws_from_default = False
    said = 0

    def forward(self, x: Tensor) -> Tensor:
        middle = self[0](x)
        type(self).said += int(middle.sum().isfinite().item())
        return self[1](middle)


def small(*, speaks: bool = False) -> ALPackage:
    """Four layers: plain, published style, batch norm, dropout of both kinds."""
    torch.manual_seed(5)
    first = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh())
    second = nn.Sequential(nn.Linear(8, 8), nn.GELU())
    third = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU())
    last = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Dropout(0.3), Dropout(0.3))
    if speaks:
        second = Speaks(nn.Sequential(nn.Linear(8, 8), nn.GELU()), nn.Sequential(nn.Linear(8, 8), nn.Tanh()))
    return ALPackage(
        [
            AL(ENC(first, nn.Linear(8, 4)), LabelAE(nn.Linear(CLASSES, 4), nn.Linear(4, CLASSES), CLASSES)),
            TwoBackwards(ENC(second, nn.Linear(8, 3)), AE(nn.Linear(4, 3), nn.Linear(3, 4))),
            AL(ENC(third, nn.Linear(6, 3)), AE(nn.Linear(3, 3), nn.Linear(3, 3))),
            AL(ENC(last, nn.Linear(5, 2)), AE(nn.Linear(3, 2), nn.Linear(2, 3))),
        ]
    )


class Masked(nn.Module):
    """Two masks on one tensor."""

    draws_from_default = False

    def __init__(self) -> None:
        super().__init__()
        self.drop = Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(x) + 2 * self.drop(x)


def pair(dropout: type[nn.Dropout | Dropout] = Dropout) -> ALPackage:
    """Two layers, for real kernels: batch norm, and dropout, of both kinds if asked, in the published style."""
    torch.manual_seed(9)
    first = nn.Sequential(nn.Linear(FEATURES, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh())
    second = nn.Sequential(nn.Linear(8, 5), nn.GELU(), dropout(0.3), Masked())
    return ALPackage(
        [
            AL(ENC(first, nn.Linear(8, 4)), LabelAE(nn.Linear(CLASSES, 4), nn.Linear(4, CLASSES), CLASSES)),
            TwoBackwards(ENC(second, nn.Linear(5, 3)), AE(nn.Linear(4, 3), nn.Linear(3, 4))),
        ]
    )


def batches_of(rows: list[int]) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(6)
    return [
        (torch.randn(count, FEATURES, generator=draw), torch.randint(CLASSES, (count,), generator=draw))
        for count in rows
    ]


def train(
    schedule: str | Schedule,
    sizes: list[int],
    rows: list[int],
    build: Callable[[], ALPackage] = small,
    **options: Any,
) -> Outcome:
    """What a training leaves, predictions along every exit included."""
    package, batches = build(), batches_of(rows)
    pipe = Pipeline(package, ["cpu"] * len(sizes), schedule, sizes=sizes, threads=1, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CompileWarning)
        with pipe:
            report = pipe.run(batches, lr_scale=cosine)
            predictions = [pipe.predict(batches[0][0], depth + 1) for depth in range(len(package))]
    return outcome(package, report.losses, predictions)


def assert_close(found: Outcome, wanted: Outcome) -> None:
    """In what can be compared: Adam makes whole steps of the rounding of gradients that are nearly zero."""
    names = [name for name in wanted.tensors if name.startswith(("losses", "prediction"))]
    for name in names:
        torch.testing.assert_close(found.tensors[name], wanted.tensors[name], rtol=2e-3, atol=2e-3, msg=name)


@pytest.mark.parametrize(("rows", "dropout"), [([4, 3, 6, 2], nn.Dropout), ([4, 3], Dropout)], ids=str)
@pytest.mark.slow
def test_every_schedule_leaves_the_same_bits_compiled(
    rows: list[int], dropout: type[nn.Dropout | Dropout], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the real kernels; a smaller last batch; the result is the uncompiled one up to rounding.

    Not with the dropout of PyTorch, of which its compiler makes its own masks: there one schedule is enough. A program
    for each shape, which takes three minutes here, is for the next tests.

    PyTorch's caches are empty for the first training, and not for the others: what they hold changes nothing.
    """
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    build = partial(pair, dropout)
    wanted = train("sequential", [2], rows, build, compile="dynamic")
    for schedule in SCHEDULES if dropout is Dropout else ("pipelined",):
        assert train(schedule, [1, 1], rows, build, compile="dynamic").differences(wanted) == []
    plain = train("sequential", [2], rows, build)
    if dropout is Dropout:
        assert_close(wanted, plain)
    assert wanted.differences(plain) != []  # else nothing was compiled


@pytest.mark.usefixtures("tracing_only")
@given(
    rows=st.lists(st.integers(2, 5), min_size=2, max_size=3),
    how=st.sampled_from(["static", "dynamic"]),
    speaks=st.booleans(),
    data=st.data(),
)
@settings(max_examples=2)
@pytest.mark.slow
def test_compiled_random_shapes_under_every_schedule(
    rows: list[int], how: str, speaks: bool, data: st.DataObject
) -> None:
    """The graphs' operators are those of the eager model, one by one: here even the bits are."""
    build = partial(small, speaks=speaks)
    plain = train("sequential", [4], rows, build)
    for schedule in ("pipelined", data.draw(st.sampled_from(sorted({*ORDERS} - {"pipelined"})), label="schedule")):
        stages = data.draw(st.integers(1, 4), label=f"{schedule} stages")
        sizes = data.draw(st.sampled_from(list(cuts(4, stages))), label="sizes")
        found = train(ORDERS[schedule], sizes, rows, build, compile=how)
        assert [name for name in found.differences(plain) if "_opt" not in name] == [], (schedule, sizes)


def conv() -> ALPackage:
    torch.manual_seed(7)

    def encoder() -> ENC:
        block = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        return ENC(block, nn.Sequential(nn.Flatten(), nn.Linear(100, CLASSES)))

    layers = [
        AL(encoder(), LabelAE(nn.Linear(CLASSES, CLASSES), nn.Linear(CLASSES, CLASSES), CLASSES)),
        AL(encoder(), AE(nn.Linear(CLASSES, CLASSES), nn.Linear(CLASSES, CLASSES))),
    ]
    return ALPackage(layers).to(memory_format=torch.channels_last)


@pytest.mark.slow
def test_bf16_and_channels_last_compiled() -> None:
    draw = torch.Generator().manual_seed(8)
    images = [torch.randn(3, 4, 5, 5, generator=draw).to(memory_format=torch.channels_last) for _ in range(2)]
    batches = [(image, torch.randint(CLASSES, image.shape[:1], generator=draw)) for image in images]
    left = []
    for schedule, stages in (("sequential", 1), ("pipelined", 2)):
        package = conv()
        options: dict[str, Any] = {"threads": 1, "precision": "bf16", "compile": "static"}
        with Pipeline(package, ["cpu"] * stages, schedule, **options) as pipe:
            losses = pipe.run(batches).losses
        left.append(outcome(package, losses, []))
    assert left[1].differences(left[0]) == []
    assert int(package[1].enc.f[1].num_batches_tracked) == len(batches)


FEW = 5


class Looks(nn.Module):
    """Rows of two tables, few of them, and so many times over that threads add to the gradient of each."""

    draws_from_default = False

    def __init__(self) -> None:
        super().__init__()
        self.table, self.other = nn.Embedding(FEW, 64), nn.Embedding(FEW, 64)

    def forward(self, x: Tensor) -> Tensor:
        selected = self.other.weight.index_select(0, x.flatten()).view(*x.shape, 64)
        return (torch.tanh(self.table(x)) * selected).sum(1)


class Folds(nn.Module):
    """Patches of all samples that overlap in one image: joined, cut again, slid over.

    It takes 64 samples of 64 numbers, so many that threads add to the same places.
    """

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Linear(64, 18 * 64)
        self.join, self.cut = nn.Fold(64, 3, padding=1), nn.Unfold(3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.patches(x / FEW).unflatten(1, (18, 64))
        image = self.join(patches.transpose(0, 1).reshape(1, 18, 64 * 64))  # (1, 2, 64, 64)
        cut = self.cut(image).tanh().view(18, 64, 64).mean(0)
        slid = image.unfold(3, 5, 1).tanh().mean((0, 1, 3, 4))[:, None]
        return cut + slid


@pytest.mark.slow
@pytest.mark.parametrize(("block", "how"), [(Looks, "static"), (Folds, "dynamic")])
def test_threads_add_to_one_place_in_one_order(block: type[nn.Module], how: Any) -> None:
    """Symptom: no two trainings alike. Cause: threads added to the gradient of an embedding as they came."""
    draw = torch.Generator().manual_seed(3)
    texts = [torch.randint(FEW, (64, 64), generator=draw) for _ in range(2)]
    batches = [(text, text[:, 0] % CLASSES) for text in texts]
    left = []
    for _ in range(4):
        torch.manual_seed(5)
        layer = AL(ENC(block(), nn.Linear(64, CLASSES)), LabelAE(nn.Identity(), nn.Identity(), CLASSES))
        with Pipeline(ALPackage([layer]), ["cpu"], threads=2, compile=how) as pipe:
            losses = pipe.run(batches).losses
        left.append(outcome(ALPackage([layer]), losses, []))
    assert [found.differences(left[0]) for found in left[1:]] == [[]] * 3


class Adds(AL):
    """A user's layer that goes back through what its encoder side gives, too."""

    def forward(self, x: Any, y: Any) -> tuple[Any, Any]:
        ae_loss, code = self.ae(y)
        enc_loss, out = self.enc(x, code.detach())
        self._graph = (enc_loss + out.square().mean(), ae_loss)
        self._losses = tuple(loss.detach() for loss in self._graph)
        return out.detach(), code.detach()


@pytest.mark.usefixtures("tracing_only")
@pytest.mark.parametrize("kind", [AL, Adds, PublishedAL])
def test_graphs_end_where_a_layer_goes_back_no_further(kind: type[AL]) -> None:
    """A layer that detaches what its sides give has graphs that do; one that may go back through it learns of it."""
    torch.manual_seed(2)
    layer = kind(
        ENC(nn.Linear(4, 6), nn.Linear(6, CLASSES)), LabelAE(*(nn.Linear(CLASSES, CLASSES) for _ in "gh"), CLASSES)
    )
    parts = {part.name: part for part in regions(layer, "layer", dynamic=False, cut=layer.cut_parts())}
    ae_loss, code = parts["layer.ae"](torch.arange(8) % CLASSES)
    enc_loss, out = parts["layer.enc"](torch.randn(8, 4), code.detach())
    assert (ae_loss.requires_grad, enc_loss.requires_grad) == (True, True)
    assert (code.requires_grad, out.requires_grad) == (kind is not AL,) * 2
    batches = [(torch.randn(8, 4), torch.arange(8) % CLASSES) for _ in range(2)]
    left = []
    for how in ("none", "static"):
        package = ALPackage([copy.deepcopy(layer)])
        with Pipeline(package, ["cpu"], threads=1, compile=how) as pipe:
            losses = pipe.run(batches).losses
        left.append(outcome(package, losses, []))
    assert left[1].differences(left[0]) == []


@pytest.mark.usefixtures("tracing_only")
def test_a_newer_setting_of_matrix_products_is_read_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks for it by its older name then gets an error."""

    def refuse() -> str:
        raise RuntimeError("PyTorch is checking whether allow_tf32 and fp32_precision are mixed")

    if not hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        pytest.skip("this version of PyTorch has the older name alone")
    monkeypatch.setattr("pipeal.engine.runner.compiling.torch.get_float32_matmul_precision", refuse)
    _numerics()


@pytest.mark.slow
def test_predictions_are_the_uncompiled_ones() -> None:
    """From any exit, and in a stream."""
    (x, _), (fewer, _) = batches_of([4, 3])
    plain, compiled = (Pipeline(pair(), ["cpu"] * 2, threads=1, compile=how) for how in ("none", "static"))
    for depth in (1, 2, None):
        torch.testing.assert_close(compiled.predict(x, depth), plain.predict(x, depth))
    for found, batch in zip(compiled.predict_each([x, fewer, x]), [x, fewer, x], strict=True):
        torch.testing.assert_close(found, plain.predict(batch))


@pytest.mark.usefixtures("tracing_only")
def test_a_stream_of_predictions_compiles_nothing_anew() -> None:
    """Symptom: everything was compiled twice. Cause: a single prediction ran with another number of threads."""
    x = batches_of([4])[0][0]
    pipe = Pipeline(pair(), ["cpu"] * 2, threads=2, compile="static")
    pipe.predict(x)
    layers = [runner.compiled for stage in pipe.stages for runner in stage.runners.values()]
    seen = [set(compiled._seen) for compiled in layers if compiled is not None]
    assert len(seen) == 2
    list(pipe.predict_each([x]))
    assert [compiled._seen for compiled in layers if compiled is not None] == seen


@pytest.mark.usefixtures("tracing_only")
def test_what_the_process_computes_otherwise_compiles_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Symptom: the compiler made another graph for it beside other actions, and under PyTorch's own limits."""
    alone: list[int] = []
    monkeypatch.setattr(
        "pipeal.engine.runner.compiling.compiler_settings",
        lambda **how: alone.append(1) or compiler_settings(**how),  # type: ignore[func-returns-value]
    )
    x = batches_of([4])[0][0]
    pipe = Pipeline(pair(), threads=1, compile="static", matmul="high")
    with pipe:
        pipe.predict(x)
        before = len(alone)
        pipe.predict(x)
        assert len(alone) == before
    pipe.predict(x)  # when products are exact again
    assert len(alone) > before


# What is compiled, and what is not


def test_what_draws_is_left_uncompiled_where_pytorch_cannot_compile_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard asked our own mode, which always says yes, and not PyTorch."""
    monkeypatch.delattr(TorchDispatchMode, "ignore_compile_internals", raising=False)
    monkeypatch.setattr("pipeal.engine.pipeline.check_compile", lambda name, devices: name)
    package = pair(nn.Dropout)
    with pytest.warns(CompileWarning, match=r"layer 1 \(TwoBackwards\) may draw .* trains uncompiled"):
        Pipeline(package, ["cpu"], compile="static")


@pytest.mark.usefixtures("tracing_only")
def test_dropout_is_part_of_the_graph() -> None:
    """Once it was refused, and blocks around it were compiled in parts."""
    package = pair()
    package[1].enc.f = nn.Sequential(nn.Linear(8, 5), Masked(), nn.GELU(), Dropout(0.3))
    package = ALPackage([package[0], TwoBackwards(package[1].enc, package[1].ae)])
    (batch,) = batches_of([4])
    with warnings.catch_warnings(), Pipeline(package, ["cpu"], compile="static") as pipe:
        warnings.simplefilter("error", CompileWarning)
        pipe.run([batch] * 2)


@pytest.mark.slow
@pytest.mark.usefixtures("tracing_only")
def test_a_block_that_cannot_be_one_graph_runs_in_parts_and_says_so() -> None:
    package = small(speaks=True)
    x, y = batches_of([4])[0]
    Speaks.said = 0
    with pytest.warns(CompileWarning) as caught, Pipeline(package, ["cpu"], compile="static") as pipe:
        pipe.run([(x, y)] * 3)
    assert Speaks.said == 3  # a refused attempt has run nothing
    said = [str(warning.message) for warning in caught]
    assert [text for text in said if text.startswith("layer 1 (TwoBackwards).enc runs compiled in parts: ")] != []


@pytest.mark.usefixtures("tracing_only")
def test_more_shapes_than_the_compiler_remembers_by_itself() -> None:
    """PyTorch stops compiling a function after 8 graphs."""
    region = Region("sum", lambda x: x.sum() * x.numel(), dynamic=False)
    with compiler_settings(dynamic=False):
        for size in range(2, 13):
            assert region(torch.ones(size)) == size * size
    assert list(region.in_force()) == [region]


@pytest.mark.usefixtures("tracing_only")
def test_beyond_the_limit_a_region_runs_uncompiled_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeal.engine.runner.regions.GRAPHS_MOST", 3)
    region = Region("layer 0.f", lambda x: x.sum() * x.numel(), dynamic=False)
    with compiler_settings(dynamic=False):
        for size in (2, 3, 4):
            region(torch.ones(size))
        with pytest.warns(CompileWarning, match=r"^layer 0\.f runs uncompiled: more kinds of input than 3 graphs"):
            assert region(torch.ones(5)) == 25
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert region(torch.ones(6)) == 36  # said once


@pytest.mark.slow
@pytest.mark.usefixtures("tracing_only")
def test_what_stands_in_for_a_refused_region_compiles_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Symptom: shapes that the layer had met before compiled beside others, under PyTorch's own limits."""
    monkeypatch.setattr("pipeal.engine.runner.regions.GRAPHS_MOST", 2)
    alone: list[int] = []
    monkeypatch.setattr(
        "pipeal.engine.runner.compiling.compiler_settings",
        lambda **how: alone.append(1) or compiler_settings(**how),  # type: ignore[func-returns-value]
    )
    _check_compiler(torch.device("cpu"))  # compiles something, once per process
    with Pipeline(small(), threads=1, compile="static") as pipe, warnings.catch_warnings():
        warnings.simplefilter("ignore", CompileWarning)
        alone.clear()
        before = []
        for rows in (2, 3, 2, 4, 2, 2):
            pipe.run(batches_of([rows]))
            before.append(len(alone))
    first, second, again, refused, anew, known = (b - a for a, b in zip([0, *before], before, strict=False))
    assert first == second == refused == anew > again == known == 0


@pytest.mark.usefixtures("tracing_only")
def test_one_layers_shapes_do_not_use_up_anothers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law 1: PyTorch counts graphs for each code object, which all layers of one class share."""
    monkeypatch.setattr("pipeal.engine.runner.regions.GRAPHS_MOST", 2)
    modules = [nn.Sequential(nn.Linear(3, wide), nn.Tanh()) for wide in range(2, 7)]
    with compiler_settings(dynamic=False), warnings.catch_warnings():
        warnings.simplefilter("error", CompileWarning)
        for module in modules:
            region = Region("f", module.forward, dynamic=False, module=module)
            with installed([region]):
                for rows in (2, 3):
                    module(torch.ones(rows, 3))
            assert list(region.in_force()) == [region]


@pytest.mark.slow
def test_no_truth_values_are_kept_for_a_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Symptom: a compiled feed-forward was slower than an uncompiled one. Cause: beside what ReLU gave, its forward
    kept where that is above zero, which a CPU writes slowly. No kernels are needed to see what is kept."""
    compile = torch.compile

    def partitioned(function: Callable[..., Any], *, backend: object, **keywords: Any) -> Callable[..., Any]:
        return compile(function, **keywords, backend="aot_eager_decomp_partition")

    monkeypatch.setattr(torch, "compile", partitioned)
    module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    region = Region("f", module.forward, dynamic=False, module=module)
    with compiler_settings(dynamic=False), installed([region]):
        node: Any = module(torch.ones(2, 3, 4)).grad_fn
    assert {kept.dtype for kept in node.saved_tensors} == {torch.float32}


@pytest.mark.slow
@pytest.mark.usefixtures("tracing_only")
def test_modules_are_as_they_were() -> None:
    """Between two batches, and after a failure; so that they can be copied, pickled and compiled by others."""
    package, batches = small(), batches_of([4, 4])
    names = list(package.state_dict())

    def untouched() -> bool:
        return not any("forward" in vars(part) or part._compiled_call_impl for part in package.modules())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CompileWarning)
        with Pipeline(package, ["cpu"] * 2, compile="static") as pipe:
            pipe.run(batches)
            assert untouched()
            copy.deepcopy(package[2])
            torch.save(package[2], io.BytesIO())
        with pytest.raises(RuntimeError), Pipeline(package, ["cpu"] * 2, compile="static") as pipe:
            pipe.run([(torch.ones(4, FEATURES + 1), batches[0][1])])
    assert untouched()
    assert list(package.state_dict()) == names


@pytest.mark.usefixtures("tracing_only")
def test_a_users_own_forward_stays() -> None:
    """A function that a user has put in the place of one module's forward is compiled, and put back."""
    module = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    module.forward = lambda x: x * 3  # type: ignore[method-assign]
    own = module.forward
    region = Region("f", module.forward, dynamic=False, module=module)
    with installed([region]):
        assert module(torch.ones(1)) == 3
    assert module.forward is own


@pytest.mark.usefixtures("tracing_only")
def test_a_traced_module_is_compiled() -> None:
    """Symptom: converted models ran uncompiled. Cause: dynamo looks for the code of a GraphModule's own forward."""
    module = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    region = Region("f", module.forward, dynamic=False, module=module)
    with installed([region]):
        module(torch.ones(1, 2))
    assert list(region.in_force()) == [region]


# Errors


@pytest.mark.usefixtures("tracing_only")
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_users_error_keeps_its_type_and_its_place(schedule: str) -> None:
    class Refuses(nn.Sequential):
        draws_from_default = False

        def forward(self, x: Tensor) -> Tensor:
            if x.shape[0] == 3:
                raise LookupError("three of them")
            return super().forward(x)

    package = small()
    package[1].enc.f = Refuses(nn.Linear(8, 8)).requires_grad_(False)
    pipe = Pipeline(package[:2], ["cpu"] * 2, schedule, threads=1, compile="static")
    with pytest.raises(LookupError, match="three of them") as caught, pipe:
        pipe.run(batches_of([4, 3]))
    assert "forward of stage 1, layer 1 (TwoBackwards), batch 1, device cpu; input (3, 8) float32" in notes_of(
        caught.value
    )


@pytest.mark.slow
def test_an_input_changed_in_place_is_still_found() -> None:
    package = pair()
    package[0].enc.f = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(FEATURES, 8)).requires_grad_(False)
    with pytest.raises(ScheduleError, match="in place"), Pipeline(package[:1], ["cpu"], compile="static") as pipe:
        pipe.run(batches_of([4]))


def test_an_unknown_setting() -> None:
    with pytest.raises(ConfigError, match=r"unknown compile 'statik'; did you mean 'static'\? \(known: dynamic, none"):
        Pipeline([VirtualLayer(0, 0)], ["cpu"], compile="statik")  # type: ignore[arg-type]


def test_no_compiler() -> None:
    import torch._inductor.config as inductor

    with (
        inductor.patch({"cpp.cxx": (None, "no-such-compiler"), "force_disable_caches": True}),
        pytest.raises(
            ConfigError, match=r"nothing can be compiled for device 'cpu' here: .*; install a C\+\+"
        ) as caught,
    ):
        _check_compiler.__wrapped__(torch.device("cpu"))
    assert "\n" not in str(caught.value)


def test_the_compiler_is_tried_on_the_devices_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prediction 12 of the GPU reading: on plain "cuda", each rank had half a gigabyte on the first GPU."""
    tried: list[str] = []
    monkeypatch.setattr("pipeal.engine.runner.compiling._check_compiler", lambda device: tried.append(str(device)))
    check_compile("static", [torch.device(name) for name in ("cpu", "cuda:3", "cpu")])
    assert sorted(tried) == ["cpu", "cuda:3"]


# What else depends on it


@pytest.mark.usefixtures("tracing_only")
@pytest.mark.slow
def test_placements_are_tried_as_they_will_run() -> None:
    package, batches = ALPackage(small()[:2]), batches_of([4] * (WARM_UP + 2))
    before = {name: value.clone() for name, value in package.state_dict().items()}
    place(package, batches, "pipelined", EngineOptions(compile="static"), rounds=1)
    assert len(layer_costs(copy.deepcopy(package), batches, EngineOptions(compile="static"))) == len(package)
    assert all(torch.equal(value, before[name]) for name, value in package.state_dict().items())


@pytest.mark.cuda
@pytest.mark.parametrize("how", ["static", "dynamic"])
def test_compiled_on_cuda(how: str) -> None:
    rows = [64, 64, 64, 48]
    left = []
    for schedule, stages in (("sequential", 1), ("pipelined", 2)):
        package = small()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CompileWarning)
            with Pipeline(package, ["cuda"] * stages, schedule, compile=how) as pipe:  # type: ignore[arg-type]
                losses = pipe.run(batches_of(rows)).losses
        left.append(outcome(package.cpu(), losses, []))
    assert_close(left[1], left[0])
