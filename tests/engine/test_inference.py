"""Predictions of many batches: the bits of one at a time, stages at work together, and early exits that save work."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from math import inf
from typing import Any

import pytest
import torch
from bench.virtual import VirtualLayer
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from pipeal import AE, AL, BP, ENC, ALPackage, ConfigError, LabelAE, Pipeline, PlacementError, ScheduleError, StallError
from pipeal.core.protocols import Path
from pipeal.core.tree import Tree
from pipeal.engine import SCHEDULES
from pipeal.engine.inference.exit_policy import ExitPolicy, confidence
from pipeal.engine.runner.compile_gate import GATE
from pipeal.models.text import LSTMAL, TextDims, TransformerAL

from .cases import Case, Layer, cases, cosine, cuts, predictions_by_hand, reference
from .conftest import STOP_S
from .test_failures import notes_of
from .traps import SOON_S, STALL_S, Gate, throw

SMALL = Case((Layer("nn.Dropout"), Layer("batch norm"), Layer("pipeal.Dropout")), rows=(4, 4, 3))
THREADED = "pipelined"


@st.composite
def settings_of(draw: st.DrawFn, layers: int) -> dict[str, Any]:
    """A placement, a schedule and a queue depth."""
    sizes = draw(st.sampled_from([cut for stages in range(1, layers + 1) for cut in cuts(layers, stages)]))
    return {
        "devices": ["cpu"] * len(sizes),
        "sizes": sizes,
        "schedule": draw(st.sampled_from(sorted(SCHEDULES))),
        "queue_depth": draw(st.integers(1, 3)),
        "threads": 1,
    }


@given(case=cases(), data=st.data())
def test_batch_after_batch_gives_the_bits_of_one_at_a_time(case: Case, data: st.DataObject) -> None:
    """Law 1 for inference: any placement, exit, queue depth and number of batches, none included."""
    package = case.build()
    options = data.draw(settings_of(len(package)), label="options")
    exit_at = data.draw(st.sampled_from([None, *range(1, len(package) + 1)]), label="exit")
    inputs = [x for x, _ in case.batches()][: data.draw(st.integers(0, len(case.rows)), label="batches")]
    pipe = Pipeline(package, **options)
    found = list(pipe.predict_each(iter(inputs), exit_at))
    assert len(found) == len(inputs)
    for x, logits in zip(inputs, found, strict=True):
        assert torch.equal(logits, pipe.predict(x, exit_at))
        assert not logits.requires_grad
    for x, exits in zip(inputs, pipe.predict_exits(inputs), strict=True):
        assert all(torch.equal(one, two) for one, two in zip(exits, predictions_by_hand(package, x), strict=True))


@given(case=cases(), data=st.data())
def test_every_sample_leaves_at_the_first_exit_that_is_sure_and_with_its_answer(
    case: Case, data: st.DataObject
) -> None:
    """Law 6: an answer does not depend on who else is still under way."""
    package = case.build()
    layers = len(package)
    options = data.draw(settings_of(layers), label="options")
    thresholds = st.sampled_from([0.0, 0.3, 0.4, 0.5, 0.6, 0.8, inf])
    temperatures = st.sampled_from([0.1, 0.5, 1.0, 3.0])
    policy = ExitPolicy(
        tuple(data.draw(st.lists(thresholds, min_size=layers, max_size=layers), label="thresholds")),
        tuple(data.draw(st.lists(temperatures, min_size=layers, max_size=layers), label="temperatures")),
    )
    inputs = [x for x, _ in case.batches()]
    answers = list(Pipeline(package, **options).predict_each(inputs, policy=policy))
    for x, answer in zip(inputs, answers, strict=True):
        by_exit = predictions_by_hand(package, x)
        assert answer.logits.shape == by_exit[-1].shape
        for row, taken in enumerate(answer.exits.tolist()):
            torch.testing.assert_close(answer.logits[row], by_exit[taken - 1][row], atol=1e-5, rtol=1e-5)
            sure = [float(confidence(one[row], by)) for one, by in zip(by_exit, policy.temperatures, strict=True)]
            assert taken in policy.tried
            assert taken == layers or sure[taken - 1] >= policy.thresholds[taken - 1] - 1e-4
            assert all(sure[k] < policy.thresholds[k] + 1e-4 for k in range(taken - 1))


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("model", [LSTMAL, TransformerAL])
def test_a_padded_text_has_its_own_answer_whoever_left_before(
    model: type[LSTMAL] | type[TransformerAL], stages: int
) -> None:
    """Packets of features and a mask: every tensor of them follows the samples that climb on."""
    torch.manual_seed(0)
    package = model(30, 3, dims=TextDims(embedding=12, hidden=8, code=6, heads=2))
    draw = torch.Generator().manual_seed(1)
    x = torch.randint(1, 30, (16, 9), generator=draw)
    for row in range(16):
        x[row, 1 + row % 9 :] = 0
    pipe = Pipeline(package, ["cpu"] * stages, threads=1)
    # A bit above the middle: a confidence that equals the threshold may fall to either side by its rounding.
    middle = [float(confidence(one, 1.0).median()) + 1e-4 for one in next(pipe.predict_exits([x]))]
    policy = ExitPolicy(tuple(middle), (1.0,) * 4)
    (together,) = pipe.predict_each([x], policy=policy)
    assert len(set(together.exits.tolist())) > 2
    for row, alone in enumerate(pipe.predict_each(x.split(1), policy=policy)):
        assert alone.exits == together.exits[row]
        torch.testing.assert_close(alone.logits[0], together.logits[row], atol=1e-5, rtol=1e-5)


class Rounds(nn.Module):
    """Stands for a reduction, which rounds differently for every number of threads."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + 1e-6 * torch.get_num_threads())


