"""``pipeal report``: real runs on one page, in a real browser."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pipeal.cli import report, text, vision
from pipeal.reporting.chrome_trace import write_chrome_trace
from tests.cli.running import run_command, told_one_line
from tests.training.run_folders import SPANS, make_run, tell

pytestmark = pytest.mark.draws

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")

Look = Callable[..., tuple[Path, list[str]]]


@pytest.fixture
def look(tmp_path: Path) -> Look:
    """Opens a page in a headless browser; gives the screenshot, and what its console said."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"no browser here: none of {', '.join(BROWSERS)}; Debian's package is called chromium")

    def opened(page: Path, *, width: int = 1280, height: int = 800) -> tuple[Path, list[str]]:
        shot = tmp_path / f"{page.stem}.png"
        done = subprocess.run(
            [
                browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                "--disable-dev-shm-usage", f"--user-data-dir={tmp_path / 'profile'}",
                "--enable-logging=stderr", "--v=0",
                f"--window-size={width},{height}", f"--screenshot={shot}", page.resolve().as_uri(),
            ],
            capture_output=True,
            text=True,
            timeout=600,
            check=True,
        )  # fmt: skip
        return shot, [line for line in done.stderr.splitlines() if ":CONSOLE" in line]

    return opened


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A comparison on texts, and a run on images with exits; seconds each. Two epochs: a curve of one is a point."""
    root = tmp_path_factory.mktemp("runs")
    small = ["--epochs", "2", "--out", str(root), "--set=train.precision=fp32", "--set=engine.threads=1"]
    small.append("--set=train.train_accuracy_samples=64")
    for command, arguments in (
        (text.command, ["toynews", "lstm", "--mode", "compare", "--devices", "cpu,cpu", "--set=model.x_hid=8",
                        "--set=model.embedding_dim=8", "--set=model.y_hid=8", "--max-len=8"]),
        (vision.command, ["toyimages", "resnet", "--devices", "cpu", "--size=16", "--set=model.width=0.03125",
                          "--set=model.x_hid=8", "--set=model.y_hid=8"]),
    ):  # fmt: skip
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("pipeal.run.outlook.MOST_S", 0.0)  # no forecast, which no page shows
            command.main([*arguments, *small], standalone_mode=False)
    return {"text": root / "toynews-lstm-compare-001", "vision": root / "toyimages-resnet-al-001"}


@pytest.mark.slow
def test_real_runs_on_one_page_in_a_real_browser(
    trained: dict[str, Path], tmp_path: Path, look: Look, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    code, out, err = run_command(report.command, capsys, *map(str, trained.values()), "--out", str(page))
    assert (code, out, err) == (0, f"{page}\n", "")
    assert page.stat().st_size < 2_000_000
    told = page.read_text(encoding="utf-8")
    for word in (
        "Comparison",
        "toynews-lstm-compare-001/bp",
        "Exits",
        "early exit (calibrated)",
        "Batches and padding",
    ):
        assert word in told
    assert told.count("<img") == 4 + 3 + 2, "a timeline of each form, batches of each on texts, exits of each in AL"
    for height in (800, 6000):
        shot, console = look(page, height=height)
        assert console == []
        with Image.open(shot) as picture:
            assert picture.size == (1280, height)
            pixels = np.asarray(picture.convert("RGB"))
        assert (pixels[:, [0, -1]] == 255).all(), "a page in the middle of white margins, with nothing that sticks out"
        assert (pixels.min(axis=2) < 60).any(axis=1).mean() > 0.2, "it has words on it"
        for colour in ((0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00)):
            near = np.abs(pixels.astype(int) - colour).max(axis=2) < 24  # the edges of a line are paler
            assert near.sum() > 100, "the curves of the first and of the second run"


def test_a_page_that_asks_for_a_network_or_a_script_would_be_noticed(tmp_path: Path, look: Look) -> None:
    run = make_run(tmp_path / "run")
    report.command.main([str(run)], standalone_mode=False)
    bad = (
        (run / "report.html").read_text().replace("</main>", "<img src='http://127.0.0.1:9/'><script>1</script></main>")
    )
    (tmp_path / "bad.html").write_text(bad)
    assert len(look(tmp_path / "bad.html")[1]) == 2


def test_a_run_that_holds_hostile_names_shows_them_and_nothing_else(tmp_path: Path, look: Look) -> None:
    run = make_run(tmp_path / "<img src=x onerror=console.error(1)>")
    tell(run, "failed", "<script>console.error(2)</script>")
    report.command.main([str(run)], standalone_mode=False)
    shot, console = look(run / "report.html")
    assert console == []
    assert shot.stat().st_size > 20_000


@pytest.mark.parametrize("left", ["config.yaml", "epochs.csv"])
def test_an_unfinished_run_has_a_page_without_an_error(
    left: str, tmp_path: Path, look: Look, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run", done=1)
    for path in run.iterdir():
        if path.name != left:
            path.unlink()
    code, out, _ = run_command(report.command, capsys, str(run))
    assert (code, out) == (0, f"{run / 'report.html'}\n")
    assert look(run / "report.html")[1] == []


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("summary.json", None, "not there; a run writes it when it ends"),
        ("epochs.csv", None, "not there; a run adds a row after each epoch"),
        ("config.yaml", None, "not there; a run writes it when it begins"),
        ("config.yaml", "a: [", "cannot be read: "),
        ("status.json", '{"status": "fin', "cannot be read: "),
    ],
)
def test_what_the_page_lacks_is_told_at_the_terminal(
    name: str, content: str | None, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The page named what was missing, but for a cut status; the command said that all is well."""
    run = make_run(tmp_path / "run")
    (run / "asked.yaml").write_text((run / "config.yaml").read_text())
    tell(run, "finished")
    assert run_command(report.command, capsys, str(run)) == (0, f"{run / 'report.html'}\n", "")
    (run / name).unlink()
    if content is not None:
        (run / name).write_text(content)
    code, out, err = run_command(report.command, capsys, str(run))
    assert (code, out) == (0, f"{run / 'report.html'}\n")
    assert err.startswith(f"pipeal: run: {name}: {line}")
    assert err.count("\n") == 1
    assert f"{name}: {line}" in (run / "report.html").read_text()


