"""Ranks of distance.py: it starts this file as each of them, with an order; rank 0 says what it finds.

Layers sleep. Those of :mod:`virtual` take part in pipeal's own line; for torch's schedules they are a module whose
backward sleeps as well; data parallel and local SGD sleep a share of a batch through all stages.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import torch
import torch.distributed as dist
from distance_ideals import Step, drawn
from long_line import DEVICE, Say
from schedules import wake_on_time
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from virtual import VirtualLayer

from pipeal.core.tree import Tree
from pipeal.engine.devices.allocator import keep_freed_memory
from pipeal.engine.distributed import DistributedPipeline, Launch, World, open_world, serve
from pipeal.engine.execution.collector import libraries_left_out
from pipeal.line.incoming import Incoming
from pipeal.line.items import BATCH, Item, Packed
from pipeal.line.link import Keys
from pipeal.line.outgoing import Outgoing
from pipeal.line.retained import Retained

FLOATS = 1024
"""Of a sample: 64 samples are a packet of 256 KB."""


@contextmanager
def prompt() -> Iterator[None]:
    """Within it this thread wakes before all others: what stands for a device's work waits for no core of this machine.
    Where that is not allowed, it wakes when it may.

    Not for longer: with the thread in this class for good, 1F1B over Gloo took eight to fifty times as long, on the
    loopback as well, for a reason that was not found; GPipe and pipeal's own lines took as long as without.
    """
    with suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    try:
        yield
    finally:
        with suppress(PermissionError):
            os.sched_setscheduler(0, os.SCHED_OTHER | os.SCHED_RESET_ON_FORK, os.sched_param(0))


def prompt_sleep(seconds: float) -> None:
    """Stands for a device's work, which ends so long after the call; a thread that wakes late is late, as it would be
    for that."""
    end = perf_counter() + seconds
    with prompt():
        sleep(max(0.0, end - perf_counter()))


class SleepingLayer(VirtualLayer):
    """A virtual layer whose steps were drawn before, and that notes when it works.

    Args:
        steps: Of the batches to come.
    """

    draws_from_default = False

    def __init__(self, steps: Sequence[Step]) -> None:
        super().__init__(0.0, 0.0)
        self.steps = iter(steps)
        self.begun: list[float] = []
        self.turned: list[float] = []
        self.went_back: list[float] = []
        self.ended: list[float] = []
        self.windows: list[int] = []
        self.window: Callable[[], int] = lambda: 0

    def forward(self, x: Tree, y: Tree) -> tuple[Tree, Tree]:
        """Takes its time."""
        self.begun.append(perf_counter())
        self.seconds["F"], self.seconds["B"] = next(self.steps)
        onward = super().forward(x, y)
        self.turned.append(perf_counter())
        return onward

    def backward(self) -> None:
        """Likewise."""
        self.went_back.append(perf_counter())  # the packet is handed over by now
        super().backward()
        self.ended.append(perf_counter())
        self.windows.append(self.window())

    def _take(self, action: str) -> None:
        if self.seconds[action]:
            prompt_sleep(self.seconds[action])

    def found(self) -> dict[str, Any]:
        """When each step began and ended, and the window after it, of all batches."""
        return {name: getattr(self, name) for name in ("begun", "turned", "went_back", "ended", "windows")}


def pipeal(say: Say, order: dict[str, Any], launch: Launch) -> None:
    """Runs of so many batches each, one after the other in one open line."""
    runs: list[int] = order["runs"]
    steps = drawn(launch.size, sum(runs), tuple(order["step"]), order["cv"], order["seed"])
    layers = [SleepingLayer(of_stage) for of_stage in steps]
    x = torch.zeros(order["samples"], FLOATS)
    with open_world(launch, order, timeout_s=120.0) as world:
        options: dict[str, Any] = {"threads": 1}
        own = layers[world.rank]
        own.window = partial(_window, world)
        if world.rank:
            serve(layers, world, **options)
        else:
            with DistributedPipeline(layers, world, **options) as pipe:
                for batches in runs:
                    say({"begins": True})
                    reported = pipe.run([(x, None)] * batches).seconds
                    say({"ended": True, "reported_s": reported})
        found = world.gather(own.found())
    if launch.rank == 0:
        say({"stages": found})


def come_and_go(say: Say, order: dict[str, Any], launch: Launch) -> None:
    """The same over the links of ``pipeal line``, whose stages keep what the next one has not saved."""
    runs, rank, folder = order["runs"], launch.rank, Path(order["folder"])
    steps = drawn(launch.size, sum(runs), tuple(order["step"]), order["cv"], order["seed"])
    own = SleepingLayer(steps[rank])
    pairs, addresses = order["keys"], order["addresses"]

    def keys(peer: int) -> Keys:
        return Keys(pairs[rank][0], pairs[rank][1], pairs[peer][0])

    retained, incoming, outgoing = Retained(2**30), None, None
    if rank:
        incoming = Incoming(rank, addresses[rank], keys(rank - 1), "distance", 0, largest_bytes=2**26, room_bytes=2**30)
        incoming.start()
    if rank + 1 < launch.size:
        outgoing = Outgoing(rank, addresses[rank + 1], keys(rank + 1), retained, "distance")
        outgoing.start()
        own.window = lambda: outgoing.window.size
    x = torch.zeros(order["samples"], FLOATS)
    number = 0
    for run, batches in enumerate(runs):
        if rank == 0:
            say({"begins": True})
            begin = perf_counter()
        for _ in range(batches):
            given: Tree = x
            if incoming is not None:
                while (found := incoming.take(1.0)) is None:
                    pass
                given, _ = found[1].item().tree
            onward, _ = own(given, None)
            if outgoing is not None:
                facts = {"batch": number, "lr_scale": 1.0, "updates": True}
                retained.add(Packed.of(Item(BATCH, facts, (onward, None))))
                outgoing.tell()
            own.backward()
            own.update()
            number += 1
        if incoming is not None:
            incoming.tell_saved(number)
        if rank == launch.size - 1:
            (folder / f"ended-{run}").touch()
        while not (folder / f"ended-{run}").exists():
            sleep(0.002)
        if rank == 0:
            say({"ended": True, "reported_s": perf_counter() - begin})
    (folder / f"told-{rank}.aside").write_text(json.dumps(own.found()), encoding="utf-8")
    (folder / f"told-{rank}.aside").rename(folder / f"told-{rank}.json")
    paths = [folder / f"told-{other}.json" for other in range(launch.size)]
    while not all(path.exists() for path in paths):
        sleep(0.02)
    if rank == 0:
        say({"stages": [json.loads(path.read_text(encoding="utf-8")) for path in paths]})
    for end in (outgoing, incoming):
        if end is not None:
            end.close(0.0)


def _window(world: World) -> int:
    """How many packets may be on their way to the next stage."""
    boxes = list(world.endpoint._mailboxes.values())
    return max((box.windows[world.rank + 1].size for box in boxes if world.rank + 1 in box.windows), default=0)


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor, forward_s: float, backward_s: float) -> Tensor:
        context.backward_s, context.like = backward_s, weight
        prompt_sleep(forward_s)
        return x + weight

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        prompt_sleep(context.backward_s)
        return gradient, torch.zeros_like(context.like), None, None


class SleepingStage(nn.Module):
    """A stage for backpropagation, that takes its time for each sample."""

    def __init__(self, step: Step, samples: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.step, self.samples = step, samples

    def forward(self, x: Tensor) -> Tensor:
        """Takes its time; x: ``(B, D)``."""
        share = len(x) / self.samples
        taken: Tensor = _Sleep.apply(x, self.weight, share * self.step[0], share * self.step[1])
        return taken


def backprop(say: Say, order: dict[str, Any], launch: Launch) -> None:
    """Updates of one batch in so many micro-batches, by torch's own schedules over Gloo."""
    made = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[order["method"]]
    whole = order["samples"] * order["packets"]
    last = launch.rank == launch.size - 1
    x, y = torch.zeros(whole, FLOATS), torch.zeros(whole)
    for parts in order["parts"]:
        module = SleepingStage(tuple(order["step"]), order["samples"])
        given_like, handed_like = torch.zeros(2, whole // parts, FLOATS).unbind()
        stage = PipelineStage(
            *(module, launch.rank, launch.size, torch.device("cpu")),
            input_args=given_like.requires_grad_(launch.rank > 0),  # else torch 2.14 sends no gradient
            output_args=handed_like.requires_grad_(),
        )
        schedule = made(stage, parts, loss_fn=lambda given, _: given.mean())

        def update() -> None:
            given: dict[str, Any] = {"target": y} if last else {}
            schedule.step(*([x] if launch.rank == 0 else []), **given)  # noqa: B023

        _timed(say, launch, update, order, parts=parts)


def data_parallel(say: Say, order: dict[str, Any], launch: Launch) -> None:
    """Each rank has the whole model; gradients are averaged layer by layer, while the backward goes on."""
    share = order["packets"] / launch.size
    forward_s, backward_s = order["step"]
    gradients = [torch.zeros(order["weights_bytes"] // 4) for _ in range(launch.size)]

    def update() -> None:
        prompt_sleep(share * forward_s * launch.size)
        averaging = []
        for gradient in gradients:
            prompt_sleep(share * backward_s)
            averaging.append(dist.all_reduce(gradient, async_op=True))
        for one in averaging:
            one.wait()

    _timed(say, launch, update, order)


def local_sgd(say: Say, order: dict[str, Any], launch: Launch) -> None:
    """Each rank takes so many steps with a model of its own, and then all models are averaged, as DiLoCo does."""
    forward_s, backward_s = order["step"]
    weights = torch.zeros(order["weights_bytes"] // 4 * launch.size)

    def update() -> None:
        for _ in range(order["local_steps"]):
            prompt_sleep((forward_s + backward_s) * launch.size)
        dist.all_reduce(weights)

    _timed(say, launch, update, order)


def _timed(say: Say, launch: Launch, update: Callable[[], None], order: dict[str, Any], **facts: Any) -> None:
    """Some updates to warm up, which make connections, and then some that count."""
    for _ in range(order["warm_ups"]):
        update()
    dist.barrier()
    if launch.rank == 0:
        say({"begins": True, **facts})
    seconds = []
    for _ in range(order["updates"]):
        begin = perf_counter()
        update()
        seconds.append(perf_counter() - begin)
    dist.barrier()
    if launch.rank == 0:
        say({"ended": True, "seconds": seconds, **facts})


@libraries_left_out()  # as the commands do
def be_rank(say: Say, order: dict[str, Any], launch: Launch) -> None:
    """Does its part of an order; rank 0 says what it finds."""
    here = {name for _, name in socket.if_nameindex()}  # on one machine there is the loopback alone
    os.environ |= {"GLOO_SOCKET_IFNAME": DEVICE if DEVICE in here else "lo", "OMP_NUM_THREADS": "1"}
    keep_freed_memory()  # as the commands do
    wake_on_time()
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, -10)  # what else the machine does is not measured
    torch.set_num_threads(1)
    if order["method"] in ("pipeal", "line"):
        {"pipeal": pipeal, "line": come_and_go}[order["method"]](say, order, launch)
        return
    where = f"tcp://{launch.address}:{launch.port}"
    dist.init_process_group(
        "gloo", init_method=where, rank=launch.rank, world_size=launch.size, timeout=timedelta(seconds=120)
    )
    work = {"gpipe": backprop, "1f1b": backprop, "data parallel": data_parallel, "local SGD": local_sgd}
    work[order["method"]](say, order, launch)
    dist.destroy_process_group()
