"""CUDA graphs per layer, without a GPU: what is captured when, what is not, and that the result is the same.

Recordings are those of :mod:`tests.engine.tape`, which replays operators on the addresses that they had.
"""

from __future__ import annotations

import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from fractions import Fraction
from functools import partial
from itertools import combinations, cycle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from pipeal import AE, AL, ENC, ALPackage, ConfigError, Dropout, LabelAE, Pipeline
from pipeal.al import BP
from pipeal.engine import SCHEDULES
from pipeal.engine.alike import Makeup
from pipeal.engine.before import cut_graphs, left_uncut
from pipeal.engine.capturable import Watch
from pipeal.engine.copies import carried, copy_of, overlaps
from pipeal.engine.cudagraph import CudaRecorder, Gradients, LayerGraph, own_stream
from pipeal.engine.forward import go_forward
from pipeal.engine.gate import GATE
from pipeal.engine.graphed import WARM_UP, GraphedLayer, GraphWarning, check_cuda_graphs

from .cases import CLASSES, FEATURES, Outcome, PublishedAL, cosine, cuts, outcome
from .tape import TapeRecorder
from .test_failures import notes_of

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def tapes(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[TapeRecorder]]:
    """Every stage records, on a CPU, on tapes."""
    monkeypatch.setattr("pipeal.engine.stage.recorders", lambda device: TapeRecorder)
    monkeypatch.setattr("pipeal.engine.pipeline.check_cuda_graphs", lambda wanted, devices, **beside: None)
    TapeRecorder.recorded, TapeRecorder.alone = 0, True
    yield TapeRecorder
    assert TapeRecorder.alone


class Counted(nn.Sequential):
    """Says how often its Python ran."""

    draws_from_default = False
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class TwoBackwards(PublishedAL):
    """The published style: two losses, each with a backward of its own."""

    draws_from_default = False


def package() -> ALPackage:
    """Four layers: plain; published style with dropout; batch norm, changed in place; layer norm."""
    torch.manual_seed(5)
    first = Counted(nn.Linear(FEATURES, 8), nn.Tanh())
    second = nn.Sequential(Dropout(0.2), nn.Linear(8, 8), nn.GELU(), Dropout(0.4))
    third = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU(inplace=True))
    last = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5))
    return ALPackage(
        [
            AL(ENC(first, nn.Linear(8, 4)), LabelAE(nn.Linear(CLASSES, 4), nn.Linear(4, CLASSES), CLASSES)),
            TwoBackwards(ENC(second, nn.Linear(8, 3)), AE(nn.Linear(4, 3), nn.Linear(3, 4))),
            AL(ENC(third, nn.Linear(6, 3)), AE(nn.Linear(3, 3), nn.Linear(3, 3))),
            AL(ENC(last, nn.Linear(5, 2)), AE(nn.Linear(3, 2), nn.Linear(2, 3))),
        ]
    )


def batches_of(rows: list[int]) -> list[tuple[Tensor, Tensor]]:
    """Targets are probabilities: of class numbers, a CPU asks how large they are, which no graph can."""
    draw = torch.Generator().manual_seed(6)
    return [
        (torch.randn(count, FEATURES, generator=draw), torch.rand(count, CLASSES, generator=draw).softmax(1))
        for count in rows
    ]


def train(
    schedule: str,
    sizes: list[int],
    rows: list[int],
    build: Callable[[], ALPackage] = package,
    updates: Callable[[int], bool] = lambda _: True,
    **options: Any,
) -> Outcome:
    """What a training leaves, predictions included."""
    model, batches = build(), batches_of(rows)
    with Pipeline(model, ["cpu"] * len(sizes), schedule, sizes=sizes, threads=1, **options) as pipe:
        report = pipe.run(batches, lr_scale=cosine, updates=updates)
        predictions = [pipe.predict(batches[0][0], depth + 1) for depth in range(len(model))]
    return outcome(model, report.losses, predictions)


def warned(caught: pytest.WarningsRecorder) -> list[str]:
    return [str(one.message) for one in caught if issubclass(one.category, GraphWarning)]


# Exactness


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_leaves_the_bits_of_a_run_without_graphs(schedule: str, tapes: type[TapeRecorder]) -> None:
    """With dropout, batch norm, a changing learning rate and a smaller last batch."""
    rows = [4, 4, 4, 4, 4, 4, 3]
    wanted = train("sequential", [4], rows)
    for sizes in ([4], [1, 1, 2], [1, 1, 1, 1]):
        tapes.recorded = 0
        assert train(schedule, sizes, rows, cuda_graphs=True).differences(wanted) == []
        assert tapes.recorded == 2 * 4  # a forward and a backward of each layer


