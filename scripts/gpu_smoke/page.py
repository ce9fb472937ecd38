"""What was found as one page of Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

NO_GPU = "**There was no GPU. No prediction was tested.**"
_VERDICTS = {True: "true", False: "false", None: "not tested"}
_AFFECTED = {True: "affected", False: "spared", None: "not seen"}


def page(kept: Mapping[str, Any]) -> str:
    """The page of a run, or of as much of it as there is."""
    title = "Stand-in for the first minutes with a GPU" if kept["stand_in"] else "The first minutes with a GPU"
    parts = [f"# {title}", "", *_head(kept)]
    if kept["facts"]:
        parts += ["", "## Versions and devices", "", *_facts(kept["facts"])]
    if kept["predictions"]:
        parts += ["", "## Predictions", "", *_predictions(kept)]
    if kept["measurements"]:
        parts += ["", "## Measured beside", "", *_measurements(kept)]
    if kept["tests"]:
        parts += ["", "## Tests marked `cuda`", "", *_tests(kept["tests"])]
    if kept["benchmarks"]:
        parts += ["", "## Benchmarks", "", *_benchmarks(kept["benchmarks"])]
    return "\n".join(parts) + "\n"


def _head(kept: Mapping[str, Any]) -> list[str]:
    lines = []
    if kept["stand_in"]:
        lines += [
            f"{NO_GPU} The probes ran on the CPU, to show that their code runs; tests that need a GPU skipped; "
            "benchmarks ran on the CPU at toy size. Nothing below says anything about a GPU.",
            "",
        ]
    ended = kept["ended"] or "under way"
    lines.append(f"Began {kept['began']}, {kept['seconds']:.0f} s of at most {kept['time_limit_s']:.0f} s; {ended}.")
    verdicts = [one["verdict"] for one in kept["predictions"]]
    if verdicts and not kept["stand_in"]:
        lines.append(
            f"Predictions: {verdicts.count(True)} true, {verdicts.count(False)} false, "
            f"{verdicts.count(None)} not tested."
        )
    if kept["tests"]:
        counts = ", ".join(
            f"{sum(one[name] for one in kept['tests'])} {name}" for name in ("passed", "failed", "skipped")
        )
        cut = sum(bool(one["ended"]) for one in kept["tests"])
        lines.append(f"Tests: {counts}" + (f"; {cut} files did not come to their end." if cut else "."))
    return lines


def _facts(facts: Mapping[str, Any]) -> list[str]:
    shown = ("torch", "cuda", "driver", "cudnn", "nccl", "python", "pipeal", "commit", "system", "cpu", "cores",
             "data")  # fmt: skip
    rows = [(name.replace("_", " "), facts[name]) for name in shown if facts.get(name) is not None]
    for number, device in enumerate(facts.get("devices", ())):
        words = (f"{device['name']}, {device['total_memory'] / 2**30:.0f} GiB, {device['multi_processor_count']} "
                 f"multiprocessors, capability {device['capability']}, {device['uuid']}")  # fmt: skip
        rows.append((f"cuda:{number}", words))
    rows += [(f"`{name}`", f"`{value}`") for name, value in facts.get("environment", {}).items()]
    return _table(("what", "found"), rows)


def _predictions(kept: Mapping[str, Any]) -> list[str]:
    if kept["stand_in"]:
        rows = [(one["number"], one["text"], _stand_in(one)) for one in kept["predictions"]]
        return _table(("#", "prediction", "not tested: there was no GPU; its probe"), rows)
    lines = _table(
        ("#", "prediction", "is", "figure", "pipeal is", "seen of pipeal"),
        [
            (
                one["number"],
                one["text"],
                f"**{_VERDICTS[one['verdict']]}**",
                one["not_tested"] + ("; " if one["not_tested"] and one["figure"] else "") + one["figure"],
                _AFFECTED[one["affected"]],
                one["affected_figure"],
            )
            for one in kept["predictions"]
        ],
    )
    lines += ["", "How each was measured:", ""]
    return lines + [
        f"- {one['number']}: {one['how']} ({one['seconds']:.0f} s)" for one in kept["predictions"] if one["how"]
    ]


def _measurements(kept: Mapping[str, Any]) -> list[str]:
    if kept["stand_in"]:
        return _table(("what", "its probe"), [(one["text"], _stand_in(one)) for one in kept["measurements"]])
    rows = [(one["text"], one["not_tested"] or one["figure"], one["how"]) for one in kept["measurements"]]
    return _table(("what", "figure", "how"), rows)


def _stand_in(one: Mapping[str, Any]) -> str:
    return f"**failed**: {one['failed']}" if one["failed"] else f"ran on the CPU ({one['seconds']:.0f} s)"


def _tests(tests: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = [
        (one["file"], one["passed"], one["failed"], one["skipped"], f"{one['seconds']:.0f}", one["ended"])
        for one in tests
    ]
    lines = _table(("file", "passed", "failed", "skipped", "s", "ended early"), rows)
    if failures := [(one["test"], one["line"]) for file in tests for one in file["failures"]]:
        lines += ["", *_table(("failed test", "first line"), failures)]
    reasons: dict[str, int] = {}
    for file in tests:
        for reason, count in file["skip_reasons"].items():
            reasons[reason] = reasons.get(reason, 0) + count
    if reasons:
        lines += ["", "Skipped: " + "; ".join(f"{count} for {reason!r}" for reason, count in reasons.items()) + "."]
    return lines


def _benchmarks(benchmarks: Iterable[Mapping[str, Any]]) -> list[str]:
    lines = []
    for one in benchmarks:
        ended = f"; {one['ended']}" if one["ended"] else ""
        lines += [f"### {one['name']}", "", f"`{one['command']}` ({one['seconds']:.0f} s{ended})", ""]
        if printed := one["printed"].strip("\n"):
            lines += ["```", printed.replace("```", "'''"), "```", ""]
    return lines[:-1]


def _table(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    """
    >>> print("\\n".join(_table(("a", "b"), [(1, "x|y")])))
    | a | b |
    | --- | --- |
    | 1 | x\\|y |
    """
    lines = [_row(heads), _row(["---"] * len(heads))]
    return lines + [_row([" ".join(str(cell).split()).replace("|", "\\|") for cell in row]) for row in rows]


def _row(cells: Sequence[Any]) -> str:
    return f"| {' | '.join(map(str, cells))} |"
