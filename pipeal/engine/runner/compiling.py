"""``torch.compile`` for the layers of a stage: what is compiled when, so that schedules never change the result.

Of a layer are compiled the modules that it calls in its forward (of an ``AL`` layer the encoder side and the label
side, of ``BP`` the network), and each path of its inference, as :class:`~pipeal.engine.runner.regions.Region`. Not its
own forward: what that keeps for the backward is the layer's affair, and some layers go back twice.

Compilation is not thread-safe, and it is lazy: forwards compile at the first call with new shapes, backwards at the
first backward after it. So all actions of all pipelines that compile pass one
:data:`~pipeal.engine.runner.compile_gate.GATE`: an action that may compile, because its layer has not seen its like,
runs alone; all others run side by side. A layer sees the same actions in the same order under every schedule. PyTorch's
deterministic mode is ``warn`` at times meanwhile: code of yours on other threads sees it.

``dynamic`` compiles with the first batch that comes: another one, as after loading a checkpoint, may leave kernels that
round otherwise.
"""

from __future__ import annotations

import dataclasses
import threading
import warnings
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pipeal.core.errors import ConfigError, first_line
from pipeal.core.modules import module_of
from pipeal.core.options import Compile
from pipeal.core.packet import Packet
from pipeal.core.protocols import WAY, CutsOutputs, Path, TrainableLayer
from pipeal.core.tree import Tree
from pipeal.engine.runner.compile_gate import GATE
from pipeal.engine.runner.layer import Around, Passed
from pipeal.engine.runner.regions import CompileWarning, Region, compiled, compiler_settings, installed, regions
from pipeal.engine.schedule import Action


def check_compile(compile: Compile, devices: Iterable[torch.device]) -> None:
    """Refuses to compile on a machine where it does not work.

    Raises:
        ConfigError: Nothing can be compiled for one of the devices here.
    """
    if compile != "none":
        for device in {device.type: device for device in devices}.values():  # one of each kind
            _check_compiler(device)


class CompiledLayer:
    """One layer's regions, and what of it has been compiled already.

    Args:
        layer: The layer; it is altered only while a forward runs.
        name: For messages.
        how: ``static`` or ``dynamic``.
        draws: Whether its forward may draw from PyTorch's default generators.
    """

    def __init__(self, layer: TrainableLayer, name: str, how: Compile, *, draws: bool) -> None:
        module = module_of(layer)
        self._layer = layer
        self._dynamic = dynamic = how == "dynamic"
        self._parts = list(module.modules())
        self._parameters = list(module.parameters())
        self._seen: set[Hashable] = set()
        self._forward_like: Hashable = None
        self._paths: dict[Path, Region] = {}
        for path in WAY:
            self._paths[path] = Region(f"{name}, inference {path!r}", partial(_infer, layer, path), dynamic=dynamic)
        cut = layer.cut_parts() if isinstance(layer, CutsOutputs) else ()
        self._regions = list(regions(module, name, dynamic=dynamic, cut=cut))
        if draws and not _compiles_under_keys():
            self._regions = []
            warnings.warn(
                f"{name} may draw from PyTorch's default generators, which this version of PyTorch cannot compile "
                "exactly, and trains uncompiled; pipeal.Dropout, and `draws_from_default = False` in the class of a "
                "module that draws nothing, let it be compiled",
                CompileWarning,
                stacklevel=2,
            )

    @contextmanager
    def forward(self, inputs: Tree, abandoned: threading.Event) -> Iterator[None]:
        """Within it, the layer's forward on ``inputs`` may run, and runs compiled."""
        parts = [part for region in self._regions for part in region.in_force()]
        # What stands in for a region that was refused has not been compiled for the shapes before.
        self._forward_like = self._like(inputs, abandoned), tuple(map(id, parts))
        with self._admitted(("forward", self._forward_like), abandoned), installed(parts):
            yield

    def backward(self, abandoned: threading.Event) -> AbstractContextManager[None]:
        """Within it, the backward of the last forward may run."""
        return self._admitted(("backward", self._forward_like), abandoned)

    def inference(self, x: Tree, path: Path, abandoned: threading.Event | None, *, compiled: bool = True) -> Tree:
        """The layer's inference along one path, compiled or as it is. Call it on one thread at a time."""
        if not compiled:
            with GATE.shared(abandoned):
                return self._layer.inference(x, path)
        with self._admitted((path, self._like(x, abandoned)), abandoned):
            return self._paths[path](x)

    @contextmanager
    def _admitted(self, what: Hashable, abandoned: threading.Event | None) -> Iterator[None]:
        if what in self._seen:
            with GATE.shared(abandoned):
                yield
        else:
            with GATE.alone(abandoned), compiler_settings(dynamic=self._dynamic):
                yield
            self._seen.add(what)

    def _like(self, inputs: Tree, abandoned: threading.Event | None) -> Hashable:
        """All that the compiler makes another graph for, as far as it can change between two batches."""
        with GATE.shared(abandoned):  # who compiles alters the process's settings meanwhile
            process = _numerics()
        return (
            _signature(inputs),
            tuple(part.training for part in self._parts),
            tuple(parameter.requires_grad for parameter in self._parameters),
            torch.is_grad_enabled(),
            torch.get_num_threads(),
            process,
        )


