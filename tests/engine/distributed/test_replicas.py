"""Replicas learn from their shares of a batch what one process learns from all of it, and stay alike."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeal import AE, AL, BP, ENC, ALPackage, ConfigError, Pipeline, RunReport
from pipeal.engine.devices import Device
from pipeal.engine.distributed.mesh import Mesh
from pipeal.engine.distributed.pipeline import DistributedPipeline, serve
from pipeal.engine.distributed.replicas import Alike
from pipeal.engine.distributed.world import World
from pipeal.engine.pipeline import Updates

from ..cases import Case, Layer, Outcome, cosine, outcome, train_by_hand
from ..test_exactness import Langevin
from .lines import on_each, thread_ranks

EXACT = Case((Layer("linear", "AL", 7, 5), Layer("linear", "published AL", 6, 4, "sgd"), Layer("linear", "AL", 4, 3)),
             rows=(6, 8, 7, 5), seed=4)  # fmt: skip
DRAWS = Case((Layer("batch norm", "AL", 7, 5), Layer("nn.Dropout", "own ENC", 6, 4, "sgd"), Layer("functional")),
             rows=(6, 8, 6, 5), seed=4)  # fmt: skip
Share = list[tuple[Any, Tensor]]


def shares(case: Case, *sizes: int) -> list[Share]:
    """Each batch cut: to the last replica what the others leave."""
    found: list[Share] = [[] for _ in range(len(sizes) + 1)]
    for x, y in case.batches():
        ends = [0, *torch.tensor(sizes).cumsum(0).tolist(), len(y)]
        for share, begin, end in zip(found, ends, ends[1:], strict=False):
            share.append((x[begin:end], y[begin:end]))
    return found


def train(
    worlds: list[World],
    packages: list[ALPackage],
    parts: list[Share],
    epochs: int = 1,
    updates: Updates = True,
    **settings: Any,
) -> list[RunReport]:
    """One epoch after the other; the second begins with batch 1."""

    def work(world: World) -> list[RunReport]:
        def feed(epoch: int, first: int) -> Iterator[Any]:
            yield from parts[world.mesh.replica_of(world.rank)][first:]

        chosen: dict[str, Any] = {"seed": 4, "threads": 1, "stall_timeout_s": 60.0} | settings
        if world.rank:
            serve(packages[world.rank], world, "cpu", feed=feed, **chosen)
            return []
        reports = []
        with DistributedPipeline(packages[0], world, "cpu", **chosen) as pipe:
            for epoch in range(epochs):
                pipe.begin_feed(epoch, epoch)
                reports.append(pipe.run(parts[0][epoch:], cosine, updates=updates))
                pipe.predict(parts[0][0][0])
        return reports

    return on_each(worlds, work)[0]


def state(worlds: list[World], packages: list[ALPackage], replica: int) -> Outcome:
    """What a replica's ranks have learnt."""
    stages = worlds[0].mesh.stages
    layers: list[AL] = []
    for number in range(len(packages[0])):
        stage = next(s for s in range(stages) if number < (s + 1) * len(packages[0]) / stages)
        layers.append(packages[worlds[0].mesh.rank_of(replica, stage)][number])
    return outcome(ALPackage(layers), [], [])


