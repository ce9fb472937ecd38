"""How much hypothesis tries, and the law that no test leaves a thread of the engine or a temporary file behind."""

from __future__ import annotations

import gc
import multiprocessing.util
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from time import monotonic, sleep

# Before torch is imported. The threads of its operators would wait for each other in loops, which takes five times the
# CPU time of the operators themselves where the machine is busy.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings

from tests.benches import Benches, benches
from tests.cheap import cheapen
from tests.messages import messages

settings.register_profile("dev", max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("dev"), derandomize=True)
# For scripts/mutants.py, which asks whether a test fails, and not for the smallest case with which it does.
settings.register_profile("unshrunk", settings.get_profile("ci"), phases=(Phase.explicit, Phase.generate))
settings.register_profile("thorough", settings.get_profile("dev"), max_examples=500)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))


@pytest.fixture(scope="session", autouse=True)
def own_cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is kept for the user's next run, decoded images and choices of devices, is not kept for tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def pytest_collection_finish() -> None:
    """What was imported by now is not garbage while tests run: to look through it takes half a second each time."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """As before."""
    gc.unfreeze()


GRACE_S = 60.0
"""How long a thread that was told to stop may take to be gone, on a busy machine too."""


_COLLECTED = pytest.StashKey[frozenset[str]]()


@pytest.hookimpl(tryfirst=True)  # before those are gone that are not asked for
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked ``cuda`` skip where there is no such device."""
    config.stash[_COLLECTED] = frozenset(item.nodeid for item in items)
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("cuda"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="module")
def bench() -> Iterator[Benches]:
    """The programs of ``scripts/bench``, by their names."""
    with benches() as found:
        yield found


@pytest.fixture
def collected(request: pytest.FixtureRequest) -> frozenset[str]:
    """The tests that there are where this session looks, asked for or not, by their ids."""
    return request.config.stash[_COLLECTED]


def engine_threads() -> set[threading.Thread]:
    """The live workers of all pipelines."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("pipeal-")}


@pytest.fixture(autouse=True)
def leaves_no_thread() -> Iterator[None]:
    """Fails a test after which a worker lives on; those that an earlier test left are that test's failure."""
    before = engine_threads()
    yield
    until = monotonic() + GRACE_S
    while engine_threads() - before and monotonic() < until:
        sleep(0.01)
    left = sorted(thread.name for thread in engine_threads() - before)
    assert not left, f"threads left behind: {left}"


NOT_OURS = ("pymp-", "torchelastic_", "torchinductor_")
"""How names of folders begin that processes leave when they are killed, torchrun whenever it ends, and PyTorch where it
does not look at its variable for what it compiles."""


@pytest.fixture(scope="session", autouse=True)
def leaves_no_temporary_file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Temporary files, of all processes that are started, go into a folder that is removed in the end.

    Fails if there is any in it of our own.
    """
    tmp_path_factory.getbasetemp()  # that of pytest stays where it is
    multiprocessing.util.get_temp_dir()  # so does that of processes which this one forks, to the end
    compiled = Path(tempfile.gettempdir(), f"torchinductor_{os.getuid()}")
    with (
        tempfile.TemporaryDirectory(prefix="pipeal-tests-", ignore_cleanup_errors=True) as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
            patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(compiled))  # for the next session, too
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", folder)
        yield
        # PyTorch 2.6 has a folder from the import of this module to the end of the process.
        kept = getattr(sys.modules.get("torch.distributed.nn.jit.instantiator"), "_TEMP_DIR", None)
        not_ours = NOT_OURS if kept is None else (*NOT_OURS, Path(kept.name).name)
        left = sorted(path.name for path in Path(folder).iterdir() if not path.name.startswith(not_ours))
    assert not left, f"temporary files left behind: {left}"


@pytest.fixture
def said() -> Iterator[list[str]]:
    """What pipeal logs during a test, in lines."""
    with messages() as lines:
        yield lines


@pytest.fixture
def silent(said: list[str]) -> Iterator[None]:
    """Fails a test during which pipeal logs anything."""
    yield
    assert said == []


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One intra-op thread in the caller: it computes with the bits of a worker with one thread, and of tiny tensors
    a second thread would only wait, and slow every other test that runs on this machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def cheap_runs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As :func:`tests.cheap.cheapen`. Tests marked ``draws`` run as users do."""
    if request.node.get_closest_marker("draws") is None:
        cheapen(monkeypatch)


@pytest.fixture(scope="session")
def real_data() -> Path:
    folder = os.environ.get("PIPEAL_DATA")
    if not folder:
        pytest.skip("PIPEAL_DATA is not set: no real data sets here")
    return Path(folder)