@given(rows=st.lists(st.sampled_from([2, 3, 5]), min_size=6, max_size=16), data=st.data())
@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_random_shapes_and_random_updates(rows: list[int], data: st.DataObject) -> None:
    """Gradients that are gathered over batches of several shapes, some of which are replayed and others not."""
    every = data.draw(st.integers(1, 4), label="batches for an update")

    def updates(batch: int) -> bool:
        return batch % every == every - 1 or batch == len(rows) - 1

    wanted = train("sequential", [4], rows, updates=updates)
    schedule = data.draw(st.sampled_from(sorted(SCHEDULES)), label="schedule")
    sizes = data.draw(st.sampled_from([*cuts(4, 1), *cuts(4, 2), *cuts(4, 4)]), label="sizes")
    with warnings.catch_warnings():
        warnings.simplefilter("error", GraphWarning)  # gradients of batches before are no reason
        found = train(schedule, sizes, rows, updates=updates, cuda_graphs=True)
    assert found.differences(wanted) == []


@pytest.mark.parametrize("precision", ["bf16"])
def test_casts_are_part_of_the_graph(precision: str, tapes: type[TapeRecorder]) -> None:
    wanted = train("sequential", [4], [4] * 6, precision=precision)
    assert train("pipelined", [2, 2], [4] * 6, precision=precision, cuda_graphs=True).differences(wanted) == []
    assert tapes.recorded == 2 * 4


def test_a_network_trained_by_backpropagation(tapes: type[TapeRecorder]) -> None:
    """It hands its target on as it came."""

    def trained(**options: Any) -> list[Tensor]:
        torch.manual_seed(0)
        model = BP(nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), Dropout(0.3), nn.Linear(8, CLASSES)))
        with Pipeline([model], ["cpu"], "sequential", threads=1, **options) as pipe:
            losses = pipe.run(batches_of([4] * 6)).losses
        return [*losses, *model.state_dict().values()]

    for one, other in zip(trained(cuda_graphs=True), trained(), strict=True):
        assert torch.equal(one, other)
    assert tapes.recorded == 2


def test_weights_that_are_loaded_between_two_runs_are_learnt_on(tapes: type[TapeRecorder]) -> None:
    """In place, where a graph finds them; and elsewhere, which makes new graphs, after batches that run as they are."""
    other = package().state_dict()
    for value in other.values():
        value += 1

    def trained(elsewhere: bool, **options: Any) -> list[Tensor]:
        model, batches = package(), batches_of([4] * 6)
        with Pipeline(model, ["cpu"] * 2, threads=1, **options) as pipe:
            pipe.run(batches)
            model.load_state_dict(other)
            if elsewhere:
                for one in model.parameters():
                    one.data = one.data.clone()
            pipe.run(batches)
        return list(model.state_dict().values())

    for elsewhere, recorded in ((False, 8), (True, 16)):
        tapes.recorded = 0
        found, wanted = trained(elsewhere, cuda_graphs=True), trained(elsewhere)
        assert all(torch.equal(*both) for both in zip(found, wanted, strict=True))
        assert tapes.recorded == recorded


def own_mean(model: ALPackage) -> None:
    norm = next(part for part in model[2].modules() if isinstance(part, nn.BatchNorm1d))
    assert norm.running_mean is not None
    norm.running_mean = norm.running_mean.clone()


def other_block(model: ALPackage) -> None:
    model[0].blocks()["f"][1] = nn.Sigmoid()


def assigned(model: ALPackage) -> None:
    model[3].load_state_dict({name: value + 1 for name, value in model[3].state_dict().items()}, assign=True)


@pytest.mark.parametrize("replace", [own_mean, other_block, assigned])
def test_what_is_replaced_by_another_object_is_learnt_on(
    replace: Callable[[ALPackage], None], tapes: type[TapeRecorder]
) -> None:
    """Graphs that were made with the old one are not replayed; new ones are made, on the same threads."""

    def trained(**options: Any) -> list[Tensor]:
        model, batches = package(), batches_of([4] * 6)
        with Pipeline(model, ["cpu"] * 2, threads=1, **options) as pipe:
            losses = pipe.run(batches).losses
            replace(model)
            losses += pipe.run(batches).losses
        return [*losses, *model.state_dict().values()]

    assert all(torch.equal(*both) for both in zip(trained(cuda_graphs=True), trained(), strict=True))
    assert tapes.recorded == 2 * 4 + 2  # one layer's anew


