"""Replicas learn together: after a layer's backward its gradients become those of all replicas' samples.

::

    replica 0   F B(layer 2) ─┐ B(layer 3) ─┐         U(layer 2)  U(layer 3)     an average is under way while the
                              ├ average     ├ average                            layers after it go backward, and is
    replica 1   F B(layer 2) ─┘ B(layer 3) ─┘         U(layer 2)  U(layer 3)     waited for before the update

Each replica's gradients and losses are weighted by its samples, so that the update is that of one larger batch, up to
rounding, wherever losses are means over samples. Batch norm sees each replica's own statistics; buffers are replica 0's
after every batch. Sums are made in an order that depends on nothing but the sizes: runs repeat bit for bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeal.engine.device import Device
from pipeal.engine.distributed.meeting import BUCKET_BYTES, Groups
from pipeal.engine.distributed.world import World
from pipeal.engine.layer_state import layer_state
from pipeal.engine.link import Stopped
from pipeal.engine.stage import Stage
from pipeal.engine.worker import TICK_S
from pipeal.errors import ConfigError, PeerLostError
from pipeal.packet import TrainableLayer, module_of, tensors


@dataclass
class _UnderWay:
    """What is being averaged for one layer: rows of several tensors each, and which."""

    facts: Tensor  # all replicas' samples, of this batch and of the gradients, then how many have one, by parameter
    works: list[Any]
    parameters: list[nn.Parameter]
    shares: list[tuple[list[int], Tensor]]
    losses: int
    buffers: list[Tensor]
    firsts: list[tuple[list[int], Tensor]]


class Alike:
    """This rank among those that hold the same layers.

    Args:
        world: The processes.
        groups: With a group of these ranks for the host, and one for their GPUs where each has its own.
        device: The stage's device.
        stopped: Whether the pipeline is ending.

    Attributes:
        replica: Which of them this is.
    """

    def __init__(self, world: World, groups: Groups, device: Device, stopped: Callable[[], bool]) -> None:
        assert groups.alike is not None
        self.replica = world.mesh.replica_of(world.rank)
        self._world = world
        self._groups = groups
        self._host: Any = groups.alike
        self._far: Any = groups.alike_on_gpus or groups.alike
        self._on_gpus = groups.alike_on_gpus is not None
        self._by_host = device.lags and not self._on_gpus
        self._stopped = stopped
        self._under_way: dict[int, _UnderWay] = {}

    @torch.no_grad()
    def begin(self, index: int, layer: TrainableLayer, losses: list[Tensor] | None, samples: int, learnt: int) -> None:
        """Begins to average, after a layer's backward and on its device's stream.

        Args:
            index: The layer's number.
            layer: The layer, with its own gradients.
            losses: Of the batch, detached.
            samples: How many there are in this replica's batch.
            learnt: How many the gradients are the mean of; 0 where they are not to be brought together yet. All
                replicas agree on whether.

        Raises:
            ConfigError: A gradient is sparse.
            PeerLostError: A replica is lost.
        """
        module = module_of(layer)
        parameters = [one for one in module.parameters() if one.requires_grad and learnt]
        buffers = list(module.buffers())
        facts = torch.tensor([samples, learnt, *(one.grad is not None for one in parameters)], dtype=torch.float64)
        works = [self._begun(self._host.allreduce, facts)]
        mine = [_share(one, learnt) for one in parameters]
        if losses:
            mine.append(torch.stack([loss.float() for loss in losses]) * samples)
        shares = self._rows(mine)
        works += [
            self._begun(self._far.allreduce, torch.view_as_real(row) if row.is_complex() else row)
            for row in _not_empty(shares)
        ]
        firsts = self._rows(buffers)
        works += [
            self._begun(self._far.broadcast, row.view(torch.uint8), dist.BroadcastOptions())
            for row in _not_empty(firsts)
        ]
        self._under_way[index] = _UnderWay(facts, works, parameters, shares, len(losses or ()), buffers, firsts)

    @torch.no_grad()
    def finish(self, index: int) -> list[Tensor] | None:
        """Waits for the averages of a layer and puts them into its gradients, before its update.

        Returns:
            The losses of the whole batch; None where the layer reports none.

        Raises:
            PeerLostError: A replica is lost.
        """
        found = self._under_way.pop(index)
        facts, *others = found.works
        self._wait(facts, on_gpu=False)
        for work in others:
            self._wait(work, on_gpu=self._on_gpus)
        samples, learnt, *have = found.facts.tolist()
        samples, learnt = max(samples, 1.0), max(learnt, 1.0)
        for places, row in found.firsts if self.replica else []:
            for place, value in _parts([found.buffers[one] for one in places], places, row):
                found.buffers[place].copy_(value)
        losses = None
        like = [*found.parameters, torch.empty(found.losses)]
        for places, row in found.shares:
            for place, value in _parts([like[one] for one in places], places, row.div_(learnt)):
                if place == len(found.parameters):
                    losses = list((value * (learnt / samples)).unbind())  # without the rest of the row
                elif have[place]:
                    parameter = found.parameters[place]
                    if parameter.grad is None:
                        parameter.grad = torch.empty_like(parameter)
                    parameter.grad.copy_(value)
        return losses

    def require_alike(self, stage: Stage) -> None:
        """Compares what the replicas' layers have learnt; every rank calls it, and all say the same.

        Raises:
            ConfigError: They are not alike.
        """
        mesh = self._world.mesh
        digests = self._world.gather({str(index): _digest(layer) for index, layer in stage.layers})
        for rank, found in enumerate(digests):
            first = mesh.rank_of(0, mesh.stage_of(rank))
            for index in found:
                if found[index] != digests[first].get(index):
                    raise ConfigError(
                        f"layer {index} is not the same on rank {rank} as on rank {first}, which holds it in replica "
                        "0; build all replicas from one seed, and load the same states into them"
                    )

    def _rows(self, found: list[Tensor]) -> list[tuple[list[int], Tensor]]:
        """The tensors in few rows, each with the places of those in it, where the group can reach them."""
        rows = []
        for places in _buckets(found):
            row = torch.cat([found[place].reshape(-1) for place in places])
            rows.append((places, row.cpu() if self._by_host else row))
        return rows

    def _begun(self, operation: Callable[..., Any], row: Tensor, *options: Any) -> Any:
        try:
            return operation([row], *options)
        except RuntimeError as error:
            raise self._lost(error) from error

    def _wait(self, work: Any, *, on_gpu: bool) -> None:
        """Waits for one operation; between GPUs, lets only the stream wait for it."""
        while True:
            ended = work.is_completed()  # asked before: what ends just after its tick ran out has not failed
            try:
                if on_gpu or ended:
                    work.wait()
                else:
                    work.wait(timedelta(seconds=TICK_S))
                return
            except RuntimeError as error:
                if on_gpu or ended:
                    raise self._lost(error) from error
                if self._stopped():
                    raise Stopped from None

    def _lost(self, error: RuntimeError) -> PeerLostError:
        world = self._world
        others = [rank for rank in world.mesh.column(world.mesh.stage_of(world.rank)) if rank != world.rank]
        return self._groups.blame(world, others, error)


def _share(parameter: nn.Parameter, samples: int) -> Tensor:
    """A gradient by its weight."""
    if parameter.grad is None:
        return torch.zeros_like(parameter)
    if parameter.grad.layout is not torch.strided:
        raise ConfigError(
            f"the gradient of a parameter of shape {tuple(parameter.shape)} is sparse, which replicas cannot average; "
            "use sparse=False in its embedding"
        )
    return parameter.grad * samples


def _buckets(found: list[Tensor]) -> list[list[int]]:
    """The places of tensors of one type together, in order, as many as make a bucket."""
    full: list[list[int]] = []
    filling: dict[torch.dtype, tuple[list[int], int]] = {}
    for place, tensor in enumerate(found):
        places, size = filling.pop(tensor.dtype, ([], 0))
        places.append(place)
        size += tensor.numel() * tensor.element_size()
        if size >= BUCKET_BYTES:
            full.append(places)
        else:
            filling[tensor.dtype] = places, size
    return full + [places for places, _ in filling.values()]


def _not_empty(rows: list[tuple[list[int], Tensor]]) -> list[Tensor]:
    """What there is to send of rows. Those of parameters without elements stay in their place: they have gradients."""
    return [row for _, row in rows if row.numel()]


def _parts(like: list[Tensor], places: list[int], row: Tensor) -> Iterator[tuple[int, Tensor]]:
    """A row as the tensors it is made of, with their places."""
    pieces = row.split([one.numel() for one in like])
    for place, one, piece in zip(places, like, pieces, strict=True):
        yield place, piece.view(one.shape)


def _digest(layer: TrainableLayer) -> str:
    """A hash of all that a layer has learnt."""
    summed = hashlib.sha256()
    for tensor in tensors(layer_state(layer)):
        summed.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return summed.hexdigest()
