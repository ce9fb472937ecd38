"""Several batches to one update: it is that of one larger batch, under every schedule, and nothing is lost between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from pipeal import AE, AL, BP, ENC, ALPackage, LabelAE, Pipeline, ScheduleError
from pipeal.engine import SCHEDULES, Schedule
from pipeal.engine.runner.accumulation import Accumulation
from pipeal.engine.state.layer_state import layer_state, load_layer_state

from .cases import CLASSES, FEATURES, ORDERS, Case, Layer, cases, cosine, cuts, outcome

PLAIN = Case((Layer("linear"), Layer("linear", width=5, code=2), Layer("linear", "own AE")), rows=(4, 2, 5, 3, 1))


def trained(case: Case, schedule: str | Schedule, sizes: list[int], group: int, **options: Any) -> Any:
    """The outcome, where each ``group`` batches make an update, and the last of all one."""
    package, batches = case.build(), case.batches()
    last = len(batches) - 1
    with Pipeline(
        package, ["cpu"] * len(sizes), schedule, sizes=sizes, seed=case.seed, threads=1, stall_timeout_s=120, **options
    ) as pipe:
        report = pipe.run(batches, cosine, updates=lambda batch: batch == last or batch % group == group - 1)
        predictions = [pipe.predict(batches[0][0])]
    return outcome(package, report.losses, predictions)


@given(case=cases(), data=st.data())
def test_every_schedule_leaves_the_same(case: Case, data: st.DataObject) -> None:
    group = data.draw(st.integers(2, 4), label="group")
    wanted = trained(case, "sequential", [len(case.layers)], group)
    for name, schedule in ORDERS.items():
        stages = data.draw(st.integers(1, min(4, len(case.layers))), label=f"{name} stages")
        sizes = data.draw(st.sampled_from(list(cuts(len(case.layers), stages))), label="sizes")
        assert trained(case, schedule, sizes, group).differences(wanted) == []


def deterministic() -> ALPackage:
    """Nothing is drawn, and no sample looks at another."""
    torch.manual_seed(0)
    first = ENC(nn.Sequential(nn.Linear(FEATURES, 7), nn.Tanh()), nn.Linear(7, 4))
    second = ENC(nn.Sequential(nn.Linear(7, 5), nn.Tanh()), nn.Linear(5, 2))
    sides = LabelAE(nn.Linear(CLASSES, 4), nn.Linear(4, CLASSES), CLASSES), AE(nn.Linear(4, 2), nn.Linear(2, 4))
    return ALPackage(
        AL(enc, side, 0.1, optimizer=torch.optim.SGD) for enc, side in zip((first, second), sides, strict=True)
    )


def backpropagation() -> ALPackage:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(FEATURES, 7), nn.Tanh(), nn.Linear(7, CLASSES))
    return ALPackage([BP(net, lr=0.1, optimizer=torch.optim.SGD)])


def joined(batches: list[tuple[Tensor, Tensor]], group: int) -> list[tuple[Tensor, Tensor]]:
    parts = [batches[start : start + group] for start in range(0, len(batches), group)]
    return [(torch.cat([x for x, _ in part]), torch.cat([y for _, y in part])) for part in parts]


@pytest.mark.parametrize("build", [deterministic, backpropagation])
@pytest.mark.parametrize("group", [2, 3, 8])
@pytest.mark.parametrize("options", [{}, {"on_non_finite": "skip"}, {"on_oom": "split"}], ids=str)
def test_it_learns_what_larger_batches_teach(
    build: Callable[[], ALPackage], group: int, options: dict[str, Any]
) -> None:
    """Batches of different sizes, and at the end fewer of them: each counts by its samples."""
    one, other, batches = build(), build(), PLAIN.batches()
    with Pipeline(one, ["cpu"], threads=1, **options) as pipe:
        pipe.run(batches, updates=lambda batch: batch % group == group - 1 or batch == len(batches) - 1)
    with Pipeline(other, ["cpu"], threads=1, **options) as pipe:
        pipe.run(joined(batches, group))
    for found, wanted in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("broken", [0, 1, 2])
def test_a_batch_that_is_left_out_counts_for_nothing(broken: int) -> None:
    """Also the one that would have updated: its update learns from the others."""
    batches = PLAIN.batches()[:3]
    bad = list(batches)
    bad[broken] = torch.full_like(batches[broken][0], torch.nan), batches[broken][1]
    found, wanted = deterministic(), deterministic()
    with Pipeline(found, ["cpu"] * 2, threads=1, on_non_finite="skip") as pipe:
        pipe.run(bad, updates=lambda batch: batch == 2)
    del bad[broken]
    with Pipeline(wanted, ["cpu"] * 2, threads=1, on_non_finite="skip") as pipe:
        pipe.run(joined(bad, 2))
    changed = dict(deterministic().named_parameters())
    for name, value in found.named_parameters():
        if name.startswith(("0.", "1.enc")):  # the label side of layer 1 learns from the labels of all three
            torch.testing.assert_close(value, dict(wanted.named_parameters())[name], rtol=1e-5, atol=1e-7)
            assert not torch.equal(value, changed[name])


def test_an_update_of_batches_that_were_all_left_out_is_none() -> None:
    package, before = deterministic(), deterministic()
    bad = [(torch.full_like(x, torch.nan), y) for x, y in PLAIN.batches()[:2]]
    with Pipeline(package, ["cpu"], threads=1, on_non_finite="skip") as pipe:
        pipe.run(bad, updates=lambda batch: batch == 1)
    assert all(map(torch.equal, package.parameters(), before.parameters()))


def test_what_was_learnt_cannot_be_saved_in_the_middle_of_an_update() -> None:
    (x, y), *_ = PLAIN.batches()
    with Pipeline(deterministic(), threads=1) as pipe:
        pipe.submit(x, y, updates=False)
        with pytest.raises(ScheduleError, match=r"between two batches of one update.*updates=True"):
            pipe.snapshot()
        pipe.submit(x, y)
        pipe.snapshot().wait(120)


def test_a_pipeline_that_ends_in_the_middle_of_an_update_says_so() -> None:
    (x, y), *_ = PLAIN.batches()
    with pytest.raises(ScheduleError, match="cannot end between two batches"), Pipeline(deterministic()) as pipe:
        pipe.submit(x, y, updates=False)


@pytest.mark.parametrize(("method", "action", "batch"), [("expect", "forward", 0), ("mean", "update", 1)])
def test_what_fails_in_gathering_says_where(
    monkeypatch: pytest.MonkeyPatch, method: str, action: str, batch: int
) -> None:
    """As a GPU does that has failed before: it was told of without stage, layer or batch."""

    def fails(_: Accumulation, *__: Any) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(Accumulation, method, fails)
    with pytest.raises(RuntimeError) as caught, Pipeline(deterministic(), ["cpu"] * 2, "sequential", threads=1) as pipe:
        pipe.run(PLAIN.batches()[:2], updates=lambda number: number == 1)
    assert f"in the {action} of stage 0, layer 0 (AL), batch {batch}, device cpu" in caught.value.__notes__[0]


def interrupted(*_: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("within", ["a batch", "an update of several"])
@pytest.mark.parametrize("opens", ["the same", "another"])
def test_gradients_of_an_update_that_never_came_are_not_in_the_next_life(
    monkeypatch: pytest.MonkeyPatch, within: str, opens: str
) -> None:
    """They were, and so whoever trained the layers next learnt from a batch of the life before.

    For long, only the very pipeline that had failed dropped them.
    """
    found, wanted, batches = deterministic(), deterministic(), PLAIN.batches()
    with Pipeline(wanted, threads=1) as pipe:
        pipe.submit(*batches[1])
    pipe = Pipeline(found, schedule="sequential", threads=1)
    if within == "a batch":
        monkeypatch.setattr(found[1], "update", interrupted)
    with pytest.raises(KeyboardInterrupt), pipe:
        pipe.run(batches[:1], on_batch=interrupted, updates=within == "a batch")
    monkeypatch.undo()
    assert all(one.grad is None for one in found.parameters())
    for layer, fresh in zip(found, deterministic(), strict=True):
        layer.load_state_dict(fresh.state_dict())
    if opens == "another":
        pipe = Pipeline(found, threads=1)
    with pipe:
        pipe.submit(*batches[1])
    assert all(map(torch.equal, found.parameters(), wanted.parameters()))


def test_gradients_that_a_state_brings_after_a_life_that_failed_are_in_the_next() -> None:
    """They were thrown away with those of the life that had failed."""
    found, wanted, other, batches = deterministic(), deterministic(), deterministic(), PLAIN.batches()
    for layer in other:
        for one in layer.parameters():
            one.grad = torch.ones_like(one)
    for layer, source in zip(wanted, other, strict=True):
        load_layer_state(layer, layer_state(source))
    with Pipeline(wanted, threads=1) as pipe:
        pipe.submit(*batches[1])
    pipe = Pipeline(found, schedule="sequential", threads=1)
    with pytest.raises(KeyboardInterrupt), pipe:
        pipe.run(batches[:1], on_batch=interrupted, updates=False)
    for layer, source in zip(found, other, strict=True):
        load_layer_state(layer, layer_state(source))
    with pipe:
        pipe.submit(*batches[1])
    assert all(map(torch.equal, found.parameters(), wanted.parameters()))


@pytest.mark.cuda
@pytest.mark.parametrize("stages", [1, 2])
def test_on_a_gpu_schedules_leave_the_same_and_nobody_waits(stages: int) -> None:
    def trained(schedule: str) -> list[Tensor]:
        package = deterministic()
        batches = [(x.cuda(), y.cuda()) for x, y in PLAIN.batches()]
        with Pipeline(package, ["cuda:0"] * stages, schedule) as pipe:
            pipe.run(batches)  # makes the optimizers' states
            torch.cuda.set_sync_debug_mode("error")
            try:
                for number, (x, y) in enumerate(batches):
                    pipe.submit(x, y, updates=number in (2, 4))
            finally:
                torch.cuda.set_sync_debug_mode("default")
        return [value.cpu() for value in package.state_dict().values()]

    wanted = trained("sequential")
    for schedule in SCHEDULES:
        assert all(map(torch.equal, trained(schedule), wanted)), schedule


def test_gradients_of_tables_are_gathered_as_well() -> None:
    """Sparse ones, which a multiplication of many at once does not take."""

    def trained(batches: list[tuple[Tensor, Tensor]], group: int) -> Tensor:
        torch.manual_seed(0)
        table = nn.Embedding(9, 3, sparse=True)
        layer = BP(nn.Sequential(table, nn.Flatten(), nn.Linear(6, CLASSES)), lr=0.1, optimizer=torch.optim.SGD)
        with Pipeline([layer], threads=1) as pipe:
            pipe.run(batches, updates=lambda batch: batch % group == group - 1)
        return table.weight.detach()

    batches = [(torch.randint(9, (rows, 2)), torch.randint(CLASSES, (rows,))) for rows in (3, 5, 4, 2)]
    torch.testing.assert_close(trained(batches, 2), trained(joined(batches, 2), 1))