def rounding() -> ALPackage:
    sides: list[AE] = [LabelAE(nn.Identity(), nn.Identity(), 3), AE(nn.Identity(), nn.Identity())]
    return ALPackage([AL(ENC(Rounds(), Rounds()), side) for side in sides])


@pytest.mark.parametrize("threads", [1, 2])
def test_the_callers_own_number_of_threads_changes_no_answer(threads: int) -> None:
    """Law 1. Symptom: accuracies and thresholds that depended on the schedule. Cause: the caller, where it did the
    stages' work, did it with PyTorch's default number of threads and not with the pipeline's."""
    x = torch.randn(4, 3)
    torch.set_num_threads(threads)
    wanted = predictions_by_hand(rounding(), x)
    torch.set_num_threads(3 - threads)
    assert not torch.equal(predictions_by_hand(rounding(), x)[0], wanted[0])
    policy = ExitPolicy((0.0, 0.0), (1.0, 1.0))
    for schedule in ("sequential", "pipelined"):
        for stages in (1, 2):
            pipe = Pipeline(rounding(), ["cpu"] * stages, schedule, threads=threads)
            (exits,) = pipe.predict_exits([x])
            for depth in (1, 2):
                assert torch.equal(pipe.predict(x, depth), wanted[depth - 1])
                assert torch.equal(next(pipe.predict_each([x], depth)), wanted[depth - 1])
                assert torch.equal(exits[depth - 1], wanted[depth - 1])
            assert torch.equal(next(pipe.predict_each([x], policy=policy)).logits, wanted[0])
            assert torch.get_num_threads() == 3 - threads


class Watched(VirtualLayer):
    """Hands on what it gets, after ``hook(path, visit)``; visits are counted for each path."""

    def __init__(self, hook: Callable[[str, int], object] = lambda path, visit: None) -> None:
        super().__init__(0, 0)
        self.hook = hook
        self.visits = {"f": 0, "b": 0, "h": 0}

    def inference(self, x: Tree, path: Path) -> Tree:
        visit, self.visits[path] = self.visits[path], self.visits[path] + 1
        self.hook(path, visit)
        return x


class Counting(AL):
    """Counts the samples that come to each block."""

    def __init__(self, wide_in: int, wide_out: int, side: AE) -> None:
        super().__init__(ENC(nn.Linear(wide_in, wide_out), nn.Linear(wide_out, 3)), side)
        self.came = {"f": 0, "b": 0, "h": 0}

    def inference(self, x: Tree, path: Path) -> Tree:
        self.came[path] += len(x)
        return super().inference(x, path)