def test_the_page_lies_in_the_run_or_of_several_runs_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = make_run(tmp_path / "a"), make_run(tmp_path / "b")
    write_chrome_trace(SPANS, first / "trace.json", ["cpu", "cpu"])
    monkeypatch.chdir(tmp_path)
    assert run_command(report.command, capsys, "a")[1] == "a/report.html\n"
    assert "in Perfetto" in (first / "report.html").read_text()
    assert run_command(report.command, capsys, "a", "b", "b/")[1] == "report.html\n"
    assert (tmp_path / "report.html").read_text().count('<section id="run-') == 2
    assert not (second / "report.html").exists()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "Missing argument 'RUN"),
        (["none"], "none: no such folder"),
        (["."], r"\.: no run: .* it holds 1, such as run"),
        (["file"], "file: no such folder"),
        (["run", "--out", "."], "--out: . is a folder; name a file"),
        (["run", "--out", "file/x.html"], "cannot write file/x.html: "),
        (["run\0"], "expected the name of a file or folder"),
        (["run", "--out", ""], "expected the name of a file or folder"),
        # It took the place of the run's configuration, and said that all is well.
        (["run", "--out", "run/config.yaml"], "--out run/config.yaml: config.yaml there is the run's own"),
        (["run", "--out", "run/checkpoints/page.html"], "checkpoints there is the run's own; name another --out"),
        (["run", "--out", "run/model.safetensors"], "model.safetensors there is the run's own"),
        (["run", "--out", "run/none/../config.yaml"], "config.yaml there is the run's own"),
        (["run", "none"], "none: no such folder"),
        pytest.param(["n" * 5000], "n: File name too long", id="a long name"),
        pytest.param(["run", "--out", "n" * 5000], "n: File name too long", id="a long file"),
    ],
)
def test_a_mistake_is_told_in_one_line(
    arguments: list[str],
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    make_run(tmp_path / "run", done=0)
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    told_one_line(line, *run_command(report.command, capsys, *arguments))
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["config.yaml", "file", "run"]


def test_links_lead_into_a_run_and_out_of_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Symptom: over a link to it a checkpoint lost its manifest, and a page beside a run was refused."""
    run = make_run(tmp_path / "run")
    checkpoints = run / "checkpoints"
    checkpoints.mkdir(exist_ok=True)
    (tmp_path / "link").symlink_to(checkpoints)
    before = sorted(tmp_path.rglob("*"))
    refused = run_command(report.command, capsys, str(run), "--out", str(tmp_path / "link" / "manifest.json"))
    told_one_line("checkpoints there is the run's own", *refused)
    assert sorted(tmp_path.rglob("*")) == before
    beside = str(checkpoints / ".." / ".." / "page.html")
    assert run_command(report.command, capsys, str(run), "--out", beside)[0] == 0
    assert (tmp_path / "page.html").is_file()