def test_what_is_replaced_again_and_again_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeal.engine.graphed.CHANGES_MOST", 2)
    model = package()
    pipe = Pipeline(model, ["cpu"], "sequential", threads=1, cuda_graphs=True)
    with pytest.warns(GraphWarning) as caught, pipe:
        pipe.run(batches_of([4] * 7), on_batch=lambda _: own_mean(model))
    (said,) = warned(caught)
    assert said.startswith("layer 2 (AL) runs without CUDA graphs: its modules, parameters or buffers were replaced by")


def test_a_newer_setting_of_matrix_products_is_read_where_it_is(
    monkeypatch: pytest.MonkeyPatch, tapes: type[TapeRecorder]
) -> None:
    """Whoever asks for it by its older name then gets an error."""

    def refuse() -> str:
        raise RuntimeError("PyTorch is checking whether allow_tf32 and fp32_precision are mixed")

    if not hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        pytest.skip("this version of PyTorch has the older name alone")
    monkeypatch.setattr(torch, "get_float32_matmul_precision", refuse)
    train("pipelined", [2, 2], [4] * 5, cuda_graphs=True)
    assert tapes.recorded == 2 * 4


class Colour(Enum):
    RED = 1
    BLUE = 2


def test_plain_values_of_an_input_are_told_apart() -> None:
    """A graph holds those that it was captured with."""
    makeup = Makeup(nn.Linear(2, 2))
    values = [Colour.RED, Colour.BLUE, 1, True, 1.0, 0.0, -0.0, 1j, "1", b"1", torch.float32, torch.float16, CPU, None]
    likes = [makeup.like({"value": [value]}) for value in values]
    assert all(fault is None for _, fault in likes)
    assert all(one != other for one, other in combinations(likes, 2))
    assert makeup.like((float("nan"), 1)) == makeup.like((float("nan"), 1))


def test_an_input_that_may_change_unseen_is_never_captured() -> None:
    x, y = torch.randn(4, FEATURES), torch.rand(4, CLASSES)
    graphed = GraphedLayer(package()[0], "layer 0 (AL)", CPU, TapeRecorder, draws=False)
    with (
        pytest.warns(GraphWarning, match="its input holds a Fraction, which may change from batch to batch unseen"),
        graphed.forward(((x, Fraction(1)), y), threading.Event()),
    ):
        pass
    assert graphed._closed


# What is captured when


