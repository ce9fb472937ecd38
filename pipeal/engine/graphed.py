"""CUDA graphs for the layers of a stage: what is captured when, so that schedules never change the result.

Of each layer the forward and the backward are captured, for each set of shapes by itself, on the batch after the first
:data:`WARM_UP` that had it. Those are ordinary batches: they learn as ever, and show whether a graph can hold what the
layer does (:class:`~pipeal.engine.capturable.Watch`). A capture computes nothing; the batch it is made with is the
first to be replayed. So no batch is learnt from twice, and what is captured when follows from the layer's own batches.
Graphs live as long as the workers, whose handles of CUDA's libraries they were warmed up with.

Not captured: updates, whose learning rates are numbers; inference; layers that may draw from PyTorch's default
generators, or that wait for the GPU; sets of shapes beyond the first :data:`GRAPHS_MOST`. They run as they are, and one
:class:`GraphWarning` for each layer, in each life of the pipeline, says why. The words that :class:`pipeal.Dropout`
draws are drawn before each replay, outside of the graph, from the same key: its masks are those of a run without
graphs.

A replay runs kernels, and no Python: what a layer decides there is decided once for each set of shapes, hooks that are
added later are not called, and a layer asked for its ``loss()`` knows nothing of it; reports do. While a layer is
captured (some milliseconds, alone behind :data:`~pipeal.engine.gate.GATE`) nobody else in the process may wait for the
whole GPU, as ``torch.cuda.synchronize`` does, free what PyTorch keeps of its memory, as ``torch.cuda.empty_cache``
does, or draw from its default generator.

What differs from a run without graphs, and nobody sees:

* Numbers that modules hold in Python, as the ``p`` of a dropout or the ``momentum`` of a batch norm, and PyTorch's
  settings of cuDNN (``benchmark``, ``allow_tf32``), of attention (``sdp_kernel``) and of reduced precision in sums stay
  those of the capture: set them before the pipeline is opened.
* Gradients lie in memory that the next replay writes over. An optimizer of your own that keeps ``p.grad`` beyond its
  update must clone it; those of ``torch.optim`` keep none.
* Where a layer goes back twice over the same parameters, and gradients of several batches are gathered, a graph adds
  ``g + (a + b)`` where PyTorch adds ``(g + a) + b``: the same up to rounding.
* A graph's inputs begin at multiples of 512 bytes, which those of the layers before need not do; libraries may choose
  another kernel there, which may round otherwise.
* What a forward keeps in the layer, such as for the layer's own ``update()``: a replay runs no Python, so numbers stay
  those of the last capture, and tensors those of the last set of shapes that was captured. Numbers that change within
  the first :data:`WARM_UP` batches are seen, and the layer is not captured.
* A function that its author gave to ``torch.compile`` and calls within a forward (see
  :class:`~pipeal.engine.capturable.Watch`).

Graphs of weights that have since moved elsewhere, and those of a thread that another has followed, count among
the :data:`GRAPHS_MOST` until the pipeline is closed.
"""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from enum import Enum

import torch

from pipeal.engine.alike import Makeup
from pipeal.engine.before import left_uncut
from pipeal.engine.blame import add_note
from pipeal.engine.capturable import Batch, Watch
from pipeal.engine.copies import overlaps
from pipeal.engine.cudagraph import Gradients, LayerGraph, Recorder
from pipeal.engine.cudagraph import GraphWarning as GraphWarning
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
"""The stages of one pipeline on one GPU whose layers are captured: of the 32 streams that PyTorch has for captures on
each GPU, so that several pipelines may have theirs (:func:`~pipeal.engine.cudagraph.own_stream`)."""

