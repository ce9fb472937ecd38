"""The engine's options: one frozen dataclass, checked when it is made, and handed on whole.

A choice among names is a ``Literal`` here, which the configuration takes over: a key of
:class:`pipeal.config.schema.EngineConfig` with the name of an option sets it, and needs nothing more. An option that
excludes another one is refused in ``__post_init__``; one that excludes a layout, in
:meth:`EngineOptions.check_layout`, once that is known. How long processes wait for each other is no option of the
engine: ``engine.peer_timeout_s`` in :mod:`pipeal.config.schema`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from numbers import Real
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from pipeal.core.errors import ConfigError, PlacementError, check_named, is_whole, unknown_name

Precision: TypeAlias = Literal["fp32", "bf16", "fp16"]
"""The number type of matrix products in forward passes."""

Compile: TypeAlias = Literal["none", "static", "dynamic"]
"""Whether layers are compiled: not at all, a graph for each set of shapes, or one graph for all of them."""

OnNonFinite: TypeAlias = Literal["raise", "skip", "ignore"]
"""What a loss that is not finite does: end the run, leave out that layer's update, or nothing."""

OnOom: TypeAlias = Literal["raise", "split"]
"""What a batch that does not fit into memory does: end the run, or be learned from in parts."""

Recompute: TypeAlias = Literal["none", "blocks"]
"""What is computed again in a backward instead of kept from the forward: nothing, or the blocks of each layer."""

Offload: TypeAlias = Literal["none", "host", "disk"]
"""Where layers lie that are not at work: on the device, in the memory of a GPU's host, or in mapped files of a CPU."""

WithinStage: TypeAlias = Literal["layer", "stage"]
"""The order of a stage's layers: each forward, backward and update before the next, or all forwards first."""

PacketFormat: TypeAlias = Literal["as_is", "bf16", "int8", "int8-stochastic"]
"""What a layer hands on: as it is, or rounded to bfloat16 or to 8-bit integers with a scale for each row."""

Matmul: TypeAlias = Literal["highest", "high", "medium"]
"""How matrix products of float32 are computed, as ``torch.set_float32_matmul_precision`` says: ``high`` is TF32 on a
GPU that has it; ``medium`` is bfloat16 on a CPU that has it. Convolutions on a GPU have a setting of their own."""