def test_a_set_of_shapes_is_captured_when_it_has_come_often_enough(tapes: type[TapeRecorder]) -> None:
    model = package()
    seen = []
    with Pipeline(model, ["cpu"], "sequential", threads=1, cuda_graphs=True) as pipe:
        for batch in batches_of([4, 3, 4, 3, 4, 4, 3, 3, 4, 5]):
            pipe.submit(*batch)
            seen.append(tapes.recorded // 8)
    assert WARM_UP == 3
    assert seen == [0, 0, 0, 0, 0, 1, 1, 2, 2, 2]
    counted = next(part for part in model.modules() if isinstance(part, Counted))
    assert counted.calls == 2 * (WARM_UP + 1) + 1  # replays run no Python


def test_every_life_of_a_pipeline_has_graphs_of_its_own(tapes: type[TapeRecorder]) -> None:
    """Its threads are new; and another layer's graph may hold what a dropped one has let go."""
    pipe = Pipeline(package(), ["cpu"] * 2, threads=1, cuda_graphs=True)
    for life in (1, 2):
        with pipe:
            pipe.run(batches_of([4] * 5))
        assert tapes.recorded == 8 * life
        assert not any(graphed._graphs for stage in pipe.stages for graphed in stage._graphed.values())


def test_batches_of_an_earlier_life_warm_nothing_up(tapes: type[TapeRecorder]) -> None:
    """Libraries keep a handle for each thread, which cannot be made within a capture."""
    pipe = Pipeline(package(), ["cpu"] * 2, threads=1, cuda_graphs=True)
    for _ in range(2):
        with pipe:
            pipe.run(batches_of([4] * WARM_UP))
    assert tapes.recorded == 0


def test_batches_of_another_thread_warm_nothing_up(tapes: type[TapeRecorder]) -> None:
    """Of a serial schedule, whose work the caller does, from whichever thread he submits."""
    batches = batches_of([4] * (WARM_UP + 1))
    with Pipeline(package(), ["cpu"], "sequential", threads=1, cuda_graphs=True) as pipe:
        for batch in batches[:WARM_UP]:
            pipe.submit(*batch)
        thread = threading.Thread(target=pipe.submit, args=batches[WARM_UP])
        thread.start()
        thread.join()
    assert tapes.recorded == 0


def test_graphs_of_autograd_are_cut_before_a_capture() -> None:
    """What they hold on to was made on another stream, which a capture must not reach."""
    layer = package()[1]
    x, y = torch.randn(4, 8), torch.randn(4, 4)
    layer(x, y)
    layer.backward()

    def held() -> list[str]:
        found = [(name, value) for part in layer.modules() for name, value in vars(part).items()]
        return [name for name, value in found if isinstance(value, Tensor) and value.grad_fn is not None]

    class Inspects(TapeRecorder):
        def record(self, work: Callable[[], Any]) -> Any:
            assert self._tapes or held() == []
            return super().record(work)

    assert held() != []
    with GATE.alone():
        graph = LayerGraph(layer, Inspects(), Gradients(), (x, y), [4, 4], CPU)
        assert held() != []
        graph.record_backward()
    assert held() == []  # nor must one that is made without a graph end on the capture's stream


class Holder:
    """Has a method that an object may hold."""

    def __init__(self, held: Tensor) -> None:
        self.held = held

    def show(self) -> Tensor:
        return self.held


def test_graphs_in_containers_are_cut_and_others_are_found() -> None:
    """A view's cannot be cut; and what an object holds may be somebody else's."""
    made = torch.ones(3, requires_grad=True).exp()
    layer = nn.Linear(1, 1)
    layer.kept = {"deep": [(made.exp(), deque([made.exp()]))]}  # type: ignore[assignment]
    assert left_uncut(layer) is None
    cut_graphs(layer)
    assert not layer.kept["deep"][0][0].requires_grad  # type: ignore[index, operator]

    def closes_over(by_default: Any = None) -> Any:
        return made, by_default

    for kept in (
        *(made[:2], [made.view(3, 1)], SimpleNamespace(out=made), {"a": SimpleNamespace(out=(made,))}),
        *(closes_over, [partial(print, made)], partial(print, end=made), deque([made]).append, Holder(made).show),
    ):
        layer.kept = kept  # type: ignore[assignment]
        assert left_uncut(layer) == "Linear.kept"
        cut_graphs(layer)
        assert made.grad_fn is not None


def test_half_a_capture_is_forgotten(monkeypatch: pytest.MonkeyPatch, tapes: type[TapeRecorder]) -> None:
    """A run that fails between the forward and the backward of a capture leaves a graph that has no backward."""
    model, batches = package(), batches_of([4] * 6)
    pipe = Pipeline(model, ["cpu"], "sequential", threads=1, cuda_graphs=True)

    def broken(*_: Any) -> Any:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"), pipe:  # noqa: PT012
        pipe.run(batches[:WARM_UP])
        monkeypatch.setattr(model[1].blocks()["f"], "forward", broken)
        pipe.run(batches)
    monkeypatch.undo()
    tapes.recorded = 0
    with pipe:
        pipe.run(batches)
    assert tapes.recorded == 8


def test_what_fails_in_a_capture_says_so() -> None:
    model, batches = package(), batches_of([4] * 6)

    class Failing(TapeRecorder):
        def record(self, work: Callable[[], Any]) -> Any:
            raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="not permitted") as caught, pytest.MonkeyPatch.context() as patch:  # noqa: PT012
        patch.setattr("pipeal.engine.stage.recorders", lambda device: Failing)
        with Pipeline(model, ["cpu"] * 2, threads=1, cuda_graphs=True) as pipe:
            pipe.run(batches)
    said = notes_of(caught.value)
    assert "while layer 0 (AL) was captured as a CUDA graph; cuda_graphs=false trains without" in said
    assert "in the forward of stage 0, layer 0 (AL), batch 3, device cpu" in said


@contextmanager
def failing_end(*_: Any, **options: Any) -> Iterator[None]:
    """As :class:`torch.cuda.graph` where the capture has failed: it cannot end."""
    try:
        yield
    finally:
        raise RuntimeError("operation failed due to a previous error during capture")


def test_of_a_failed_capture_the_first_error_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=None))
    monkeypatch.setattr(torch.cuda, "graph", failing_end)
    recorder = CudaRecorder(SimpleNamespace())  # type: ignore[arg-type]
    cause = KeyError("what it came from")

    def work() -> None:
        raise ValueError("the layer's own") from cause

    with pytest.raises(ValueError, match="the layer's own") as caught:
        recorder.record(work)
    assert caught.value.__cause__ is cause
    with pytest.raises(RuntimeError, match="previous error"):
        recorder.record(lambda: None)


