"""Tables for people: aligned in a terminal, Markdown where the output is kept."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from io import StringIO

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

Cell = str | float | int | None
"""What a table holds. None is ``-``; the floats of a column get the same decimals.

A column of numbers, or of texts such as ``1,380``, ``2.05×`` and ``0.91 ± 0.02``, stands to the right.
"""

_NUMBER = re.compile(
    r"[-+−]?\d[\d.,]*(?:e[-+]?\d+)?\s?(?:%|×|[KMGT]iB|bytes|of \d+)?(?: ± [\d.,]+(?: %)?)?|[-–]|-?inf|nan"
)


def is_number(cell: str) -> bool:
    """Whether a cell stands to the right, in a terminal as on a page: a number, also with its unit or deviation."""
    return _NUMBER.fullmatch(cell) is not None


def print_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]], *, console: Console | None = None
) -> None:
    """Prints a table; cells are never cut.

    In a terminal, cells that do not fit are folded. Elsewhere each row is one line, as wide as it must be.

    Args:
        title: Stands above the table.
        columns: The heads.
        rows: One cell per column.
        console: Where to print; standard output if None.

    Raises:
        ValueError: A row has another number of cells than there are columns.
    """
    console = console or Console()
    cells = [_shown(column) for column in _columns(columns, rows)]
    right = [bool(column) and all(map(is_number, column)) for column in cells]
    console.print(Text(title, style="bold"), soft_wrap=True)
    if not console.is_terminal:
        for line in _markdown(columns, cells, right):
            console.print(Text(line), soft_wrap=True)
        return
    table = Table(box=box.ROUNDED, header_style="bold")
    for head, to_right in zip(columns, right, strict=True):
        table.add_column(Text(head), justify="right" if to_right else "left", overflow="fold")
    for row in zip(*cells, strict=True):
        table.add_row(*map(Text, row))  # Text: brackets in a path are no markup
    console.print(table)


def table_text(title: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """What :func:`print_table` prints where no terminal is, for a file or a line of what is being done."""
    text = StringIO()
    print_table(title, columns, rows, console=Console(file=text))
    return text.getvalue().rstrip()


def _markdown(heads: Sequence[str], cells: Sequence[Sequence[str]], right: Sequence[bool]) -> Iterator[str]:
    """Yields the lines of a table whose source is as readable as what Markdown makes of it.

    >>> print(*_markdown(["form", "test"], [["one", "two"], ["0.92", "0.9"]], [False, True]), sep="\\n")
    | form | test |
    | ---- | ---: |
    | one  | 0.92 |
    | two  |  0.9 |
    """
    texts = [[_one_line(text) for text in (head, *column)] for head, column in zip(heads, cells, strict=True)]
    widths = [max(3, *map(cell_len, column)) for column in texts]
    rule = ["-" * (width - to_right) + ":" * to_right for width, to_right in zip(widths, right, strict=True)]
    for number, row in enumerate(zip(*texts, strict=True)):
        gaps = [" " * (width - cell_len(text)) for text, width in zip(row, widths, strict=True)]
        padded = [gap + text if to_right else text + gap for text, gap, to_right in zip(row, gaps, right, strict=True)]
        yield f"| {' | '.join(padded)} |"
        if number == 0:
            yield f"| {' | '.join(rule)} |"


def _one_line(text: str) -> str:
    return " ".join(text.splitlines()).replace("|", "\\|")


def _columns(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> list[list[Cell]]:
    for row in rows:
        if len(row) != len(columns):
            raise ValueError(f"a row has {len(row)} cells, but the table {len(columns)} columns: {list(row)}")
    return [[row[number] for row in rows] for number in range(len(columns))]


def _shown(column: Sequence[Cell]) -> list[str]:
    """The cells of a column as text.

    >>> _shown([0.9196, 0.91])
    ['0.9196', '0.9100']
    >>> _shown([20.7, 14.25, None])
    ['20.70', '14.25', '-']
    >>> _shown([123456.7, 5.0])
    ['123457', '5']
    """
    floats = [abs(cell) for cell in column if isinstance(cell, float) and math.isfinite(cell)]
    # Four digits in all, as far as they stand behind the point.
    digits = math.floor(math.log10(max(floats))) + 1 if any(floats) else 1
    decimals = min(4, max(0, 4 - max(0, digits)))
    return [
        "-" if cell is None else f"{cell:.{decimals}f}" if isinstance(cell, float) else str(cell) for cell in column
    ]
