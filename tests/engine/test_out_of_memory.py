"""Memory that runs out: what a person is told, and that a batch learnt from in parts teaches what it does whole."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeal import AE, AL, ENC, ALPackage, PipealError, Pipeline
from pipeal.core.errors import NonFiniteError, OutOfMemoryError
from pipeal.core.outofmemory import is_out_of_memory
from pipeal.engine import SCHEDULES
from pipeal.engine.devices import Device
from pipeal.engine.runner.before import cut_graphs
from pipeal.engine.runner.split import SplitWarning
from pipeal.methods.al import BP

from .cases import ORDERS
from .traps import Trap, nothing, throw

WIDE = 4
CUDA_SAYS = (
    "CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 8.00 GiB of which 512.00 MiB is "
    "free. Including non-PyTorch memory, this process has 7.00 GiB memory in use."
)


class Narrow(torch.autograd.Function):
    """Runs out of memory in the backward of more than some rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, most: int) -> Tensor:
        ctx.most = most
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if len(grad) > ctx.most:
            raise torch.OutOfMemoryError(CUDA_SAYS)
        return grad, None


class Tight(nn.Module):
    """A block with room for some rows; counts what it was asked for, in a buffer."""

    def __init__(self, block: nn.Module, most: int, where: str) -> None:
        super().__init__()
        self.block, self.most, self.where = block, most, where
        self.asked: list[int] = []
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.asked.append(len(x))
        self.calls += 1
        out = self.block(x)
        if self.where == "F" and len(x) > self.most:
            raise torch.OutOfMemoryError(CUDA_SAYS)
        return Narrow.apply(out, self.most) if self.where == "B" else out


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDE, WIDE), nn.Tanh())


def layer(f: nn.Module, kind: str = "AL") -> nn.Module:
    if kind == "BP":
        return BP(f, nn.MSELoss(), 0.01)
    return AL(ENC(f, nn.Linear(WIDE, WIDE)), AE(nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)), 0.01)


def model(most: int, where: str, kind: str = "AL", tight: int = 1) -> Any:
    """Three layers (one for BP) of which one is short of memory."""
    torch.manual_seed(0)
    if kind == "BP":
        return nn.ModuleList([layer(Tight(block(), most, where), kind)]).double()
    blocks = [block() for _ in range(3)]
    blocks[tight] = Tight(blocks[tight], most, where)
    return ALPackage([layer(f) for f in blocks]).double()


def data(*rows: int) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [
        (torch.randn(n, WIDE, generator=draw).double(), torch.randn(n, WIDE, generator=draw).double()) for n in rows
    ]


def run(layers: Any, batches: list[Any], schedule: str = "pipelined", **options: Any) -> Any:
    with Pipeline(layers, None, schedule, threads=1, stall_timeout_s=120, **options) as pipe:
        return pipe.run(batches)


@pytest.mark.parametrize("where", "FB")
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_caller_is_told_what_where_and_what_to_lower(schedule: str, where: str) -> None:
    with pytest.raises(OutOfMemoryError) as caught:
        run(model(5, where), data(4, 6, 4), schedule, first_batch=30)
    error = caught.value
    word = {"F": "forward", "B": "backward"}[where]
    assert isinstance(error, PipealError)
    assert is_out_of_memory(error)
    assert (error.stage, error.layer, error.batch) == (1, 1, 31)
    text = str(error)
    assert text.startswith(
        f"out of memory in the {word} of stage 1, layer 1 (AL), batch 31, device cpu: 1.50 GiB were asked for and "
        "512.00 MiB were free, the input is (6, 4) float64, (6, 4) float64; "
    )
    for remedy in ("batch_size", "budget_tokens", "max_samples", "more stages", "bf16", "on_oom='split'"):
        assert remedy in text
    assert "\n" not in text
    assert isinstance(error.__cause__, torch.OutOfMemoryError)


