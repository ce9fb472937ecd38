"""A layer's forward and backward as two CUDA graphs, each given to the GPU as a whole.

::

    forward   inputs ─copy─► own inputs ─┐                        ┌─ outputs, losses ─copy─► handed on
              random words, drawn anew ──┴─► graph of the forward ┴─ what the backward needs
    backward                                                       └─► graph of the backward ─► the gradients

Graphs work on memory of their own, and all graphs of a layer on the same: no more than one batch is in a layer at a
time. What a replay leaves there, the next one writes over, wherever it was allocated. So what goes in is copied, and
so is what stages and reports hold on to. Gradients are handed out as they are, to be used up by the update; before the
next replay they are copied if there was none. All of it is given to the stage's compute stream, in order; captures are
made on another one, since threads that free pinned memory record events on the first.
"""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Protocol, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor, nn

from pipeal.engine.before import cut_graphs
from pipeal.engine.copies import copied, copy_of, one_of_each
from pipeal.engine.device import CudaDevice, Device
from pipeal.engine.forward import Passed, go_forward
from pipeal.errors import ScheduleError
from pipeal.packet import TrainableLayer, Tree, map_tensors, module_of, tensors
from pipeal.random import redraw, words_from

T = TypeVar("T")

_STREAMS = 32
_TAKEN: WeakSet[torch.cuda.Stream] = WeakSet()
_TAKING = threading.Lock()


class GraphWarning(UserWarning):
    """A layer runs without CUDA graphs, although they were asked for; or graphs could not yet be dropped."""


