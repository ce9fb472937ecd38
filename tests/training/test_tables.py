"""A table shows every cell whole, numbers aligned."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from pipeal.reporting.tables import print_table


def shown(title, columns, rows, **kwargs):
    console = Console(file=io.StringIO(), width=40, **kwargs)
    print_table(title, columns, rows, console=console)
    return console.file.getvalue()


def test_outside_a_terminal_it_is_markdown():
    text = shown("accuracy", ["form", "test", "s / epoch"], [["al", 0.9196, 14.2], ["bp", 0.91, None]])
    assert [line.rstrip() for line in text.splitlines() if line.strip()] == [
        "accuracy",
        "| form |   test | s / epoch |",
        "| ---- | -----: | --------: |",
        "| al   | 0.9196 |     14.20 |",
        "| bp   | 0.9100 |         - |",
    ]


@pytest.mark.parametrize("cells", [["1,380", "5"], ["2.05×", None], ["97 %", "3%"], [1, "-2.5"], [float("inf"), 1e30]])
def test_texts_that_are_numbers_stand_to_the_right_too(cells):
    assert shown("t", ["what"], [[cell] for cell in cells]).splitlines()[2].endswith("-: |")


@pytest.mark.parametrize("cells", [["1", "one"], ["cuda:0"], ["2026-01-01"], []])
def test_texts_stand_to_the_left(cells):
    assert ":" not in shown("t", ["what"], [[cell] for cell in cells]).splitlines()[2]


def test_outside_a_terminal_a_long_path_stays_whole_and_in_its_row():
    path = "/very/long" * 30
    rows = [line for line in shown("t", ["run", "n"], [[path, 1], ["[bold]", 2]]).splitlines() if path in line]
    assert len(rows) == 1
    assert rows[0].endswith("|   1 |")


def test_brackets_are_no_markup():
    assert "[bold]x[/bold]" in shown("[red]", ["[a]"], [["[bold]x[/bold]"]])


def test_in_a_narrow_terminal_cells_are_folded_not_cut():
    text = shown("t", ["path"], [["abcdefghij" * 9]], force_terminal=True, color_system=None)
    assert "".join(char for char in text if char in "abcdefghij").endswith("abcdefghij" * 9)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 40


def test_numbers_that_are_no_numbers_are_shown():
    text = shown("t", ["x"], [[float("nan")], [float("inf")], [0.0], [-1.5]])
    assert [line.strip("| ") for line in text.splitlines()[3:]] == ["nan", "inf", "0.000", "-1.500"]


def test_a_table_without_rows_has_its_heads():
    assert "| a   | b   |" in shown("t", ["a", "b"], [])


def test_a_row_with_too_few_cells_is_refused():
    with pytest.raises(ValueError, match=r"a row has 1 cells, but the table 2 columns: \['x'\]"):
        shown("t", ["a", "b"], [["x"]])


@given(st.lists(st.tuples(st.none() | st.floats(), st.integers(), st.text("ab[]/ ")), max_size=4))
def test_any_cells_give_one_line_per_row_and_equal_widths(rows):
    lines = [line for line in shown("t", ["a", "b", "c"], rows).splitlines() if line.startswith("|")]
    assert len(lines) == 2 + len(rows)
    assert len(set(map(len, lines))) == 1
