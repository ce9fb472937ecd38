"""Randomness that belongs to a layer and a batch, never to a process.

Law 1 (a schedule never changes the result) needs every random number of a forward to depend on nothing but
``(seed, layer, batch)``. PyTorch's default generators are process-wide: threads that share one draw in racing
order. So the engine opens :func:`keyed` around each forward, and

* :func:`generator` gives code that knows about it a generator of that key, and :func:`random_words` numbers from it
  (:class:`pipeal.methods.dropout.Dropout`);
* :class:`KeyedDefault` makes code that does not (``nn.Dropout``, ``torch.rand``, attention with dropout, any
  operator that draws) draw from the key as well, operator by operator.
"""

from __future__ import annotations

import hashlib
import struct
import threading
from collections.abc import Mapping, Sequence
from operator import index
from typing import Any, SupportsIndex

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pipeal.core.errors import ConfigError, ScheduleError


def key_seed(*parts: int) -> int:
    """Mixes whole numbers into a seed of 63 bits, the same in every process.

    >>> key_seed(0, 1, 2) == key_seed(0, 1, 2) != key_seed(0, 2, 1)
    True
    """
    packed = struct.pack(f"<{len(parts)}q", *parts)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1


def check_seed(seed: object) -> None:
    """Refuses what is no seed of a run.

    Raises:
        ConfigError: It is no whole number, or below 0, or not below 2^63.
    """
    if not (isinstance(seed, SupportsIndex) and 0 <= index(seed) < 2**63):
        raise ConfigError(f"seed is {seed!r}; expected a whole number, at least 0 and below 2^63")


class _Key:
    """The key in force on one thread, and the generators already made from it, one per device."""

    __slots__ = ("generators", "last_gpu", "parts", "replays")

    def __init__(self, parts: tuple[int, ...], *, replays: bool = False) -> None:
        self.parts = parts
        self.replays = replays  # whether it is drawn again, within a backward, what was drawn before
        self.generators: dict[torch.device, torch.Generator] = {}
        self.last_gpu: torch.Generator | None = None


class _Local(threading.local):
    key: _Key | None = None


_local = _Local()

_LOWEST, _HIGHEST = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max


class keyed:  # noqa: N801  used as a function is; a class, because the engine enters it three times per batch
    """Within it, on this thread, all randomness follows from ``parts`` (usually seed, layer, batch).

    Args:
        parts: Whole numbers that name the place of the draw.
        whole_default: Also redirect operators that draw from PyTorch's default generators
            (:class:`KeyedDefault`). It costs some microseconds per operator, so the engine asks for it only
            where :func:`~pipeal.core.draws.may_draw` says that a module may need it.
    """

    __slots__ = ("_before", "_default", "_key")

    def __init__(self, *parts: int, whole_default: bool = False) -> None:
        self._key = _Key(parts)
        self._default = KeyedDefault() if whole_default else None

    def __enter__(self) -> None:
        self._before, _local.key = _local.key, self._key
        if self._default is not None:
            self._default.__enter__()

    def __exit__(self, *raised: object) -> None:
        if self._default is not None:
            self._default.__exit__(*raised)
        _local.key = self._before


class replayed:  # noqa: N801  as :class:`keyed`
    """Within it, what is drawn is what was drawn after it was made: by the key of then, from generators as they were.

    For a part of a forward that is computed again within the backward, on the thread of the forward. Outside of
    :class:`keyed` it does nothing. It may be entered several times, one after the other.
    """

    __slots__ = ("_before", "_key", "_last_gpu", "_states")

    def __init__(self) -> None:
        self._key = _local.key
        found = {} if self._key is None else self._key.generators
        self._states = {device: own.get_state() for device, own in found.items()}
        last = None if self._key is None else self._key.last_gpu
        self._last_gpu = None if last is None else last.device

    def __enter__(self) -> None:
        self._before = _local.key
        if self._key is None:
            return
        again = _Key(self._key.parts, replays=True)
        for device, state in self._states.items():
            again.generators[device] = torch.Generator(device)
            again.generators[device].set_state(state)
        if self._last_gpu is not None:
            again.last_gpu = again.generators[self._last_gpu]
        _local.key = again

    def __exit__(self, *raised: object) -> None:
        _local.key = self._before


def generator(device: torch.device) -> torch.Generator | None:
    """The generator of the key in force, or None (PyTorch's default) outside :func:`keyed`.

    One key has one generator per device: successive draws within one forward differ from each other. Where a forward
    goes on from one GPU to the next, so does the generator: on alike GPUs it draws what it would draw on one.
    """
    key = _local.key
    if key is None or device.type == "meta":  # there, nothing is drawn
        return None
    if device.type == "cpu":
        device = torch.device("cpu")  # "cpu:0" is the same place
    elif device.index is None:
        device = torch.device(device.type, torch.cuda.current_device())
    found = key.generators.get(device)
    if found is None:
        found = torch.Generator(device)
        found.manual_seed(key_seed(*key.parts))
        key.generators[device] = found
    if device.type == "cuda" and key.last_gpu is not found:
        if key.last_gpu is not None:
            found.set_state(key.last_gpu.get_state())
        key.last_gpu = found
    return found


