"""The GPU benchmark runs, at toy size on a CPU, and reads a GPU's trace aright."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from pipeal import AE, AL, ENC, ALPackage, Pipeline
from tests.benches import Benches


@pytest.fixture(scope="module")
def gpu(bench: Benches) -> ModuleType:
    return bench["gpu"]


def test_what_runs_at_once_is_of_different_owners(gpu: ModuleType) -> None:
    found = gpu.overlap([("a", 0, 4), ("b", 3, 5), ("b", 8, 10)])
    assert (found.busy, found.at_once, found.owners) == (0.7, 0.1, 2)
    assert gpu.overlap([("a", 0, 4), ("a", 0, 4), ("a", 4, 8)]).at_once == 0  # a stage's own, nested or in a row
    assert gpu.overlap([("a", 0, 4), ("b", 4, 8)]).at_once == 0
    assert gpu.overlap([("a", 0, 8), ("b", 2, 4), ("c", 3, 6)]).at_once == 0.5
    assert gpu.overlap([]) == gpu.Overlap(0.0, 0.0, 0)


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_kernels_of_a_trace_are_told_apart_by_device_and_stream(gpu: ModuleType, tmp_path: Path, suffix: str) -> None:
    def event(kind: str, begin: float, seconds: float, **args: int) -> dict[str, object]:
        return {"ph": "X", "cat": kind, "name": "x", "ts": begin, "dur": seconds, "args": args}

    events = [
        event("kernel", 100.0, 4.0, device=0, stream=7),
        event("kernel", 102.0, 4.0, device=0, stream=9),
        event("kernel", 102.0, 2.0, device=1, stream=7),
        event("gpu_memcpy", 90.0, 100.0, device=0, stream=11),
        event("cuda_runtime", 0.0, 500.0),
        {"ph": "M", "name": "process_name"},
    ]
    path = tmp_path / f"trace{suffix}"
    text = json.dumps({"traceEvents": events})
    if suffix == ".json":
        path.write_text(text)
    else:
        path.write_bytes(gzip.compress(text.encode()))
    found = gpu.kernels_in(path)
    assert [owner for owner, *_ in found] == [(0, 7), (0, 9), (1, 7)]
    assert gpu.overlap(found) == gpu.Overlap(1.0, pytest.approx(2 / 6), 3)


@pytest.mark.slow
def test_it_runs_and_keeps_its_figures(gpu: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = ["--models", "transformer,vgg", "--precisions", "fp32", "--turns", "1", "--steps", "1"]
    gpu.main(["--quick", "--device", "cpu", "--out", str(tmp_path), *chosen])
    found = json.loads((tmp_path / "figures.json").read_text())["figures"]["toy"]
    assert [(one["model"], one["way"]["name"]) for one in found[:4]] == [
        ("transformer", "BP"),
        ("transformer", "AL, one stage"),
        ("transformer", "AL, 2 stages on cpu"),
        ("transformer", "AL, 4 stages on cpu"),
    ]
    assert all(len(one["samples_per_s"]) == 1 for one in found)
    assert all(len(one["tokens_per_s"]) == (one["model"] == "transformer") for one in found)
    assert len(list(tmp_path.glob("toy-*.json.gz"))) == len(found) == 8
    out = capsys.readouterr().out
    assert "transformer, batches of 8 × 6 tokens, 1 turns of 1 batches" in out
    assert "vgg, batches of 8 images" in out


@pytest.mark.parametrize(("option", "name"), [("--models", "lsmt"), ("--sizes", "huge")])
def test_an_unknown_name_is_one_line(
    gpu: ModuleType, option: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        gpu.main(["--device", "cpu", option, name])
    assert ended.value.code == 2
    assert name in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.cuda
def test_a_profile_sees_kernels_of_several_streams(gpu: ModuleType, tmp_path: Path) -> None:
    gpu.main(["--quick", "--sizes", "toy", "--models", "transformer", "--turns", "1", "--out", str(tmp_path)])
    found = json.loads((tmp_path / "figures.json").read_text())["figures"]["toy"]
    streams = {one["way"]["name"]: one["kernels"]["owners"] for one in found}
    alone = streams["BP"]  # the stage's own, and the caller's, on which the report puts losses together
    assert streams["AL, one stage"] == alone
    assert streams["AL, 2 stages on cuda:0"] == alone + 1
    assert streams["AL, 4 stages on cuda:0"] == alone + 3
    assert all(one["kernels"]["busy"] > 0 and one["peak_bytes"] > 0 for one in found)


class Sleeps(AL):
    """A forward that keeps the GPU's clock busy far longer than hosts take to give it a batch's work, and leaves the
    rest of it free."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        torch.cuda._sleep(100_000_000)
        return super().forward(x, y)


@pytest.mark.cuda
@pytest.mark.parametrize(("stages", "most"), [(1, 0.0), (2, 1.0)])
def test_kernels_of_two_stages_on_one_gpu_run_at_once(
    gpu: ModuleType, tmp_path: Path, stages: int, most: float
) -> None:
    sides = [AE(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(2)]
    model = ALPackage([Sleeps(ENC(nn.Linear(8, 8), nn.Linear(8, 8)), side) for side in sides])
    data = [(torch.randn(4, 8), torch.randn(4, 8)) for _ in range(12)]
    with Pipeline(model, ["cuda:0"] * stages) as pipe:
        pipe.run(data[:2])
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
            pipe.run(data)
    seen.export_chrome_trace(str(tmp_path / "trace.json"))
    found = gpu.overlap(gpu.kernels_in(tmp_path / "trace.json"))
    assert most / 2 <= found.at_once <= most
