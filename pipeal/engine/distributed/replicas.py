"""Replicas learn together: after a layer's backward its gradients become those of all replicas' samples.

::

    replica 0   F B(layer 2) ─┐ B(layer 3) ─┐         U(layer 2)  U(layer 3)     an average is under way while the
                              ├ average     ├ average                            layers after it go backward, and is
    replica 1   F B(layer 2) ─┘ B(layer 3) ─┘         U(layer 2)  U(layer 3)     waited for before the update

Each replica's gradients and losses are weighted by its samples, so that the update is that of one larger batch, up to
rounding, wherever losses are means over samples. Batch norm sees each replica's own statistics; buffers are replica 0's
after every batch. Sums are made in an order that depends on nothing but the sizes: runs repeat bit for bit.

Gradients travel in few rows, of many parameters each, and in these they stay: what is averaged is not copied back, and
a parameter's own gradient goes when it is in its row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeal.core.errors import ConfigError, PeerLostError
from pipeal.core.modules import module_of
from pipeal.core.protocols import TrainableLayer
from pipeal.core.tree import one_of_each, tensors
from pipeal.engine.devices import Device
from pipeal.engine.distributed.process_groups import BUCKET_BYTES, Groups
from pipeal.engine.distributed.world import World
from pipeal.engine.execution.channel import Stopped
from pipeal.engine.execution.worker import TICK_S
from pipeal.engine.stage import Stage
from pipeal.engine.state.layer_state import layer_state


@dataclass
class _UnderWay:
    """What is being averaged for one layer: rows of several tensors each, and which."""

    counts: list[int]  # own samples, of this batch and of the gradients, then whether it has one, by parameter
    works: list[Any]
    parameters: list[nn.Parameter]
    shares: list[tuple[list[int], Tensor]]
    losses: int
    buffers: list[Tensor]
    firsts: list[tuple[list[int], Tensor]]
    counted: tuple[Any, Tensor] | None = None  # the counts of all replicas, once they have been sent


class Alike:
    """This rank among those that hold the same layers.

    Args:
        world: The processes.
        groups: With a group of these ranks for the host, and one for their GPUs where each has its own.
        device: The stage's device.
        stopped: Whether the pipeline is ending.
        last: The number of the stage's last layer: with it, where GPUs average, the counts of all go to the others at
            once.

    Attributes:
        replica: Which of them this is.
    """

    def __init__(self, world: World, groups: Groups, device: Device, stopped: Callable[[], bool], *, last: int) -> None:
        assert groups.alike is not None
        self.replica = world.mesh.replica_of(world.rank)
        self._world = world
        self._host: Any = groups.alike
        self._far: Any = groups.alike_on_gpus or groups.alike
        self._on_gpus = groups.alike_on_gpus is not None
        self._by_host = device.lags and not self._on_gpus
        self._device = device.device
        self._stopped = stopped
        self._last = last
        self._under_way: dict[int, _UnderWay] = {}
        self._uncounted: list[_UnderWay] = []

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
        buffers = [one_of_each(one) for one in module.buffers()]  # over the same memory
        counts = [samples, learnt, *(one.grad is not None for one in parameters)]
        mine = [_flat(one) for one in parameters]
        weight = learnt or samples
        if losses:  # of this batch's samples, in a row that counts by those of the gradients
            mine.append(torch.stack([loss.float() for loss in losses]) * (samples / max(weight, 1)))
        shares = self._rows(mine, weight)
        del mine
        for one in parameters:
            one.grad = None
        firsts = self._rows([one.reshape(-1) for one in buffers])
        found = _UnderWay(counts, [], parameters, shares, len(losses or ()), buffers, firsts)
        self._under_way[index] = found
        self._uncounted.append(found)
        # Hosts make one sum after the other: behind the rows of all layers, counts would keep the first layers from
        # their updates until the last average is there.
        if not self._on_gpus:
            self._count()
        found.works += [
            self._begun(self._far.allreduce, torch.view_as_real(row) if row.is_complex() else row)
            for row in _not_empty(shares)
        ]
        found.works += [
            self._begun(self._far.broadcast, row.view(torch.uint8), dist.BroadcastOptions())
            for row in _not_empty(firsts)
        ]
        if self._on_gpus and index == self._last:
            self._count()

    @torch.no_grad()
    def finish(self, index: int) -> list[Tensor] | None:
        """Waits for the averages of a layer and puts them into its gradients, before its update.

        Returns:
            The losses of the whole batch; None where the layer reports none.

        Raises:
            PeerLostError: A replica is lost.
        """
        found = self._under_way.pop(index)
        if found.counted is None:  # it updates before the next layer begins
            self._count()
        assert found.counted is not None
        counting, counts = found.counted
        self._wait(counting, on_gpu=False)
        for work in found.works:
            self._wait(work, on_gpu=self._on_gpus)
        samples, learnt, *have = counts.tolist()
        samples, learnt = max(samples, 1.0), max(learnt, 1.0)
        for places, row in found.firsts if self.replica else []:
            for place, value in _parts(row, places, found.buffers):
                found.buffers[place].copy_(value.view(found.buffers[place].shape))
        losses = None
        like = [*found.parameters, torch.empty(found.losses)]
        for places, row in found.shares:
            for place, value in _parts(row.to(self._device).div_(learnt), places, like):
                if place == len(found.parameters):
                    losses = list((value * (learnt / samples)).unbind())  # without the rest of the row
                elif have[place]:
                    found.parameters[place].grad = _shaped(value, found.parameters[place])
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

    def _count(self) -> None:
        """Begins to add up the counts that have not been sent. By the hosts: which parameters have a gradient decides
        what is given to the device. Each wait for them takes a round trip, and so, beside GPUs that average, they go
        together."""
        row = torch.tensor([count for one in self._uncounted for count in one.counts], dtype=torch.float64)
        work = self._begun(self._host.allreduce, row)
        parts = row.split([len(one.counts) for one in self._uncounted])
        for one, part in zip(self._uncounted, parts, strict=True):
            one.counted = work, part
        self._uncounted = []

    def _rows(self, found: list[Tensor], weight: int = 1) -> list[tuple[list[int], Tensor]]:
        """Flat tensors in few rows, each with the places of those in it, where the group can reach them."""
        rows = []
        for places in _buckets(found):
            row = torch.cat([found[place] for place in places])
            if weight != 1:
                row.mul_(weight)
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
        return world.one_lost(others, error)


def _flat(parameter: nn.Parameter) -> Tensor:
    """All of a parameter's gradient, in the order in which the parameter lies in memory."""
    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    if gradient.layout is not torch.strided:
        raise ConfigError(
            f"the gradient of a parameter of shape {tuple(parameter.shape)} is sparse, which replicas cannot average; "
            "use sparse=False in its embedding"
        )
    return (gradient if parameter.is_contiguous() else gradient.permute(_order(parameter))).reshape(-1)


def _shaped(row: Tensor, parameter: nn.Parameter) -> Tensor:
    """A gradient in that order, to the last stride as the parameter: fused optimizers want it so."""
    order = _order(parameter)
    if parameter.is_contiguous() or parameter.permute(order).is_contiguous():
        return row.as_strided(parameter.shape, parameter.stride())
    # The parameter has gaps, or lies over itself: nobody can lie as it does.
    back = sorted(range(parameter.dim()), key=order.__getitem__)
    return row.view([parameter.shape[one] for one in order]).permute(back)


def _order(parameter: nn.Parameter) -> list[int]:
    """Its dimensions, first the one whose neighbours are furthest apart in memory."""
    return sorted(range(parameter.dim()), key=parameter.stride().__getitem__, reverse=True)


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


def _parts(row: Tensor, places: list[int], like: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
    """The flat tensors that a row is made of, with their places."""
    return zip(places, row.split([like[place].numel() for place in places]), strict=True)


def _digest(layer: TrainableLayer) -> str:
    """A hash of all that a layer has learnt."""
    summed = hashlib.sha256()
    for tensor in tensors(layer_state(layer)):
        summed.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return summed.hexdigest()