class Huge(nn.Module):
    """Asks the CPU for a petabyte."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.empty(10**15, dtype=torch.uint8, device=x.device)[: x.shape[1]]


@pytest.mark.parametrize("policy", ["raise", "split"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_memory_that_a_cpu_really_has_not(schedule: str, policy: str) -> None:
    with pytest.raises(
        OutOfMemoryError, match=r"stage 0, layer 0 .* 909.49 TiB were asked for and .* were free"
    ) as caught:
        run(ALPackage([layer(Huge()), layer(block())]).double(), data(5), schedule, on_oom=policy)
    assert ("in parts, either: even a single sample is too much" in str(caught.value)) == (policy == "split")


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED")], ids=repr)
@pytest.mark.parametrize("schedule", ["sequential", "pipelined"])
def test_the_update_is_told_as_well(schedule: str, error: Exception) -> None:
    with pytest.raises(OutOfMemoryError, match=r"in the update of stage 0, layer 0 \(Trap\), batch 1") as caught:
        run([Trap("U", 1, throw(error))], nothing(3), schedule, on_oom="split")
    assert caught.value.__cause__ is error


def test_a_batch_that_does_not_even_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(device: Device, tree: Any, ready: Any) -> Any:
        raise torch.OutOfMemoryError(CUDA_SAYS)

    monkeypatch.setattr(Device, "receive", full)
    with pytest.raises(OutOfMemoryError, match=r"forward of stage 0, batch 0, device cpu: .*\(3, 4\)") as caught:
        run(model(9, "F"), data(3), on_oom="split")
    assert caught.value.layer is None


def quietly(layers: Any, batches: list[Any], schedule: str, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SplitWarning)
        return run(layers, batches, schedule, on_oom="split", **options)


@pytest.mark.parametrize("kind", ["AL", "BP"])
@pytest.mark.parametrize("where", "FB")
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_in_parts_a_batch_teaches_what_it_does_whole(schedule: str, where: str, kind: str) -> None:
    batches = data(7, 2, 8, 7, 1, 5)
    wanted, wanted_report = (whole := model(99, where, kind)), run(whole, batches, schedule)
    for most in (1, 2, 3, 6):
        found = model(most, where, kind)
        report = quietly(found, batches, schedule)
        for name, value in found.state_dict().items():
            if not name.endswith("calls"):
                torch.testing.assert_close(value, wanted.state_dict()[name], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(report.losses, wanted_report.losses, rtol=1e-6, atol=1e-6)
        expected = sum(rows > most for rows in (7, 2, 8, 7, 1, 5))
        assert report.splits == ([expected] if kind == "BP" else [0, expected, 0])


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("most", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("where", "FB")
def test_schedules_and_stages_do_not_matter_and_draws_are_keyed_part_by_part(
    where: str, most: int, precision: Any
) -> None:
    def trained(name: str, stages: int) -> list[Tensor]:
        torch.manual_seed(0)
        layers = [layer(nn.Sequential(nn.Dropout(0.4), Tight(block(), most, where))) for _ in range(3)]
        package = ALPackage(layers)
        torch.manual_seed(len(name))  # the default generator stands elsewhere for each
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SplitWarning)
            pipe = Pipeline(package, ["cpu"] * stages, ORDERS[name], threads=1, on_oom="split", precision=precision)
            with pipe:
                report = pipe.run([(x.float(), y.float()) for x, y in data(7, 2, 8, 7)])
        return [*package.state_dict().values(), *report.losses]

    wanted = trained("sequential", 1)
    for name in ORDERS:
        for stages in (1, 3):
            assert all(map(torch.equal, trained(name, stages), wanted)), (name, stages)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_is_handed_on_is_in_its_order(schedule: str) -> None:
    class Sees(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.got: list[Tensor] = []

        def forward(self, x: Tensor) -> Tensor:
            self.got.append(x.detach().clone())
            return x

    seen = []
    for most in (99, 2):
        torch.manual_seed(0)
        eye = Sees()
        quietly(ALPackage([layer(Tight(block(), most, "F")), layer(eye)]).double(), data(7), schedule)
        seen.append(eye.got[0])
    torch.testing.assert_close(seen[0], seen[1])


def test_parts_draw_each_for_itself() -> None:
    """Two halves of four equal rows: one key for both would drop the same."""
    drawn: list[Tensor] = []

    class Drops(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            drawn.append(nn.functional.dropout(torch.ones(2, 64, dtype=x.dtype), 0.5))
            return x

    torch.manual_seed(0)
    quietly(ALPackage([layer(nn.Sequential(Tight(block(), 2, "F"), Drops()))]).double(), data(4), "pipelined")
    assert len(drawn) == 2
    assert not torch.equal(*drawn)


@pytest.mark.parametrize(("where", "calls"), [("F", 4.0), ("B", 1.0)])
def test_failed_attempts_leave_no_mark_on_buffers(where: str, calls: float) -> None:
    """Seven rows in four parts, two at most: a mark of each part, or of the whole forward if that went well."""
    package = model(2, where)
    quietly(package, data(7), "pipelined")
    assert float(package[1].enc.f.calls) == calls


@pytest.mark.parametrize(("where", "again"), [("F", [2, 2]), ("B", [4, 2, 2])])
def test_what_did_not_fit_is_not_tried_again_whole(where: str, again: list[int]) -> None:
    package = model(2, where)
    quietly(package, data(4, 4, 6), "sequential")
    assert package[1].enc.f.asked == [4, 2, 2, *again, 6, 3, 2, 1, 3, 2, 1]


@pytest.mark.parametrize("where", "FB")
def test_it_does_not_matter_which_batches_came_before(where: str) -> None:
    """Symptom: a run that was taken up again differed. Cause: once a backward had not fitted, later batches of that
    shape went forward in parts as well, and handed on what those gave; in a new process the first one did not."""

    def trained(*ends: int) -> list[Tensor]:
        torch.manual_seed(0)
        package = ALPackage([layer(nn.Sequential(nn.Dropout(0.4), Tight(block(), 4, where))) for _ in range(2)])
        begin = 0
        for end in ends:  # each with a pipeline of its own, which knows nothing of the one before
            quietly(package.double(), data(8, 8, 8, 8)[begin:end], "sequential", first_batch=begin)
            begin = end
        return [value for name, value in package.state_dict().items() if not name.endswith("calls")]

    assert all(map(torch.equal, trained(4), trained(2, 4)))


def test_it_is_said_once_and_counted() -> None:
    package = model(2, "F")
    counted = []
    with pytest.warns(SplitWarning) as told, Pipeline(package, threads=1, on_oom="split") as pipe:  # noqa: PT031
        counted.append(pipe.run(data(4, 4, 2)).splits)
        counted.append(pipe.run(data(2, 4)).splits)
    assert counted == [[0, 2, 0], [0, 1, 0]]
    (text,) = [str(warning.message) for warning in told]
    assert "layer 1 (AL), batch 0, " in text
    assert "learnt from in parts of 2 samples at most" in text


def test_graphs_in_containers_are_freed_and_others_are_left() -> None:
    """A view's cannot be cut; and what an object holds may be somebody else's."""
    made = torch.ones(3, requires_grad=True).exp()
    layer, itself = nn.Linear(1, 1), [made.exp()]
    itself.append(itself)  # type: ignore[arg-type]
    layer.kept = {"deep": [(made.exp(), deque([made.exp()]))], "itself": itself}  # type: ignore[assignment]
    cut_graphs(layer)
    (first, (second,)), third = layer.kept["deep"][0], itself[0]  # type: ignore[index, operator]
    assert not any(tensor.requires_grad for tensor in (first, second, third))
    for kept in (made[:2], [made.view(3, 1)], SimpleNamespace(out=made), deque([made]).append):
        layer.kept = kept  # type: ignore[assignment]
        cut_graphs(layer)
        assert made.grad_fn is not None


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_one_sample_that_does_not_fit_ends_the_run(schedule: str) -> None:
    with pytest.raises(OutOfMemoryError, match="either: even a single sample is too much") as caught:
        quietly(model(0, "B"), data(5), schedule)
    assert (caught.value.stage, caught.value.layer, caught.value.batch) == (1, 1, 0)
    assert "on_oom" not in str(caught.value)


def test_a_packet_that_cannot_be_cut_says_so() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Tight(block(), 2, "F")

        def forward(self, x: tuple[Tensor, Tensor]) -> Tensor:
            return self.block(x[0]) * x[1].sum()

    (x, y), shared = data(5)[0], torch.ones(3).double()
    with pytest.raises(OutOfMemoryError, match=r"only tensors with one entry per sample can be cut"):
        quietly(ALPackage([layer(Pair())]).double(), [((x, shared), y)], "pipelined")


def test_parts_that_do_not_fit_together_say_so() -> None:
    class Trims(nn.Module):
        """As wide as its widest row."""

        def __init__(self) -> None:
            super().__init__()
            self.block = Tight(block(), 2, "F")

        def forward(self, x: Tensor) -> Tensor:
            return self.block(x)[:, : len(x) + 1]

    torch.manual_seed(0)
    enc = ENC(Trims(), nn.Sequential(nn.AdaptiveAvgPool1d(WIDE)))
    package = ALPackage([AL(enc, AE(nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)))]).double()
    with pytest.raises(OutOfMemoryError, match=r"what its parts hand on cannot be put together: \(2, 3\).*; \(1, 2\)"):
        quietly(package, data(3), "pipelined")


class Accumulates(AL):
    """Learns from two batches at a time."""

    seen = 0

    def update(self) -> None:
        self.seen += 1
        if self.seen % 2 == 0:
            super().update()


@pytest.mark.parametrize("where", "FB")
def test_gradients_that_wait_for_a_later_update_are_kept(where: str) -> None:
    found = []
    for most in (99, 2):
        torch.manual_seed(0)
        f = Tight(block(), most, where)
        ae = AE(nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE))
        package = ALPackage([Accumulates(ENC(f, nn.Linear(WIDE, WIDE)), ae, 0.01)]).double()
        batches = data(3, 5, 2, 4)
        run(package, batches) if most == 99 else quietly(package, batches, "pipelined")
        found.append([value for name, value in package.state_dict().items() if not name.endswith("calls")])
    torch.testing.assert_close(found[0], found[1], rtol=1e-6, atol=1e-6)


class Owned(AL):
    """A user's layer that keeps its losses, and so its graph, after a failed backward."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        out = super().forward(x, y)
        assert self._graph is not None
        self.kept = list(self._graph)
        return out

    def backward(self) -> None:
        sum(self.kept).backward()


