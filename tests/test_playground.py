"""The schedule playground of the docs calculates what the planner does, in a real browser: one start of Chromium."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from html import unescape
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from pipeal.engine import SCHEDULES, Action
from pipeal.planning import simulate
from pipeal.planning.pure.forecast import RIVALS, Forecast, forecast
from pipeal.planning.pure.hardware import Link, PlannedDevice, Setup
from pipeal.planning.pure.layer_cost import LayerCost
from pipeal.planning.pure.layout import Layout, PlannedStage
from pipeal.planning.pure.simulate import Hop, Rules, Simulation
from pipeal.planning.pure.stage_cost import task_seconds

PAGE = Path(__file__).parents[1] / "docs" / "playground.html"
NAMES = (*SCHEDULES, *(name.removeprefix("BP ") for name in RIVALS))
CASES = 200
LONG_RUN = 1000
ACTIONS = list(Action)
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

Settings = dict[str, Any]


def some_settings(random: Random) -> Settings:
    """Some whole numbers, as most people type them, with which much happens at the same time; and some that are not."""
    whole = random.random() < 0.5

    def ms(most: int) -> float:
        return random.choice((0, random.randint(0, most))) if whole else round(random.uniform(0.1, most), 3)

    stages = random.randint(1, 7)
    return {
        "schedule": random.choice((*NAMES, "pipelined", "pipelined")),
        "stages": stages,
        "forward": ms(20),
        "backward": ms(20),
        "update": ms(20),
        "speeds": [
            random.choice((1, 0.5, 2, 1.25)) for _ in range(random.choice((0, stages // 2, stages, stages + 1)))
        ],
        "layers": random.choice((1, 1, 2, 5)),
        "delay": random.choice((0, ms(20), ms(400))),
        "carry": random.choice((0, ms(20))),
        "queue": random.choice((0, 1, 2, 3, 5, 6, 16)),
        "batches": random.randint(1, 7),
        "micro": random.randint(1, 6),
    }


def rules_of(settings: Settings) -> tuple[Any, int]:
    """The schedule, and into how many micro-batches it cuts a batch."""
    if (name := settings["schedule"]) in SCHEDULES:
        return SCHEDULES[name], 1
    rival = RIVALS[f"BP {name}"](settings["micro"])
    return rival, rival.micro_batches


def speeds_of(settings: Settings) -> list[float]:
    return (settings["speeds"] + [1.0] * settings["stages"])[: settings["stages"]]


def simulated(settings: Settings) -> Simulation:
    rules, parts = rules_of(settings)
    layers = settings["layers"]
    one = {Action.FORWARD: "forward", Action.BACKWARD: "backward", Action.UPDATE: "update"}

    def layer(speed: float) -> Mapping[Action, float]:
        cut = {action: 1 if action is Action.UPDATE else parts for action in Action}
        return {action: settings[key] / speed / layers / cut[action] for action, key in one.items()}

    times = [task_seconds([layer(speed)] * layers, by_layer=rules.by_layer) for speed in speeds_of(settings)]
    hop = Hop(settings["carry"] / parts, settings["delay"])
    schedule: Rules = rules
    return simulate(
        schedule,
        times,
        settings["batches"] * parts,
        queue_depth=(settings["queue"] or settings["batches"]) if rules in SCHEDULES.values() else parts,
        hops=[hop] * (settings["stages"] - 1),
    )


def forecasted(settings: Settings) -> Forecast:
    """What ``pipeal plan`` would say of a long run on this layout; a second there is a millisecond here."""
    rules, parts = rules_of(settings)
    layers, carry = settings["layers"], settings["carry"] / parts
    cost = LayerCost(
        settings["forward"] / layers / parts,
        settings["backward"] / layers / parts,
        settings["update"] / layers,
        out_bytes=1000 if carry else 0,
    )
    devices = tuple(PlannedDevice(speed=speed) for speed in speeds_of(settings))
    stages = [
        PlannedStage(range(number * layers, (number + 1) * layers), (number,), device, 0.0, 0.0, 0)
        for number, device in enumerate(devices)
    ]
    link = Link(1000 / carry if carry else float("inf"), settings["delay"])
    setup = Setup(devices, link, batches=LONG_RUN, queue_depth=settings["queue"])
    costs = {"cpu": [cost] * (layers * len(devices))}
    return forecast(settings["schedule"], rules, costs, setup, Layout(tuple(stages), any_order=False))


@dataclass(frozen=True)
class Seen:
    """What a browser made of the page: the answers, the page afterwards, and what stood on its console."""

    cases: list[Settings]
    answers: list[dict[str, Any]]
    facts: dict[str, Any]
    console: list[str]


ASKED = """<script>
const answers = CASES.map((settings) => {
  const { spans, makespan, busy, held, ended, packets } = simulate(settings);
  const long = forecast(settings), there = settingsOf(hashOf(settings));
  return { spans: spans.map((one) => [one.stage, one.batch, one.action, one.begin, one.end]),
    makespan, busy, held, ended, perBatch: long.perBatch, longBusy: long.busy,
    back: there.settings, problems: there.problems,
    early: packets.filter((packet) => !(packet.came >= packet.sent + settings.delay)).length };
});
const facts = { box: byId("forward").value, slider: byId("forward-slider").value, chosen: byId("schedule").value };
location.hash = "#stages=99&schedule=none&else=1&micro=3";
onhashchange = () => {
  facts.problem = byId("problem").textContent;
  facts.kept = settings;
  byId("backward-slider").value = "31";
  byId("backward-slider").dispatchEvent(new Event("input"));
  byId("queue").value = "0.5";
  byId("queue").dispatchEvent(new Event("input"));
  facts.moved = { address: location.hash, queue: settings.queue, problem: byId("problem").textContent };
  requestAnimationFrame(() => {
    facts.cards = byId("cards").textContent;
    facts.rows = [...document.querySelectorAll("#table tbody tr")].map((row) => row.textContent);
    facts.sentence = byId("sentence").textContent;
    const controls = [...document.querySelectorAll("input, select")];
    facts.unlabelled = controls.filter((one) => !one.labels.length && !one.ariaLabel).map((one) => one.id);
    const { width, height } = byId("canvas"), paint = byId("canvas").getContext("2d");
    byId("scroller").dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight" }));
    byId("scroller").dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowDown" }));
    facts.told = byId("detail").textContent;
    const pixels = paint.getImageData(0, 0, width, height).data, colours = new Set();
    for (let at = 0; at < pixels.length; at += 4) {
      colours.add(`#${[0, 1, 2].map((part) => pixels[at + part].toString(16).padStart(2, "0")).join("")}`);
    }
    const style = getComputedStyle(document.documentElement);
    facts.undrawn = NAMES.filter((name) => !colours.has(style.getPropertyValue(`--${name}`).trim()));
    document.body.append(element("pre", { id: "answers" }, JSON.stringify({ answers, facts })));
  });
};
</script>
"""


def every_span_is_where_the_simulator_has_it(seen: Seen) -> None:
    for settings, answer in zip(seen.cases, seen.answers, strict=True):
        wanted = simulated(settings)
        spans = {(s.stage, s.batch, ACTIONS.index(s.action)): (s.begin, s.end) for s in wanted.spans}
        assert len(answer["spans"]) == len(spans), settings
        for *task, begin, end in answer["spans"]:
            wanted_begin, wanted_end = spans[tuple(task)]
            assert abs(begin - wanted_begin) < 1e-6, (settings, task)
            assert abs(end - wanted_end) < 1e-6, (settings, task)
        assert answer["makespan"] == pytest.approx(wanted.makespan_s, abs=1e-6), settings
        assert answer["busy"] == pytest.approx(wanted.busy, abs=1e-9), settings
        assert answer["ended"] == pytest.approx(wanted.ended, abs=1e-6), settings
        assert answer["held"] == wanted.held, settings
        assert answer["early"] == 0, settings


def a_long_run_takes_what_is_forecast(seen: Seen) -> None:
    for settings, answer in zip(seen.cases, seen.answers, strict=True):
        wanted = forecasted(settings)
        assert answer["perBatch"] == pytest.approx(wanted.batch_s, abs=1e-6), settings
        assert answer["longBusy"] == pytest.approx(wanted.busy, abs=1e-9), settings


def an_address_holds_all_settings(seen: Seen) -> None:
    assert [answer["back"] for answer in seen.answers] == seen.cases
    assert not any(answer["problems"] for answer in seen.answers)
    assert (seen.facts["box"], seen.facts["slider"], seen.facts["chosen"]) == ("7.5", "7.5", "gpipe")


def what_an_address_cannot_mean_is_named_and_the_rest_holds(seen: Seen) -> None:
    problem, kept = seen.facts["problem"], seen.facts["kept"]
    assert "found “99”; expected a whole number from 1 to 16" in problem
    assert "found “none”; expected one of sequential, backward-overlap, al-fm, pipelined, naive, gpipe, 1f1b" in problem
    assert "“else”, which is no setting" in problem
    assert (kept["stages"], kept["schedule"], kept["micro"]) == (4, "1f1b", 3)


def a_control_moves_everything_at_once(seen: Seen) -> None:
    moved, cards = seen.facts["moved"], seen.facts["cards"]
    assert "backward=31&" in moved["address"]
    assert (moved["queue"], "found “0.5”" in moved["problem"]) == (2, True)
    settings = {**seen.facts["kept"], "backward": 31}
    assert len(seen.facts["rows"]) == len(NAMES) + 2
    for name in NAMES:
        per_batch = simulated({**settings, "schedule": name}).makespan_s / settings["batches"]
        assert any(row.startswith(f"{name}{per_batch:.2f}") for row in seen.facts["rows"])
        assert (f"{per_batch:.1f} ms per batch" in cards) == (name in ("1f1b", "gpipe", "pipelined"))
    assert seen.facts["sentence"].startswith("Under 1f1b the pipeline fills and empties with every batch")
    assert seen.facts["told"] == "1f1b, stage 1: forward of batch 0, micro-batch 0, 1.67 ms to 3.33 ms"
    assert seen.facts["unlabelled"] == []
    assert seen.facts["undrawn"] == []


def nothing_stands_on_the_console(seen: Seen) -> None:
    assert seen.console == []


CHECKS = (
    every_span_is_where_the_simulator_has_it,
    a_long_run_takes_what_is_forecast,
    an_address_holds_all_settings,
    what_an_address_cannot_mean_is_named_and_the_rest_holds,
    a_control_moves_everything_at_once,
    nothing_stands_on_the_console,
)


@pytest.mark.slow
def test_the_page_in_a_browser(tmp_path: Path) -> None:
    """One test, so that processes which share the tests do not each start a browser."""
    if CHROMIUM is None:
        pytest.skip("there is no chromium on the PATH")
    seen = in_a_browser(tmp_path, CHROMIUM)
    for check in CHECKS:
        check(seen)


def test_the_page_has_every_schedule() -> None:
    listed = re.search(r"^const SCHEDULES = \{\n(.*?)^\};", PAGE.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    assert listed
    assert re.findall(r'^  "([\w-]+)": ', listed[1], flags=re.MULTILINE) == list(NAMES)


def test_the_page_asks_no_one_else_for_anything() -> None:
    assert not re.search(
        r"""(?:src|href)=["'](?!data:|[\w/-]+\.html)|url\(|@import|fetch\(|https?:""", PAGE.read_text("utf-8")
    )


def in_a_browser(folder: Path, chromium: str) -> Seen:
    random = Random(0)
    cases = [some_settings(random) for _ in range(CASES)]
    copy = folder / "playground.html"
    asked = ASKED.replace("CASES", json.dumps(cases))
    copy.write_text(PAGE.read_text("utf-8").replace("</body>", f"{asked}</body>"), encoding="utf-8")
    options = "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --enable-logging=stderr --dump-dom"
    options += " --virtual-time-budget=5000"  # so long it may still act after it has loaded; counted, not waited
    with TemporaryDirectory() as own:  # a short name: a socket's path has at most some 100 letters
        ran = subprocess.run(
            [chromium, *options.split(), f"--user-data-dir={own}", f"{copy.as_uri()}#forward=7.5&schedule=gpipe"],
            env={**os.environ, "TMPDIR": own, "HOME": own},
            capture_output=True,
            text=True,
            timeout=600,
        )
    console = [line for line in ran.stderr.splitlines() if "CONSOLE" in line]
    found = re.search(r'<pre id="answers">(.*?)</pre>', ran.stdout, flags=re.DOTALL)
    assert found, f"the page gave no answers: {console or ran.stderr[-2000:]}"
    return Seen(cases, **json.loads(unescape(found[1])), console=console)
