"""The table of a run folder's files: complete, true of the modules that it names, and the one in the docs."""

from __future__ import annotations

from fnmatch import fnmatch
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from pipeal.cli import text
from pipeal.core import artifacts
from pipeal.reporting.recorders import Recorder
from tests.cli.running import run_command
from tests.integration.test_resume import FEW, SMALL

ROOT = Path(__file__).parents[1]
NAMES = {name: found for name, found in vars(artifacts).items() if isinstance(found, artifacts.Artifact)}


def test_the_page_holds_the_table() -> None:
    page = (ROOT / "docs" / "run-folder.md").read_text(encoding="utf-8")
    assert page.endswith(artifacts.table())


@pytest.mark.parametrize("name", NAMES)
def test_the_modules_that_write_and_read_a_file_name_it(name: str) -> None:
    found = NAMES[name]
    stem = found.name.split("*")[0]
    for module in (found.writer, *found.readers):
        spec = find_spec(f"pipeal.{module}")
        assert spec is not None
        assert spec.origin is not None
        source = Path(spec.origin).read_text(encoding="utf-8")
        # A recorder or a store is given its path by the run, and its own docstring says what it keeps.
        assert name in source or stem in source or "path" in source


@pytest.mark.parametrize("found", [found for found in NAMES.values() if found.recorder], ids=lambda found: found.name)
def test_a_recorder_is_found_by_its_entry_alone(found: artifacts.Artifact) -> None:
    assert issubclass(getattr(import_module(f"pipeal.{found.writer}"), found.recorder), Recorder)


def test_every_file_of_a_run_is_in_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeal.run.plan_costs.MICRO_BATCHES", (2,))
    monkeypatch.setattr("pipeal.run.plan_costs.BATCHES", 1)
    arguments = [
        "toynews",
        "lstm",
        "--mode",
        "compare",
        "--devices",
        "cpu,cpu",
        "--out",
        str(tmp_path),
    ]
    code, _, err = run_command(text.command, capsys, *arguments, *SMALL, *FEW, "--epochs=1")
    assert code == 0, err
    (run,) = (folder for folder in tmp_path.iterdir() if folder.is_dir())
    known = [found.name for found in artifacts.artifacts()]
    forms = [run, *(folder for folder in run.iterdir() if (folder / artifacts.CONFIG.name).exists())]
    found = {path.name for folder in forms for path in folder.iterdir() if path not in forms}
    assert {name for name in found if not any(fnmatch(name, pattern) for pattern in known)} == set()
    assert found >= {
        artifacts.CONFIG.name,
        artifacts.ASKED.name,
        artifacts.ROWS.name,
        artifacts.SUMMARY.name,
        artifacts.COSTS.name,
    }