CHANGES_MOST = 8
"""How often, in one life, modules, parameters or buffers of a layer may be replaced by others."""


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
        self._draws = draws
        self._begin_anew()
        if draws:
            self._close(
                "it may draw from PyTorch's default generators, whose numbers a graph would repeat; pipeal.Dropout, "
                "and `draws_from_default = False` in the class of a module that draws nothing, let it be captured"
            )

    def forget(self) -> None:
        """Before and after a life of the pipeline: drops the graphs, whoever holds them still, as a traceback may, and
        what closed the layer. The layers of a stage do so together, once all replays have ended."""
        self._recorder.drop()
        self._begin_anew()

    def retire(self) -> None:
        """Has no graph of before run any more. They are kept: their replays may yet be under way."""
        self._met.clear()
        self._retired += self._graphs.values()
        self._graphs.clear()

    def _begin_anew(self) -> None:
        self._closed = self._draws
        self._graphs: dict[Hashable, LayerGraph] = {}
        self._retired: list[LayerGraph] = []
        self._gradients, self._recorder = Gradients(), self._new_recorder()
        self._met: dict[Hashable, list[Batch]] = {}
        self._thread: int | None = None
        self._step = _Step.AS_IT_IS
        self._like_now: Hashable = None
        self._watch: Watch | None = None
        self._makeup, self._changes = Makeup(self._module), 0

    @contextmanager
    def forward(self, inputs: Tree, abandoned: threading.Event) -> Iterator[None]:
        """Within it, :meth:`go_forward` may run on ``inputs``; alone, if it captures."""
        self._step = _Step.AS_IT_IS
        if self._graphs or not self._closed:
            self._follow()
        if self._graphs or not self._closed:
            self._like_now, fault = self._makeup.like(inputs)
            if fault is None:
                self._step = self._next()
            elif not self._closed:
                self._close(fault)
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
        if self._step is _Step.CAPTURED:
            left = left_uncut(self._module)
            if left is not None:
                self._close(f"{left} keeps a result whose graph of autograd cannot be cut; detach what is kept")
                self._step = _Step.AS_IT_IS
        if self._step is _Step.AS_IT_IS:
            return go_forward(self._layer, x, y)
        if self._step is _Step.WATCHED:
            self._watch = Watch(self._device, tensors((x, y)), self._makeup.tensors)
            with self._watch, words_from(self._watch.words):
                passed = go_forward(self._layer, x, y)
            if any(overlaps(tensor) for tensor in tensors((x, y, passed.onward))):
                self._watch.fault = self._watch.fault or (
                    "what it is given, or hands on, overlaps with itself, as windows that unfold() gives; clone it"
                )
            return passed
        if self._step is _Step.CAPTURED:
            draws = self._met[self._like_now][-1].draws
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
            gathered = [one.grad for one in self._module.parameters()]
            watch.know(grad for grad in gathered if grad is not None)
            with watch:
                self._layer.backward()
            self._judge(watch, Batch(watch, tuple(grad is None for grad in gathered)))
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
        elif len(self._graphs) + len(self._retired) < GRAPHS_MOST:
            return _Step.CAPTURED
        else:
            self._close(f"it meets more sets of shapes than the {GRAPHS_MOST} that have one")
        return _Step.AS_IT_IS

    def _judge(self, watch: Watch, batch: Batch) -> None:
        """After a watched batch: it counts, or the layer is captured no more."""
        met = self._met[self._like_now]
        if watch.fault is not None:
            self._close(watch.fault)
        elif self._makeup.replaced():
            self._close("its forward or backward puts another module, parameter or buffer in the place of one")
        elif (unlike := batch.unlike(met)) is not None:
            self._close(unlike)
        else:
            met.append(batch)

    def _close(self, why: str) -> None:
        """No more graphs but those there are."""
        self._closed = True
        self._met.clear()
        more = "more " if self._graphs else ""
        warnings.warn(f"{self._name} runs without {more}CUDA graphs: {why}", GraphWarning, stacklevel=3)

    def _follow(self) -> None:
        """Looks whether the layer consists of what it did, on the thread that it was on."""
        if self._thread != threading.get_ident():
            # Libraries keep a handle for each thread, which must not be made within a capture.
            self._thread = threading.get_ident()
            self.retire()
        elif not self._makeup.replaced():
            return
        if self._makeup.replaced():
            self.retire()  # graphs would go on with what was replaced
            self._changes += 1
        self._makeup = Makeup(self._module)
        fault = self._makeup.fault()
        if fault is None and self._changes > CHANGES_MOST:
            fault = f"its modules, parameters or buffers were replaced by others more than {CHANGES_MOST} times"
        if fault is not None and not self._closed:
            self._close(fault)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            add_note(error, f"while {self._name} was captured as a CUDA graph; cuda_graphs=false trains without")
            raise
