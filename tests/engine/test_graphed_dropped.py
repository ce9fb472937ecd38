"""CUDA graphs per layer, without a GPU: when they are dropped, and what is kept until then."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeal import Pipeline
from pipeal.engine.cudagraph import CudaRecorder
from pipeal.engine.gate import GATE, Abandoned
from pipeal.engine.graphed import WARM_UP, GraphedLayer, GraphWarning

from .paper import World
from .tape import TapeRecorder
from .test_graphed import batches_of, package, tapes, warned

__all__ = ["tapes"]


def graphed_of(pipe: Pipeline) -> list[GraphedLayer]:
    return [graphed for stage in pipe.stages for graphed in stage._graphed.values()]


def test_a_layer_that_was_closed_is_tried_again_in_the_next_life(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its graphs, and without a word, it would run as it is for ever."""
    monkeypatch.setattr("pipeal.engine.graphed.GRAPHS_MOST", 1)
    pipe, rows = Pipeline(package(), ["cpu"], "sequential", threads=1, cuda_graphs=True), [4] * 5 + [3] * 5
    for _ in range(2):
        TapeRecorder.recorded = 0
        with pytest.warns(GraphWarning) as caught, pipe:
            pipe.run(batches_of(rows))
        assert len(warned(caught)) == 4
        assert TapeRecorder.recorded == 2 * 4
    with warnings.catch_warnings(), pipe:
        warnings.simplefilter("error", GraphWarning)
        pipe.run(batches_of([3] * 5))
        assert all(len(graphed._graphs) == 1 for graphed in graphed_of(pipe))


def test_a_layer_that_may_draw_stays_closed() -> None:
    model = package()
    model[1].blocks()["f"].append(nn.Dropout(0.5))
    with pytest.warns(GraphWarning, match="layer 1 .* may draw from PyTorch's default generators"):
        pipe = Pipeline(model, ["cpu"], "sequential", threads=1, cuda_graphs=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", GraphWarning)
        for _ in range(2):
            with pipe:
                pipe.run(batches_of([4] * 5))
                assert [len(graphed._graphs) for graphed in graphed_of(pipe)] == [1, 0, 1, 1]


def test_graphs_of_one_thread_are_not_replayed_on_another(tapes: type[TapeRecorder]) -> None:
    """Of a serial schedule, whose work the caller does: libraries keep handles, and workspaces, for each thread."""
    batches = batches_of([4] * (WARM_UP + 4))

    def trained(**options: Any) -> list[Tensor]:
        model = package()
        with Pipeline(model, ["cpu"], "sequential", threads=1, **options) as pipe:
            for batch in batches[:-2]:
                pipe.submit(*batch)
            thread = threading.Thread(target=pipe.submit, args=batches[-2])
            thread.start()
            thread.join()
            if options:
                assert not any(graphed._graphs for graphed in graphed_of(pipe))
                assert all(len(graphed._retired) == 1 for graphed in graphed_of(pipe))
            pipe.submit(*batches[-1])
        return list(model.state_dict().values())

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert all(torch.equal(*both) for both in zip(trained(cuda_graphs=True), trained(), strict=True))
    finally:
        torch.set_num_threads(before)
    assert tapes.recorded == 8


def test_graphs_go_even_where_somebody_holds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a traceback does, after a failure: their memory would be held until it goes."""
    said: list[str] = []

    class Graph:
        def replay(self) -> None: ...

        def reset(self) -> None:
            said.append("reset")
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    @contextmanager
    def captures(*_: Any, **options: Any) -> Iterator[None]:
        yield

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", captures)
    recorder = CudaRecorder(SimpleNamespace())  # type: ignore[arg-type]
    held = [recorder.record(lambda: None)[0] for _ in range(2)]
    recorder.drop()
    recorder.drop()
    assert said == ["reset"] * len(held)


def test_the_end_of_a_life_drops_what_recorders_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    dropped: list[bool] = []
    drop = TapeRecorder.drop

    def drops(self: TapeRecorder) -> None:
        if self._tapes:
            dropped.append(GATE._inside == 1)
        drop(self)

    monkeypatch.setattr(TapeRecorder, "drop", drops)
    with Pipeline(package(), ["cpu"] * 2, threads=1, cuda_graphs=True) as pipe:
        pipe.run(batches_of([4] * 5))
    assert dropped == [True] * 4


@contextmanager
def endless_gate() -> Iterator[None]:
    """Somebody else compiles, for very long."""
    inside, done = threading.Event(), threading.Event()

    def compiles() -> None:
        with GATE.alone():
            inside.set()
            done.wait(120)

    thread = threading.Thread(target=compiles)
    thread.start()
    assert inside.wait(120)
    try:
        yield
    finally:
        done.set()
        thread.join()


@contextmanager
def endless_work() -> Iterator[None]:
    """A kernel that does not end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipeal.engine.device.base.Device.rests_within", lambda self, seconds: False)
        yield


@pytest.mark.parametrize(
    ("standing", "why"),
    [(endless_gate, "somebody else was compiling, or capturing for 0 s"), (endless_work, "cpu did not end its work")],
)
def test_the_end_of_a_life_waits_for_nobody_without_an_end(
    standing: Callable[[], Any], why: str, monkeypatch: pytest.MonkeyPatch, tapes: type[TapeRecorder]
) -> None:
    """Graphs whose replays may be under way are kept, are replayed no more, and go before the next life."""
    monkeypatch.setattr("pipeal.engine.stage.DROP_PATIENCE_S", 0.2)
    pipe, wanted = (Pipeline(package(), ["cpu"], "sequential", threads=1, cuda_graphs=on) for on in (True, False))
    batches = batches_of([4] * 6)

    with pytest.warns(GraphWarning, match="stage 0 keeps its CUDA graphs, and their memory") as caught:  # noqa: PT031
        pipe.__enter__()
        pipe.run(batches)
        with standing():
            pipe.__exit__(None, None, None)
    (said,) = warned(caught)
    assert why in said
    assert all(len(graphed._retired) == 1 and not graphed._graphs for graphed in graphed_of(pipe))
    with warnings.catch_warnings(), pipe:
        warnings.simplefilter("error", GraphWarning)
        assert not any(graphed._retired for graphed in graphed_of(pipe))
        pipe.run(batches)
    with wanted:
        wanted.run(batches)
    with wanted:
        wanted.run(batches)
    assert tapes.recorded == 2 * 8
    found = zip(pipe.model.state_dict().values(), wanted.model.state_dict().values(), strict=True)  # type: ignore[union-attr]
    assert all(torch.equal(*both) for both in found)


def test_patience_ends_and_leaves_no_place_in_the_queue() -> None:
    with endless_gate():
        with pytest.raises(Abandoned), GATE.shared(patience_s=0.01):
            pass
        assert not GATE._queue
    with GATE.shared(patience_s=0.0):
        pass


def test_making_a_pipeline_waits_for_nobody_elses_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights are waited for on the caller's stream: of the whole GPU no capture would stand a wait."""
    world = World(gpus=1)
    world.install(monkeypatch)

    def refuse(_: Any = None) -> None:
        raise AssertionError("waits for the whole GPU")

    monkeypatch.setattr(torch.cuda, "synchronize", refuse)
    model = [package()[0]]
    monkeypatch.setattr(nn.Module, "to", lambda self, *_: self)  # nothing can lie on paper
    with endless_gate():
        Pipeline(model, ["cuda:0"])
