"""The script for a first GPU: it goes on after failures, ends in time, and claims nothing that it has not measured."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from pkgutil import resolve_name
from platform import machine
from time import monotonic, sleep
from typing import Any

import pytest
from gpu_smoke import __main__ as smoke
from gpu_smoke import benches, suite, wheels
from gpu_smoke.commands import Command, Ended, _Running, run
from gpu_smoke.page import NO_GPU, page
from gpu_smoke.place import Place
from gpu_smoke.predictions import MEASUREMENTS, OF_PIPEAL, PREDICTIONS, Finding, Prediction
from gpu_smoke.probes.facts import facts
from gpu_smoke.probes.nvml import free_bytes
from PIL import Image

ROOT = Path(__file__).parents[1]
HERE = "tests.gpu_smoke_probes"
PROBES = (
    Prediction(1, "raises", f"{HERE}:raises"),
    Prediction(2, "hangs", f"{HERE}:hangs", limit_s=2.0),
    Prediction(3, "claims", f"{HERE}:claims"),
)
KEYS = {
    "format", "stand_in", "began", "seconds", "time_limit_s", "ended", "facts", "predictions", "measurements", "tests",
    "benchmarks",
}  # fmt: skip
OF_A_FINDING = {
    "number", "text", "verdict", "figure", "how", "affected", "affected_figure", "not_tested", "figures", "seconds",
    "failed",
}  # fmt: skip


@pytest.fixture(autouse=True)
def own_signals() -> Iterator[None]:
    """The script takes signals over, for as long as its process lives."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def probed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the probes of this file on a machine with so many GPUs, as far as the script can tell."""

    def probe(gpus: int, numbers: str, *arguments: str) -> tuple[int, dict[str, Any], str]:
        monkeypatch.setattr(smoke, "PREDICTIONS", PROBES)
        monkeypatch.setattr(smoke.Smoke, "_gpus", lambda _: gpus)
        monkeypatch.setattr(smoke.Smoke, "_facts", lambda _: None)
        given = ["--out", str(tmp_path), "--only", "predictions", "--predictions", numbers, *arguments]
        code = smoke.main(given)
        kept = json.loads((tmp_path / "gpu-smoke.json").read_text(encoding="utf-8"))
        return code, kept, (tmp_path / "gpu-smoke.md").read_text(encoding="utf-8")

    return probe


def test_a_probe_that_fails_is_told_and_the_next_ones_run(probed: Any) -> None:
    code, kept, page = probed(1, "1,2,3")
    raised, hung, claimed = kept["predictions"]
    assert code == 1
    assert "no such kernel" in raised["failed"]
    assert raised["verdict"] is None
    assert "stopped at its limit of 2 s" in hung["failed"]
    assert hung["verdict"] is None
    assert (claimed["verdict"], claimed["affected"], claimed["failed"]) == (True, True, "")
    assert NO_GPU not in page
    assert "Predictions: 1 true, 0 false, 2 not tested." in page
    assert kept.keys() == KEYS
    assert all(row.keys() == OF_A_FINDING for row in kept["predictions"])


def test_without_a_gpu_no_prediction_is_true_or_false(probed: Any) -> None:
    """Whatever a probe says: the CPU that stands in shows nothing about a GPU."""
    _, kept, page = probed(0, "1,3")
    assert kept["stand_in"]
    assert [(row["verdict"], row["affected"]) for row in kept["predictions"]] == [(None, None)] * 2
    assert all(row["not_tested"] == "there was no GPU" for row in kept["predictions"])
    assert page.splitlines()[2].startswith(NO_GPU)
    assert "7 ms" not in page
    assert "no such kernel" in page


def test_asked_to_stand_in_it_tests_nothing_on_a_gpu(probed: Any) -> None:
    assert probed(1, "3", "--stand-in")[1]["stand_in"]


