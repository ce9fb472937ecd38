"""The memory model: peaks that are real, a fit that is the best, a search that lives through running out of memory."""

from __future__ import annotations

import gc
import warnings
import weakref
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pipeal.core import host_memory
from pipeal.core.errors import ConfigError, DataError
from pipeal.data.batching.size_aware import SizeAwareBatchSampler
from pipeal.data.memory import peaks as peaks_module
from pipeal.data.memory.model import MemoryModel, fit_memory_model, max_batch_cost, probe_memory
from pipeal.data.memory.peaks import (
    CudaPeak,
    ResidentPeak,
    collect_cuda_peak_alloc,
    collect_peaks,
    device_memory,
    is_out_of_memory,
    meter_for,
)

MB = 1_000_000


@pytest.fixture(autouse=True, scope="module")
def quick_collection():
    """Meters collect garbage before each step; what other tests have left need not be looked through each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


SHAPES = st.lists(st.tuples(st.integers(1, 64), st.integers(1, 512)), min_size=4, max_size=20)
COEFFICIENTS = st.tuples(st.floats(0, 1e9), st.floats(0, 1e5), st.floats(0, 1e3))


class FakeAllocator:
    """Gives out bytes up to a capacity, and is its own meter."""

    def __init__(self, capacity, error=MemoryError):
        self.capacity, self.error = capacity, error
        self.now = self.peak = 0
        self.held, self.trials = [], []

    def allocate(self, count):
        if self.now + count > self.capacity:
            raise self.error()
        self.now += count
        self.peak = max(self.peak, self.now)

    def start(self):
        self.peak = self.now

    def peak_bytes(self):
        return self.peak

    def step(self, needs):
        def step(cost):
            self.trials.append(cost)
            self.held.append(needs(cost) // 2)
            self.allocate(needs(cost) // 2)
            self.allocate(needs(cost) - needs(cost) // 2)
            self.free()

        return step

    def free(self):
        self.now = 0


def cpu_error():
    return RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried to")


class TestFit:
    @given(SHAPES, COEFFICIENTS)
    def test_exact_peaks_give_the_model_back(self, shapes, coefficients):
        n, length = np.array(shapes, dtype=float).T
        terms = np.stack([np.ones_like(n), n * length, n * length**2], axis=1)
        if len(set(length)) < 3 or np.linalg.cond(terms / np.linalg.norm(terms, axis=0)) > 1e4:
            return
        peaks = terms @ coefficients
        model = fit_memory_model(n, length, peaks)
        top = max(peaks.max(), 1.0)
        assert model.rms_error <= 1e-6 * top
        assert model.worst_excess <= 1e-6 * top
        assert [model.predict(*shape) for shape in shapes] == pytest.approx(peaks.tolist(), abs=1e-5 * top)
        assert model.points == len(shapes)

    @given(SHAPES, st.integers(0, 2**32 - 1))
    def test_no_other_coefficients_are_better(self, shapes, seed):
        """At the best point, no coefficient can be raised, nor lowered if it is above 0, with profit."""
        random = np.random.default_rng(seed)
        n, length = np.array(shapes, dtype=float).T
        peaks = random.uniform(0, 1000, len(shapes))
        try:
            model = fit_memory_model(n, length, peaks)
        except DataError:
            return
        terms = np.stack([np.ones_like(n), n * length, n * length**2], axis=1)
        scale = np.linalg.norm(terms, axis=0)
        found = np.array([model.c0, model.c1, model.c2])
        gradient = (terms / scale).T @ (terms @ found - peaks) / np.linalg.norm(peaks)
        assert (found >= 0).all()
        assert (gradient > -1e-6).all()
        assert (np.abs(gradient[found > 0]) < 1e-6).all()
        excess = peaks - terms @ found
        assert model.rms_error == pytest.approx(np.sqrt((excess**2).mean()))
        assert model.worst_excess == pytest.approx(max(0, excess.max()), abs=1e-6)

    def test_noise_is_told_by_the_error(self):
        shapes = list(product([1, 4, 16], [16, 128, 512]))
        noise = np.random.default_rng(0).normal(0, MB, len(shapes))
        peaks = [500 * MB + n * length * 4096 + n * length**2 * 32 + more for (n, length), more in zip(shapes, noise)]  # noqa: B905
        model = fit_memory_model(*zip(*shapes, strict=True), peaks)
        assert model.c0 == pytest.approx(500 * MB, rel=0.01)
        assert model.c2 == pytest.approx(32, rel=0.05)
        assert 0.3 * MB < model.rms_error < 1.5 * MB
        assert all(model.bound(*shape) >= peak * (1 - 1e-12) for shape, peak in zip(shapes, peaks, strict=True))
        assert any(model.predict(*shape) < peak for shape, peak in zip(shapes, peaks, strict=True))

    @given(COEFFICIENTS, st.floats(1, 500), st.floats(0, 1e12))
    def test_the_most_samples_fit_and_one_more_does_not(self, coefficients, longest, budget):
        model = MemoryModel(*coefficients, rms_error=0.0, worst_excess=10.0, points=4)
        if not longest * (model.c1 + model.c2 * longest) > 1e-3:
            return
        most = model.max_samples(longest, budget)
        assert model.bound(most, longest) <= budget * (1 + 1e-9) or most == 0
        assert model.bound(most + 1, longest) > budget * (1 - 1e-9)

    def test_as_a_cost_every_batch_fits(self):
        model = MemoryModel(c0=1000.0, c1=10.0, c2=0.5, rms_error=0.0, worst_excess=50.0, points=9)
        lengths = np.random.default_rng(0).integers(1, 60, 500)
        batches = list(SizeAwareBatchSampler(range(500), lengths, 10_000, cost=model.bound, oversize="raise"))
        assert all(model.bound(len(batch), lengths[batch].max()) <= 10_000 for batch in batches)
        assert len(batches) < 300

    @pytest.mark.parametrize(
        ("samples", "lengths", "peaks", "message"),
        [
            ([], [], [], "0 batches do not tell"),
            ([1, 2, 4], [8, 8, 8], [1, 2, 3], "3 batches do not tell c0, c1 and c2 apart; measure at least 3"),
            ([1, 2], [8, 9], [1, 2], "2 batches"),
            ([1, 2, 3], [8, 9, 7], [1, 2], "3 sample counts, 3 lengths and 2 peaks"),
            ([1, 2, 3], [8, 9, 7], [1, float("nan"), 3], "peak 1 is nan"),
            ([1, 2, 3], [8, -9, 7], [1, 2, 3], "length 1 is -9"),
            ([0, 0, 0], [8, 9, 7], [1, 2, 3], "do not tell"),
        ],
    )
    def test_bad_measurements(self, samples, lengths, peaks, message):
        with pytest.raises(DataError, match=message):
            fit_memory_model(samples, lengths, peaks)

    def test_a_budget_without_end(self):
        with pytest.raises(ConfigError, match="budget_bytes is inf; wanted a finite number"):
            MemoryModel(10.0, 1.0, 0.0, 0.0, 0.0, 3).max_samples(5, float("inf"))

    def test_samples_that_need_nothing(self):
        with pytest.raises(ConfigError, match="samples of length 5 need no memory"):
            MemoryModel(10.0, 0.0, 0.0, 0.0, 0.0, 3).max_samples(5, 100)


class TestSearch:
    @given(
        st.integers(1, 10**6), st.integers(0, 50), st.integers(0, 3), st.floats(0.2, 1),
        st.sampled_from([0.0, 0.02, 0.3]), st.booleans(),
    )  # fmt: skip
    def test_the_largest_cost_within_the_share(self, total, linear, square, share, tolerance, may_run_out):
        def needs(cost):
            return 10 + linear * cost + square * cost**2

        budget = share * total
        fitting = [cost for cost in (1, 10**6) if needs(cost) <= budget]
        memory = FakeAllocator(total if may_run_out else 10**15)
        options = {"share": share, "total_bytes": total, "meter": memory, "tolerance": tolerance, "high": 10**6}
        options["cleanup"] = memory.free
        if 1 not in fitting:
            with pytest.raises(ConfigError, match="a batch of cost 1 "):
                max_batch_cost(memory.step(needs), **options)
            return
        found = max_batch_cost(memory.step(needs), **options)
        assert found in memory.trials
        assert needs(found) <= budget
        if 10**6 in fitting:
            assert found == 10**6
        else:
            assert needs(found + max(1, int(tolerance * found) + 1)) > budget
        assert len(memory.trials) <= 60

    @pytest.mark.parametrize("error", [MemoryError, torch.OutOfMemoryError, cpu_error])
    def test_it_lives_through_every_way_to_run_out(self, error):
        memory = FakeAllocator(1000, error)
        options = {"share": 1, "total_bytes": 10**9, "tolerance": 0, "meter": memory}
        assert max_batch_cost(memory.step(lambda cost: 7 * cost), **options, cleanup=memory.free) == 142
        assert max(memory.trials) > 142

    @given(st.integers(100, 10**6), st.floats(0.5, 1), st.sampled_from([0.0, 0.02, 1.0]), st.integers(0, 99))
    def test_noise_does_not_keep_it_going_or_take_it_over_the_budget(self, total, share, tolerance, seed):
        """The same cost may need more the next time, and run out only sometimes."""
        random, seen = np.random.default_rng(seed), {}
        memory = FakeAllocator(10**15)

        def step(cost):
            memory.peak = int((10 + 7 * cost) * random.uniform(0.8, 1.2))
            if memory.peak > 1.05 * total:
                raise MemoryError
            seen.setdefault(cost, []).append(memory.peak)

        found = max_batch_cost(step, share=share, total_bytes=total, meter=memory, tolerance=tolerance)
        assert min(seen[found]) <= share * total
        assert sum(map(len, seen.values())) < 60

    def test_the_limit_may_be_one_of_bytes_only(self):
        memory = FakeAllocator(10**15)
        options = {"share": 0.5, "total_bytes": 2000, "tolerance": 0, "meter": memory}
        assert max_batch_cost(memory.step(lambda cost: 7 * cost), **options) == 142
        # The line through two peaks foretells it: hardly anything beyond the limit is ever tried.
        assert max(memory.trials) <= 143

    def test_what_a_failed_step_held_is_gone_before_the_next(self):
        class Held:
            """A tensor's stand-in."""

        alive = []

        def step(cost):
            assert all(one() is None for one in alive)
            held = Held()
            alive.append(weakref.ref(held))
            if cost > 20:
                raise MemoryError
            memory.peak = cost

        memory = FakeAllocator(10**9)
        assert max_batch_cost(step, share=1, total_bytes=10**9, meter=memory, tolerance=0) == 20
        assert len(alive) > 6

    def test_cleanup_comes_after_each_step(self):
        memory = FakeAllocator(100)
        freed = []

        def cleanup():
            freed.append(memory.trials[-1])
            memory.free()

        max_batch_cost(memory.step(lambda cost: cost), total_bytes=100, meter=memory, cleanup=cleanup)
        assert freed == memory.trials

    def test_other_errors_are_not_taken_for_it(self):
        def step(cost):
            if cost > 4:
                raise RuntimeError("shapes do not match")

        with pytest.raises(RuntimeError, match="shapes do not match"):
            max_batch_cost(step, total_bytes=100, meter=FakeAllocator(100))

    def test_a_step_that_heeds_no_cost(self):
        with pytest.raises(ConfigError, match="still fits; does step heed the cost"):
            max_batch_cost(lambda cost: None, total_bytes=100, meter=FakeAllocator(100))

    def test_a_step_that_does_not_fit_at_all(self):
        memory = FakeAllocator(100)
        with pytest.raises(ConfigError, match="a batch of cost 8 needs 96 bytes; the budget is 90 bytes: lower low"):
            max_batch_cost(memory.step(lambda cost: 12 * cost), total_bytes=100, meter=memory, low=8)
        with pytest.raises(ConfigError, match="a batch of cost 9 runs out of memory"):
            max_batch_cost(memory.step(lambda cost: 12 * cost), total_bytes=100, meter=memory, low=9)

    @pytest.mark.parametrize(
        "options",
        [
            {"share": 0},
            {"share": 1.1},
            {"share": float("nan")},
            {"tolerance": -1},
            {"tolerance": float("inf")},
            {"low": 0},
            {"low": 5, "high": 4},
        ],
    )
    def test_arguments(self, options):
        with pytest.raises(ConfigError, match="wanted"):
            max_batch_cost(lambda cost: None, **options)