def random_words(count: int, device: torch.device) -> Tensor:
    """``(count,)`` random words of 64 bits, as int64, from the key in force, else from PyTorch's default generator.

    Raises:
        ScheduleError: A key is in force, and a backward under way: a part of a forward is computed again in it. (A
            backward of your own cannot draw by this either; take ``torch.rand`` and its like.)
    """
    if _local.key is not None and _goes_back() and not _local.key.replays:
        raise ScheduleError(_DRAWN_AGAIN)
    words = torch.empty(count, dtype=torch.int64, device=device)
    return words.random_(_LOWEST, _HIGHEST, generator=generator(words.device))


class KeyedDefault(TorchDispatchMode):
    """Gives operators that would draw from a default generator the generator of the key in force.

    PyTorch tags each such operator ``nondeterministic_seeded``. Those with a ``generator`` argument get it, and
    ``native_dropout`` is written out. For the rest (on CUDA: attention with dropout) the default generator is
    borrowed: set to the key's state, used by this one operator, and put back, under a lock. A thread that draws
    from the same default generator without a key does not know of that lock: while layers with such operators
    train, draw elsewhere from generators of your own. cuDNN keeps the dropout state of ``nn.LSTM`` to itself:
    it cannot be keyed.

    What draws in a part of a forward that is computed again within a backward gets a
    :class:`~pipeal.core.errors.ScheduleError`: the key is another by then, and so would the numbers be.
    """

    _lock = threading.Lock()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Lets ``torch.compile`` work beneath the mode: compiled graphs draw by operators, too, which come here."""
        return True

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Runs one operator; only those that draw are touched."""
        kwargs = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded not in func.tags or func.namespace == "pipeal":  # those are keyed already
            return func(*args, **kwargs)
        device = _device_of(args, kwargs)
        own = generator(device)
        if own is None or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        # Without gradients it is a backward of somebody's own, which may draw.
        again = _local.key is not None and _local.key.replays
        before = own.get_state() if _goes_back() and torch.is_grad_enabled() and not again else None
        found = self._drawn(own, device, func, args, kwargs)
        if before is not None and not torch.equal(before, own.get_state()):
            raise ScheduleError(_DRAWN_AGAIN)
        return found

    def _drawn(
        self, own: torch.Generator, device: torch.device, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Calls an operator; if it draws, it draws from that generator."""
        if func is torch.ops.aten.native_dropout.default:
            return _native_dropout(own, *args, **kwargs)
        overload = _generator_overload(func)
        if overload is not None:
            kwargs["generator"] = own
            return overload(*args, **kwargs)
        default = _default_generator(device)
        with self._lock:
            kept = default.get_state()
            default.set_state(own.get_state())
            try:
                return func(*args, **kwargs)
            finally:
                own.set_state(default.get_state())
                default.set_state(kept)


_DRAWN_AGAIN = (
    "a part of a forward that draws random numbers is computed again within the backward, as torch.utils.checkpoint "
    "does, and would draw others; leave what draws out of that part, or set engine.recompute in its place"
)


def _goes_back() -> bool:
    return torch._C._current_graph_task_id() != -1  # private, but what torch.utils.checkpoint asks, too


def _native_dropout(own: torch.Generator, x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    """``aten::native_dropout`` with a generator, which the operator lacks."""
    keep = torch.ones_like(x, dtype=torch.bool)
    if train is False or p == 0:
        return x.clone(), keep
    keep.bernoulli_(1 - p, generator=own)
    return x * keep * (1 / (1 - p) if p < 1 else 0.0), keep


def _generator_overload(func: Any) -> Any | None:
    """The overload of the same operator that takes a generator and otherwise the same arguments, if any."""
    wanted = [argument.name for argument in func._schema.arguments if argument.name != "generator"]
    packet = func.overloadpacket
    for overload in (func, *(getattr(packet, name) for name in packet.overloads())):
        names = [argument.name for argument in overload._schema.arguments]
        if "generator" in names and [name for name in names if name != "generator"] == wanted:
            return overload
    return None


def _device_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.device:
    """Where an operator draws: its ``device`` argument, or that of its first tensor."""
    if kwargs.get("device") is not None:
        return torch.device(kwargs["device"])
    tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
    first = next(tensors, None)
    return torch.device("cpu") if first is None else first.device


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    raise ScheduleError(f"no keyed random numbers on device {device}: expected cpu or cuda")
