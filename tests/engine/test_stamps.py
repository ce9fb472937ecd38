"""How often a GPU is asked for the time, and what the times of its stages then mean."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from pipeal import Pipeline, Window
from pipeal.engine import pipeline
from pipeal.engine.devices import CudaDevice, Device
from pipeal.engine.schedule import Action
from pipeal.engine.trace import BY_LAYER_EVERY, StageClock

from .paper import PaperEvent, PaperLayer, PaperStream, World
from .traps import nothing, quick


class Lagging(Device):
    """Takes what it is given at once, as a CPU, and is asked for the time as a GPU."""

    lags = True

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.asked: Counter[str] = Counter()

    def stamp(self) -> Any:
        self.asked["stamp"] += 1
        return super().stamp()

    def between(self, begin: Any, end: Any) -> float:
        self.asked["between"] += 1
        return super().between(begin, end)

    def mark(self) -> Any:
        class Passed:
            def query(self) -> bool:
                return True

            def synchronize(self) -> None:
                pass

        return Passed()


LAYERS, BATCHES = 6, 2 * BY_LAYER_EVERY


@pytest.mark.parametrize("schedule", ["pipelined", "sequential", "backward-overlap", "al-fm"])
def test_a_stage_on_a_gpu_is_timed_as_a_whole(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prediction 5 of the GPU reading: six events and nine differences of their times for each layer and batch, some
    50 µs of the host. Beside traced batches, and one in 16, it is six for a stage, whatever the number of layers."""
    device = Lagging()
    monkeypatch.setattr(pipeline, "open_device", lambda _: device)
    with Pipeline(quick(LAYERS), ["cpu"], schedule, trace=Window(3, 2), threads=1) as pipe:
        report = pipe.run(nothing(BATCHES))
    by_layer = 2 + BATCHES // BY_LAYER_EVERY
    wanted = 6 * (LAYERS * by_layer + BATCHES - by_layer)
    assert device.asked["stamp"] == wanted
    assert device.asked["between"] == wanted // 2
    assert {span.batch for span in pipe.spans()} == {3, 4}
    assert len(pipe.spans()) == 3 * LAYERS * 2
    (times,) = report.stages
    assert 0 < times.busy_s <= report.seconds
    assert times.kernels_s is not None
    assert 0 <= times.kernels_s <= times.busy_s
    rows = str(report).splitlines()
    assert rows[1].split() == ["stage", "device", "layers", "host-open", "kernel-busy", "waiting", "for"]
    assert rows[2].split()[3:6] == [f"{report.busy_share[0]:.0%}", ">=", f"{report.kernel_share[0]:.0%}"]