def counting(layers: int) -> ALPackage:
    torch.manual_seed(0)
    sides = [LabelAE(nn.Linear(3, 3), nn.Linear(3, 3), 3), *(AE(nn.Linear(3, 3), nn.Linear(3, 3)) for _ in range(9))]
    return ALPackage([Counting(6, 6, side) for side in sides[:layers]])


@pytest.mark.parametrize("stages", [1, 3])
def test_who_has_left_costs_nothing_more(stages: int) -> None:
    package = counting(3)
    pipe = Pipeline(package, ["cpu"] * stages, threads=1)
    x = torch.randn(50, 6)
    middle = [float(confidence(one, 1.0).median()) for one in next(pipe.predict_exits([x]))]
    for layer in package:
        layer.came = dict.fromkeys(layer.came, 0)
    (answer,) = pipe.predict_each([x], policy=ExitPolicy((middle[0], middle[1], inf), (1.0,) * 3))
    first, second, third = (int((answer.exits >= depth).sum()) for depth in (1, 2, 3))
    assert first > second > third > 0
    assert [layer.came for layer in package] == [
        {"f": first, "b": first, "h": first + second + third},
        {"f": second, "b": second, "h": second + third},
        {"f": third, "b": third, "h": third},
    ]


def test_an_exit_that_is_off_is_not_computed() -> None:
    package = counting(4)
    (answer,) = Pipeline(package, threads=1).predict_each(
        [torch.randn(9, 6)], policy=ExitPolicy((inf,) * 4, (1.0,) * 4)
    )
    assert answer.exits.tolist() == [4] * 9
    assert [layer.came["b"] for layer in package] == [0, 0, 0, 9]


def test_every_layer_is_climbed_once_for_all_exits() -> None:
    package = counting(4)
    (exits,) = Pipeline(package, ["cpu"] * 2, threads=1).predict_exits([torch.randn(5, 6)])
    assert len(exits) == 4
    assert [layer.came["f"] for layer in package] == [5] * 4


def test_once_all_have_left_nobody_climbs_on() -> None:
    package = counting(3)
    (answer,) = Pipeline(package, threads=1).predict_each(
        [torch.randn(4, 6)], policy=ExitPolicy((0.0, 0.5, 0.5), (1.0,) * 3)
    )
    assert answer.exits.tolist() == [1] * 4
    assert package[1].came["f"] == 0


def test_answers_that_are_no_numbers_climb_on() -> None:
    """A NaN is never sure; at the last exit it leaves as well."""
    package = counting(2)
    x = torch.randn(4, 6)
    x[2] = torch.nan
    (answer,) = Pipeline(package, threads=1).predict_each([x], policy=ExitPolicy((0.01, 0.01), (1.0, 1.0)))
    assert answer.exits.tolist() == [1, 1, 2, 1]