@pytest.mark.parametrize("kind", [AL, Owned])
@pytest.mark.parametrize("where", "FB")
def test_a_failed_attempt_is_let_go_of_before_the_next(where: str, kind: type[AL]) -> None:
    """One graph at a time: were the failed one still alive, its halves would not fit, either."""
    alive: list[weakref.ref[Tensor]] = []
    most_alive = [0]

    class Counts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            out = x + 0
            alive.append(weakref.ref(out))
            most_alive[0] = max(most_alive[0], sum(ref() is not None for ref in alive))
            return out * out  # whose backward needs it

    torch.manual_seed(0)
    f = nn.Sequential(nn.Linear(WIDE, WIDE), Counts(), Tight(block(), 2, where))
    package = ALPackage(
        [kind(ENC(f, nn.Linear(WIDE, WIDE)), AE(nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)))]
    ).double()
    gc.disable()
    try:
        quietly(package, data(8, 8), "pipelined")
    finally:
        gc.enable()
    assert most_alive == [1]
    assert len(alive) == (1 + 2 + 4) + 4 + (where == "B")


@pytest.mark.parametrize("policy", ["raise", "split"])
def test_inputs_are_not_held_longer_than_the_backward_needs(policy: Any) -> None:
    package = model(99, "F")
    batches = data(3, 3)
    held = [weakref.ref(x) for x, _ in batches]
    with Pipeline(package, threads=1, on_oom=policy) as pipe:
        for x, y in batches:
            pipe.submit(x, y)
        del x, y
        batches.clear()
        pipe.drain()
        gc.collect()
        assert [ref() for ref in held] == [None, None]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("where", "FB")
def test_a_batch_in_parts_whose_loss_is_not_finite_is_left_out_too(schedule: str, where: str) -> None:
    batches = data(5, 5, 5)
    batches[1][0][4, 0] = torch.nan
    package, wanted = model(2, where, tight=0), model(2, where, tight=0)
    report = quietly(package, batches, schedule, on_non_finite="skip")
    assert report.non_finite == [1, 1, 1]
    quietly(wanted, [batches[0], batches[2]], schedule)
    for name, value in package.state_dict().items():
        torch.testing.assert_close(value, wanted.state_dict()[name], rtol=1e-6, atol=1e-6)
    with pytest.raises(NonFiniteError, match=r"layer 0 .* batch 1"):
        quietly(model(2, where, tight=0), batches, schedule)


def test_an_unknown_policy_is_one_line() -> None:
    with pytest.raises(PipealError, match="unknown on_oom 'splt'; did you mean 'split'"):
        Pipeline(model(1, "F"), on_oom="splt")  # type: ignore[arg-type]