class Recorder(Protocol):
    """Records work that is given to a device, so that it can be given again."""

    def record(self, work: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """What gives it again, and what the work returned. Nothing is computed until then."""
        ...

    def drop(self) -> None:
        """Lets go of all that was recorded, whoever holds what gives it again; that must not be called any more."""
        ...


class CudaRecorder:
    """Records the CUDA graphs of one layer, which share their memory.

    Args:
        stream: Of nobody but this stage's recorders: what anyone else gives to it meanwhile would be recorded, too.
            cuBLAS has one workspace for it, in the memory of the layer that was captured first, and all graphs of the
            stage write there: its recorders drop their graphs together.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: list[torch.cuda.CUDAGraph] = []

    def record(self, work: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """Waits for the GPU before it begins. Other threads may use the GPU meanwhile, but not wait for all of it."""
        graph = torch.cuda.CUDAGraph()
        recording = torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local")
        failed: BaseException | None = None
        try:
            with _no_collection(), recording:
                try:
                    result = work()
                except BaseException as error:
                    failed = error
                    raise
        except BaseException as error:
            if failed is None or error is failed:
                raise
            raise failed from failed.__cause__  # the capture cannot end either, and would say so instead
        self._graphs.append(graph)
        return graph.replay, result

    def drop(self) -> None:
        """Call it once the replays have ended, and while nobody captures: it frees what they worked on."""
        for graph in self._graphs:
            with suppress(RuntimeError):  # a broken GPU frees nothing; whoever uses it next is told so
                graph.reset()
        self._graphs.clear()


def recorders(device: Device) -> Callable[[], Recorder] | None:
    """Makes recorders, one for each layer of a stage on that device; None where there are no graphs."""
    if not isinstance(device, CudaDevice):
        return None
    stream = own_stream(device.device)
    if stream is None:
        warnings.warn(
            f"a stage on {device} runs without CUDA graphs: other pipelines that are not yet gone hold all streams "
            "for captures",
            GraphWarning,
            stacklevel=2,
        )
        return None
    return partial(CudaRecorder, stream)


def own_stream(
    device: torch.device, new: Callable[[torch.device], torch.cuda.Stream] | None = None
) -> torch.cuda.Stream | None:
    """A stream that nobody else captures on while it lives; None where all are taken.

    PyTorch has 32 streams of each priority for each GPU, and then gives the first ones out again. Of this priority are
    those of captures alone, so that a stage of whichever pipeline never works on one of them. Where PyTorch lets graphs
    keep the priority of their capture, replays go before what runs without graphs on the same GPU.

    Args:
        device: The GPU.
        new: Gives the next stream out.
    """
    new = new or partial(torch.cuda.Stream, priority=-1)
    with _TAKING:
        for _ in range(_STREAMS):
            stream = new(device)
            if all(stream.cuda_stream != other.cuda_stream for other in _TAKEN):
                _TAKEN.add(stream)
                return stream
    return None


class Gradients:
    """The gradients of one layer, as far as they lie in the memory of its graphs."""

    def __init__(self) -> None:
        self._lent: list[tuple[nn.Parameter, Tensor]] = []

    @torch.no_grad()
    def hand_out(self, found: Sequence[tuple[nn.Parameter, Tensor]]) -> None:
        """Gives parameters their gradients, or adds to those that they have."""
        self._lent = [(one, own) for one, own in found if one.grad is None]
        gathered = [(one.grad, own) for one, own in found if one.grad is not None]
        for one, own in self._lent:
            one.grad = own
        if gathered:
            torch._foreach_add_([sum_of for sum_of, _ in gathered], [own for _, own in gathered])

    @torch.no_grad()
    def keep(self) -> None:
        """Before a replay: copies those whose update is yet to come."""
        for one, own in self._lent:
            if one.grad is own:
                one.grad = own.clone()
        self._lent.clear()


class LayerGraph:
    """One layer's forward and backward on inputs that are alike.

    The forward is recorded at once and computes nothing; the backward must be recorded before another forward.

    Args:
        layer: The layer.
        recorder: The layer's.
        gradients: The layer's.
        inputs: ``(x, y)``.
        draws: How many random words its forward draws, call by call.
        device: Where the layer is.
    """

    def __init__(
        self,
        layer: TrainableLayer,
        recorder: Recorder,
        gradients: Gradients,
        inputs: tuple[Tree, Tree],
        draws: Sequence[int],
        device: torch.device,
    ) -> None:
        self._layer = layer
        self._recorder = recorder
        self._gradients = gradients
        self._parameters = list(module_of(layer).parameters())
        own = copied(inputs)
        # Written to without autograd's knowledge: it would take the recorded forward for spoilt.
        self._slots = [one_of_each(tensor.data) for tensor in tensors(own)]
        words = [torch.empty(count, dtype=torch.int64, device=device) for count in draws]
        self._words = [word.data for word in words]

        # A graph of autograd that lives on would have the new backward end on the streams of the old one.
        cut_graphs(module_of(layer))

        def given(count: int, _: torch.device) -> Tensor:
            if not words or words[0].numel() != count:
                raise ScheduleError("the layer draws other random numbers than on like batches before")
            return words.pop(0)

        with words_from(given):
            self._replay_forward, self._passed = recorder.record(partial(go_forward, layer, *own))
        self._replay_backward: Callable[[], None] | None = None
        self._found: list[tuple[nn.Parameter, Tensor]] = []

    def forward(self, x: Tree, y: Tree) -> Passed:
        """As :func:`~pipeal.engine.forward.go_forward` on inputs like those recorded, under the key in force."""
        self._gradients.keep()
        with torch.no_grad():
            for slot, new in zip(self._slots, tensors((x, y)), strict=True):
                slot.copy_(one_of_each(new))
            for words in self._words:
                redraw(words)
            self._replay_forward()
            losses = self._passed.losses
            return Passed(copied(self._passed.onward), None if losses is None else [copy_of(loss) for loss in losses])

    def record_backward(self) -> None:
        """Records the backward of the forward that was recorded; computes nothing."""
        gathered = [one.grad for one in self._parameters]
        for one in self._parameters:
            one.grad = None
        self._replay_backward, _ = self._recorder.record(self._layer.backward)
        self._found = [(one, one.grad) for one in self._parameters if one.grad is not None]
        for one, before in zip(self._parameters, gathered, strict=True):
            one.grad = before
        # What is kept of this graph of autograd would have a later backward end on the stream of the capture.
        self._passed = Passed(map_tensors(Tensor.detach, self._passed.onward), self._passed.losses)
        cut_graphs(module_of(self._layer))

    def backward(self) -> None:
        """As the layer's own backward after :meth:`forward`; adds to gradients that are there."""
        assert self._replay_backward is not None
        self._replay_backward()
        self._gradients.hand_out(self._found)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Within it, nobody collects garbage: that of an older graph is not to be freed during a capture."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
