"""Progress fits any terminal, leaves it as it was, and stays out of the way elsewhere."""

import io
import re
import threading
import time
from dataclasses import replace

import pytest
from rich.console import Console

from pipeal.reporting.progress import Progress
from pipeal.training.row import EpochRow

ROW = EpochRow(1, 2, 0.91234, 0.89, 24.0, 12.0, 1380.4, 55000.0, ((0.1, 0.2),))
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 0.05
        return self.now


def play(console, *, batches=10, fail=None, **kwargs):
    with Progress(epochs=3, label="al", console=console, clock=Clock(), **kwargs) as progress:
        progress.begin_epoch(2, batches=batches)
        for _ in range(batches):
            progress.advance(samples=32, tokens=1000)
        if fail:
            raise fail
        progress.end_epoch(ROW)
    return console.file.getvalue()


def terminal(width):
    return Console(file=io.StringIO(), force_terminal=True, width=width, legacy_windows=False, color_system=None)


def test_without_a_terminal_each_epoch_is_one_plain_line():
    shown = play(Console(file=io.StringIO(), width=20))
    assert shown == "al  epoch 2/3  train 0.9123  test 0.8900  12.00 s  1,380 samples/s  55,000 tokens/s\n"


def test_a_language_model_is_told_by_its_losses():
    console = Console(file=io.StringIO(), width=20)
    row = replace(ROW, train_loss=1.59, test_loss=1.76)
    with Progress(epochs=3, label="al", console=console, clock=Clock()) as progress:
        progress.begin_epoch(2, batches=1)
        progress.end_epoch(row)
    assert console.file.getvalue().startswith("al  epoch 2/3  loss: train 1.5900  validation 1.7600  12.00 s")


def test_turns_are_named_where_there_are_several():
    assert play(Console(file=io.StringIO()), turns=4).startswith("al  turn 1/4  epoch 2/3  ")


def test_a_terminal_shows_batches_and_throughput():
    shown = play(terminal(200))
    live = [line for line in CONTROL.split(shown) if "/10" in line]
    assert re.fullmatch(r"al  epoch 2/3  ━+─*  \d+/10  \d+:\d\d  [\d,]+ samples/s  [\d,]+ tokens/s\n?", live[-1])
    assert "al  epoch 2/3  train 0.9123  test 0.8900" in shown


def test_the_last_accuracy_is_shown_in_the_next_epoch():
    console = terminal(200)
    with Progress(epochs=3, console=console, clock=Clock()) as progress:
        progress.end_epoch(ROW)
        progress.begin_epoch(3, batches=2)
    assert "last test 0.8900" in console.file.getvalue()


@pytest.mark.parametrize("width", [1, 2, 10, 20, 40, 80, 200])
def test_the_live_line_never_wraps(width):
    shown = play(terminal(width))
    drawn = [line for line in CONTROL.split(shown) if "━" in line or "─" in line or "samples/s" in line]
    assert all(len(line) <= width for line in drawn if "test" not in line)
    assert shown.count("\x1b[1A") == 1  # only to take the last line away: nothing was ever two lines high


@pytest.mark.parametrize("fail", [KeyboardInterrupt(), RuntimeError("stage 1"), SystemExit(2)])
def test_the_cursor_comes_back_and_the_exception_passes(fail):
    console = terminal(80)
    with pytest.raises(type(fail)):
        play(console, fail=fail)
    shown = console.file.getvalue()
    assert shown.count("\x1b[?25l") == 1
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")


def test_the_clock_goes_on_while_a_batch_takes_long():
    """The line stood still for as long as a batch took, three seconds of a large one."""
    console = terminal(80)
    with Progress(epochs=1, console=console) as progress:
        progress.begin_epoch(1, batches=1)
        while not re.search(r"0/1  (?!0:00)\d+:\d\d", console.file.getvalue()):
            time.sleep(0.01)


def test_its_thread_ends_with_the_epoch():
    before = set(threading.enumerate())
    with Progress(epochs=1, console=terminal(80)) as progress:
        progress.begin_epoch(1, batches=1)
        (own,) = set(threading.enumerate()) - before
        progress.end_epoch(ROW)
        own.join()


def test_it_writes_to_standard_error(capsys):
    with Progress(epochs=3) as progress:
        progress.end_epoch(ROW)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1


def test_the_terminal_is_not_redrawn_for_every_batch():
    console = terminal(80)
    play(console, batches=1000)
    assert console.file.getvalue().count("━") / 12 < 400


def test_an_epoch_of_no_or_more_batches_than_said_is_shown():
    console = terminal(80)
    with Progress(epochs=1, console=console, clock=Clock()) as progress:
        for batches in (0, 1):
            progress.begin_epoch(1, batches=batches)
            for _ in range(9):
                progress.advance(samples=1, tokens=1)
    assert "9/1" in console.file.getvalue() or "8/1" in console.file.getvalue()