@pytest.mark.parametrize("option", [{"on_non_finite": "skip"}, {"on_oom": "split"}])
def test_where_something_waits_between_actions_each_is_timed(
    option: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Lagging()
    monkeypatch.setattr(pipeline, "open_device", lambda _: device)
    with Pipeline(quick(2), ["cpu"], threads=1, **option) as pipe:
        pipe.run(nothing(5))
    assert device.asked["stamp"] == 6 * 2 * 5


class ByHand(Device):
    """Shows the time that it is told, on the host's clock and on its own alike."""

    lags = True

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(torch.device("cpu"))
        self.now = self.host = 0.0
        monkeypatch.setattr("pipeal.engine.trace.perf_counter", lambda: self.host)

    def stamp(self) -> Any:
        return self.now


def test_what_is_timed_as_a_whole_has_the_shares_of_the_last_batch_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    device = ByHand(monkeypatch)
    clock = StageClock(device, 0, Window(0, 0))
    clock.restart()

    def work(action: Action | None, batch: int, seconds: float) -> None:
        begin, device.now = device.stamp(), device.now + seconds
        clock.add_whole(None, begin) if action is None else clock.add(0, action, batch, batch, begin)

    for batch, long in ((0, 100.0), (16, 1.0)):  # the first one is slow, as first ones are
        for action, seconds in ((Action.FORWARD, 1.0), (Action.BACKWARD, 2.0), (Action.UPDATE, 1.0)):
            work(action, batch, long * seconds)
    work(None, -1, 40.0)
    (times,) = clock.take_all_times()
    assert times.busy == {Action.FORWARD: 111.0, Action.BACKWARD: 222.0, Action.UPDATE: 111.0}
    clock.restart()
    work(None, -1, 8.0)
    (times,) = clock.take_all_times()
    assert times.busy == {Action.FORWARD: 2.0, Action.BACKWARD: 4.0, Action.UPDATE: 2.0}
    clock.forget()  # and batch 16 of another life is no part of that one
    clock.restart()
    work(Action.FORWARD, 16, 3.0)
    work(Action.BACKWARD, 16, 1.0)
    work(None, -1, 8.0)
    (times,) = clock.take_all_times()
    assert times.busy == {Action.FORWARD: 9.0, Action.BACKWARD: 3.0, Action.UPDATE: 0.0}


@pytest.mark.parametrize(
    ("given", "certain"),
    [(0.0, 3.0), (10.0, 3.0), (11.0, 2.0), (13.0, 0.0), (20.0, 0.0)],
    ids=["long before", "as it began", "while it ran", "as it ended", "was seen late"],
)
def test_kernels_are_certain_to_run_from_when_the_host_has_given_them(
    given: float, certain: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prediction 6 of the GPU reading: busy read near 100 % on an idle GPU, as an action is open while its host looks
    for the next kernel."""
    device = ByHand(monkeypatch)
    clock = StageClock(device, 0, Window(0, 1))
    clock.restart()
    device.now, device.host = 13.0, given
    clock.add(0, Action.FORWARD, 0, 0, 10.0)
    (span,) = clock.spans()
    assert (span.begin, span.end, span.given) == (10.0, 13.0, given)
    (times,) = clock.take_all_times()
    assert (times.busy_s, times.kernels_s) == (3.0, certain)


def test_events_are_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prediction 5 of the GPU reading: each event was made and freed."""
    world = World(gpus=1)
    world.install(monkeypatch)
    made: list[PaperEvent] = []

    def event(**options: Any) -> PaperEvent:
        made.append(PaperEvent(world))
        return made[-1]

    monkeypatch.setattr(torch.cuda, "Event", event)
    with Pipeline([PaperLayer(world) for _ in range(3)], ["cuda:0"], trace=Window(0, 20), threads=1) as pipe:
        device = pipe.stages[0].device
        assert isinstance(device, CudaDevice)
        data = [(world.make("cpu").pin_memory(), world.make("cpu").pin_memory()) for _ in range(20)]
        pipe.run(data[:1])
        before = len(made)
        pipe.run(data[1:])
    assert len(made) - before == 19  # one for the end of each batch, for which its host waits
    assert len(pipe.spans()) == 20 * 3 * 3


class Late(PaperEvent):
    """The GPU comes to it when it has been given many more, or when its host has waited for it or a later one."""

    recorded = passed = 0
    early: ClassVar[list[int]] = []

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.number = 0

    def record(self, stream: PaperStream) -> None:
        super().record(stream)
        if not self.query():
            Late.early.append(self.number)
        Late.recorded += 1
        Late.passed = max(Late.passed, Late.recorded - 25)
        self.number = Late.recorded

    def query(self) -> bool:
        return self.number <= Late.passed

    def synchronize(self) -> None:
        super().synchronize()
        Late.passed = max(Late.passed, self.number)


def test_no_event_is_used_again_before_the_gpu_has_come_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(gpus=1)
    world.install(monkeypatch)
    made: list[Late] = []

    def event(**_: Any) -> Late:
        made.append(Late(world))
        return made[-1]

    def come_to_the_end(_: PaperStream) -> bool:
        Late.passed = Late.recorded
        return query(_)

    query = PaperStream.query
    monkeypatch.setattr(PaperStream, "query", come_to_the_end)
    monkeypatch.setattr(torch.cuda, "Event", event)
    for name, value in {"recorded": 0, "passed": 0, "early": []}.items():
        monkeypatch.setattr(Late, name, value)
    with Pipeline([PaperLayer(world) for _ in range(3)], ["cuda:0"], trace=Window(0, 20), threads=1) as pipe:
        pipe.run([(world.make("cpu").pin_memory(), world.make("cpu").pin_memory()) for _ in range(20)])
    assert not Late.early
    assert len(made) < Late.recorded / 3  # so they are used again
    assert len(pipe.spans()) == 20 * 3 * 3


class Drifting:
    """An event of a GPU whose clock is by 60 millionths faster than its host's, which reads ``now``."""

    now = 0.0

    def record(self, _: object) -> None:
        type(self).now += 1e-5  # the GPU comes to it at once, and the host goes on somewhat later
        self.at = 5.0 + type(self).now * (1 + 6e-5)
        type(self).now += 3e-5

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: Drifting) -> float:
        return float(torch.tensor((other.at - self.at) * 1e3, dtype=torch.float32))


def test_kernel_busy_claims_nothing_of_clocks_that_drift(monkeypatch: pytest.MonkeyPatch) -> None:
    """Symptom: in long runs kernel-busy was all of host-open on a GPU that was idle. Cause: the host's clock was taken
    from a GPU's as of when the pipeline was made; an hour later they are 0.2 s apart, as long as many actions. Cure: it
    is tied anew at each report, and what the clocks may differ by is left out."""
    World(gpus=1).install(monkeypatch)
    monkeypatch.setattr(Drifting, "now", 0.0)
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: Drifting())
    monkeypatch.setattr("pipeal.engine.devices.cuda.time", SimpleNamespace(perf_counter=lambda: Drifting.now))
    monkeypatch.setattr("pipeal.engine.trace.perf_counter", lambda: Drifting.now)
    device = CudaDevice(torch.device("cuda:0"))
    clock = StageClock(device, 0, Window(0, 9))

    def act(batch: int, *, behind_s: float) -> None:
        """An action of 10 ms; its host gives the last of it so long before it ends."""
        begin = device.stamp()
        Drifting.now += 0.01
        end, stamp = device.stamp(), device.stamp
        Drifting.now -= behind_s
        device.stamp = lambda: end  # type: ignore[method-assign]
        clock.add(0, Action.FORWARD, batch, batch, begin)
        device.stamp = stamp  # type: ignore[method-assign]
        Drifting.now += behind_s

    for _ in range(2):
        Drifting.now += 3600.0
        clock.restart()
        act(0, behind_s=0.008)
        (times,) = clock.take_all_times()
        assert times.kernels_s == pytest.approx(0.008, abs=1e-4)
        assert times.busy_s == pytest.approx(0.01, abs=1e-4)
        clock.restart()
        act(1, behind_s=0.0)
        Drifting.now += 3600.0
        act(2, behind_s=0.0)
        assert all(span.given is not None and span.given >= span.end for span in clock.spans()[-2:])
        (times,) = clock.take_all_times()
        assert times.kernels_s == 0.0


@pytest.mark.cuda
def test_kernels_of_a_gpu_that_is_behind_are_certain() -> None:
    clock = StageClock(device := CudaDevice(torch.device("cuda:0")), 0, Window(0, 2))
    clock.restart()
    x = torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    with device.active():
        for number in range(2):
            begin = device.stamp()
            for _ in range(20):
                x @ x
            clock.add(0, Action.FORWARD, number, number, begin)
    device.synchronize()
    _, behind = clock.spans()
    assert behind.given is not None
    assert behind.given < behind.begin < behind.end
    (times,) = clock.take_all_times()
    assert times.kernels_s is not None
    assert behind.end - behind.begin <= 1.01 * times.kernels_s <= 1.02 * times.busy_s
