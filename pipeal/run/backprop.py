"""Pipelined backpropagation in a run: what it goes together with, how its network is cut, and its pipeline."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch.torch_version import TorchVersion

from pipeal.config import EngineConfig, RunConfig
from pipeal.core.errors import ConfigError
from pipeal.core.methods import METHODS
from pipeal.core.names import BACKPROP_SCHEDULES
from pipeal.core.protocols import TrainableLayer
from pipeal.engine import Pipeline, Window
from pipeal.engine.distributed.world import World
from pipeal.engine.runner.attention import attention_without_plans
from pipeal.engine.runner.precision import matmul_precision
from pipeal.methods.bp import BP

_log = logging.getLogger(__name__)

PER_STAGE = 4
"""Micro-batches for each stage, unless told: then a pipeline of equal stages is idle a fifth of the time at most."""


def is_pipelined_bp(engine: EngineConfig) -> bool:
    """Whether the stages of a run are those of pipelined backpropagation."""
    return engine.schedule in BACKPROP_SCHEDULES


def check_backprop(config: RunConfig, *, processes: int) -> None:
    """Refuses what pipelined backpropagation does not go with, where a configuration asks for it.

    Raises:
        ConfigError: One line, with the key, what was found, and what to do.
    """
    engine, train = config.engine, config.train
    if not is_pipelined_bp(engine):
        return
    if train.mode not in METHODS or not METHODS[train.mode].is_whole:
        raise ConfigError(
            f"engine.schedule: found {engine.schedule}, a schedule of backpropagation, but train.mode is {train.mode}; "
            "expected --mode bp, or a schedule of layers that learn by themselves, such as pipelined"
        )
    if processes == 1:
        raise ConfigError(
            f"engine.schedule: found {engine.schedule}, whose stages are processes, but this is one process; start it "
            "with torchrun --nproc-per-node, or leave the schedule out"
        )
    for key, found, wanted, instead in (
        ("engine.replicas", engine.replicas, (1,), "its ranks are stages"),
        ("train.accumulate", train.accumulate, (1,), "raise the batch size: a batch is learnt from in micro-batches"),
        (
            "train.on_non_finite",
            train.on_non_finite,
            ("raise",),
            "other ranks have gone back through the batch by then",
        ),
        ("engine.on_oom", engine.on_oom, ("raise",), "raise engine.micro_batches"),
        ("engine.recompute", engine.recompute, ("none",), "1f1b holds fewer graphs than gpipe"),
        ("engine.compile", engine.compile, ("none",), "its blocks run as they are"),
        ("train.precision", train.precision, ("auto", "bf16", "fp32"), "its losses are not scaled"),
    ):
        if found not in wanted:
            raise ConfigError(
                f"{key}: found {found}, which does not go with engine.schedule {engine.schedule} ({instead}); expected "
                f"{' or '.join(map(str, wanted))}"
            )
    if engine.schedule == "1f1b" and engine.micro_batches is not None and engine.micro_batches < processes:
        raise ConfigError(
            f"engine.micro_batches: found {engine.micro_batches} for {processes} stages; expected at least as many "
            "under 1f1b, or engine.schedule gpipe"
        )


def check_transport(engine: EngineConfig, device: str) -> None:
    """Refuses the schedule that an older PyTorch leaves standing on CPUs.

    Args:
        engine: Of a run whose stages are those of backpropagation.
        device: Of a stage.

    Raises:
        ConfigError: It would.
    """
    # It waits for the last of several sends and receives alone, which NCCL makes one of, and Gloo does not.
    if engine.schedule == "1f1b" and device == "cpu" and TorchVersion(torch.__version__) < "2.8":
        raise ConfigError(
            f"engine.schedule: found 1f1b on CPUs under PyTorch {torch.__version__}, where its stages wait for each "
            "other for ever; expected PyTorch 2.8 or newer, or gpipe"
        )


def open_backprop(
    layers: Iterable[TrainableLayer],
    world: World,
    device: str,
    config: RunConfig,
    settings: dict[str, Any],
    *,
    pad_index: int | None,
    tells: bool,
) -> Pipeline:
    """Rank 0's pipeline, which all others serve.

    Args:
        layers: The network as a layer, as it goes on.
        world: The processes.
        device: This rank's.
        config: With every choice made.
        settings: As for :class:`pipeal.Pipeline`.
        pad_index: As for :class:`~pipeal.run.backprop_ranks.Leader`.
        tells: Whether what is otherwise than in one process is told.

    Raises:
        PeerLostError: Another rank is lost.
        ConfigError: The network cannot be cut so, or ranks share a GPU.
    """
    from pipeal.run.backprop_pipeline import PipelinedBackprop  # with parts of PyTorch that take long to import
    from pipeal.run.backprop_ranks import Leader

    network = _whole(layers)
    if tells and any(isinstance(part, torch.nn.modules.batchnorm._BatchNorm) for part in network.modules()):
        _log.warning(
            "batch norm takes the statistics of each micro-batch by itself, with the copies that fill it up: pipelined "
            "backpropagation is not that of one process here"
        )
    leader = Leader(
        *(network, world, device),
        threads=config.engine.threads,
        stall_timeout_s=config.engine.stall_timeout_s,
        pad_index=pad_index,
        longest=getattr(config.data, "max_len", None),
        **_settings(config, settings["trace"]),
    )
    return PipelinedBackprop(leader, **{**settings, "sizes": None, "trace": None})


def serve_backprop(
    layers: Iterable[TrainableLayer],
    world: World,
    device: str,
    config: RunConfig,
    traced: Window | None,
    first_batch: int,
) -> None:
    """Serves it on any other rank, until it ends; the arguments are those of :func:`open_backprop`, as is what is
    raised, the batches that are traced, and the number of the first batch."""
    from pipeal.run.backprop_ranks import Follower  # likewise

    follower = Follower(_whole(layers), world, device, **_settings(config, traced))
    with matmul_precision(config.engine.matmul), attention_without_plans({follower.device.device.type}):
        follower.serve(config.engine.threads, first_batch)


def _whole(layers: Iterable[TrainableLayer]) -> BP:
    (layer,) = layers
    assert isinstance(layer, BP)
    return layer


def _settings(config: RunConfig, traced: Window | None) -> dict[str, Any]:
    engine = config.engine
    return {
        "sizes": engine.sizes,
        "schedule": engine.schedule,
        "micro_batches": engine.micro_batches,
        "precision": config.train.precision,
        "traced": traced or Window(0, 0),
    }