def _alone(measure):
    """In a process of its own: gaps that other tests left in this one's heap would take part of a step."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:
        return fresh.submit(measure).result()


def _falling_peaks():
    def work(megabytes):
        np.ones(megabytes * MB // 8)
        return megabytes

    return collect_peaks([160, 80, 40, 0], work, ResidentPeak())


def _fall_after_many_small_blocks():
    def work(megabytes):
        blocks = [bytes(20_000) for _ in range(megabytes * 50)]
        return len(blocks)

    peaks = collect_peaks([100, 0], work, ResidentPeak())[1]
    return peaks[0] - peaks[1]


def _model_of_scores_of_pairs():
    def step(n, length):
        hidden = torch.ones(n, length, 256)
        scores = torch.ones(n, length, length)
        assert hidden.shape[0] == scores.shape[0]

    shapes = list(product([2, 8, 16], [64, 512, 1024]))
    return probe_memory(step, shapes, meter=ResidentPeak())


def _rows_of_a_training_step_in_60_megabytes():
    layers = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64))

    def step(cost):
        layers(torch.ones(cost, 64)).square().mean().backward()

    meter = ResidentPeak()
    meter.start()
    step(1)
    options = {"share": 1, "total_bytes": meter.peak_bytes() + 60 * MB, "low": 256, "tolerance": 0.05}
    return max_batch_cost(step, **options, cleanup=layers.zero_grad)


@pytest.mark.slow
class TestResidentPeak:
    @pytest.fixture
    def meter(self):
        meter = ResidentPeak()
        if not meter.resets:
            pytest.skip("the peak resident size cannot be reset here")
        return meter

    def test_a_step_has_its_own_peak_also_after_a_larger_one(self, meter):
        """Without the reset, all three would be as large as the first."""
        features, peaks = _alone(_falling_peaks)
        assert features == [160, 80, 40, 0]
        base = peaks[-1]
        assert [(peak - base) / MB for peak in peaks[:3]] == pytest.approx([160, 80, 40], abs=6)

    def test_many_small_blocks_of_a_step_before_do_not_count(self, meter):
        assert _alone(_fall_after_many_small_blocks) > 60 * MB

    def test_the_model_of_a_step_with_scores_of_pairs(self, meter):
        model = _alone(_model_of_scores_of_pairs)
        assert model.points == 9
        assert model.c1 == pytest.approx(4 * 256, rel=0.2)
        assert model.c2 == pytest.approx(4, rel=0.1)
        assert model.rms_error < 4 * MB

    def test_the_search_on_a_real_training_step(self, meter):
        found = _alone(_rows_of_a_training_step_in_60_megabytes)
        # Per row: 64 in, 512 twice, 64 out, and about as much again backwards.
        assert 60 * MB / (3 * 4 * (64 + 1024 + 64)) < found < 60 * MB / (4 * (64 + 1024 + 64))

    def test_where_it_cannot_be_reset_only_a_rise_is_known(self, monkeypatch, tmp_path):
        monkeypatch.setattr(host_memory, "_CLEAR_REFS", tmp_path / "none" / "clear_refs")
        life = iter([0, 100, 150, 150, 150, 150, 170])
        monkeypatch.setattr(peaks_module, "lifetime_peak", lambda: next(life))
        meter = ResidentPeak()
        assert not meter.resets
        with pytest.warns(UserWarning, match="sample 1 is left out of the peaks: its peak is not above"):
            assert collect_peaks("abc", str.upper, meter) == (["A", "C"], [150, 170])

    def test_the_search_says_so_there(self, monkeypatch, tmp_path):
        monkeypatch.setattr(host_memory, "_CLEAR_REFS", tmp_path / "none" / "clear_refs")
        monkeypatch.setattr(peaks_module, "lifetime_peak", lambda: 100)
        with pytest.raises(ConfigError, match="cannot be measured here, only that of the process"):
            max_batch_cost(lambda cost: None)

    def test_the_peak_of_a_whole_life_is_no_smaller_than_a_step(self, meter):
        meter.start()
        assert 0 < meter.peak_bytes() < device_memory("cpu")


class TestCollecting:
    def test_samples_that_run_out_are_left_out_with_a_warning(self):
        memory = FakeAllocator(50)
        cleaned = []

        def work(size):
            memory.allocate(size)
            return -size

        def cleanup():
            cleaned.append(memory.now)
            memory.free()

        with pytest.warns(UserWarning, match="sample 1 is left out of the peaks: it ran out of memory"):
            assert collect_peaks([10, 90, 30], work, memory, cleanup) == ([-10, -30], [10, 30])
        assert cleaned == [10, 0, 30]

    def test_other_errors_come_through_after_the_cleanup(self):
        cleaned = []
        with pytest.raises(ZeroDivisionError):
            collect_peaks([0], lambda x: 1 // x, FakeAllocator(1), lambda: cleaned.append(1))
        assert cleaned == [1]

    def test_which_errors_count(self):
        for error in (MemoryError(), torch.OutOfMemoryError("CUDA out of memory"), cpu_error()):
            assert is_out_of_memory(error)
        for library in ("CUBLAS", "CUSOLVER", "CUDNN"):
            assert is_out_of_memory(RuntimeError(f"CUDA error: {library}_STATUS_ALLOC_FAILED when calling `create`"))
        for error in (RuntimeError("nan"), ValueError("out of memory"), OSError("out of memory")):
            assert not is_out_of_memory(error)
        with pytest.raises(RuntimeError) as caught:
            torch.empty(10**15)
        assert is_out_of_memory(caught.value)

    def test_devices(self):
        assert isinstance(meter_for("cpu"), ResidentPeak)
        for unknown in ("meta", "gpu", None):
            with pytest.raises(ConfigError, match=f"device is {unknown!r}; wanted a CUDA device"):
                meter_for(unknown)
        with pytest.raises(ConfigError, match=r"device is 'cuda:99', but there are [0-9]+ CUDA devices here"):
            CudaPeak("cuda:99")
        with pytest.raises(ValueError, match="device is 'cpu'; wanted a CUDA device"):
            collect_cuda_peak_alloc([1], lambda x: x, torch.device("cpu"))

    def test_probing_needs_shapes(self):
        with pytest.raises(DataError, match="no shapes to measure"):
            probe_memory(lambda n, length: None, [])

    def test_probing_where_not_even_the_smallest_fits(self):
        memory, cleaned = FakeAllocator(10), []
        with pytest.raises(DataError, match=r"even the smallest of the shapes, \(1, 20\), runs out of memory"):
            probe_memory(
                lambda n, length: memory.allocate(n * length), [(2, 30), (1, 20)], meter=memory,
                cleanup=lambda: cleaned.append(1),
            )  # fmt: skip
        assert cleaned == [1]
        with pytest.raises(ZeroDivisionError):
            probe_memory(lambda n, length: n // 0, [(1, 20)], meter=memory)

    def test_probing_goes_on_where_the_largest_do_not_fit(self):
        memory = FakeAllocator(1100)
        shapes = [(4, 8), (1, 8), (1, 16), (9, 99), (2, 64)]
        with pytest.warns(UserWarning, match="is left out of the peaks: it ran out of memory") as warned:
            model = probe_memory(
                lambda n, length: memory.allocate(1000 + n * length), shapes, meter=memory, cleanup=memory.free
            )
        assert (model.points, len(warned)) == (3, 2)
        assert (round(model.c0), round(model.c1, 6)) == (1000, 1)

    def test_warm_up_steps_do_not_count(self):
        memory, seen = FakeAllocator(10**9), []

        def step(n, length):
            seen.append((n, length))
            memory.free()
            memory.allocate(1000 + n * length)

        model = probe_memory(step, [(4, 8), (1, 8), (1, 16)], meter=memory, warm_up=2, cleanup=memory.free)
        assert seen == [(1, 8), (1, 8), (1, 8), (1, 16), (4, 8)]
        assert (round(model.c0), round(model.c1, 6)) == (1000, 1)


@pytest.mark.cuda
class TestCuda:
    def test_the_documents_example(self):
        device = torch.device("cuda:0")
        model = nn.Linear(256, 256).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        kept = []

        def work(data):
            optimizer.zero_grad()
            loss = model(data.to(device)).square().mean()
            loss.backward()
            optimizer.step()
            kept.append(loss)
            return len(data)

        sizes = [64, 64, 4096, 16384, 65536]
        batches = [torch.ones(size, 256) for size in sizes]
        features, found = collect_cuda_peak_alloc(dataset=batches, work=work, device=device, cleanup=kept.clear)
        assert features == sizes
        assert found[1:] == sorted(found[1:])
        # The input, the output and its square, and gradients of the latter two.
        assert 2 * 65536 * 1024 < found[-1] - found[1] < 6 * 65536 * 1024

    def test_only_cuda_devices(self):
        assert isinstance(meter_for("cuda"), CudaPeak)
        assert device_memory("cuda") > 10**9

    def test_the_search_survives_the_real_error(self):
        torch.cuda.set_per_process_memory_fraction(min(1.0, 2e9 / device_memory("cuda")))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                found = max_batch_cost(
                    lambda cost: torch.empty(cost, 1_000_000, dtype=torch.uint8, device="cuda"),
                    device="cuda",
                    share=1.0,
                    tolerance=0,
                )
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        assert 1800 < found <= 2000
