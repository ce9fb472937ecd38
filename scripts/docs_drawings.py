"""Draws the pictures of ``docs/concepts.md`` into ``docs/img/``: ``python scripts/docs_drawings.py``.

Timelines come from the rules that the engine carries out. Colours follow the reader's light or dark page. A drawing is
520 units wide, so that its words can still be read on a telephone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from pipeal.engine.schedule import SCHEDULES, Action
from pipeal.planning.pure.backprop_schedules import naive
from pipeal.planning.pure.simulate import Rules, simulate
from pipeal.reporting.timeline import ACTIONS

FOLDER = Path(__file__).parents[1] / "docs" / "img"
WIDTH = 520
STYLE = """
    text { font: 14px system-ui, sans-serif; fill: #24292f; text-anchor: middle; dominant-baseline: central }
    .left { text-anchor: start } .right { text-anchor: end }
    .small { font-size: 12px } .tiny { font-size: 11px } .strong { font-weight: 600 } .on { fill: #ffffff }
    .dark { fill: #1b1f24 } .box { fill: #dbeafe; stroke: #4878a8 } .code { fill: #d5f2e3; stroke: #3d8f6d }
    .loss { fill: #fde3c0; stroke: #b9770e } .group { fill: none; stroke: #7a828c; stroke-dasharray: 2 3 }
    .idle { fill: #e6e9ed } .line { stroke: #57606a; stroke-width: 1.5; fill: none }
    .back { stroke: #c2560c; stroke-width: 2; stroke-dasharray: 4 3; fill: none }
    .bar { stroke: #57606a; stroke-width: 3 } .tip { fill: #57606a } .backtip { fill: #c2560c } .note { fill: #57606a }
    @media (prefers-color-scheme: dark) {
      text { fill: #e3e7ec } .on { fill: #ffffff } .dark { fill: #1b1f24 } .box { fill: #21415f; stroke: #79a8d6 }
      .code { fill: #1d4a38; stroke: #68bd97 } .loss { fill: #5b3d10; stroke: #e3a94a } .idle { fill: #3a404a }
      .line, .bar { stroke: #aab3be } .tip, .note { fill: #aab3be } .group { stroke: #8d96a1 }
      .back { stroke: #f0914a } .backtip { fill: #f0914a }
    }
"""
TIP = '<marker id="{0}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="5" markerHeight="5" orient="auto">{1}</marker>'
TIPS = "".join(TIP.format(name, f'<path d="M0 0 8 4 0 8z" class="{name}"/>') for name in ("tip", "backtip"))


def drawings() -> dict[str, str]:
    """Every file by its name."""
    return {
        "local-losses.svg": _svg(_local_losses(), 418, "Backpropagation beside layers with local losses"),
        "schedules.svg": _svg(_schedules(), 584, "Three stages over time under each schedule"),
        "packets.svg": _svg(_packets(), 300, "What flows from stage to stage, and how an answer goes"),
        "exactness.svg": _svg(_exactness(), 292, "Two orders of the same steps"),
        "look-ahead.svg": _svg(_look_ahead(), 258, "Layers that look ahead through copies of all blocks still to come"),
    }


def _svg(shapes: Iterator[str], height: int, title: str) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    parts = (f"<title>{title}</title>", f"<style>{STYLE}  </style>", f"<defs>{TIPS}</defs>", *filter(None, shapes))
    return "\n".join((f'{head} role="img">', *(f"  {part}" for part in parts), "</svg>\n"))


def _text(x: float, y: float, words: str, kind: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{words}</text>'


def _box(x: float, y: float, width: float, height: float, kind: str, words: str = "", on: str = "") -> str:
    box = f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" class="{kind}"/>'
    return box + (_text(x + width / 2, y + height / 2, words, on) if words else "")


def _arrow(*points: tuple[float, float], back: bool = False) -> str:
    path = " ".join(f"{x:g},{y:g}" for x, y in points)
    line, tip = ("back", "backtip") if back else ("line", "tip")
    return f'<polyline points="{path}" class="{line}" marker-end="url(#{tip})"/>'


def _bar(x: float, y: float, upright: bool = False) -> str:
    across, up = (0, 9) if upright else (9, 0)
    return f'<line x1="{x - across:g}" y1="{y - up:g}" x2="{x + across:g}" y2="{y + up:g}" class="bar"/>'


def _local_losses() -> Iterator[str]:
    """On the left one backward through all blocks, on the right two within each layer."""
    yield _text(75, 14, "Backpropagation", "strong")
    yield _text(340, 14, "Associated Learning", "strong")
    rows = [(number, 376 - 104 * number) for number in (1, 2, 3)]
    yield _box(30, 28, 90, 20, "loss", "loss", "small")
    for number, y in rows:
        above = 48 if number == 3 else y - 60
        yield _box(30, y + 10, 90, 34, "box", f"block {number}")
        yield _arrow((60, y + 10), (60, above)) + _arrow((92, above), (92, y + 8), back=True)
    yield _arrow((60, 366), (60, 318)) + _text(75, 378, "input")
    for number, y in rows:
        yield _box(164, y - 12, 354, 66, "group") + _text(520 - 8, y - 2, f"layer {number}", "right small note")
        yield _box(172, y + 10, 46, 34, "box", f"f{number}") + _box(242, y + 10, 40, 34, "box", f"b{number}")
        yield _box(366, y + 10, 40, 34, "code", f"g{number}") + _box(430, y + 10, 40, 34, "code", f"h{number}")
        for x in (317, 498):
            yield f'<circle cx="{x}" cy="{y + 27}" r="15" class="loss"/>' + _text(x, y + 27, "loss", "tiny")
        for left, right in ((218, 241), (282, 303), (406, 429), (470, 485)):
            yield _arrow((left, y + 21), (right, y + 21)) + _arrow((right, y + 35), (left + 2, y + 35), back=True)
        yield _arrow((366, y + 27), (333, y + 27)) + _bar(350, y + 27, upright=True)
        for x in (195, 386):
            yield _arrow((x, y + 10), (x, y - 59)) + _bar(x, y - 26) if number < 3 else ""
    for x, words in ((195, "input"), (386, "target")):
        yield _arrow((x, 366), (x, 318)) + _text(x, 378, words)
    yield _arrow((44, 406), (14, 406), back=True) + _text(52, 406, "gradient", "left small")
    yield _bar(182, 406) + _text(200, 406, "detached: no gradient goes through", "left small")


def _schedules() -> Iterator[str]:
    """Simulated: a forward takes one unit, a backward and its update together two."""
    costs: Mapping[Action, float] = {Action.FORWARD: 1.0, Action.BACKWARD: 1.5, Action.UPDATE: 0.5}
    shown: list[tuple[str, Rules]] = [*SCHEDULES.items(), ("backpropagation", naive())]
    unit, left, row, units = 22.4, 66, 25, 20
    for place, (name, rules) in enumerate(shown):
        y = 12 + place * 112
        yield _text(2, y, name, "left strong")
        for stage in range(3):
            top = y + 16 + (2 - stage) * row
            yield _text(2, top + 10, f"stage {stage}", "left small") + _box(left, top, units * unit, 20, "idle")
        for span in simulate(rules, [costs] * 3, batches=9).spans:
            begin, end = left + unit * span.begin, left + unit * min(span.end, units)
            if begin < end:
                top = y + 16 + (2 - span.stage) * row
                colour = ACTIONS[span.action.value][1]
                yield f'<rect x="{begin:.1f}" y="{top}" width="{end - begin - 1:.1f}" height="20" fill="{colour}"/>'
                if span.action is not Action.UPDATE and end - begin > 14:
                    ink = "on" if span.action is Action.FORWARD else "dark"
                    yield _text((begin + end - 1) / 2, top + 10, str(span.batch), f"small {ink}")
    for x, (name, colour) in zip((66, 160, 262), ACTIONS.values(), strict=True):
        yield f'<rect x="{x}" y="564" width="14" height="14" fill="{colour}"/>' + _text(x + 20, 571, name, "left small")
    yield _box(354, 564, 14, 14, "idle") + _text(374, 571, "idle", "left small")


def _packets() -> Iterator[str]:
    """Above a training, below an answer."""
    yield _text(2, 12, "Training", "left strong")
    for stage, layers in enumerate(("layer 1", "layers 2, 3", "layer 4")):
        x = 76 + 158 * stage
        yield _box(x, 34, 92, 54, "box") + _text(x + 46, 51, f"stage {stage}") + _text(x + 46, 72, layers, "small")
        if stage < 2:
            yield _arrow((x + 92, 61), (x + 157, 61)) + _text(x + 125, 48, "packet", "small")
    yield _text(28, 61, "loader") + _arrow((52, 61), (75, 61))
    yield _text(2, 110, "packet: number of the batch, features, label code, factor on learning rates", "left small")
    yield _text(2, 128, "Nothing flows back.", "left small")
    yield _text(2, 168, "An answer", "left strong")
    for layer in range(4):
        x = 76 + 102 * layer
        yield _box(x, 190, 64, 34, "box", f"f{layer + 1}") + _box(x, 244, 64, 34, "code", f"h{layer + 1}")
        if layer:
            yield _arrow((x - 38, 207), (x - 1, 207)) + _arrow((x, 261), (x - 37, 261))
    yield _box(478, 218, 40, 34, "box", "b4")
    yield _arrow((446, 207), (498, 207), (498, 217)) + _arrow((498, 252), (498, 261), (448, 261))
    yield _text(28, 207, "input") + _arrow((50, 207), (75, 207))
    yield _arrow((76, 261), (58, 261)) + _text(28, 261, "answer")


def _exactness() -> Iterator[str]:
    """A step of one layer with one batch per cell, numbered by when it is done."""
    panels = (
        ("one after the other", lambda layer, batch: 3 * batch + layer),
        ("pipelined", lambda layer, batch: layer + batch),
    )
    for place, (name, when) in enumerate(panels):
        left = 44 + 238 * place
        yield _text(left + 12, 12, name, "left strong")
        for layer in range(3):
            y = 150 - 58 * layer
            yield _text(24, y + 17, f"layer {layer + 1}", "small") if not place else ""
            for batch in range(3):
                x = left + 12 + 64 * batch
                tick = when(layer, batch)
                yield _box(x, y, 38, 34, "box", str(tick + 1), "strong")
                yield _arrow((x + 38, y + 17), (x + 63, y + 17))
                yield _arrow((x + 19, y), (x + 19, y - 22)) if layer < 2 else ""
        for batch in range(3):
            x = left + 31 + 64 * batch
            yield _arrow((x, 206), (x, 186)) + _text(x, 216, f"batch {batch}", "small")
    yield _text(2, 246, "→ the layer's weights, optimizer and batch statistics", "left small")
    yield _text(2, 264, "↑ the packet: features, label code, factor on learning rates", "left small")
    yield _text(2, 282, "Numbers: when a step is done. Equal numbers run at the same time.", "left small")


def _look_ahead() -> Iterator[str]:
    """A row for each layer: its block, the copies beside it, its loss."""
    for number in (1, 2, 3):
        y = 232 - 70 * number
        yield _box(58, y - 12, 460, 58, "group") + _text(2, y + 17, f"layer {number}", "left small")
        for block in range(number, 4):
            x = 68 + 128 * (block - 1)
            yield _box(x, y, 92, 34, "box", f"block {block}") if block == number else ""
            yield _box(x, y, 92, 34, "code", f"copy of {block}") if block > number else ""
            yield _arrow((x + 92, y + 11), (x + 126, y + 11)) + _arrow((x + 126, y + 23), (x + 94, y + 23), back=True)
        yield f'<circle cx="{476}" cy="{y + 17}" r="22" class="loss"/>' + _text(476, y + 17, "loss", "small")
        x = 114 + 128 * number
        yield _arrow((x - 92, y), (x - 36, y - 35)) + _bar(x - 62, y - 20) if number < 3 else ""
    yield _arrow((114, 222), (114, 197)) + _text(150, 216, "input", "small")
    yield _arrow((32, 246), (2, 246), back=True) + _text(40, 246, "gradient", "left small")
    yield _bar(160, 246) + _text(178, 246, "detached", "left small")


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, drawing in drawings().items():
        (FOLDER / name).write_text(drawing, encoding="utf-8")