def test_what_finds_no_time_is_told(probed: Any) -> None:
    code, kept, _ = probed(1, "1,3", "--time-limit", "1")
    assert code == 1
    assert {row["failed"] for row in kept["predictions"]} == {"not run: no time was left"}


def test_what_is_of_pipeal_alone_has_no_verdict_and_shows_whether_pipeal_suffers(tmp_path: Path) -> None:
    answer = tmp_path / "answer.json"
    answer.write_text(json.dumps(asdict(Finding(None, "4 kernels", "", affected=True, not_tested=OF_PIPEAL))))
    row = smoke.finding_of(PROBES[0], answer, Ended(Command("one", ["python"], 1.0), 0, 1.0, ""), stand_in=False)
    assert (row["verdict"], row["affected"], row["not_tested"]) == (None, True, OF_PIPEAL)


def test_events_that_cannot_be_counted_spare_no_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A PyTorch whose events have their methods in C: a count of 0 would read as if pipeal made none."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "bench"))
    monkeypatch.setattr("torch.cuda.Event", type("Event", (), {}))
    found = resolve_name("gpu_smoke.probes.host:events")(Place(stand_in=True))
    assert found.affected is None
    assert "not seen" in found.affected_figure


@pytest.mark.parametrize("left", [None, '{"verdict": tr', "\xff"])
def test_an_answer_that_is_missing_or_cut_off_fails_its_step_alone(tmp_path: Path, left: str | None) -> None:
    """A process that was killed while it wrote; one that ended well before it did."""
    lost = tmp_path / "figures.json"
    if left is not None:
        lost.write_text(left, encoding="latin-1")
    command = Command("one", ["python"], 1.0)
    well = Ended(command, 0, 1.0, "")
    row = smoke.finding_of(PROBES[2], lost, well, stand_in=False)
    assert lost.name in row["failed"]
    assert row["verdict"] is None
    bench = benches.found(benches.Benchmark(command, tmp_path), well)
    assert bench["figures"] is None
    assert bool(bench["ended"]) == (left is not None)


def test_a_line_that_a_kill_cut_off_is_left_out(tmp_path: Path) -> None:
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"test": "a", "outcome": "passed", "line": ""}\n{"test": "b", "outc')
    command = Command("file", ["python"], 1.0)
    row = suite.found(suite.MarkedFile("file", command, lines), Ended(command, -9, 1.0, ""))
    assert row["passed"] == 1
    assert row["ended"].startswith("signal SIGKILL")


def test_versions_that_were_not_found_leave_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smoke, "PREDICTIONS", PROBES)
    monkeypatch.setattr(smoke.Smoke, "_gpus", lambda _: 1)
    monkeypatch.setattr(smoke, "_FACTS_S", 0.0)  # stopped as soon as it is looked at
    assert smoke.main(["--out", str(tmp_path), "--only", "predictions", "--predictions", "3"]) == 1
    kept = json.loads((tmp_path / "gpu-smoke.json").read_text(encoding="utf-8"))
    assert kept["predictions"][0]["verdict"]
    assert "## Versions and devices" in page({**kept, "facts": {"data": "made up"}})