@pytest.mark.parametrize("broken", [False, True])
def test_graphs_are_dropped_when_their_replays_have_ended(monkeypatch: pytest.MonkeyPatch, broken: bool) -> None:
    """After a failure, too, nobody else has waited; and never while another layer is captured."""
    said: list[str] = []
    forget = GraphedLayer.forget

    def waits(_: Any) -> None:
        said.append("waits")
        if broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def drops(self: GraphedLayer) -> None:
        said.append(f"drops, {GATE._inside} inside")
        forget(self)

    pipe = Pipeline(package(), ["cpu"], threads=1, cuda_graphs=True)
    with pytest.raises(ValueError, match="by the way"), pipe:  # noqa: PT012
        pipe.run(batches_of([4] * 5))
        monkeypatch.setattr("pipeal.engine.device.base.Device.synchronize", waits)
        monkeypatch.setattr(GraphedLayer, "forget", drops)
        raise ValueError("by the way")
    assert said == ["waits", *["drops, 1 inside"] * 4]
    assert not any(graphed._graphs for stage in pipe.stages for graphed in stage._graphed.values())


class GivenStream:
    """In the place of :class:`torch.cuda.Stream`, of which several may stand for one."""

    def __init__(self, handle: int) -> None:
        self.cuda_stream = handle


def test_streams_for_captures_are_given_out_once() -> None:
    """PyTorch has 32, and then gives the first ones out again."""
    handles = cycle(range(1, 33))

    def new(_: torch.device) -> Any:
        return GivenStream(next(handles))

    taken: dict[int, Any] = {}
    for _ in range(32):
        stream = own_stream(CUDA[0], new)
        assert stream is not None
        taken[stream.cuda_stream] = stream
    del stream
    assert sorted(taken) == list(range(1, 33))
    assert own_stream(CUDA[0], new) is None
    del taken[7]
    again = own_stream(CUDA[0], new)
    assert again is not None
    assert again.cuda_stream == 7


# Memory


def test_what_is_repeated_travels_once() -> None:
    """Between GPUs the codes of all classes were copied for each sample of a batch."""
    codes, sparse = torch.arange(12.0).view(2, 6), torch.eye(3).to_sparse()
    travelled: list[int] = []

    def carry(tensor: Tensor) -> Tensor:
        travelled.append(tensor.numel())
        return tensor.clone()

    for tensor, elements in ((codes.expand(5, 2, 6), 12), (codes[:, None].expand(2, 7, 6), 12), (codes.t(), 12)):
        travelled.clear()
        arrived = carried(tensor, carry)
        assert torch.equal(arrived, tensor)
        assert (travelled, arrived.stride()) == ([elements], tensor.stride())
    assert carried(sparse, carry).layout == sparse.layout


def test_a_copy_of_a_repeated_tensor_takes_no_more_memory_and_has_its_strides() -> None:
    """Labels by class hand the codes of all classes on, for each sample: the next layer's kernels go by the strides."""
    codes = torch.arange(6.0).view(2, 3)
    for tensor in (codes.expand(5, 2, 3), codes.t().expand(4, 3, 2), codes[:, None].expand(2, 7, 3), codes):
        copy = copy_of(tensor)
        assert not overlaps(tensor)
        assert torch.equal(copy, tensor)
        assert copy.stride() == tensor.stride()
        assert copy.untyped_storage().nbytes() == codes.untyped_storage().nbytes()
        assert copy.data_ptr() != tensor.data_ptr()
    windows = torch.arange(5.0).unfold(0, 3, 1)
    assert overlaps(windows)
    assert overlaps(windows.expand(2, 3, 3))
    assert torch.equal(copy_of(windows), windows)


def test_an_input_that_repeats_itself_is_replayed() -> None:
    layer, like = package()[0], package()[0]
    batches = [(x[:1].expand(4, -1), y) for x, y in batches_of([4] * 3)]
    with GATE.alone():
        graph = LayerGraph(layer, TapeRecorder(), Gradients(), batches[0], [], CPU)
        graph.record_backward()
    for x, y in batches:
        passed, wanted = graph.forward(x, y), go_forward(like, x, y)
        torch.testing.assert_close(passed.onward, wanted.onward)


def test_windows_that_overlap_are_not_captured() -> None:
    """A copy without overlaps has other strides, for which libraries may choose kernels that round otherwise."""
    x = torch.randn(30).unfold(0, FEATURES, 1)
    inputs, abandoned = (x, torch.rand(len(x), CLASSES).softmax(1)), threading.Event()
    graphed = GraphedLayer(package()[0], "layer 0 (AL)", CPU, TapeRecorder, draws=False)
    with graphed.forward(inputs, abandoned):
        graphed.go_forward(*inputs)
    with (
        pytest.warns(GraphWarning, match="what it is given, or hands on, overlaps with itself, as windows"),
        graphed.after_forward(True, abandoned),
    ):
        graphed.go_backward()
    assert graphed._closed