@dataclass(eq=False)
class Compiled(Around):
    """Waits for a layer's turn at the compiler, and has its forward run compiled.

    Attributes:
        compiled: The layer's regions.
        abandoned: When set, a wait ends with :class:`Abandoned`.
    """

    compiled: CompiledLayer
    abandoned: threading.Event

    def forward(self, packet: Packet, x: Tree, y: Tree, rows: range | None = None) -> Passed:
        """As :meth:`Runner.forward`."""
        with self.compiled.forward((x, y), self.abandoned):
            return self.inner.forward(packet, x, y, rows)

    def around(self, action: Action, packet: Packet, rows: range | None) -> AbstractContextManager[None]:  # noqa: ARG002
        """The turn of a backward, or of an update, which compiles nothing."""
        return self.compiled.backward(self.abandoned) if action is Action.BACKWARD else GATE.shared(self.abandoned)


def _numerics() -> Hashable:
    """What of the process's settings decides how operators compute."""
    # Asked for it by its older name, PyTorch raises where the newer, of 2.9 and later, was used.
    newer = getattr(torch.backends.cuda.matmul, "fp32_precision", None)
    return (
        torch.get_float32_matmul_precision() if newer is None else str(newer),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.get_default_dtype(),
    )


def _signature(tree: Tree) -> Hashable:
    """Shapes, strides and types of the tensors of a tree, and its plain values."""
    if isinstance(tree, Tensor):
        strides = tree.stride() if tree.layout is torch.strided else tree.layout
        return tree.shape, strides, tree.dtype, tree.device, tree.is_inference()
    if isinstance(tree, tuple | list):
        return type(tree), tuple(_signature(part) for part in tree)
    if isinstance(tree, Mapping):
        return type(tree), tuple((key, _signature(part)) for key, part in tree.items())
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return type(tree), tuple(_signature(getattr(tree, field.name)) for field in dataclasses.fields(tree))
    return tree if isinstance(tree, int | float | str) else type(tree).__qualname__


def _infer(layer: TrainableLayer, path: Path, x: Tree) -> Tree:
    return layer.inference(x, path)


def _compiles_under_keys() -> bool:
    """Whether a forward that is keyed operator by operator can be compiled, or would be left uncompiled silently.

    :class:`pipeal.core.rng.KeyedDefault` always asks for it; only a PyTorch that knows the question listens.
    """
    return hasattr(TorchDispatchMode, "ignore_compile_internals")


@cache
def _check_compiler(device: torch.device) -> None:
    """Compiles a trivial function for a device; once per process."""
    with GATE.alone(), compiler_settings(dynamic=False):
        try:
            compiled(_trivial, torch.get_num_threads(), dynamic=False)(torch.zeros(8, device=device))
        except Exception as error:
            raise ConfigError(
                f"nothing can be compiled for device '{device.type}' here: {first_line(error)}; install "
                f"{_needed(device.type)}, or use compile='none'"
            ) from error


def _trivial(x: Tensor) -> Tensor:
    return x + 1


def _needed(kind: str) -> str:
    return "Triton and a C compiler" if kind == "cuda" else "a C++ compiler such as g++ (or name one in CXX)"