def test_a_cuda_that_does_not_answer_is_told_on_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no package that is missing, which would be exit code 2 and no page."""
    monkeypatch.setattr(smoke, "_FACTS_S", 0.0)  # stopped as soon as it is looked at
    assert smoke.main(["--out", str(tmp_path)]) == 1
    kept = json.loads((tmp_path / "gpu-smoke.json").read_text(encoding="utf-8"))
    assert kept["ended"].startswith("CUDA did not answer in")
    assert kept["ended"] in (tmp_path / "gpu-smoke.md").read_text(encoding="utf-8")
    assert kept["predictions"] == kept["tests"] == []


def test_of_the_environment_nothing_secret_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    secret = {"NVIDIA_API_KEY": "secret", "TORCH_HUB_TOKEN": "secret", "NCCL_KEY": "secret"}
    for name, value in {**secret, "OMP_NUM_THREADS": "1"}.items():
        monkeypatch.setenv(name, value)
    found = facts(Place(stand_in=True))
    assert "secret" not in json.dumps(found)
    assert found["environment"]["OMP_NUM_THREADS"] == "1"


def test_sections_come_in_their_order_and_once() -> None:
    """The share of the time that each may take counts from the begin of the first."""
    assert smoke._options(["--only", "tests,predictions,tests"]).only == ["predictions", "tests"]


def test_predictions_are_numbered_and_each_has_a_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "bench"))
    assert [one.number for one in PREDICTIONS] == list(range(1, 18))
    for one in (*PREDICTIONS, *MEASUREMENTS):
        assert callable(resolve_name(one.probe))
        assert one.limit_s <= 90


@pytest.mark.parametrize(
    ("variable", "first"), [("", "0"), ("0,1", "0"), ("3,1", "3"), ("MIG-4d, MIG-5e", "MIG-4d"), ("GPU-7f", "GPU-7f")]
)
def test_ranks_stay_on_the_gpus_that_were_given(variable: str, first: str) -> None:
    assert resolve_name("gpu_smoke.probes.ranks:first_visible")(variable) == first


@pytest.mark.parametrize("kind", ["GPU", "MIG"])
def test_free_memory_is_of_the_gpu_that_cuda_means(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """NVML's number 0 is another GPU where CUDA sees the third alone: both know it by its UUID."""

    class Driver:
        def __init__(self, _: str) -> None:
            self.cuInit = self.cuDeviceGet = self.nvmlInit_v2 = lambda *_: 0

        def cuDeviceGetUuid_v2(self, found: Any, _: Any) -> int:
            found._obj[:] = range(16)
            return 0

        def nvmlDeviceGetHandleByUUID(self, name: bytes, handle: Any) -> int:
            handle._obj.value = 7
            return int(name != f"{kind}-00010203-0405-0607-0809-0a0b0c0d0e0f".encode())

        def nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> int:
            memory._obj.free = 100 * handle.value
            return 0

    monkeypatch.setattr("ctypes.CDLL", Driver)
    assert free_bytes(0) == 700


@pytest.mark.parametrize(
    ("name", "is_kernel"),
    [
        ("void at::native::unrolled_elementwise_kernel<float, at::native::memory::LoadWithCast<1> >", True),
        ("Memcpy HtoD (Pinned -> Device)", False),
        ("Memset (Device)", False),
    ],
)
def test_kernels_are_told_from_copies(name: str, is_kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "bench"))
    assert resolve_name("gpu_smoke.probes.kernels:is_kernel")(name) == is_kernel


def test_a_folder_that_takes_no_file_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as ended:
        smoke.main(["--out", str(tmp_path / "file" / "out")])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "cannot write to" in line
    assert "--out" in line