@pytest.mark.parametrize(("size", "sizes"), [(2, [3]), (4, [2, 1]), (6, [1, 1, 1])])
def test_two_replicas_learn_what_one_process_learns_from_whole_batches(size: int, sizes: list[int]) -> None:
    parts = shares(EXACT, 4)  # the others have 2, 4, 3 and 1
    whole = EXACT.build()
    losses = train_by_hand(whole, EXACT.batches(), seed=4)
    with thread_ranks(size, replicas=2) as worlds:
        packages = [EXACT.build() for _ in worlds]
        (report,) = train(worlds, packages, parts, sizes=sizes)
        assert report.samples == sum(EXACT.rows)
        for mine, wanted in zip(report.losses, losses, strict=True):
            torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-6)
        wanted_now = whole.state_dict()
        for stage, package in enumerate(packages[: len(sizes)]):
            for name, value in package.state_dict().items():
                if not value.is_meta and int(name.split(".")[0]) in range(sum(sizes[:stage]), sum(sizes[: stage + 1])):
                    torch.testing.assert_close(value, wanted_now[name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("size", "sizes"), [(2, [3]), (4, [2, 1])])
def test_the_order_of_layers_changes_no_bit_of_what_replicas_learn(size: int, sizes: list[int]) -> None:
    """With each layer before the next one, averages are under way while the next layers are at work."""
    found = []
    for order in ("layer", "stage"):
        with thread_ranks(size, replicas=2) as worlds:
            packages = [DRAWS.build() for _ in worlds]
            (report,) = train(worlds, packages, shares(DRAWS, 3), sizes=sizes, within_stage=order)
            found.append(state(worlds, packages, 1).tensors | {"losses": torch.stack(report.losses)})
    assert Outcome(found[0]).differences(Outcome(found[1])) == []


def test_a_batch_that_is_left_out_is_left_out_by_all_replicas() -> None:
    """Symptom: the others learnt from the batch before, for the rest of the epoch."""
    parts, whole = shares(EXACT, 4), EXACT.build()

    def without_one(pipe: Pipeline, batches: Share) -> None:
        for number, (x, y) in enumerate(batches):
            pipe.skip() if number == 1 else pipe.submit(x, y)

    def work(world: World) -> None:
        if world.rank:
            serve(packages[1], world, "cpu", feed=lambda *_: iter(parts[1]), seed=4, threads=1)
            return
        with DistributedPipeline(packages[0], world, "cpu", seed=4, threads=1) as pipe:
            pipe.begin_feed(0)
            without_one(pipe, parts[0])

    with Pipeline(whole, seed=4, threads=1) as pipe:
        without_one(pipe, EXACT.batches())
    with thread_ranks(2, replicas=2) as worlds:
        packages = [EXACT.build() for _ in worlds]
        on_each(worlds, work)
    for mine, wanted in zip(packages[0].parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-3, atol=1e-5)


def test_runs_repeat_bit_for_bit_and_replicas_stay_alike_with_batch_norm_and_dropout() -> None:
    parts, found = shares(DRAWS, 3), []
    for _ in range(2):
        with thread_ranks(2, replicas=2) as worlds:
            packages = [DRAWS.build() for _ in worlds]
            reports = train(worlds, packages, parts, epochs=2, sizes=[3])
            first, second = (outcome(package, [], []) for package in packages)
            assert first.differences(second) == []
            found.append(outcome(packages[0], [rows for report in reports for rows in report.losses], []))
    assert found[0].differences(found[1]) == []


def test_replicas_draw_numbers_of_their_own() -> None:
    """Else every replica would drop the same units of its samples.

    (This test could not fail: what it looked at was the draw of the prediction that follows, which has no key.)
    """
    torch.manual_seed(0)
    seen: dict[int, Tensor] = {}

    class Kept(nn.Module):
        def __init__(self, rank: int) -> None:
            super().__init__()
            self.rank = rank

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                seen[self.rank] = torch.rand(4)
            return x

    def package(rank: int) -> ALPackage:
        torch.manual_seed(0)
        side = AE(nn.Linear(2, 2), nn.Linear(2, 2))
        return ALPackage([AL(ENC(nn.Sequential(nn.Linear(3, 3), Kept(rank)), nn.Linear(3, 2)), side)])

    with thread_ranks(2, replicas=2) as worlds:
        train(worlds, [package(0), package(1)], [[(torch.randn(4, 3), torch.randn(4, 2))]] * 2)
    assert not torch.equal(seen[0], seen[1])


def test_updates_that_draw_leave_replicas_alike() -> None:
    """What they draw there is the same, unlike in a forward."""

    def package() -> ALPackage:
        torch.manual_seed(0)
        side = AE(nn.Linear(2, 2), nn.Linear(2, 2))
        return ALPackage([AL(ENC(nn.Linear(3, 3), nn.Linear(3, 2)), side, optimizer=Langevin)])

    torch.manual_seed(1)
    parts = [[(torch.randn(4, 3), torch.randn(4, 2)) for _ in range(3)] for _ in range(2)]
    with thread_ranks(2, replicas=2) as worlds:
        packages = [package(), package()]
        train(worlds, packages, parts)
    first, second = (outcome(package, [], []) for package in packages)
    assert first.differences(second) == []


def test_a_buffer_that_repeats_its_memory_is_none_to_write_to_as_a_whole() -> None:
    """Symptom: "more than one element of the written-to tensor refers to a single memory location", from replica 1."""

    class Masked(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 3)
            self.register_buffer("mask", torch.ones(1).expand(4, 3), persistent=False)
            self.register_buffer("seen", torch.zeros(2, 1))

        def forward(self, x: Tensor) -> Tensor:
            self.seen += self.training * x.sum()
            return super().forward(x * self.mask)

    def package() -> ALPackage:
        torch.manual_seed(0)
        return ALPackage([AL(ENC(Masked(), nn.Linear(3, 2)), AE(nn.Linear(2, 2), nn.Linear(2, 2)))])

    parts = [[(torch.randn(4, 3), torch.randn(4, 2))] for _ in range(2)]
    with thread_ranks(2, replicas=2) as worlds:
        packages = [package(), package()]
        train(worlds, packages, parts)
    first, second = (one[0].enc.f for one in packages)
    assert torch.equal(first.seen, second.seen)
    assert first.seen.flatten().tolist() == [parts[0][0][0].sum().item()] * 2
    assert second.mask.unique().tolist() == [1]


def test_one_stage_with_replicas_is_plain_data_parallel_backpropagation() -> None:
    def package() -> ALPackage:
        torch.manual_seed(1)
        return ALPackage([BP(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), lr=0.01)])

    whole = package()
    train_by_hand(whole, EXACT.batches(), cosine)
    with thread_ranks(3, replicas=3) as worlds:
        packages = [package() for _ in worlds]
        train(worlds, packages, shares(EXACT, 2, 2))
        for name, value in packages[2].state_dict().items():
            torch.testing.assert_close(value, whole.state_dict()[name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("size", "sizes"), [(2, [3]), (4, [2, 1])])
def test_replicas_and_stages_gather_several_batches_for_an_update(size: int, sizes: list[int]) -> None:
    """Shares of 4 and 2, 4 and 4, 4 and 3, 4 and 1: each batch and each share counts by its samples."""

    def updates(batch: int) -> bool:
        return batch in (2, 3)

    whole = EXACT.build()
    with Pipeline(whole, ["cpu"], "sequential", seed=4, threads=1) as pipe:
        wanted = pipe.run(EXACT.batches(), cosine, updates=updates)
    with thread_ranks(size, replicas=2) as worlds:
        packages = [EXACT.build() for _ in worlds]
        (report,) = train(worlds, packages, shares(EXACT, 4), updates=updates, sizes=sizes)
        for mine, theirs in zip(report.losses, wanted.losses, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)
        found = state(worlds, packages, 1).tensors
        for name, value in whole.state_dict().items():
            torch.testing.assert_close(found[f"weights/{name}"], value, rtol=1e-3, atol=1e-5)


def test_a_replica_that_comes_late_is_waited_for() -> None:
    """A wait for an average ends now and then to look around, and must not have broken what it waits for."""
    parts, found = shares(EXACT, 3), []
    for late_s in (0.0, 0.5):
        with thread_ranks(2, replicas=2) as worlds:
            packages = [EXACT.build() for _ in worlds]
            backward = packages[1][1].backward
            packages[1][1].backward = lambda: (time.sleep(late_s), backward())  # type: ignore[method-assign]  # noqa: B023
            train(worlds, packages, parts, sizes=[3])
            found.append(outcome(packages[0], [], []))
    assert found[0].differences(found[1]) == []


class Odd(nn.Module):
    """Has what neither gloo nor NCCL can add up or knows the type of."""

    def __init__(self) -> None:
        super().__init__()
        self.twist = nn.Parameter(torch.randn(6, dtype=torch.complex64))
        self.register_buffer("seen", torch.zeros(2, dtype=torch.int16))
        self.register_buffer("phase", torch.zeros(1, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += len(x)  # each replica's own
        return torch.fft.ifft(torch.fft.fft(x) * self.twist).real


def test_complex_parameters_and_buffers_of_any_type_are_alike_as_well() -> None:
    def package() -> ALPackage:
        torch.manual_seed(1)
        sides = ENC(Odd(), nn.Linear(6, 2)), AE(nn.Linear(3, 2), nn.Linear(2, 3))
        return ALPackage([AL(*sides, optimizer=torch.optim.Adam)])

    parts = [[(torch.randn(3, 6), torch.ones(3, 3))] * 2, [(torch.randn(2, 6), torch.ones(2, 3))] * 2]
    with thread_ranks(2, replicas=2) as worlds:
        packages = [package() for _ in worlds]
        train(worlds, packages, parts)
    first, second = (package.state_dict() for package in packages)
    assert [name for name in first if not torch.equal(first[name], second[name])] == []
    (seen,) = (value for name, value in first.items() if name.endswith("seen"))
    (twist,) = (name for name in first if name.endswith("twist"))
    assert seen.tolist() == [6, 6]  # those of replica 0
    assert not torch.equal(first[twist], package().state_dict()[twist])


class Sometimes(nn.Module):
    """Uses its second half on batches of three samples alone."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.rarely, self.never = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.always(x)
        return self.rarely(x) if len(x) == 3 else x


def test_a_parameter_without_a_gradient_on_some_replicas_or_on_all() -> None:
    """Adam would move, and give a state to, a parameter with a gradient of zero."""

    def package() -> ALPackage:
        torch.manual_seed(1)
        return ALPackage([AL(ENC(Sometimes(), nn.Linear(6, 2)), AE(nn.Linear(3, 2), nn.Linear(2, 3)))])

    parts = [[(torch.ones(3, 6), torch.ones(3, 3))], [(torch.ones(2, 6), torch.ones(2, 3))]]
    with thread_ranks(2, replicas=2) as worlds:
        packages = [package() for _ in worlds]
        train(worlds, packages, parts)
    assert outcome(packages[0], [], []).differences(outcome(packages[1], [], [])) == []
    for one in packages:
        moved = {
            name for name, p in one.named_parameters() if not torch.equal(p, dict(package().named_parameters())[name])
        }
        assert {name.split(".")[3] for name in moved if ".enc.f." in name} == {"always", "rarely"}


def test_a_parameter_that_no_replica_used_keeps_its_bits_and_its_moments() -> None:
    """A gradient of zero would let it drift on, by what is left of its momentum."""

    def package() -> ALPackage:
        torch.manual_seed(1)
        return ALPackage([AL(ENC(Sometimes(), nn.Linear(6, 2)), AE(nn.Linear(3, 2), nn.Linear(2, 3)))])

    def kept(one: ALPackage) -> list[Tensor]:
        f, states = one[0].enc.f, one[0].enc_opt.state
        assert not any(weight in states for weight in f.never.parameters())
        return [value.clone() for p in f.rarely.parameters() for value in (p.detach(), *states[p].values())]

    used, unused = ([(torch.ones(count, 6), torch.ones(count, 3))] for count in (3, 2))
    with thread_ranks(2, replicas=2) as worlds:
        packages = [package() for _ in worlds]
        train(worlds, packages, [used, unused])
        before = [kept(one) for one in packages]
        train(worlds, packages, [unused, unused])
        for one, earlier in zip(packages, before, strict=True):
            assert all(map(torch.equal, kept(one), earlier))


def test_replicas_that_are_not_alike_at_the_start_are_told_of_it() -> None:
    with thread_ranks(2, replicas=2) as worlds:
        packages = [Case(EXACT.layers, EXACT.rows, seed=seed).build() for seed in (4, 5)]
        with pytest.raises(ConfigError, match="layer 0 is not the same on rank 1 as on rank 0"):
            train(worlds, packages, shares(EXACT, 2))


@pytest.mark.parametrize("choice", [{"on_non_finite": "skip"}, {"on_oom": "split"}])
def test_choices_that_one_replica_cannot_make_for_all_are_refused(choice: dict[str, str]) -> None:
    with (
        thread_ranks(2, replicas=2) as worlds,
        pytest.raises(ConfigError, match="is not possible with 2 replicas"),
    ):
        train(worlds, [EXACT.build() for _ in worlds], shares(EXACT, 2), **choice)


class JustDone:
    """An operation that ends between the moment its wait gave up and the question whether it has."""

    def __init__(self) -> None:
        self.waits: list[bool] = []

    def is_completed(self) -> bool:
        return bool(self.waits)

    def wait(self, timeout: object = None) -> None:
        self.waits.append(timeout is not None)
        if timeout is not None:
            raise RuntimeError("Operation timed out!")


def test_an_average_that_ends_just_after_its_wait_gave_up_is_no_loss_of_a_peer() -> None:
    """Symptom: once in a while a healthy run ended with "connection to rank 1 broke"."""
    alike = Alike.__new__(Alike)
    alike._stopped = lambda: False
    work = JustDone()
    alike._wait(work, on_gpu=False)
    assert work.waits == [True, False]


class Done:
    """An operation that has ended."""

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class FullOnly:
    """A group, as NCCL: what is sent has elements."""

    def allreduce(self, rows: list[Tensor]) -> Done:
        assert rows[0].numel()
        return Done()

    def broadcast(self, rows: list[Tensor], _: object) -> Done:
        assert rows[0].numel()
        return Done()


def with_nobody() -> Alike:
    """One of two whose other adds nothing."""
    world: Any = SimpleNamespace(rank=0, mesh=Mesh(1, replicas=2))
    groups: Any = SimpleNamespace(alike=FullOnly(), alike_on_gpus=None)
    return Alike(world, groups, Device(torch.device("cpu")), lambda: False, last=0)


class Counted(FullOnly):
    """Doubles what it is given, as another replica with the same would."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def allreduce(self, rows: list[Tensor]) -> Done:
        self.rows.append(len(rows[0]))
        rows[0].mul_(2)
        return Done()


def test_the_counts_of_a_stages_layers_go_to_the_others_at_once() -> None:
    """Prediction 14 of the GPU reading: the host waited for a round trip of them for every layer and batch. Layers that
    update before the next one begins still wait each for its own."""
    hosts, layers = Counted(), [ALPackage([BP(nn.Linear(3, 2), lr=0.01)])[0] for _ in range(3)]
    groups: Any = SimpleNamespace(alike=hosts, alike_on_gpus=FullOnly())
    world: Any = SimpleNamespace(rank=0, mesh=Mesh(1, replicas=2))
    alike = Alike(world, groups, Device(torch.device("cpu")), lambda: False, last=2)

    def begin(index: int) -> None:
        weight, bias = layers[index].parameters()
        weight.grad = torch.ones_like(weight)
        bias.grad = None if index == 1 else torch.ones_like(bias)
        alike.begin(index, layers[index], None, 4, 4)

    def finish(index: int) -> None:
        alike.finish(index)
        weight, bias = layers[index].parameters()
        assert weight.grad is not None
        assert torch.equal(weight.grad, torch.full_like(weight, 0.5))  # of 8 samples, of which one replica gave its 4
        assert (bias.grad is None) == (index == 1)

    for batch in range(2):
        for index in range(3):
            begin(index)
        assert hosts.rows == [12] * (batch + 1)
        for index in range(3):
            finish(index)
    assert hosts.rows == [12] * 2
    for index in range(3):
        begin(index)
        finish(index)
    assert hosts.rows == [12, 12, 4, 4, 4]


def test_where_hosts_average_counts_go_before_the_rows_of_their_layer() -> None:
    """Symptom: over Gloo no layer updated before the last one's average was there. Cause: a group of hosts makes one
    sum after the other, and the counts of all layers, sent at once, came behind the rows of all."""
    hosts, layers = Counted(), [ALPackage([BP(nn.Linear(3, 2), lr=0.01)])[0] for _ in range(3)]
    groups: Any = SimpleNamespace(alike=hosts, alike_on_gpus=None)
    world: Any = SimpleNamespace(rank=0, mesh=Mesh(1, replicas=2))
    alike = Alike(world, groups, Device(torch.device("cpu")), lambda: False, last=2)
    for index in range(3):
        for one in layers[index].parameters():
            one.grad = torch.ones_like(one)
        alike.begin(index, layers[index], None, 4, 4)
    assert hosts.rows == [4, 8] * 3  # of two samples' numbers and two parameters; of their eight elements
    for index in range(3):
        alike.finish(index)
        assert all(torch.equal(one.grad, torch.ones_like(one)) for one in layers[index].parameters())
    assert hosts.rows == [4, 8] * 3


def test_what_has_no_elements_is_not_sent_but_learns_all_the_same() -> None:
    class Empty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 2)
            self.nothing = nn.Parameter(torch.empty(0, dtype=torch.float64))
            self.register_buffer("none", torch.empty(0, dtype=torch.int64))

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x)

    layer = ALPackage([BP(Empty(), lr=0.01)])[0]
    for parameter in layer.parameters():
        parameter.grad = torch.ones_like(parameter)
    alike = with_nobody()
    alike.begin(0, layer, [torch.tensor(3.0)], 4, 4)
    losses = alike.finish(0)
    assert losses is not None
    assert [float(loss) for loss in losses] == [3.0]
    for parameter in layer.parameters():
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, torch.ones_like(parameter))