MOST_THREADS = 1024
"""Of a CPU worker."""


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How an engine runs its layers, whatever the schedule, the devices and the process that it runs in.

    Not among them is what differs from one opened pipeline to the next: where a training stands (``seed`` and
    ``first_batch``), how layers are laid out (``sizes``), what is recorded (``trace``).

    Five options are numeric settings, with which results round differently: ``threads``, ``precision``, ``compile``,
    ``matmul`` and ``packet``. All others leave every bit as it is while losses are finite and batches fit.

    Attributes:
        queue_depth: How many packets may wait before each stage. Between processes as many more are on the way as the
            delay asks for (:class:`pipeal.engine.distributed.endpoint.Window`).
        threads: Intra-op threads of each CPU worker, and of the caller where it does their work (``sequential``,
            predictions). None shares the cores out evenly among the CPU stages that may run at once; an open pipeline
            knows the number. The worker of a GPU has one, and where no stage is on a CPU the caller keeps its own.
        precision: ``fp32``, or ``bf16`` or ``fp16`` for forwards under autocast. In ``fp16`` each layer scales its
            losses (:class:`pipeal.core.protocols.ScalesLosses`) from when the pipeline is opened, and in another
            precision no longer. To predict a pipeline needs not be opened, and leaves the scales as they are.
        compile: ``static`` compiles a layer's forward, backward and inference for each set of shapes, ``dynamic`` once
            for all sizes, ``none`` not at all (:mod:`pipeal.engine.runner.compiling`). What cannot be compiled runs as
            it is, under a :class:`~pipeal.engine.runner.compiling.CompileWarning`.
        on_non_finite: On a loss that is not finite, ``raise`` ends the run, on a GPU some batches late; ``skip``
            leaves out that layer's update on that batch; ``ignore`` goes on, though in fp16 a layer whose gradients
            overflowed with every factor learns no more (:mod:`pipeal.engine.runner.nonfinite`).
        on_oom: On a batch that does not fit into a stage's memory, ``raise`` ends the run; ``split`` has the layer
            learn from it in parts, the same update up to rounding where losses are means over the samples
            (:mod:`pipeal.engine.runner.split`).
        within_stage: ``layer`` has each layer of a stage go forward, backward and update before the next one begins, so
            that one layer's activations are in memory, however many there are; ``stage`` has all of them go forward
            first. None for the schedule's own: ``layer`` under ``sequential`` and ``pipelined``
            (:mod:`pipeal.engine.schedule`).
        recompute: ``blocks`` keeps of the blocks of each layer only their inputs, and computes the rest again in the
            backward: less memory where a layer is large, for about a third more time, and the same bits
            (:mod:`pipeal.engine.runner.recompute`); ``none`` keeps everything.
        offload: Where weights and optimizer states of layers lie that are not at work, in stages with one layer before
            the next. ``disk``, for CPUs, keeps them in mapped files, so that a network may be larger than memory (give
            it as a generator of layers, or on the meta device, and it never exists there whole)
            (:mod:`pipeal.engine.state.disk_offload`). ``host``, for GPUs, keeps them in locked memory of the host,
            which must hold them all, and at most three layers of a stage on its GPU, where they are copied beside the
            work on others; a stage of so few keeps them there (:mod:`pipeal.engine.state.host_offload`). While nothing
            runs, they are on the CPU. Not over processes. ``none`` keeps all on the device.
        offload_folder: Where those files are, which have no names; None for the system's folder of temporary files,
            which may be memory.
        packet: How packets are rounded on their way from each layer to the next, whether these are of one stage or of
            two: ``as_is`` not at all; ``bf16`` to bfloat16; ``int8`` to 8-bit integers with a scale for each row, along
            the last dimension; ``int8-stochastic`` the same, up or down by chance, with draws that follow from seed,
            layer and batch. So every layout and schedule leaves the same bits. Between stages packets travel, and
            wait, rounded. Inputs and targets alike are rounded (:mod:`pipeal.core.thin` says which of their tensors),
            and so is what predictions hand up, to the nearest; what they hand down is not.
        matmul: While the pipeline is open, the precision of matrix products of float32 in the whole process:
            ``highest``, ``high`` or ``medium`` (:data:`Matmul`); None leaves it as it is.
        stall_timeout_s: Seconds that all stages may stand still while the caller waits for them.
        dump_folder: Where the watchdog leaves a file with the stacks of all threads when nothing moves; None for none.

    Raises:
        ConfigError: A name is unknown, ``threads`` is no whole number from 1 to :data:`MOST_THREADS`, or
            ``stall_timeout_s`` no number above 0.
        PlacementError: ``queue_depth`` is no whole number, or below 1.
    """

    queue_depth: int = 2
    threads: int | None = None
    precision: Precision = "fp32"
    compile: Compile = "none"
    on_non_finite: OnNonFinite = "raise"
    on_oom: OnOom = "raise"
    within_stage: WithinStage | None = None
    recompute: Recompute = "none"
    offload: Offload = "none"
    offload_folder: str | Path | None = None
    packet: PacketFormat = "as_is"
    matmul: Matmul | None = None
    stall_timeout_s: float = 300.0
    dump_folder: str | Path | None = None

    def __post_init__(self) -> None:
        check_named("precision", self.precision, get_args(Precision))
        check_named("compile", self.compile, get_args(Compile))
        check_named("on_non_finite", self.on_non_finite, get_args(OnNonFinite))
        check_named("on_oom", self.on_oom, get_args(OnOom))
        check_named("offload", self.offload, get_args(Offload))
        check_named("recompute", self.recompute, get_args(Recompute))
        if self.recompute != "none" and self.compile != "none":
            raise ConfigError(
                f"recompute={self.recompute!r} does not go with compile={self.compile!r}, whose graphs choose by "
                "themselves what to keep; use 'none' for one of them"
            )
        check_named("within_stage", self.within_stage, (None, *get_args(WithinStage)))
        check_named("packet", self.packet, get_args(PacketFormat))
        check_named("matmul", self.matmul, (None, *get_args(Matmul)))
        if not is_whole(self.queue_depth, 1):
            raise PlacementError(f"queue_depth is {self.queue_depth!r}; expected at least 1 packet, a whole number")
        limit = self.stall_timeout_s
        if isinstance(limit, bool) or not (isinstance(limit, Real) and limit > 0):
            raise ConfigError(f"stall_timeout_s is {limit!r}; expected seconds, above 0 (float('inf') to wait forever)")
        if self.threads is not None and not is_whole(self.threads, 1, MOST_THREADS):
            raise ConfigError(
                f"threads is {self.threads!r}; expected a whole number from 1 to {MOST_THREADS}, or None to share the "
                "cores out"
            )

    def check_layout(
        self,
        *,
        replicas: int = 1,
        row: bool = False,
        kinds: Collection[str] = (),
        by_layer: bool = True,
        processes: bool = False,
    ) -> None:
        """Refuses options that a layout excludes.

        Args:
            replicas: How many pipelines average their gradients.
            row: Whether the blocks of a single layer lie on several devices.
            kinds: The kinds of devices, such as ``cuda``.
            by_layer: Whether each layer of a stage ends before the next one begins.
            processes: Whether each stage is a process.

        Raises:
            ConfigError: One of the options cannot be had there.
        """
        # One replica would skip or split a batch for which the others wait with their gradients.
        for name, value in (("on_non_finite", "skip"), ("on_oom", "split")):
            if replicas > 1 and getattr(self, name) == value:
                raise ConfigError(
                    f"{name}={value!r} is not possible with {replicas} replicas, which learn together; use 'raise'"
                )
        if self.offload != "none":
            if not by_layer:
                raise ConfigError(
                    f"offload={self.offload!r} needs layers that end one before the next, but this schedule has all of "
                    "a stage go forward first; use sequential or pipelined with within_stage='layer'"
                )
            if processes and self.offload == "host":
                raise ConfigError("offload='host' is for the stages of one process, not over processes; use 'none'")
            does, kind, instead = _OFFLOADS[self.offload]
            others = sorted(set(kinds) - {kind})
            if others:
                raise ConfigError(
                    f"offload={self.offload!r} {does}, not for stages on {', '.join(others)}; use {instead!r}, or "
                    f"stages on {kind} alone"
                )
        if row and self.compile != "none":
            raise ConfigError(
                f"compile={self.compile!r} needs a layer on one device, but the blocks of this one are to be on "
                "several; use 'none', or one device"
            )


_OFFLOADS = {
    "disk": ("maps files into the memory of CPUs", "cpu", "host"),
    "host": ("keeps layers of GPUs in the memory of the host", "cuda", "disk"),
}
"""What each does, the kind of its devices, and what is for others."""

DEFAULTS = EngineOptions()
"""All defaults."""


def with_keywords(options: EngineOptions | None, keywords: Mapping[str, Any]) -> EngineOptions:
    """Options with some of them given by name, as users do; these take precedence.

    >>> with_keywords(None, {"queue_depth": 3}).queue_depth
    3

    Raises:
        TypeError: A keyword is none of them.
        PipealError: As for :class:`EngineOptions`.
    """
    known = [field.name for field in fields(EngineOptions)]
    for name in keywords:
        if name not in known:
            raise TypeError(unknown_name("keyword", name, known))
    return replace(options or DEFAULTS, **keywords)
