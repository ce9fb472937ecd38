"""CUDA graphs for the layers of a stage: what is captured when, so that schedules never change the result.

Of each layer the forward and the backward are captured, for each set of shapes by itself, on the batch after the first
:data:`WARM_UP` that had it. Those are ordinary batches: they learn as ever, and show whether a graph can hold what the
layer does (:class:`~pipeal.engine.capturable.Watch`). A capture computes nothing; the batch it is made with is the
first to be replayed. So no batch is learnt from twice, and what is captured when follows from the layer's own batches.
Graphs live as long as the workers, whose handles of CUDA's libraries they were warmed up with.

Not captured: updates, whose learning rates are numbers; inference; layers that may draw from PyTorch's default
generators, or that wait for the GPU; sets of shapes beyond the first :data:`GRAPHS_MOST`. They run as they are, and one
:class:`GraphWarning` for each layer says why. The words that :class:`pipeal.Dropout` draws are drawn before each
replay, outside of the graph, from the same key: its masks are those of a run without graphs.

A replay runs kernels, and no Python: what a layer decides there is decided once for each set of shapes, hooks that are
added later are not called, and a layer asked for its ``loss()`` knows nothing of it; reports do. While a layer is
captured (some milliseconds, alone behind :data:`~pipeal.engine.gate.GATE`) nobody else in the process may wait for the
whole GPU, as ``torch.cuda.synchronize`` does, or draw from its default generator.
"""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from enum import Enum

import torch
from torch import Tensor, nn

from pipeal.engine.blame import add_note
from pipeal.engine.capturable import Watch
from pipeal.engine.compiling import signature
from pipeal.engine.cudagraph import Gradients, LayerGraph, Recorder
from pipeal.engine.forward import Passed, go_forward
from pipeal.engine.gate import GATE
from pipeal.errors import ConfigError
from pipeal.packet import Path, TrainableLayer, Tree, module_of, tensors
from pipeal.random import words_from

WARM_UP = 3
"""The batches of a set of shapes before it is captured: libraries choose kernels and allocate on the first ones."""

GRAPHS_MOST = 8
"""The sets of shapes of one layer that are captured: each keeps inputs, outputs and gradients of its own."""

SHAPES_MOST = 256
"""The sets of shapes that are counted: beyond it, they are not fixed."""

STAGES_MOST = 8
"""The stages on one GPU whose layers are captured: PyTorch has 32 streams for each GPU, and then gives the first ones
out again. A capture would record what another stage gives to such a stream."""


class GraphWarning(UserWarning):
    """A layer runs without CUDA graphs, although they were asked for."""


def check_cuda_graphs(
    wanted: bool, devices: Iterable[torch.device], *, compile: str, on_non_finite: str, on_oom: str
) -> None:
    """Refuses graphs where they are not possible.

    Args:
        wanted: Whether it is asked for.
        devices: The stages' devices. Stages on CPUs run as they are beside others on GPUs.
        compile: See :class:`~pipeal.engine.pipeline.Pipeline`, and so for the others.
        on_non_finite: What happens on a loss that is not finite.
        on_oom: What happens on a batch that does not fit.

    Raises:
        ConfigError: It is asked for, and not possible.
    """
    if not wanted:
        return
    on = Counter(device for device in devices if device.type == "cuda")
    if not on:
        raise ConfigError("cuda_graphs is true, but no stage is on a GPU; use cuda_graphs=false")
    for device, stages in on.items():
        if stages > STAGES_MOST:
            raise ConfigError(
                f"cuda_graphs is true with {stages} stages on {device}; expected at most {STAGES_MOST}, or "
                "cuda_graphs=false"
            )
    beside = {"compile": compile, "on_non_finite": on_non_finite, "on_oom": on_oom}
    for name, refused, why in (
        ("compile", ("static", "dynamic"), "a layer is captured as it is, or compiled"),
        ("on_non_finite", ("skip",), "what a batch did cannot be taken back"),
        ("on_oom", ("split",), "a batch cannot be taken apart"),
    ):
        if beside[name] in refused:
            raise ConfigError(
                f"cuda_graphs is true together with {name}={beside[name]}: {why}; leave out one of the two"
            )


class _Step(Enum):
    """What becomes of one batch."""

    AS_IT_IS = 0
    WATCHED = 1
    CAPTURED = 2
    REPLAYED = 3