@pytest.mark.parametrize(
    ("option", "value"), [("--predictions", "18"), ("--only", "probes"), ("--time-limit", "0"), ("--jobs", "0")]
)
def test_a_mistake_in_the_call_is_one_line(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        smoke.main([option, value])
    assert ended.value.code == 2
    assert value in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("stays", [True, False])
def test_what_a_command_has_started_ends_with_it(tmp_path: Path, stays: bool) -> None:
    """Also what has a session of its own, as the processes of torchrun, and what an ended command leaves behind."""
    pid = tmp_path / "pid"
    nap = "time.sleep(600)"
    child = f"import os, time; os.setsid(); open({str(pid)!r}, 'w').write(f'{{os.getpid()}}.'); {nap}"
    ready = f"while not (os.path.exists({str(pid)!r}) and open({str(pid)!r}).read().endswith('.')): time.sleep(0.01)"
    parent = f"import os, subprocess, sys, time\nsubprocess.Popen([sys.executable, '-c', {child!r}])\n{ready}\n"
    command = Command("parent", [sys.executable, "-c", parent + nap * stays], limit_s=60.0)
    if stays:
        running = _Running(command, 60.0)
        while not (pid.exists() and pid.read_text().endswith(".")):
            sleep(0.01)
        running.stop()
    else:
        (ended,) = run([command], monotonic() + 60)
        assert ended.code == 0
    while _lives(int(pid.read_text().rstrip("."))):  # until the system has come to it
        sleep(0.01)


def _lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


def test_commands_run_in_the_repository_wherever_they_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else no file of tests was found from another folder."""
    monkeypatch.chdir(tmp_path)
    (ended,) = run([Command("where", [sys.executable, "-c", "import os; print(os.getcwd())"], 60.0)], monotonic() + 60)
    assert Path(ended.last_line).samefile(ROOT)


def test_a_command_is_stopped_at_its_limit_and_the_next_one_runs() -> None:
    commands = [
        Command("hangs", [sys.executable, "-c", "import time; time.sleep(600)"], limit_s=0.2),
        Command("crashes", [sys.executable, "-c", "import os; os.kill(os.getpid(), 11)"], limit_s=60.0),
        Command("ends", [sys.executable, "-c", "print('well')"], limit_s=60.0),
    ]
    hangs, crashes, ends = run(commands, monotonic() + 60)
    assert (hangs.code, hangs.how) == (None, "stopped at its limit of 0 s")
    assert (crashes.code, crashes.how) == (-11, "signal SIGSEGV")
    assert (ends.how, ends.last_line) == ("", "well")


def test_a_process_that_no_signal_ends_is_left_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver may hold it in the kernel, and a wait for it would hold up the whole script."""

    made: list[Any] = []

    class Stuck(subprocess.Popen[bytes]):
        def wait(self, timeout: float | None = None) -> int:
            assert timeout is not None
            made.append(self)
            raise subprocess.TimeoutExpired(self.args, timeout)

        def poll(self) -> int | None:
            return None

    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", Stuck)
    (ended,) = run([Command("stuck", [sys.executable, "-c", ""], limit_s=0.1)], monotonic() + 60)
    assert ended.how == "stopped at its limit of 0 s; could not be ended"
    popen.wait(made[0])


def test_a_file_of_tests_that_crashes_keeps_what_it_found(tmp_path: Path) -> None:
    text = "import os, pytest\npytestmark = pytest.mark.cuda\ndef test_a(): pass\ndef test_b(): assert 1 == 2, 'why'\n"
    (tmp_path / "test_ends.py").write_text(f"{text}@pytest.mark.skip('no GPU')\ndef test_c(): pass\n")
    (tmp_path / "test_crashes.py").write_text(f"{text}def test_c(): os.kill(os.getpid(), 9)\n")
    (tmp_path / "test_broken.py").write_text("import nothing_of_that_name\n")
    (work := tmp_path / "work").mkdir()
    names = [str(tmp_path / f"test_{name}.py") for name in ("ends", "crashes", "broken")]
    files = {file.name: file for file in suite.commands(ROOT, work, stand_in=False, files=names)}
    commands = [
        replace(file.command, environment={**file.command.environment, "PYTHONPATH": str(ROOT / "scripts")})
        for file in files.values()
    ]
    ended = run(commands, monotonic() + 600, jobs=3)
    found = {Path(one.command.name).stem: suite.found(files[one.command.name], one) for one in ended}
    ends, crashes, broken = (found[f"test_{name}"] for name in ("ends", "crashes", "broken"))
    assert (ends["passed"], ends["failed"], ends["skipped"], ends["ended"]) == (1, 1, 1, "")
    assert ends["skip_reasons"] == {"no GPU": 1}
    assert ends["failures"][0]["test"].endswith("test_b")
    assert ends["failures"][0]["line"] == "AssertionError: why"
    assert (crashes["passed"], crashes["failed"]) == (1, 1)
    assert crashes["ended"].startswith("signal SIGKILL")
    assert broken["failed"] == 1
    assert "nothing_of_that_name" in broken["failures"][0]["line"]


def test_every_file_with_a_test_for_gpus_is_run(tmp_path: Path) -> None:
    files = suite.marked_files(ROOT)
    assert files[0] == "tests/engine/test_cuda.py"
    assert "distributed" in files[-1]
    assert len(files) == len(set(files)) >= 20
    names = [file.name for file in suite.commands(ROOT, tmp_path, stand_in=False)]
    assert names[0] == f"tests/engine/test_cuda.py ({suite.MEMORY} alone)"
    assert names[1:] == files
    assert f"def test_{suite.MEMORY}" in (ROOT / files[0]).read_text(encoding="utf-8")


def made_wheel(folder: Path, name: str, tags: str = "py3-none-any") -> None:
    with zipfile.ZipFile(folder / f"{name}-1.0-{tags}.whl", "w") as archive:
        archive.writestr(f"{name}.py", "VALUE = 7\n")
        archive.writestr(f"{name}-1.0.data/purelib/{name}_more.py", "VALUE = 8\n")
        archive.writestr(f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")


def test_wheels_bring_what_is_not_installed(tmp_path: Path) -> None:
    folder, site = tmp_path / "wheels", tmp_path / "site"
    folder.mkdir()
    made_wheel(folder, "carried_alone")
    made_wheel(folder, "torch")
    assert wheels.unpack(folder, site) == ["carried_alone"]
    code = "import carried_alone_more; from importlib.metadata import version; print(version('carried_alone'))"
    ended = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(site)}, capture_output=True, text=True)
    assert ended.stdout == "1.0\n"
    assert not (site / "torch.py").exists()