class LaidOut(nn.Module):
    """Parameters in memory as nobody would write them down."""

    def __init__(self) -> None:
        super().__init__()
        self.images = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
        self.points = nn.Conv2d(3, 4, 1).to(memory_format=torch.channels_last)
        self.turned = nn.Parameter(torch.randn(5, 3).t())
        self.number = nn.Parameter(torch.tensor(2.0))
        self.gaps = nn.Parameter(torch.randn(6, 4)[:, :2])

    def forward(self, x: Tensor) -> Tensor:
        seen = (self.images(x).mean((2, 3)) + self.points(x).mean((2, 3)))[:, :3]
        return seen * self.number + (self.turned**2).sum(1) + (self.gaps**2).sum(1)[:3]


def test_averages_lie_in_memory_as_their_parameters_do_and_are_not_copied_back() -> None:
    """Fused optimizers walk through both side by side, and on a GPU refuse what does not lie alike."""
    layer = ALPackage([BP(LaidOut(), lr=0.01)])[0]
    wanted = {name: torch.randn_like(parameter) for name, parameter in layer.named_parameters()}
    for name, parameter in layer.named_parameters():
        parameter.grad = wanted[name].contiguous()  # which some of them are not
    alike = with_nobody()
    alike.begin(0, layer, None, 1, 1)
    assert [parameter.grad for parameter in layer.parameters()] == [None] * 7  # their memory is free meanwhile
    alike.finish(0)
    found = {name: parameter.grad for name, parameter in layer.named_parameters() if parameter.grad is not None}
    assert found.keys() == wanted.keys()
    for name, parameter in layer.named_parameters():
        assert torch.equal(found[name], wanted[name]), name
        assert found[name].stride() == parameter.stride() or name.endswith("gaps"), name
    assert len({gradient.untyped_storage().data_ptr() for gradient in found.values()}) == 1


def test_replicas_with_a_fused_optimizer_learn_whatever_parameters_lie_like() -> None:
    def package() -> ALPackage:
        torch.manual_seed(1)
        return ALPackage([BP(LaidOut(), lr=0.01, optimizer=partial(torch.optim.Adam, fused=True))])

    images = [(torch.randn(6, 3, 5, 5), torch.randn(6, 3)) for _ in range(3)]
    whole = package()
    train_by_hand(whole, images, cosine)
    with thread_ranks(2, replicas=2) as worlds:
        packages = [package() for _ in worlds]
        train(worlds, packages, [[(x[:4], y[:4]) for x, y in images], [(x[4:], y[4:]) for x, y in images]])
        for name, value in packages[1].state_dict().items():
            torch.testing.assert_close(value, whole.state_dict()[name], rtol=1e-3, atol=1e-5)