# What is not captured


def test_the_first_shapes_alone_have_graphs_and_the_others_say_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeal.engine.graphed.GRAPHS_MOST", 2)
    rows = [2] * 5 + [3] * 5 + [4] * 5 + [5] * 5 + [2] * 2
    wanted = train("sequential", [4], rows)
    with pytest.warns(GraphWarning) as caught:
        found = train("sequential", [4], rows, cuda_graphs=True)
    assert found.differences(wanted) == []
    assert warned(caught) == [
        f"layer {layer} ({kind}) runs without more CUDA graphs: it meets more sets of shapes than the 2 that have one"
        for layer, kind in enumerate(["AL", "TwoBackwards", "AL", "AL"])
    ]
    assert TapeRecorder.recorded == 2 * 2 * 4


def test_shapes_without_end_are_not_counted_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeal.engine.graphed.SHAPES_MOST", 5)
    with pytest.warns(GraphWarning, match="it has met more than 5 sets of shapes") as caught:
        train("sequential", [4], list(range(2, 20)), cuda_graphs=True)
    assert len(warned(caught)) == 4


class Speaks(nn.Module):
    """Looks at its result."""

    draws_from_default = False

    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum().item() > -1e9 else -x


class Chooses(nn.Module):
    """Has a result whose shape depends on its values, inside."""

    draws_from_default = False

    def forward(self, x: Tensor) -> Tensor:
        return x + x[x > 0].mean()


class Remembers(nn.Module):
    """Keeps a tensor from batch to batch, each time another one."""

    draws_from_default = False

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(8)

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


class Draws(nn.Module):
    """Says that it does not draw, and does."""

    draws_from_default = False

    def forward(self, x: Tensor) -> Tensor:
        return x + 0 * torch.rand_like(x)


class Alternates(nn.Module):
    """Draws with its one layer of dropout more often from batch to batch."""

    draws_from_default = False

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.times = Dropout(0.1), 0

    def forward(self, x: Tensor) -> Tensor:
        self.times += 1
        for _ in range(self.times):
            x = self.drop(x)
        return x


class Counts(nn.Module):
    """Keeps a number in Python, which grows."""

    draws_from_default = False

    def __init__(self) -> None:
        super().__init__()
        self.share = 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.share += 0.125
        return x * self.share


class TakesTurns(nn.Module):
    """Reads another parameter in each batch."""

    draws_from_default = False

    def __init__(self) -> None:
        super().__init__()
        self.sides, self.times = nn.ParameterList([torch.ones(8), torch.zeros(8)]), 0

    def forward(self, x: Tensor) -> Tensor:
        self.times += 1
        return x + self.sides[self.times % 2]


class Grows(nn.Module):
    """Does more from batch to batch, until the third."""

    draws_from_default = False

    def __init__(self) -> None:
        super().__init__()
        self.times = 0

    def forward(self, x: Tensor) -> Tensor:
        self.times += 1
        return x.tanh() if self.times < WARM_UP else x.tanh().tanh()


class Turns(torch.autograd.Function):
    """Has a number in its backward that changes."""

    times = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        Turns.times += 1
        return gradients[0] * (1 + Turns.times % 2)


class TurnsBack(nn.Module):
    """Has a backward that keeps a number."""

    draws_from_default = False

    def __init__(self) -> None:
        super().__init__()
        Turns.times = 0

    def forward(self, x: Tensor) -> Tensor:
        return Turns.apply(x)  # type: ignore[no-any-return]


class Looks(nn.Module):
    """A table with sparse gradients."""

    draws_from_default = False

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 8, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table((x.detach() > 0).long().sum(1))