class GraphedLayer:
    """One layer's graphs, and how often it met what.

    Args:
        layer: The layer.
        name: For messages.
        device: Where it is.
        new_recorder: Makes recorders for this layer.
        draws: Whether its forward may draw from PyTorch's default generators.
    """

    def __init__(
        self,
        layer: TrainableLayer,
        name: str,
        device: torch.device,
        new_recorder: Callable[[], Recorder],
        *,
        draws: bool,
    ) -> None:
        self._layer = layer
        self._module = module_of(layer)
        self._name = name
        self._device = device
        self._new_recorder = new_recorder
        self._closed = False
        self.forget()
        if draws:
            self._close(
                "it may draw from PyTorch's default generators, whose numbers a graph would repeat; pipeal.Dropout, "
                "and `draws_from_default = False` in the class of a module that draws nothing, let it be captured"
            )

    def forget(self) -> None:
        """Before and after a life of the pipeline: drops the graphs. The layers of a stage do so together."""
        self._graphs: dict[Hashable, LayerGraph] = {}
        self._gradients, self._recorder = Gradients(), self._new_recorder()
        self._met: dict[Hashable, list[list[int]]] = {}
        self._thread: int | None = None
        self._step = _Step.AS_IT_IS
        self._like_now: Hashable = None
        self._watch: Watch | None = None

    @contextmanager
    def forward(self, inputs: Tree, abandoned: threading.Event) -> Iterator[None]:
        """Within it, :meth:`go_forward` may run on ``inputs``; alone, if it captures."""
        self._step = _Step.AS_IT_IS
        if self._graphs or not self._closed:
            self._like_now = self._like(inputs)
            self._step = self._next()
        with self._admitted(abandoned):
            yield

    def after_forward(self, backward: bool, abandoned: threading.Event) -> AbstractContextManager[None]:
        """Within it, :meth:`go_backward` may run, or the layer's update, which is never captured."""
        return self._admitted(abandoned) if backward else GATE.shared(abandoned)

    def inference(self, x: Tree, path: Path, abandoned: threading.Event | None, *, compiled: bool = True) -> Tree:  # noqa: ARG002
        """The layer's inference along one path, as it is."""
        with GATE.shared(abandoned):
            return self._layer.inference(x, path)

    def go_forward(self, x: Tree, y: Tree) -> Passed:
        """As :func:`~pipeal.engine.forward.go_forward`."""
        if self._step is _Step.AS_IT_IS:
            return go_forward(self._layer, x, y)
        if self._step is _Step.WATCHED:
            self._watch = Watch(self._device, [*tensors((x, y)), *self._tensors])
            with self._watch, words_from(self._watch.words):
                return go_forward(self._layer, x, y)
        if self._step is _Step.CAPTURED:
            draws = self._met[self._like_now][-1]
            with self._explained():
                graph = LayerGraph(self._layer, self._recorder, self._gradients, (x, y), draws, self._device)
            self._graphs[self._like_now] = graph
        return self._graphs[self._like_now].forward(x, y)

    def go_backward(self) -> None:
        """The layer's backward."""
        step, self._step = self._step, _Step.AS_IT_IS
        if step is _Step.AS_IT_IS:
            self._layer.backward()
        elif step is _Step.WATCHED:
            watch, self._watch = self._watch, None
            assert watch is not None
            watch.know(one.grad for one in self._module.parameters() if one.grad is not None)
            with watch:
                self._layer.backward()
            self._judge(watch)
        else:
            graph = self._graphs[self._like_now]
            if step is _Step.CAPTURED:
                with self._explained():
                    graph.record_backward()
            graph.backward()

    def _admitted(self, abandoned: threading.Event) -> AbstractContextManager[None]:
        return GATE.alone(abandoned) if self._step is _Step.CAPTURED else GATE.shared(abandoned)

    def _next(self) -> _Step:
        like = self._like_now
        if like in self._graphs:
            return _Step.REPLAYED
        if self._closed:
            return _Step.AS_IT_IS
        if len(self._met.setdefault(like, [])) < WARM_UP:
            if len(self._met) <= SHAPES_MOST:
                return _Step.WATCHED
            self._close(f"it has met more than {SHAPES_MOST} sets of shapes")
        elif len(self._graphs) < GRAPHS_MOST:
            return _Step.CAPTURED
        else:
            self._close(f"it meets more sets of shapes than the {GRAPHS_MOST} that have one")
        return _Step.AS_IT_IS

    def _judge(self, watch: Watch) -> None:
        """After a watched batch: it counts, or the layer is captured no more."""
        met = self._met[self._like_now]
        if watch.fault is not None:
            self._close(watch.fault)
        elif met and met[-1] != watch.draws:
            self._close("it does not draw alike on batches that are alike")
        else:
            met.append(watch.draws)

    def _close(self, why: str) -> None:
        """No more graphs but those there are."""
        self._closed = True
        self._met.clear()
        more = "more " if self._graphs else ""
        warnings.warn(f"{self._name} runs without {more}CUDA graphs: {why}", GraphWarning, stacklevel=3)

    def _like(self, inputs: Tree) -> Hashable:
        """All that a graph holds, as far as it can change between two batches."""
        if self._thread != threading.get_ident():
            # Libraries keep a handle for each thread, which must not be made within a capture.
            self._thread = threading.get_ident()
            self._met.clear()
            self._parts: list[nn.Module] = list(self._module.modules())
            self._tensors: list[Tensor] = [*self._module.parameters(), *self._module.buffers()]
        return (
            signature(inputs),
            tuple(part.training for part in self._parts),
            tuple((one.requires_grad, one.data_ptr()) for one in self._tensors),
            torch.get_float32_matmul_precision(),
            torch.are_deterministic_algorithms_enabled(),
        )

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            add_note(error, f"while {self._name} was captured as a CUDA graph; cuda_graphs=false trains without")
            raise