@pytest.mark.parametrize(
    ("thresholds", "temperatures", "words"),
    [
        ((0.5,), (1.0, 1.0), "1 thresholds and 2 temperatures"),
        ((float("nan"), 0.5), (1.0, 1.0), "write inf to switch an exit off"),
        ((0.5, 0.5), (1.0, 0.0), "expected numbers above 0"),
        ((0.5, 0.5), (1.0, float("nan")), "expected numbers above 0"),
    ],
)
def test_a_policy_that_means_nothing_is_refused(thresholds: Any, temperatures: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ExitPolicy(thresholds, temperatures)


def test_what_does_not_fit_is_refused_before_anything_runs() -> None:
    pipe = Pipeline(SMALL.build())
    with pytest.raises(PlacementError, match="exit 4 does not exist"):
        pipe.predict_each([], 4)
    with pytest.raises(ConfigError, match="2 exits, but this one has 3"):
        pipe.predict_each([], policy=ExitPolicy((0.5,) * 2, (1.0,) * 2))
    with pytest.raises(ConfigError, match="exit_at 2 and a policy"):
        pipe.predict_each([], 2, ExitPolicy((0.5,) * 3, (1.0,) * 3))  # type: ignore[call-overload]


class Extra(nn.Module):
    """Hands on features together with another tensor."""

    def __init__(self, extra: Tensor) -> None:
        super().__init__()
        self.extra = extra

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, self.extra


class Sum(nn.Module):
    def forward(self, x: tuple[Tensor, Tensor]) -> Tensor:
        return x[0][:, :3] + 0 * x[1].sum()


def with_extra(extra: Tensor) -> Iterator[Any]:
    first = AL(ENC(Extra(extra), Sum()), LabelAE(nn.Identity(), nn.Identity(), 3))
    second = AL(ENC(nn.Identity(), Sum()), AE(nn.Identity(), nn.Identity()))
    x = 4 * torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    middle = float(confidence(x[:, :3], 1.0).median())
    return Pipeline([first, second], threads=1).predict_each([x], policy=ExitPolicy((middle, 1.0), (1.0, 1.0)))


@pytest.mark.parametrize("extra", [torch.tensor(3.0), torch.zeros(1, 7), torch.zeros(8, 2)], ids=["0d", "1", "8"])
def test_what_all_samples_share_goes_on_as_it_is(extra: Tensor) -> None:
    (answer,) = with_extra(extra)
    assert set(answer.exits.tolist()) == {1, 2}


def test_a_packet_that_cannot_be_parted_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"8 samples holds a tensor of shape \(5, 2\)"):
        list(with_extra(torch.zeros(5, 2)))


def test_answers_that_are_no_logits_are_refused() -> None:
    class Flat(Watched):
        def inference(self, x: Tree, path: Path) -> Tree:
            return x[:, 0] if path == "h" else x

    with pytest.raises(ConfigError, match=r"shape \(B, classes\), but exit 1 gives \(4,\)"):
        list(Pipeline([Flat()]).predict_each([torch.ones(4, 3)], policy=ExitPolicy((0.5,), (1.0,))))


def test_backpropagation_has_one_exit() -> None:
    torch.manual_seed(0)
    pipe = Pipeline([BP(nn.Linear(6, 3))], threads=1)
    x = torch.randn(5, 6)
    (answer,) = pipe.predict_each([x], policy=ExitPolicy((0.2,), (1.0,)))
    assert torch.equal(answer.logits, pipe.predict(x))
    assert answer.exits.tolist() == [1] * 5


def test_stages_work_at_the_same_time_on_different_batches() -> None:
    """The second stage holds batch 0 until the first one has begun with batch 1."""
    begun = threading.Event()

    def first(path: str, visit: int) -> None:
        if (path, visit) == ("f", 1):
            begun.set()

    def second(path: str, visit: int) -> None:
        if (path, visit) == ("f", 0):
            assert begun.wait(120)

    assert list(Pipeline([Watched(first), Watched(second)]).predict_each([None] * 3)) == [None] * 3


@pytest.mark.parametrize("queue_depth", [1, 2])
def test_no_more_batches_are_under_way_than_allowed(queue_depth: int) -> None:
    """Law 5: while a stage stands still, and while the caller does."""
    drawn: list[int] = []

    def endless() -> Iterator[None]:
        while True:
            drawn.append(1)
            yield None

    gate = Gate()
    layers = [Watched(), Watched(lambda path, visit: gate.stand_still_here()), Watched()]
    answers = Pipeline(layers, queue_depth=queue_depth).predict_each(endless())
    held: list[int] = []

    def look() -> None:
        until = time.perf_counter() + SOON_S
        while len(drawn) < 3 * queue_depth and time.perf_counter() < until:
            time.sleep(0.01)
        time.sleep(0.3)  # would it take more?
        held.append(len(drawn))
        gate.open()

    looking = threading.Thread(target=look)
    looking.start()
    for _ in range(5):
        next(answers)
    assert held == [3 * queue_depth]
    assert len(drawn) <= 5 + 3 * queue_depth
    answers.close()
    looking.join()