class Adjacent(nn.Module):
    """Has a sparse buffer, which lies at no one address."""

    draws_from_default = False

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("near", torch.eye(8).to_sparse(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.sparse.mm(self.near, x.t()).t()  # type: ignore[arg-type]


class Rebinds(nn.Module):
    """Has a buffer that it does not change in place."""

    draws_from_default = False

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


class Shows(nn.Module):
    """Keeps a part of what it found, to be looked at."""

    draws_from_default = False

    def forward(self, x: Tensor) -> Tensor:
        weights = x.softmax(1)
        self.shown = weights[:, 0]
        return weights


@pytest.mark.parametrize(
    ("block", "why"),
    [
        (Adjacent, r"one of its parameters or buffers is sparse \(torch\.sparse_coo\)"),
        (Rebinds, "its forward or backward puts another module, parameter or buffer in the place of one"),
        (Shows, r"Shows\.shown keeps a result whose graph of autograd cannot be cut; detach what is kept"),
        (Speaks, r"the host waits for what aten\._local_scalar_dense\.default finds"),
        (Chooses, r"the host waits for what aten\.index\.Tensor finds"),
        (Remembers, r"aten\.mul\.Tensor reads a tensor that is no input, parameter or buffer of the layer"),
        (Draws, r"it draws random numbers with aten\.rand_like\.default; of what draws, graphs may hold pipeal\.Drop"),
        (Alternates, "it does not draw alike on batches that are alike"),
        (Counts, r"it runs aten\.mul\.Tensor\(_, 0\.25\) where it did not on a batch that is alike; a graph would rep"),
        (TakesTurns, r"it runs aten\.add\.Tensor\(_, own \d\) where it did not on a batch that is alike"),
        (Grows, r"it runs aten\..* where it did not on a batch that is alike"),
        (TurnsBack, r"it runs aten\.mul\.Tensor\(_, 1\) where it did not on a batch that is alike"),
        (Looks, r"aten\..* works on a sparse tensor"),
        (partial(nn.Dropout, 0.5), r"it may draw from PyTorch's default generators, .*pipeal\.Dropout"),
    ],
    ids=[
        "sparse buffer",
        "rebinds",
        "view",
        "item",
        "mask",
        "memory",
        "draws",
        "alternates",
        "counts",
        "turns",
        "grows",
        "backward",
        "sparse",
        "nn.Dropout",
    ],
)
def test_a_layer_that_cannot_be_captured_runs_as_it_is_and_says_why(
    block: Callable[[], nn.Module], why: str, tapes: type[TapeRecorder]
) -> None:
    def build() -> ALPackage:
        model = package()
        f = nn.Sequential(nn.Linear(8, 8), block())
        side = AE(nn.Linear(4, 3), nn.Linear(3, 4))
        return ALPackage([model[0], AL(ENC(f, nn.Linear(8, 3)), side, optimizer=torch.optim.SGD), *model[2:]])

    wanted = train("sequential", [4], [4] * 6, build)
    with pytest.warns(GraphWarning, match=rf"^layer 1 \(AL\) runs without CUDA graphs: {why}") as caught:
        found = train("pipelined", [2, 2], [4] * 6, build, cuda_graphs=True)
    assert len(warned(caught)) == 1
    assert tapes.recorded == 2 * 3
    assert found.differences(wanted) == []


def test_an_index_of_numbers_and_a_number_in_a_choice_are_fine() -> None:
    x, rows = torch.randn(4, 3), torch.tensor([2, 0])
    with Watch(CPU, [x, rows]) as watch:
        torch.where(x > 0, x, 0.5)[rows].sum()
    assert watch.fault is None


@pytest.mark.parametrize("wrap", [lambda block: block.compile(backend="eager"), None], ids=["in place", "wrapped"])
def test_modules_that_somebody_compiled_are_not_captured(wrap: Callable[[nn.Module], None] | None) -> None:
    """They run uncompiled while they are watched, and would be compiled within the capture."""
    block: Any = nn.Linear(2, 2)
    if wrap is None:
        block = torch.compile(block, backend="eager")
    else:
        wrap(block)
    assert Makeup(nn.Sequential(nn.Tanh())).fault() is None
    said = Makeup(nn.Sequential(nn.Tanh(), nn.Sequential(block))).fault()
    assert said == "a module of it was given to torch.compile, whose kernels cannot be seen beforehand"


def test_nothing_to_do_makes_no_graph() -> None:
    """PyTorch warns of empty ones."""
    x = torch.ones(2, 3)
    for work, works in ((lambda: x.view(-1).detach()[1:], False), (lambda: torch.empty(3), False), (x.exp, True)):
        with Watch(CPU, [x]) as watch:
            work()
        assert (watch.fault is None) == works, watch.fault
    with Watch(CPU, [x]) as watch:
        x.exp()
    with watch:
        pass
    assert watch.fault == "its forward, or its backward, gives the device no work"


@pytest.mark.parametrize(
    "work",
    [
        torch.linalg.matrix_exp,
        torch.linalg.inv,
        torch.linalg.qr,
        torch.linalg.cholesky,
        torch.geqrf,
        lambda x: torch.histc(x, 4),
        lambda x: F.embedding_bag(x.detach().argmax(1).view(1, 3), x),
        lambda x: F.embedding(x.detach().argmax(1), x, scale_grad_by_freq=True).sum().backward(),
    ],
    ids=["exp", "inverse", "qr", "cholesky", "geqrf", "histogram", "bag", "by frequency"],
)
def test_what_waits_in_some_versions_is_taken_to_wait(work: Callable[[Tensor], Any]) -> None:
    x = torch.eye(3).mul_(2).requires_grad_()
    with Watch(CPU, [x]) as watch:
        work(x)
    assert watch.fault is not None
    assert watch.fault.startswith("the host waits for what aten.")


def test_lengths_of_vectors_are_fine() -> None:
    x = torch.randn(4, 3)
    with Watch(CPU, [x]) as watch:
        F.normalize(x)
        torch.linalg.cross(x, x)
    assert watch.fault is None


META = torch.device("meta")


def test_a_number_may_be_a_tensor_on_the_cpu() -> None:
    x = torch.ones(4, 3, device=META)
    with Watch(META, [x]) as watch:
        x * torch.scalar_tensor(2.0)
    assert watch.fault is None


@pytest.mark.parametrize(
    ("work", "why"),
    [
        (lambda _: torch.ones(3), "works with a tensor that is not on meta"),
        (lambda _: torch.scalar_tensor(2.0).to(META), "works with a tensor that is not on meta"),
        (lambda x: x * torch.tensor(2.0), "reads a tensor that is no input, parameter or buffer of the layer"),
    ],
    ids=["made elsewhere", "a number copied", "a number of old"],
)
def test_what_leaves_the_device_is_seen(work: Callable[[Tensor], Any], why: str) -> None:
    x = torch.ones(4, 3, device=META)
    with Watch(META, [x]) as watch:
        work(x)
    assert watch.fault is not None
    assert watch.fault.endswith(why)


def test_attention_draws_for_its_dropout_alone() -> None:
    q = torch.ones(1, 2, 8, 16, device=META)
    for dropout, draws in ((0.0, False), (0.2, True)):
        with Watch(META, [q]) as watch:
            torch.ops.aten._scaled_dot_product_flash_attention(q, q, q, dropout)
        assert draws == (watch.fault is not None)


@pytest.mark.parametrize(("rows", "waits"), [(3072, False), (3073, True)])
def test_a_table_that_was_asked_for_many_rows_waits_in_its_backward(rows: int, waits: bool) -> None:
    table = nn.Embedding(50, 2)
    x = torch.zeros(rows, dtype=torch.long)
    with Watch(CPU, [x, *table.parameters()]) as watch:
        table(x).sum().backward()
    assert waits == (watch.fault is not None)


# Settings


CUDA = [torch.device("cuda", 0)] * 2
PLAIN = {"compile": "none", "on_non_finite": "raise", "on_oom": "raise"}


@pytest.mark.parametrize(
    ("devices", "beside", "said"),
    [
        ([CPU, CPU], {}, r"^cuda_graphs is true, but no stage is on a GPU; use cuda_graphs=false$"),
        (CUDA, {"compile": "static"}, r"together with compile=static: a layer is captured as it is, or compiled"),
        (CUDA, {"compile": "dynamic"}, "together with compile=dynamic"),
        (CUDA, {"on_non_finite": "skip"}, r"together with on_non_finite=skip: .*; leave out one of the two$"),
        (CUDA, {"on_oom": "split"}, "together with on_oom=split"),
        (CUDA * 5, {}, r"with 10 stages on cuda:0; expected at most 8, or cuda_graphs=false"),
    ],
    ids=str,
)
def test_what_is_not_possible_gets_one_line(devices: list[torch.device], beside: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_cuda_graphs(True, devices, **(PLAIN | beside))
    check_cuda_graphs(False, devices, **(PLAIN | beside))


def test_what_is_possible() -> None:
    check_cuda_graphs(True, [CPU, *CUDA], **PLAIN)
    check_cuda_graphs(True, CUDA, **(PLAIN | {"on_non_finite": "ignore"}))
    check_cuda_graphs(True, CUDA, **(PLAIN | {"on_non_finite": "stop-and-rewind"}))


def test_on_cpus_alone_a_pipeline_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeal.engine.pipeline.check_cuda_graphs", check_cuda_graphs)
    with pytest.raises(ConfigError, match="no stage is on a GPU"):
        Pipeline(package(), ["cpu"] * 2, cuda_graphs=True)


def test_stages_on_cpus_run_as_they_are_beside_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr("pipeal.engine.pipeline.check_cuda_graphs", lambda *_, **beside: None)
    with warnings.catch_warnings(), Pipeline(package(), ["cpu"] * 2, threads=1, cuda_graphs=True) as pipe:
        warnings.simplefilter("error")
        pipe.run(batches_of([4] * 5))
    assert not any(isinstance(one, GraphedLayer) for stage in pipe.stages for one in stage._gated.values())
