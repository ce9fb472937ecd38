"""The trace file is what the Trace Event Format asks for, and says when each action was."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeal.engine.schedule import Action
from pipeal.engine.trace import CopySpan, Span, Way
from pipeal.reporting.chrome_trace import write_chrome_trace
from tests.training.run_folders import SPANS

spans = st.lists(
    st.builds(
        lambda stage, layer, action, batch, begin, length: Span(stage, layer, action, batch, begin, begin + length),
        *(st.integers(0, 3), st.integers(0, 5), st.sampled_from(Action), st.integers(0, 99)),
        *(st.floats(0, 1e6), st.floats(0, 5)),
    ),
    max_size=20,
)


def events(path, phase):
    return [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == phase]


@given(spans)
def test_every_action_is_one_complete_event_at_its_time_in_microseconds(tmp_path_factory, run):
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    write_chrome_trace(run, path, ["cpu"] * 4)
    found = events(path, "X")
    origin = min((span.begin for span in run), default=0.0)
    words = {"F": "forward", "B": "backward", "U": "update"}
    assert sorted((e["pid"], e["tid"] - 1, e["name"], e["args"]["batch"]) for e in found) == sorted(
        (span.stage, span.layer, f"{words[span.action.value]} {span.batch}", span.batch) for span in run
    )
    assert sorted(e["ts"] for e in found) == pytest.approx(sorted((s.begin - origin) * 1e6 for s in run), abs=1e-2)
    assert sorted(e["dur"] for e in found) == pytest.approx(sorted((s.end - s.begin) * 1e6 for s in run), abs=1e-2)
    assert all(isinstance(e[key], (int, float)) and e[key] >= 0 for e in found for key in ("ts", "dur", "pid", "tid"))
    assert all(first["ts"] <= second["ts"] for first, second in pairwise(found))


def test_processes_are_stages_with_their_devices_and_threads_are_layers(tmp_path):
    write_chrome_trace(SPANS, tmp_path / "trace.json", ["cuda:0", "cuda:1"])
    named = {(e["name"], e["pid"], e["tid"]): e["args"] for e in events(tmp_path / "trace.json", "M")}
    assert named["process_name", 0, 0] == {"name": "stage 0 · cuda:0"}
    assert named["process_name", 1, 0] == {"name": "stage 1 · cuda:1"}
    assert named["thread_name", 1, 2] == {"name": "layer 2"}


def test_an_action_has_one_colour_and_another_action_another(tmp_path):
    write_chrome_trace(SPANS, tmp_path / "trace.json", ["cpu", "cpu"])
    colours = {(e["cat"], e["cname"]) for e in events(tmp_path / "trace.json", "X")}
    assert len(colours) == len({cat for cat, _ in colours}) == len({colour for _, colour in colours}) == 3


def test_copies_of_layers_are_in_threads_of_their_own(tmp_path):
    copies = [CopySpan(1, 4, Way.SEND, 7, 2.0, 2.5), CopySpan(1, 5, Way.BRING, 7, -1.0, 0.5)]
    write_chrome_trace([Span(1, 4, Action.FORWARD, 7, 1.0, 2.0)], tmp_path / "trace.json", ["cpu"] * 2, copies)
    found = {e["name"]: (e["pid"], e["tid"], e["ts"], e["dur"]) for e in events(tmp_path / "trace.json", "X")}
    assert found["forward 7"] == (1, 5, 2e6, 1e6)
    bring, send = found["layer brought 6"], found["layer sent home 5"]
    assert (bring[0], bring[2:]) == (1, (0.0, 1.5e6))
    assert (send[0], send[2:]) == (1, (3e6, 0.5e6))
    named = {e["tid"]: e["args"]["name"] for e in events(tmp_path / "trace.json", "M") if e["name"] == "thread_name"}
    assert (named[bring[1]], named[send[1]]) == ("layer brought", "layer sent home")


def test_nothing_but_the_file_is_left(tmp_path):
    path = tmp_path / "new" / "trace.json"
    write_chrome_trace(SPANS, path, ["cpu", "cpu"])
    write_chrome_trace([], path, ["cpu"])
    assert [e["name"] for e in json.loads(path.read_text())["traceEvents"]] == ["process_name", "process_sort_index"]
    assert list(path.parent.iterdir()) == [path]