@given(
    stages=st.integers(1, 4),
    schedule=st.sampled_from(["sequential", "pipelined"]),
    path=st.sampled_from("fbh"),
    data=st.data(),
)
def test_a_failure_arrives_in_its_place_and_says_where_it_was(
    stages: int, schedule: str, path: str, data: st.DataObject
) -> None:
    """Law 3. What had arrived before it is not lost, the first failure wins, and nothing is left behind."""
    layer = stages - 1 if path == "b" else data.draw(st.integers(0, stages - 1), label="layer")
    batch = data.draw(st.integers(0, 6), label="batch")

    def spring(at: str, visit: int) -> None:
        if (at, visit) == (path, batch):
            raise LookupError("the trap")

    layers = [Watched(spring if number == layer else lambda at, visit: None) for number in range(stages)]
    pipe = Pipeline(layers, schedule=schedule, threads=1, queue_depth=data.draw(st.integers(1, 3), label="depth"))
    seen: list[Tensor] = []
    with pytest.raises(LookupError, match="the trap") as caught:
        seen.extend(pipe.predict_each([torch.ones(2, 3)] * 7))
    assert len(seen) <= batch
    assert notes_of(caught.value) == (
        f"in the inference ({path}) of stage {layer}, layer {layer} (Watched), batch {batch}, device cpu; "
        "input (2, 3) float32"
    )
    assert len(list(pipe.predict_each([None] * 2))) == 2  # it can be used again


def test_a_failed_prediction_says_where_it_was() -> None:
    """Symptom: the shapes did not fit, somewhere. Cause: inference went past what adds the notes of training."""
    package = SMALL.build()
    with pytest.raises(RuntimeError) as caught:
        Pipeline(package).predict(torch.ones(2, 5))
    assert notes_of(caught.value) == ("in the inference (f) of stage 0, layer 0 (AL), device cpu; input (2, 5) float32")


@pytest.mark.parametrize("error", [KeyboardInterrupt("in a layer"), SystemExit(4), TimeoutError("not ours")])
@pytest.mark.parametrize("schedule", ["sequential", "pipelined"])
def test_it_arrives_as_the_very_same_exception(schedule: str, error: BaseException) -> None:
    layers = [Watched(), Watched(lambda path, visit: visit == 1 and throw(error)())]
    with pytest.raises(type(error)) as caught:
        list(Pipeline(layers, schedule=schedule).predict_each([None] * 4))
    assert caught.value is error


@pytest.mark.parametrize("schedule", ["sequential", "pipelined"])
def test_a_stray_stop_iteration_does_not_end_the_answers_quietly(schedule: str) -> None:
    layers = [Watched(), Watched(lambda path, visit: visit == 1 and throw(StopIteration())())]
    with pytest.raises(RuntimeError) as caught:
        list(Pipeline(layers, schedule=schedule).predict_each([None] * 4))
    assert isinstance(caught.value.__cause__, StopIteration)


@pytest.mark.parametrize("schedule", ["sequential", "pipelined"])
def test_an_exception_of_the_inputs_ends_the_answers(schedule: str) -> None:
    def inputs() -> Iterator[None]:
        yield None
        raise OSError("disk")

    pipe = Pipeline([Watched(), Watched()], schedule=schedule)
    with pytest.raises(OSError, match="disk"):
        list(pipe.predict_each(inputs()))
    assert not engine_threads()


def engine_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("pipeal-inference")]


