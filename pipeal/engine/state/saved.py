"""A pipeline in one file: what its layers have learnt, and which batch comes next.

::

    {"kind": "pipeal pipeline", "format": 1, "batch": 1500, "seed": 0,
     "layers": [state of layer 0, …]}                        as :mod:`pipeal.engine.state.layer_state` has them

One ``torch.save`` of plain values, a zip file whose entries carry their CRC-32. It is written aside and then renamed,
and held against its sums before anything of it is loaded, with ``weights_only=True``. States are mapped as they are
loaded, and of offloaded layers each goes into its file before the next one is read: they never are all in memory.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch
from torch import Tensor

from pipeal.core.atomic import replacing
from pipeal.core.errors import ConfigError, DataError, ScheduleError, a_type, first_line
from pipeal.engine.state.layer_state import (
    CopyTensor,
    State,
    check_layer_states,
    copy_to_host,
    layer_state,
    load_layer_states,
)

if TYPE_CHECKING:
    from pipeal.engine.pipeline import Pipeline

_KIND, _FORMAT = "pipeal pipeline", 1


@dataclass(frozen=True)
class Saved:
    """What a file holds.

    Attributes:
        batch: How many batches the model was trained on.
        seed: Of all randomness in forwards.
        layers: The states of the layers, in order.
    """

    batch: int
    seed: int
    layers: Sequence[State]

    def write(self, path: str | Path) -> None:
        """Writes the file; a reader sees the old one or the new one, never a part. Missing folders are made.

        Raises:
            DataError: The system refused to write.
        """
        with replacing(Path(path)) as aside:
            content = {"kind": _KIND, "format": _FORMAT, **vars(self), "layers": list(self.layers)}
            try:
                torch.save(content, aside)
            except RuntimeError as error:  # PyTorch says no more of a full disk
                raise DataError(
                    f"cannot write {path}: {first_line(error)}; make room there or choose another folder"
                ) from error

    @classmethod
    def read(cls, path: str | Path) -> Saved:
        """What is in a file, on the CPU; tensors are mapped. Nothing in it is run.

        Raises:
            DataError: It is not there, is not as it was written, or was written by something else or by a later pipeal.
        """
        try:
            with Path(path).open("rb") as file:
                with zipfile.ZipFile(file) as entries:
                    damaged = entries.testzip()
                if damaged is not None:
                    raise DataError(f"{path} is damaged: {damaged!r} in it has other bytes than were written")
                # By its name, or it could not be mapped: another file may have taken that meanwhile, with other sums.
                content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
                if not os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                    raise DataError(f"{path} was replaced while it was read; load it again")
        except DataError:
            raise
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror or error}") from error
        except Exception as error:
            raise DataError(
                f"{path} is damaged, or no file that Pipeline.save() wrote ({first_line(error)}); nothing in it was run"
            ) from error
        if not (isinstance(content, dict) and content.get("kind") == _KIND):
            raise DataError(f"{path} holds {_what(content)}; expected a file that Pipeline.save() wrote")
        if content.get("format") != _FORMAT:
            raise DataError(
                f"{path} has the format {content.get('format')!r}; this version of pipeal reads {_FORMAT}: load it "
                "with the version that wrote it, or a later one"
            )
        with suppress(KeyError, TypeError, ValueError):
            return cls(int(content["batch"]), int(content["seed"]), list(content["layers"]))
        raise DataError(f"{path} lacks a batch number, a seed or states of layers; expected what Pipeline.save() wrote")


P = TypeVar("P", bound="Pipeline")


class Load:
    """``Pipeline.load(path, model, devices, …)`` and ``pipe.load(path)``.

    The first makes a pipeline, as :class:`pipeal.Pipeline` does; both have one go on from a file as the pipeline that
    was saved would have: bit for bit on a CPU with the same ``threads`` and other numeric settings. Devices, stages and
    schedule may be others. An open pipeline learns from all that was submitted first. All layers are loaded, or none.

    Raises:
        DataError: The file is not there, is damaged, or of something else; or it is of other layers.
        ScheduleError: Layers are gathering gradients for an update to come; or are in other processes.
        ConfigError: No model is given; or a seed or a batch number is, which come from the file.
    """

    @overload
    def __get__(self, pipe: None, kind: type[P]) -> Callable[..., P]: ...
    @overload
    def __get__(self, pipe: P, kind: type[P]) -> Callable[[str | Path], None]: ...
    def __get__(self, pipe: P | None, kind: type[P]) -> Callable[..., P | None]:
        return partial(_make, kind) if pipe is None else partial(_load, pipe)


def save(pipe: Pipeline, path: str | Path) -> None:
    """See :meth:`pipeal.Pipeline.save`.

    Raises:
        ScheduleError: Layers are gathering gradients for an update to come; a failure ended the pipeline before all
            layers had learnt from the same batches; or the pipeline is over processes, and closed.
        ConfigError: A layer cannot be kept.
        DataError: The system refused to write.
        Exception: Whatever a stage raised first.
    """
    batch, states = _batch_and_states(pipe)
    Saved(batch, pipe.seed, states).write(path)


def _make(kind: type[P], path: str | Path, model: Any = None, *args: Any, **settings: Any) -> P:
    if model is None:
        raise ConfigError(
            f"the file {path} holds what a model has learnt, not how it is built: pass one built as the one that was "
            "saved, Pipeline.load(path, model, devices=…)"
        )
    saved = Saved.read(path)
    for name in ("seed", "first_batch"):
        if name in settings:
            raise ConfigError(f"{name} is given, but comes from the file {path}; leave it out")
    pipe = kind(model, *args, **settings)
    _go_on(pipe, saved, path)
    return pipe


def _load(pipe: Pipeline, path: str | Path) -> None:
    _go_on(pipe, Saved.read(path), path)


def _batch_and_states(pipe: Pipeline) -> tuple[int, list[State]]:
    executor = pipe._executor
    if executor is None:
        pipe._require_even()
        _refuse_far(pipe, "save within the `with`")
        return pipe.next_batch, [
            # Of offloaded layers no copies are made: they are written from their files.
            layer_state(layer, copy_to_host if stage.offloaded is None else Tensor.detach)
            for stage in pipe.stages
            for _, layer in stage.layers
        ]
    snapshot = pipe.snapshot()
    with pipe._delivery:
        pipe._finish(executor)  # which, unlike a wait for the snapshot, ends where a stage stands still
        found = snapshot.wait()
    if any(state.kept is not None for state in found.values()):
        raise ScheduleError(
            "other ranks keep their layers' states themselves; leave out on_snapshot where they serve()"
        )
    return snapshot.batch, [state.state for state in found.values()]


def _go_on(pipe: Pipeline, saved: Saved, path: str | Path) -> None:
    _refuse_far(pipe, "load the file in one process")
    pipe._predictor.refuse_while_under_way()
    if pipe._executor is not None:
        executor = pipe._open()
        pipe._require_update("nothing can be loaded")
        with pipe._delivery:
            pipe._finish(executor)
    places = [(stage, index) for stage in pipe.stages for index, _ in stage.layers]

    def copier(number: int) -> AbstractContextManager[CopyTensor]:
        stage, index = places[number]
        return nullcontext(copy_to_host) if stage.offloaded is None else stage.offloaded.copier(index, copy_to_host)

    def put_away(number: int) -> None:
        stage, index = places[number]
        if stage.offloaded is not None:
            stage.offloaded.changed(index)

    layers = [layer for stage in pipe.stages for _, layer in stage.layers]
    try:
        check_layer_states(layers, saved.layers)
    except DataError as error:
        raise DataError(f"{path} does not fit the model: {error}") from error
    try:
        load_layer_states(layers, saved.layers, copier, put_away)
    finally:
        for stage in pipe.stages:
            if stage.offloaded is not None and pipe._executor is None:
                stage.offloaded.rest()
    pipe.next_batch, pipe.seed, pipe._uneven = saved.batch, saved.seed, False
    for stage in pipe.stages:
        stage.seeds.seed = saved.seed
        stage.device.follow_caller()


def _refuse_far(pipe: Pipeline, instead: str) -> None:
    if any(stage.device.far for stage in pipe.stages):
        raise ScheduleError(f"what other processes' layers have learnt is not here; {instead}")


def _what(content: Any) -> str:
    """In words."""
    if not isinstance(content, dict):
        return f"{a_type(content)}"
    names = [repr(name) for name in list(content)[:3]]
    return f"a dict with {', '.join(names) or 'nothing'}{', …' if len(content) > 3 else ''}"
