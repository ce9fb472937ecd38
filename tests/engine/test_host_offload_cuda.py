"""Layers in the memory of a GPU's host, on a GPU: the same bits, three layers there, and copies beside the work."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from pipeal import AE, AL, ENC, ALPackage, Pipeline, Window
from pipeal.engine import Action, load_layer_state
from pipeal.engine.trace import Way

from .cases import Case, cases, cosine, cuts
from .test_cuda import batches, package, same, sync_debug_mode  # noqa: F401  a fixture
from .test_fence_cuda import leaves, rate

pytestmark = pytest.mark.cuda

WIDE, CODE = 512, 64


def block(wide: int = WIDE) -> nn.Module:
    return nn.Sequential(nn.Linear(wide, wide), nn.GELU(), nn.Linear(wide, wide), nn.GELU())


def deep(depth: int, wide: int = WIDE) -> list[AL]:
    torch.manual_seed(0)
    sides = [AE(nn.Linear(CODE, CODE), nn.Linear(CODE, CODE)) for _ in range(depth)]
    return [AL(ENC(block(wide), nn.Linear(wide, CODE)), side) for side in sides]


def pairs(count: int, rows: int = 256, wide: int = WIDE) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [(torch.randn(rows, wide, generator=draw), torch.randn(rows, CODE, generator=draw)) for _ in range(count)]


def learnt(case: Case, sizes: list[int], **options: Any) -> list[Tensor]:
    model = case.build()
    with Pipeline(model, ["cuda:0"] * len(sizes), sizes=sizes, seed=case.seed, threads=1, **options) as pipe:
        report = pipe.run(case.batches(), cosine)
        found = [pipe.predict(case.batches()[0][0], depth + 1).cpu() for depth in range(len(model))]
    return [*leaves(model), *report.losses, *found]


@settings(max_examples=5)  # two pipelines each, of new shapes
@given(case=cases(), data=st.data())
def test_random_models_learn_the_same(case: Case, data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(case.layers)), label="stages")
    sizes = data.draw(st.sampled_from(list(cuts(len(case.layers), stages))), label="sizes")
    with pytest.MonkeyPatch.context() as patch:
        wanted = learnt(case, sizes)
        patch.setattr("pipeal.engine.stage.SLOTS", 0)
        assert same(learnt(case, sizes, offload="host"), wanted)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"precision": "bf16"},
        {"precision": "fp16"},
        {"on_non_finite": "skip"},
        {"on_oom": "split"},
        {"recompute": "blocks"},
        pytest.param({"compile": "static"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("every", [1, 3])
def test_with_what_else_is_around_a_layer(options: dict[str, Any], every: int) -> None:
    def trained(**more: Any) -> list[Tensor]:
        model = package()
        with Pipeline(model, ["cuda:0"], threads=1, **options, **more) as pipe:
            report = pipe.run(batches(9), rate, updates=lambda batch: batch % every == every - 1)
        return [*leaves(model), *report.losses]

    assert same(trained(offload="host"), trained())


def test_weights_lie_in_locked_memory_between_batches_and_on_the_cpu_in_the_end() -> None:
    model = package()
    before = allocated()
    with Pipeline(model, ["cuda:0"], threads=1, offload="host") as pipe:
        pipe.run(batches(3))
        assert all(weight.device.type == "cpu" and weight.is_pinned() for weight in model.parameters())
        assert all(value.device.type == "cpu" for value in leaves(model))
    assert allocated() - before < 2**20
    x = batches(1)[0][0]
    assert model.eval().infer(x).device.type == "cpu"
    assert pipe.predict(x).is_cuda


def allocated() -> int:
    """Bytes on the GPU, without the workspaces that cuBLAS keeps for each stream: 32 MiB on some."""
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


def peaks(depth: int, every: int = 1, **options: Any) -> tuple[int, int]:
    """The most bytes on the GPU in the first batches, and later, beside those from before it was given the layers."""
    before = allocated()
    torch.cuda.reset_peak_memory_stats()
    with Pipeline(deep(depth), ["cuda:0"], "sequential", threads=1, **options) as pipe:
        found = []
        for _ in range(2):
            pipe.run(pairs(2 * every), updates=lambda batch: batch % every == every - 1)
            found.append(torch.cuda.max_memory_allocated() - before)
            torch.cuda.reset_peak_memory_stats()
    return found[0], found[1]


@pytest.mark.parametrize("every", [1, 2])
def test_memory_on_the_gpu_hardly_grows_with_depth(every: int) -> None:
    found = [peaks(depth, every, offload="host") for depth in (4, 16, 64)]
    assert max(later for _, later in found) <= 1.05 * found[0][1]
    assert max(first for first, _ in found) <= 1.5 * found[0][1]
    assert peaks(64)[1] >= 5 * found[2][1]


def test_the_host_does_not_wait(sync_debug_mode: Any) -> None:  # noqa: F811
    data = [(x.cuda(), y.cuda()) for x, y in pairs(8)]
    with Pipeline(deep(6), ["cuda:0"], threads=1, offload="host", trace=Window(0, 9)) as pipe:
        pipe.run(data[:2])
        sync_debug_mode("error")
        for batch in data[2:]:
            pipe.submit(*batch)
        pipe._open().drain()
        sync_debug_mode("default")
        assert pipe.drain().batches == 6


def test_copies_lie_under_the_work() -> None:
    depth, wide = 6, 2048
    data = [(x.cuda(), y.cuda()) for x, y in pairs(6, rows=8192, wide=wide)]
    with Pipeline(deep(depth, wide), ["cuda:0"], threads=1, offload="host", trace=Window(3, 2)) as pipe:
        pipe.run(data)
        spans, copies = pipe.spans(), pipe.copies()
    assert len([copy for copy in copies if copy.way is Way.SEND]) == 2 * depth
    assert len([copy for copy in copies if copy.way is Way.BRING]) == 2 * depth
    begin, end = (
        min(span.begin for span in spans if span.action is Action.FORWARD),
        max(span.end for span in spans if span.action is Action.UPDATE),
    )

    def under(copy: Any) -> float:
        return sum(max(0.0, min(copy.end, span.end) - max(copy.begin, span.begin)) for span in spans)

    within = [copy for copy in copies if begin <= copy.begin and copy.end <= end]
    assert len(within) >= 2 * depth
    assert sum(map(under, within)) >= 0.5 * sum(copy.end - copy.begin for copy in within)
    by_layer = {(span.batch, span.layer, span.action): span for span in spans}
    for copy in copies:
        if copy.way is Way.BRING and copy.layer:
            assert copy.begin <= by_layer[copy.batch, copy.layer - 1, Action.UPDATE].end + 1e-3
            assert copy.end <= by_layer[copy.batch, copy.layer, Action.FORWARD].begin + 1e-3


def test_snapshots_files_and_loading(tmp_path: Any) -> None:
    data = batches(12)

    def course(**more: Any) -> list[Tensor]:
        model = package()
        with Pipeline(model, ["cuda:0"], threads=1, **more) as pipe:
            pipe.run(data[:4], rate)
            pipe.submit(*data[4], 0.5)
            snapshot = pipe.snapshot()
            pipe.run(data[5:8], rate)
            pipe.save(tmp_path / "file")
            pipe.run(data[8:], rate)
            pipe.load(tmp_path / "file")
            pipe.run(data[8:10], rate)
        other = package()
        for layer, state in zip(other, snapshot.wait(60).values(), strict=True):
            load_layer_state(layer, state.state)
        with Pipeline(other, ["cuda:0"], threads=1, first_batch=5, **more) as pipe:
            pipe.run(data[5:], rate)
        return [*leaves(model), *leaves(other)]

    assert same(course(offload="host"), course())


def test_predictions_are_the_same_and_weights_may_be_changed_right_after() -> None:
    model, wanted = package(), package()
    x = batches(1)[0][0]
    with (
        Pipeline(model, ["cuda:0"], threads=1, offload="host") as pipe,
        Pipeline(wanted, ["cuda:0"], threads=1) as none,
    ):
        for each in (pipe, none):
            each.run(batches(3))
        for factor in (1.0, 0.5):
            with torch.no_grad():
                for weight in (*model.parameters(), *wanted.parameters()):
                    weight.mul_(factor)
            for depth in range(1, 5):
                assert torch.equal(pipe.predict(x, depth), none.predict(x, depth))
            streams = zip(pipe.predict_each([x] * 5), none.predict_each([x] * 5), strict=True)
            assert all(torch.equal(one, two) for one, two in streams)


def test_weights_of_a_recurrence_stay_in_one_piece() -> None:
    """cuDNN warns of others, and copies them at each call."""

    class Last(nn.LSTM):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x)[0]

    def trained(**more: Any) -> list[Tensor]:
        torch.manual_seed(0)
        model = ALPackage(
            [
                AL(
                    ENC(Last(32, 32, 2, batch_first=True), nn.Sequential(nn.Flatten(), nn.Linear(96, CODE))),
                    AE(nn.Linear(CODE, CODE), nn.Linear(CODE, CODE)),
                )
                for _ in range(5)
            ]
        )
        data = [(torch.randn(8, 3, 32), torch.randn(8, CODE)) for _ in range(4)]
        with Pipeline(model, ["cuda:0"], threads=1, **more) as pipe:
            pipe.run(data)
        return leaves(model)

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*single contiguous chunk")
        found = trained(offload="host")
    assert same(found, trained())


@pytest.mark.parametrize("action", ["forward", "backward", "update"])
def test_after_a_failure_weights_are_at_home(action: str) -> None:
    model = package()

    def broken(*_: Any) -> Any:
        raise ValueError("broken")

    pipe = Pipeline(model, ["cuda:0"], threads=1, offload="host")
    with pytest.raises(ValueError, match="broken"), pipe:  # noqa: PT012
        pipe.run(batches(3))
        setattr(model[2], action, broken)
        pipe.run(batches(3))
    early = [value.clone() for value in model.state_dict().values()]
    assert all(value.device.type == "cpu" for value in early)
    torch.cuda.synchronize()
    assert same(early, list(model.state_dict().values()))