def test_in_an_open_pipeline_predictions_share_their_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prediction 2 of the GPU reading: each prediction started new threads, and cuDNN plans its convolutions for each
    thread anew, which took up to two seconds in the first batch of every evaluation."""
    started: list[str] = []
    start = threading.Thread.start

    def counted(thread: threading.Thread) -> None:
        started.append(thread.name)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", counted)
    stages = [f"pipeal-inference-{number}" for number in range(3)]
    pipe = Pipeline([Watched() for _ in range(3)], threads=1)
    for _ in range(2):
        with pipe:
            started.clear()
            assert len(list(pipe.predict_each([None] * 5))) == 5
            assert len(list(pipe.predict_each([None] * 2, exit_at=2))) == 2
            assert len(list(pipe.predict_exits([None] * 4))) == 4
            assert started == stages == engine_threads()
            for _ in pipe.predict_each([None] * 20):
                break  # what is under way is left: its threads end
            assert engine_threads() == []
            under_way = pipe.predict_each([None] * 9)
            next(under_way)
            assert started == stages * 2
        assert engine_threads() == stages  # those of the iterator that is open still
        assert len(list(under_way)) == 8
        assert engine_threads() == []
    started.clear()
    assert len(list(pipe.predict_each([None] * 2, exit_at=2))) == 2
    assert started == stages[:2]
    assert engine_threads() == []


def test_after_a_failed_prediction_the_next_has_new_threads() -> None:
    def once(path: str, visit: int) -> None:
        if (path, visit) == ("f", 1):
            raise LookupError("the trap")

    with Pipeline([Watched(), Watched(once)], threads=1) as pipe:
        list(pipe.predict_each([torch.ones(1, 2)]))
        with pytest.raises(LookupError, match="the trap"):
            list(pipe.predict_each([torch.ones(1, 2)]))
        assert engine_threads() == []
        assert len(list(pipe.predict_each([torch.ones(1, 2)] * 3))) == 3
    assert engine_threads() == []


@pytest.mark.parametrize("schedule", ["sequential", "pipelined"])
@pytest.mark.parametrize("way", ["break", "raise", "interrupt", "close"])
def test_leaving_early_ends_the_threads_and_gives_the_modes_back(schedule: str, way: str) -> None:
    package, x = SMALL.build(), SMALL.batches()[0][0]
    frozen = next(module for module in package.modules() if isinstance(module, nn.BatchNorm1d))
    frozen.eval()
    modules = [module for layer in package for module in layer.modules()]
    modes = [module.training for module in modules]
    threads = torch.get_num_threads()
    pipe = Pipeline(package, schedule=schedule, threads=2)
    error = {"raise": ZeroDivisionError(), "interrupt": KeyboardInterrupt()}.get(way)

    def ask() -> None:
        for _ in pipe.predict_each([x] * 20):
            assert not any(module.training for module in modules)
            assert bool(engine_threads()) == (schedule == THREADED)
            if error is not None:
                raise error
            break
        if way == "close":
            answers = pipe.predict_each([x] * 20)
            next(answers)
            answers.close()
            assert list(answers) == []

    with pytest.raises(type(error)) if error is not None else nullcontext():
        ask()
    assert engine_threads() == []
    assert [module.training for module in modules] == modes
    assert torch.get_num_threads() == threads
    assert torch.is_grad_enabled()
    assert pipe.predict(x) is not None


def test_an_iterator_that_nobody_asks_does_nothing() -> None:
    package = SMALL.build()
    with Pipeline(package, threads=1) as pipe:
        answers = pipe.predict_each([SMALL.batches()[0][0]])
        assert engine_threads() == []
        pipe.run(SMALL.batches())
        assert len(list(answers)) == 1


@pytest.mark.parametrize("schedule", ["sequential", "pipelined"])
def test_the_pipeline_does_one_thing_at_a_time(schedule: str) -> None:
    package, batches = SMALL.build(), SMALL.batches()
    x = batches[0][0]
    with Pipeline(package, schedule=schedule, threads=1) as pipe:
        answers = pipe.predict_each([x] * 5)
        next(answers)
        for use in (
            lambda: pipe.submit(*batches[0]),
            lambda: pipe.predict(x),
            lambda: next(pipe.predict_each([x])),
            lambda: next(pipe.predict_exits([x])),
        ):
            with pytest.raises(ScheduleError, match=r"is predicting; finish the iterator .* first$"):
                use()
        assert len(list(answers)) == 4
        assert pipe.run(batches).batches == 3


@pytest.mark.parametrize("schedule", ["sequential", "pipelined"])
def test_a_batch_waits_for_a_prediction_of_another_thread(schedule: str) -> None:
    """Layers silently learnt in evaluation mode meanwhile."""
    predicts, goes_on, modes = threading.Event(), threading.Event(), []

    class Watched(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            modes.append(self.training)
            predicts.set()
            assert self.training or goes_on.wait(STALL_S)
            return super().forward(x)

    package = ALPackage([AL(ENC(Watched(4, 4), nn.Linear(4, 4)), AE(nn.Linear(4, 4), nn.Linear(4, 4)))])
    with Pipeline(package, "cpu", schedule, threads=1) as pipe:
        other = threading.Thread(target=pipe.predict, args=(torch.ones(2, 4),))
        other.start()
        assert predicts.wait(STALL_S)
        threading.Timer(0.1, goes_on.set).start()
        pipe.run([(torch.ones(2, 4), torch.ones(2, 4))])
        other.join()
    assert modes == [False, True]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_predictions_between_batches_change_nothing_of_the_training(schedule: str) -> None:
    """And they see what was submitted before them: training is drained first."""
    package, batches = SMALL.build(), SMALL.batches()
    with Pipeline(package, schedule=schedule, threads=1) as pipe:
        for number, batch in enumerate(batches):
            pipe.submit(*batch, cosine(number))
            found = list(pipe.predict_each([x for x, _ in batches]))
    wanted = reference(SMALL).tensors
    assert all(torch.equal(value, wanted[f"weights/{name}"]) for name, value in package.state_dict().items())
    for (x, _), logits in zip(batches, found, strict=True):
        assert torch.equal(logits, predictions_by_hand(package, x)[-1])


def test_the_watchdog_names_the_stage_that_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeal.engine.execution.executors.STOP_S", 0.2)
    gate = Gate()
    layers = [Watched(), Watched(lambda path, visit: visit == 2 and gate.stand_still_here()), Watched()]
    answers = Pipeline(layers, stall_timeout_s=STALL_S).predict_each([None] * 30)
    try:
        with gate.alone(), pytest.raises(StallError) as caught:
            list(answers)
    finally:
        gate.open()
    text = str(caught.value)
    assert text.startswith("stage 1 stands still: inference (climb), batch 2 for ")
    assert "stand_still_here" in text
    assert "stage 0: waiting for input" in text


def test_a_stage_that_never_returns_is_left_behind_in_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeal.engine.execution.executors.STOP_S", 0.2)
    gate = Gate()
    layers = [Watched(), Watched(lambda path, visit: visit == 1 and gate.stand_still_here())]
    answers = Pipeline(layers).predict_each([None] * 9)
    next(answers)
    assert gate.reached.wait(120)
    begin = time.perf_counter()
    try:
        with pytest.raises(StallError, match="stage 1 stands still"):
            answers.close()
        assert time.perf_counter() - begin < SOON_S
    finally:
        gate.open()


def test_leaving_while_a_stage_compiles_is_no_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    """Symptom: a StallError on leaving. Cause: the end waited two seconds for a compilation that may take minutes."""
    first, compiles, waited_for = threading.Event(), threading.Event(), threading.Event()
    compiled_s = [0.0]

    def clock() -> float:
        """While one compiles, a third of the time that an end waits passes from look to look."""
        if compiles.is_set() and GATE.busy():
            compiled_s[0] += STOP_S / 3
            if compiled_s[0] > 3 * STOP_S:
                waited_for.set()
        return time.perf_counter() + compiled_s[0]

    monkeypatch.setattr("pipeal.engine.execution.watchdog.perf_counter", clock)

    def hook(path: str, visit: int) -> None:
        if (path, visit) == ("h", 0):
            first.set()
        if (path, visit) == ("f", 1):  # of a shape that it has not seen: alone before the compiler
            compiles.set()
            waited_for.wait(120)

    def inputs() -> Iterator[Tensor]:
        yield torch.ones(4, 3)
        assert first.wait(120)
        yield torch.ones(5, 3)
        assert compiles.wait(120)
        yield torch.ones(4, 3)

    with uncompiled():
        answers = Pipeline([Watched(hook), Watched()], queue_depth=1, compile="static").predict_each(inputs())
        next(answers)
        assert compiles.wait(120)
        try:
            answers.close()
        finally:
            waited_for.set()
    assert engine_threads() == []


def test_leaving_ends_the_wait_for_another_pipelines_compilation() -> None:
    """Symptom: a StallError on leaving. Cause: nobody told a visit that waited for the compiler to give up."""
    held = GATE.alone()

    def inputs() -> Iterator[Tensor]:
        yield torch.ones(4, 3)
        held.__enter__()
        yield torch.ones(5, 3)
        while not GATE._queue:
            time.sleep(0.01)
        raise OSError("disk")

    with uncompiled():
        answers = Pipeline([Watched(), Watched()], queue_depth=3, compile="static").predict_each(inputs())
        try:
            with pytest.raises(OSError, match="disk") as caught:
                list(answers)
            assert notes_of(caught.value) == ""
            assert engine_threads() == []
        finally:
            held.__exit__(None, None, None)


@contextmanager
def uncompiled() -> Iterator[None]:
    """``torch.compile`` that gives the function back: virtual layers hold nothing to compile, but pass the gate."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda function, **keywords: function)
        yield


