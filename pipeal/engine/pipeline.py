"""The engine's front: layers on devices, a schedule, and batches through them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from math import isfinite
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any, TypeAlias, overload

import torch
from torch import Tensor, nn

from pipeal.core.errors import ConfigError, PlacementError, ScheduleError, StallError, add_note, is_whole
from pipeal.core.modules import layers_of
from pipeal.core.options import EngineOptions, with_keywords
from pipeal.core.packet import HandedOver, Packet
from pipeal.core.protocols import KnowsInput, TrainableLayer
from pipeal.core.rng import check_seed
from pipeal.core.samples import iterate, pair_of, require_samples
from pipeal.core.tree import Tree, batch_size, copied, detach, map_tensors, tensors
from pipeal.engine.checks import check_layers
from pipeal.engine.delivery import Delivery, is_same
from pipeal.engine.devices import Device, open_device, ready_now, share_gpus
from pipeal.engine.devices.assignment import Devices, assign
from pipeal.engine.execution.executors import Executor, InlineExecutor, ThreadedExecutor
from pipeal.engine.execution.worker import refuse_on_worker
from pipeal.engine.inference.exit_policy import EarlyExits, ExitPolicy
from pipeal.engine.inference.predictor import Predictor
from pipeal.engine.report import RunReport
from pipeal.engine.runner.attention import attention_without_plans
from pipeal.engine.runner.compiling import check_compile
from pipeal.engine.runner.precision import check_precision, matmul_precision, ready
from pipeal.engine.schedule import Schedule, schedule_named
from pipeal.engine.stage import Stage, bring_to_rest
from pipeal.engine.state.disk_offload import one_by_one
from pipeal.engine.state.mapped_file import MappedFile
from pipeal.engine.state.saved import Load, save
from pipeal.engine.state.snapshot import Snapshot
from pipeal.engine.trace import CopySpan, Span, StageTimes, Window

LrScale: TypeAlias = float | Callable[[int], float]
"""A factor on all learning rates, or a function from the batch number to it."""

Updates: TypeAlias = bool | Callable[[int], bool]
"""Whether layers update after a batch, or a function from the batch number to that."""


class Pipeline:
    """Trains self-training layers, each stage as soon as the schedule lets it.

    ::

        with Pipeline(package, devices="cuda:0,cuda:1") as pipe:
            print(pipe.run(batches))           # any iterable of pairs (x, y)
            logits = pipe.predict(x)
            pipe.save("model.pipeal")          # and Pipeline.load("model.pipeal", package, devices="cpu*4")

    Whatever the schedule, the number of stages and the queue depth, the weights, optimizer states and losses are those
    of training the layers one after the other: bit for bit on a CPU with the same ``threads``. It takes layers whose
    operators repeat their bits: with several threads the gradient of ``x[index]`` with repeated rows does not, nor,
    compiled, that of interpolation, that of ``index_select`` and of an embedding does, and
    ``torch.use_deterministic_algorithms`` makes all. What a layer draws in a prediction comes from the default
    generators. ``torch.set_flush_denormal`` is of the thread that calls it, and not of the workers.

    The ``with`` raises at its end what went wrong and no call within it has raised.

    Args:
        model: An :class:`pipeal.ALPackage`, or any module or sequence of layers that train themselves.
        devices: One device per stage; a device may repeat: ``["cuda:0", "cpu"]``, ``"cuda:0,cpu"``, ``"cpu*4"``; or
            what :func:`pipeal.plan` has measured to be best, with its ``sizes`` and ``threads``. ``"auto"`` measures
            nothing: all GPUs, else as many CPU stages as there are cores, at most one per layer. None: one stage per
            layer, where the layers are. The blocks of a single :class:`pipeal.BP` whose network is a row of
            them, as an ``nn.Sequential``, lie on several devices as one stage (naive model parallelism): not with
            ``compile``, and with the same bits as on one device.
        schedule: ``sequential``, ``backward-overlap``, ``al-fm`` or ``pipelined``.
        sizes: The number of layers of each stage, or of blocks on each device of a :class:`pipeal.BP`; None: as even
            in number as can be.
        seed: Of all randomness in forwards, and of what layers on the meta device start with.
        first_batch: The number of the first batch: how many the model was trained on before.
        trace: The batches whose spans are kept, counted from the pipeline's start; None keeps none.
        options: How the layers are run: queues, threads, precision, compilation, and what happens on failures.
        keywords: Any of the fields of :class:`pipeal.core.options.EngineOptions`, which go before the ``options``:
            ``Pipeline(package, "cpu*2", threads=1, precision="bf16")``.

    Attributes:
        next_batch: The number of the next batch.
        left_behind: Whether a worker did not come back when it was told to; it may still change the layers.
        gathers: Whether the last batch submitted was one without an update, for which more are to come.

    Raises:
        LayerError: The model is none, or has a layer that does not train itself.
        PlacementError: Layers, stages and devices do not fit, or a device does not exist.
        ConfigError: The schedule or another choice is unknown, or nothing can be compiled on this machine.
        TypeError: A keyword is not known.
    """

    @torch.inference_mode(False)  # layers are made and moved here, which are to learn later
    def __init__(
        self,
        model: nn.Module | Iterable[TrainableLayer],
        devices: Devices = None,
        schedule: str | Schedule = "pipelined",
        *,
        sizes: Sequence[int] | None = None,
        seed: int = 0,
        first_batch: int = 0,
        trace: Window | None = None,
        options: EngineOptions | None = None,
        **keywords: Any,
    ) -> None:
        check_seed(seed)
        self.seed = seed = int(seed)
        options = self._options_here(with_keywords(options, keywords))
        self.schedule = schedule_named(schedule).within(options.within_stage)
        if not is_whole(first_batch, 0):
            raise ConfigError(f"first_batch is {first_batch!r}; expected a whole number, at least 0")
        options.check_layout(by_layer=self.schedule.by_layer)  # told before layers are moved, which takes long
        files: dict[int, MappedFile] = {}
        layers = self._layers_here(model, sizes, options, files)
        self.model = model if isinstance(model, nn.Module) else layers
        self._require_input = model.require_input if isinstance(model, KnowsInput) else None
        check_layers(layers)
        placed = assign(layers, devices, sizes, options.threads, self.schedule)
        self.sizes = placed.sizes
        self.options = replace(options, threads=placed.threads, within_stage=self.schedule.within_stage)
        handles = self._open_devices(placed.devices)
        if not placed.is_row:  # the devices of a row take turns
            share_gpus(handles)
        near = [handle.device for handle in handles if not handle.far]
        # Told before a compiler is tried, which takes long.
        options.check_layout(row=placed.is_row, kinds={device.type for device in near})
        check_precision(options.precision, near)
        check_compile(options.compile, near)
        self._layer_count = len(layers)
        self.stages = []
        for number, (handle, own) in enumerate(placed.stages(handles)):
            # A layer of another process is compiled there.
            own_options = replace(self.options, compile="none") if handle.far else self.options
            numbered = [(index, layers[index]) for index in own]
            self.stages.append(
                Stage(
                    number,
                    numbered,
                    handle,
                    own_options,
                    seed=seed,
                    window=trace or Window(0, 0),
                    last=len(layers) - 1,
                    files={} if handle.far else files,
                )
            )
        self._process_settings = ExitStack()
        self.next_batch = int(first_batch)  # a number of NumPy's could not be loaded again, nor sent
        self.left_behind = self.gathers = self._uneven = False
        self._sequence = 0
        self._handed_over = 0, True, 0
        self._delivery = Delivery()
        self._executor: Executor | None = None
        self._predictor = Predictor(self.stages, self.options, serial=self.schedule.serial, rest=self._rest)
        self._begin: float | None = None
        self._batches = self._samples = 0
        for stage in self.stages:
            if stage.device.device.type == "cuda":
                torch.cuda.synchronize(stage.device.device)  # the weights have arrived before other streams read

    def __enter__(self) -> Pipeline:
        """Has the layers do their part for the precision, and starts the workers.

        Raises:
            ScheduleError: It is open.
            ConfigError: A layer cannot be trained in the precision; or another open pipeline trains it where losses
                are scaled and here they are not, or the other way round, or has another ``matmul``.
        """
        if self._executor is not None:
            raise ScheduleError("this pipeline is already open")
        self._sequence = self._batches = self._samples = 0
        self._begin, self._delivery.failure, self.gathers = None, None, False
        for stage in self.stages:
            stage.reset()
        with ExitStack() as undo:
            undo.enter_context(matmul_precision(self.options.matmul))
            undo.enter_context(attention_without_plans(self._kinds))
            undo.enter_context(self._ready())
            self._executor = self._start()
            self._process_settings = undo.pop_all()
        self._predictor.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Finishes what was submitted, unless an exception is on its way, and ends the workers.

        Raises what no call within the ``with`` has raised before.
        """
        executor = self._open()
        told = self._delivery.failure
        failure = told if error is None and isinstance(told, StallError) else error  # it is not waited for twice
        even = self._begin is None and not self.gathers
        if failure is None or isinstance(executor, InlineExecutor):  # which leaves nothing to wait for
            try:
                self._finish(executor)
                self._require_update("the pipeline cannot end")
                even = isinstance(executor, InlineExecutor)  # of another one it is so where there is no failure
            except BaseException as found:  # noqa: BLE001  raised below, once the workers have ended
                failure = failure or found
        self._executor = None
        self._uneven |= failure is not None and not even
        for stage in self.stages:
            stage.abandon()
        try:
            try:
                self._predictor.close()
            finally:
                executor.stop(failure)
        except StallError as left_behind:
            self.left_behind = True
            if failure is None:
                raise
            add_note(failure, str(left_behind))
        finally:
            self._process_settings.close()
            self._leave_stages(failure)
            self._delivery.failure = None  # its frames hold the last batches
        if error is None and failure is not None and not is_same(failure, told):
            raise failure

    def submit(self, x: Tree, y: Tree, lr_scale: float = 1.0, *, updates: bool = True) -> None:
        """Sends one batch on its way; waits while the first stage has ``queue_depth`` packets waiting.

        Layers learn from it while later ones are made: until :meth:`drain` returns nothing may write to its tensors.
        Hand over clones of a buffer that is filled again.

        Args:
            x: The input of the first layer. Tensors made in inference mode are copied.
            y: Its target; likewise.
            lr_scale: The factor on all learning rates.
            updates: Whether layers update after it. Else they gather its gradients for an update after a later batch,
                which is that of one batch of all their samples (:mod:`pipeal.engine.runner.accumulation`).

        Raises:
            Exception: Whatever a stage raised first, with a note of stage, layer, batch, device and shapes.
            StallError: No stage made progress for too long.
            ScheduleError: The pipeline is not open, is predicting, or has failed, as this thread was told before; or a
                layer or a hook has called, amid a batch.
            DataError: The batch has no samples, or its input lacks what the sample of a converted network had; or
                tensors of one before were written to since.
            ConfigError: ``lr_scale`` is not finite, or below 0.
        """
        executor = self._open()
        with self._predictor.turn:
            self._predictor.refuse_while_under_way()
            self._submit(executor, x, y, lr_scale, updates)

    def snapshot(self) -> Snapshot:
        """Asks every stage for what its layers have learnt from the batches submitted so far, and from no later one.

        The snapshot travels with the batches, and each stage copies as it comes by; a serial schedule copies at once.
        Waits while the first stage has ``queue_depth`` packets waiting. Call it on the thread that submits, such as in
        the ``on_batch`` of :meth:`run`, and :meth:`Snapshot.wait <pipeal.engine.state.snapshot.Snapshot.wait>` on
        another, or later.

        Raises:
            ScheduleError: Layers are gathering gradients for an update to come; or a failure has left them at different
                batches, and nothing has been loaded since.
            Exception: As :meth:`submit`.
        """
        return self._snapshot()

    def skip(self, count: int = 1) -> None:
        """Passes over the numbers of batches that are left out: those after them draw and learn under their own.

        Raises:
            ValueError: ``count`` is negative, or no whole number.
        """
        if not is_whole(count, 0):
            raise ValueError(f"cannot skip {count!r} batches; expected a whole number, at least 0")
        if self._executor is not None:
            self._count(self._executor)
        self.next_batch += int(count)

    def drain(self) -> RunReport:
        """Waits until every batch submitted has been learnt from, and reports on them; raises as :meth:`submit`."""
        executor = self._open()
        with self._delivery:
            executor.drain()
            self._synchronize()
        seconds = 0.0 if self._begin is None else perf_counter() - self._begin
        losses, times, splits, overflows = self._collect()  # which may count more samples
        rows = sorted(losses)
        report = RunReport(
            self._batches,
            self._samples,
            seconds,
            [losses[layer] for layer in rows],
            times,
            splits,
            overflows,
            rows,
            self.device_names,
            self.sizes,
        )
        self._begin, self._batches, self._samples = None, 0, 0
        return report

    def run(
        self,
        batches: Iterable[Any],
        lr_scale: LrScale = 1.0,
        on_batch: Callable[[int], None] | None = None,
        *,
        updates: Updates = True,
    ) -> RunReport:
        """Trains on every batch and waits for the end.

        Args:
            batches: Pairs ``(x, y)``, or objects with attributes ``x`` and ``y``.
            lr_scale: The factor on all learning rates, or a function from the batch number to it.
            on_batch: Called with the batch number after each submission; the place to predict or to save meanwhile.
            updates: Whether layers update after a batch, or a function from the batch number to that:
                ``lambda batch: batch % 4 == 3`` makes one update of four batches. The last one should update.

        Raises:
            Exception: As :meth:`submit`.
        """
        for batch in iterate(batches):
            x, y = pair_of(batch)
            number = self.next_batch
            scale = lr_scale(number) if callable(lr_scale) else lr_scale
            self.submit(x, y, scale, updates=updates(number) if callable(updates) else updates)
            if on_batch is not None:
                on_batch(number)
        return self.drain()

    def predict(self, x: Tree, exit_at: int | None = None) -> Tensor:
        """Infers in evaluation mode, on the devices where the layers are, after all batches submitted.

        Another thread than the one that trains may call it, whose :meth:`submit` then waits for the answer.

        Args:
            x: The input of the first layer.
            exit_at: How many layers to climb before the bridge; None for all.

        Returns:
            What the first layer's ``h`` returns, on the first stage's device; not waited for on a GPU.

        Raises:
            PlacementError: There is no such exit.
            ScheduleError: An iterator of :meth:`predict_each` or :meth:`predict_exits` is not yet finished; or a layer
                or a hook has called, amid a batch.
            Exception: Whatever a stage raised first, with a note of stage, layer, device and shapes.
        """
        refuse_on_worker(self.stages)
        return self._predictor.one(x, exit_at)

    @overload
    def predict_each(
        self, batches: Iterable[Tree], exit_at: int | None = None, policy: None = None
    ) -> Generator[Tensor, None, None]: ...
    @overload
    def predict_each(
        self, batches: Iterable[Tree], exit_at: None = None, *, policy: ExitPolicy
    ) -> Generator[EarlyExits, None, None]: ...
    def predict_each(
        self, batches: Iterable[Tree], exit_at: int | None = None, policy: ExitPolicy | None = None
    ) -> Generator[Any, None, None]:
        """Infers batch after batch, with the stages at work on several at once, and yields the answers in order.

        While it is under way, :meth:`submit` is refused, from whatever thread.
        Each answer is what :meth:`predict` gives, bit for bit on a CPU with the same ``threads``.
        ``batches`` are drawn ahead of the answers, ``queue_depth`` per stage at most; nothing may write to one before
        its answer has come. The model stays in evaluation mode until the iterator is exhausted or closed, as leaving a
        ``for`` over this call does. So long the stages' threads live, or, of an exhausted one, in an open pipeline for
        the predictions to come. Under a serial schedule, or with one stage, the caller does the work.

        Args:
            batches: Inputs of the first layer.
            exit_at: How many layers to climb before the bridge; None for all.
            policy: Lets each sample leave at the first exit where it is sure enough; only the others climb on.

        Yields:
            Per batch, the logits, or with a policy :class:`EarlyExits`; not waited for on a GPU.

        Raises:
            PlacementError: There is no such exit.
            ConfigError: The policy is for another number of exits, or is given together with ``exit_at``.
            ScheduleError: Another iterator of this pipeline is not yet finished.
            Exception: Whatever a stage raised first, with a note of stage, layer, batch, device and shapes.
            StallError: No stage made progress for too long.
        """
        refuse_on_worker(self.stages)
        return self._predictor.each(batches, exit_at, policy)

    def predict_exits(self, batches: Iterable[Tree]) -> Generator[list[Tensor], None, None]:
        """As :meth:`predict_each`, but yields a list of the logits of every exit; each layer is climbed once."""
        refuse_on_worker(self.stages)
        return self._predictor.exits(batches)

    def save(self, path: str | Path) -> None:
        """Writes what all layers have learnt, the batch number and the seed into one file, whole or not at all.

        An open pipeline learns from all that was submitted first; a :meth:`snapshot` holds nothing up. Raises as
        :func:`pipeal.engine.state.saved.save`.
        """
        save(self, path)

    load = Load()
    """``Pipeline.load(path, model, devices, …)`` makes a pipeline that goes on from a file as the saved one would have,
    on any devices, in any number of stages and under any schedule; ``pipe.load(path)`` has a pipeline go on from there.
    Seed and batch number are those of the file. See :class:`pipeal.engine.state.saved.Load`."""

    def spans(self) -> list[Span]:
        """The spans of the traced batches, in the order of their beginnings. Call it after :meth:`drain`."""
        return sorted((span for stage in self.stages for span in stage.clock.spans()), key=lambda span: span.begin)

    def copies(self) -> list[CopySpan]:
        """The copies of layers to and from GPUs meanwhile (``offload='host'``), as :meth:`spans`."""
        return sorted((copy for stage in self.stages for copy in stage.clock.copies()), key=lambda copy: copy.begin)

    @property
    def threads(self) -> int | None:
        """Intra-op threads of each CPU worker; None where no stage is on a CPU."""
        return self.options.threads

    @property
    def device_names(self) -> list[str]:
        """What the rows of a report and of a timeline are of: the devices, stage by stage."""
        return [name for stage in self.stages for name in stage.device.names]

    def _submit(self, executor: Executor, x: Tree, y: Tree, lr_scale: float, updates: bool) -> None:
        if not _is_finite(lr_scale) or lr_scale < 0:
            raise ConfigError(
                f"lr_scale is {lr_scale!r} for batch {self.next_batch}; expected a finite number, at least 0"
            )
        require_samples(self.next_batch, x)
        if self._require_input is not None:
            self._require_input(x)
        if self._begin is None:
            self._warn_of_evaluation()
            self._begin = perf_counter()
            self._restart_clocks()
        found = tensors((x, y))
        if any(tensor.requires_grad for tensor in found):  # such as a teacher's answers as targets
            x, y = detach((x, y))
        if any(tensor.is_inference() for tensor in found):  # as these are, too; no layer could learn from them
            with torch.inference_mode(False):
                x, y = map_tensors(_for_training, (x, y))
        # No caller can write to what was copied above; and a serial schedule is done with the batch at the return.
        handed_over = None if self.schedule.serial else HandedOver((x, y))
        lr_scale, updates = float(lr_scale), bool(updates)  # of any library
        packet = Packet(self.next_batch, x, y, lr_scale, updates, self._sequence, ready_now((x, y)), handed_over)
        self._handed_over = self.next_batch, updates, batch_size(x)
        try:
            with self._delivery:
                executor.submit(packet)
        finally:
            self._count(executor)

    def _count(self, executor: Executor) -> None:
        """Counts the batch that was handed over last, unless that was done. A signal may come in between: its handler
        or, after a Ctrl-C, the caller asks for something that counts."""
        if executor.submitted > self._sequence:
            number, updates, samples = self._handed_over
            self._sequence, self.next_batch, self.gathers = self._sequence + 1, number + 1, not updates
            self._batches, self._samples = self._batches + 1, self._samples + samples

    def _warn_of_evaluation(self) -> None:
        if isinstance(self.model, nn.Module) and not self.model.training:
            warnings.warn(
                "the model is trained in evaluation mode, in which dropout drops nothing and batch norm learns no "
                "statistics; call its train() first (a network in evaluation mode makes a package in evaluation mode)",
                stacklevel=5,
            )

    def _snapshot(self, note: Any = None) -> Snapshot:
        executor = self._open()
        self._require_even()
        self._require_update("what was learnt cannot be saved")
        if self._begin is None:
            for stage in self.stages:
                stage.device.follow_caller()
        snapshot = Snapshot(self.next_batch, self._layer_count)
        snapshot.note = note
        with self._delivery:
            executor.snapshot(snapshot)
        return snapshot

    @property
    def _kinds(self) -> set[str]:
        """The kinds of devices that are worked on here."""
        return {kind for stage in self.stages if not stage.device.far for kind in stage.device.types}

    def _rest(self) -> None:
        executor = self._executor  # another thread may close the pipeline meanwhile
        if executor is not None:
            with self._delivery:
                executor.drain()

    def _ready(self) -> AbstractContextManager[None]:
        """Has the layers do their part for the precision, while the pipeline is open."""
        return ready([layer for stage in self.stages for _, layer in stage.layers], self.options.precision)

    def _options_here(self, options: EngineOptions) -> EngineOptions:
        """The options as they hold in this process, checked against what kind of pipeline this is."""
        return options

    def _layers_here(
        self,
        model: nn.Module | Iterable[TrainableLayer],
        sizes: Sequence[int] | None,  # noqa: ARG002  says which are here where some are not
        options: EngineOptions,
        files: dict[int, MappedFile],
    ) -> list[TrainableLayer]:
        """The layers; those that are offloaded are in ``files`` by their numbers."""
        if options.offload != "disk":
            return layers_of(model)
        return list(one_by_one(model, options.offload_folder, files, self.seed))

    def _open_devices(self, devices: Sequence[str | torch.device]) -> list[Device]:
        return [open_device(device) for device in devices]

    def _start(self) -> Executor:
        if self.schedule.serial:
            return InlineExecutor(self.stages, self.schedule, self.options)
        return ThreadedExecutor(self.stages, self.schedule, self.options)

    def _restart_clocks(self) -> None:
        for stage in self.stages:
            stage.clock.restart()
            stage.device.follow_caller()

    def _finish(self, executor: Executor) -> None:
        """Waits for all that was submitted, before an orderly end."""
        executor.drain()
        self._synchronize()

    def _require_update(self, what: str) -> None:
        if self.gathers:
            raise ScheduleError(
                f"{what} between two batches of one update: layers hold gradients of the batches up to "
                f"{self.next_batch - 1}; submit the last of them with updates=True"
            )

    def _require_even(self) -> None:
        """Refuses what a failure has left, until a state is loaded; to open the pipeline once more does not."""
        if self._uneven or (self._executor is None and self.left_behind):
            raise ScheduleError(
                "a failure ended the pipeline before its layers had all learnt from the batches submitted, and they "
                "may stand at different ones; load what was saved before, or go on with them as they are in a new "
                "Pipeline"
            )

    def _synchronize(self) -> None:
        bring_to_rest(self.stages)

    def _collect(self) -> tuple[dict[int, Tensor], list[StageTimes], list[int], list[int]]:
        """Losses by layer, times by stage and splits by layer since the last report; overflows by layer."""
        by_layer: dict[int, Tensor] = {}
        for stage in self.stages:
            by_layer |= stage.losses.take()
        return (
            by_layer,
            [times for stage in self.stages for times in stage.clock.take_all_times()],
            [count for stage in self.stages for count in stage.take_splits().values()],
            [count for stage in self.stages for count in stage.overflows().values()],
        )

    def _open(self) -> Executor:
        refuse_on_worker(self.stages)
        if self._executor is None:
            raise ScheduleError("the pipeline is not open: `with Pipeline(...) as pipe:`, or once more `with pipe:`")
        self._count(self._executor)
        return self._executor

    def _leave_stages(self, failure: BaseException | None) -> None:
        """What a failed run left under way on a GPU still writes to weights that the caller may read, or let go."""
        first: Exception | None = None
        for stage in self.stages:
            try:
                if not self.left_behind:
                    stage.drop_unlearnt()
                stage.device.lead_caller()
            except (RuntimeError, PlacementError) as broken:
                if failure is None:
                    first = first or broken
                else:
                    add_note(failure, f"device {stage.device} takes no more work: {' '.join(str(broken).split())}")
        if first is not None:
            raise first


def _for_training(tensor: Tensor) -> Tensor:
    return copied(tensor) if tensor.is_inference() else tensor


def _is_finite(number: object) -> bool:
    try:
        return isfinite(number)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return False