@pytest.mark.parametrize("tags", [f"cp27-cp27m-linux_{machine()}", "py3-none-manylinux2014_vax"])
def test_wheels_for_another_python_or_processor_are_refused(tmp_path: Path, tags: str) -> None:
    made_wheel(tmp_path, "carried_alone", tags)
    with pytest.raises(ValueError, match="not for Python"):
        wheels.unpack(tmp_path, tmp_path / "site")
    with pytest.raises(ValueError, match="no wheels"):
        wheels.unpack(tmp_path / "site", tmp_path)


def test_made_up_data_has_the_published_forms(tmp_path: Path) -> None:
    assert not benches.has_data(tmp_path)
    benches.make_data(tmp_path, texts=20, images=10)
    assert benches.has_data(tmp_path)
    lines = (tmp_path / "ag_news_csv" / "train.csv").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 20
    assert all(len(line.split('","')) == 3 for line in lines)
    pictures = sorted((tmp_path / "cifar-10-images" / "train").rglob("*.png"))
    assert len(pictures) == 10
    with Image.open(pictures[0]) as picture:
        picture.load()
        assert (picture.size, picture.mode) == ((32, 32), "RGB")


@pytest.mark.slow
def test_ctrl_c_ends_all_of_it_and_keeps_what_was_found(tmp_path: Path) -> None:
    """Real probes, of which the first has just begun."""
    command = [str(ROOT / "scripts" / "gpu_smoke.sh"), "--stand-in", "--only", "predictions", "--out", str(tmp_path)]
    process = subprocess.Popen(
        command, env={**os.environ, "PYTHON": sys.executable}, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "prediction 1:" in line:
            break
    process.send_signal(signal.SIGINT)
    said = process.stdout.read()
    assert process.wait(600) == 130
    assert "interrupted (Ctrl-C)" in said
    kept = json.loads((tmp_path / "gpu-smoke.json").read_text(encoding="utf-8"))
    assert kept["ended"] == "interrupted (Ctrl-C)"
    assert kept["facts"]["torch"]
    assert kept["predictions"][0]["number"] == 1
    assert len(kept["predictions"]) < 17
    assert kept["predictions"][0]["failed"] == ""