def test_threads_that_cannot_all_start_do_not_leave_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def scarce(thread: threading.Thread) -> None:
        if thread.name == "pipeal-inference-2":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr("pipeal.engine.execution.worker.StageThread.start", scarce)
    pipe = Pipeline([Watched() for _ in range(3)])
    with pytest.raises(RuntimeError, match="can't start"):
        next(pipe.predict_each([None]))
    assert engine_threads() == []


def test_the_first_of_several_failures_wins() -> None:
    """The second stage fails as well, after the first one has stopped everyone."""
    gate, second_thread = Gate(), list[threading.Thread]()

    def second(path: str, visit: int) -> None:
        second_thread.append(threading.current_thread())
        gate.stand_still_here()
        raise KeyError("second")

    def first(path: str, visit: int) -> None:
        if (path, visit) == ("f", 1):
            assert gate.reached.wait(120)
            thread: Any = threading.current_thread()
            gate.open_after(thread.progress.ending)
            raise ValueError("first")

    def inputs() -> Iterator[None]:
        yield None
        yield None
        assert gate.reached.wait(120)
        second_thread[0].join(120)  # both stages have failed before the caller looks
        yield None

    answers = Pipeline([Watched(first), Watched(second)]).predict_each(inputs())
    with pytest.raises(ValueError, match="first"):
        list(answers)
    assert gate.ended.is_set()


def test_threads_born_later_have_the_intra_op_threads_they_would_have_had() -> None:
    """``torch.set_num_threads`` in a thread also sets what every later thread of the process begins with."""
    torch.set_num_threads(2)
    assert list(Pipeline([Watched(), Watched()], threads=1).predict_each([None])) == [None]
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert found == [2]


def test_a_stage_keeps_its_number_of_intra_op_threads_whatever_another_sets_before_its_first_operator() -> None:
    found: list[int] = []
    began = threading.Event()

    def hook(path: str, visit: int) -> None:
        if path == "f":
            began.set()
            if visit:
                found.append(torch.get_num_threads())

    def inputs() -> Iterator[None]:
        yield None
        assert began.wait(120)
        torch.set_num_threads(2)
        yield None

    assert list(Pipeline([Watched(hook), Watched()], threads=1).predict_each(inputs())) == [None, None]
    assert found == [1]


@settings(max_examples=10)
@given(case=cases(), data=st.data())
def test_half_precision_gives_the_bits_of_one_at_a_time_as_well(case: Case, data: st.DataObject) -> None:
    """Autocast is local to a thread: each stage's own sets it for itself."""
    package = case.build()
    options = data.draw(settings_of(len(package)), label="options")
    inputs = [x for x, _ in case.batches()]
    pipe = Pipeline(package, precision="bf16", **options)
    for x, logits in zip(inputs, pipe.predict_each(inputs), strict=True):
        assert logits.dtype == torch.bfloat16
        wanted = next(Pipeline(package, ["cpu"], precision="bf16", threads=1).predict_each([x]))
        assert torch.equal(logits, wanted)
