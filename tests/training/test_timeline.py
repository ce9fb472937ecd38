"""The picture shows every action in its place, and the shares beside it are the truth."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib import image

from pipeal.engine.trace import CopySpan, Way
from pipeal.reporting.timeline import ACTIONS, COPIES, busy_shares, draw_timeline, kernel_shares, steady, timeline_lines


@dataclass
class Span:
    stage: int
    layer: int
    action: str
    batch: int
    begin: float
    end: float
    given: float | None = None


def pipelined(stages, batches, f=0.005, b=0.010, u=0.001):
    """Each stage takes its next batch as soon as it is free."""
    free, spans = [0.0] * stages, []
    for batch in range(batches):
        ready = 0.0
        for stage in range(stages):
            at = max(ready, free[stage])
            for action, length in (("F", f), ("B", b), ("U", u)):
                spans.append(Span(stage, stage, action, batch, at, at + length))
                at += length
            ready, free[stage] = spans[-3].end, at
    return spans


def sequential(stages, batches):
    turns = [(batch, stage) for batch in range(batches) for stage in range(stages)]
    return [Span(stage, stage, "F", batch, float(at), at + 1.0) for at, (batch, stage) in enumerate(turns)]


spans = st.lists(
    st.builds(
        lambda stage, batch, action, begin, length: Span(stage, stage, action, batch, begin, begin + length),
        *(st.integers(0, 3), st.integers(0, 9), st.sampled_from("FBU"), st.floats(0, 10), st.floats(0, 5)),
    ),
    max_size=12,
)


@pytest.mark.parametrize("stages", [1, 2, 4, 16])
def test_equal_stages_in_a_pipeline_are_always_busy_in_the_steady_state(stages):
    run = pipelined(stages, 40)
    assert busy_shares(run, steady(run)) == pytest.approx(dict.fromkeys(range(stages), 1.0))


def test_a_timeline_in_letters_begins_when_every_stage_is_at_work():
    run = pipelined(2, 40, f=1.0, b=1.5, u=0.5)  # the second stage begins when the first one's forward has ended
    assert timeline_lines(run, 9.0, 18) == ["00▒▒▒▒11▒▒▒▒22▒▒▒▒", "▒▒▒▒11▒▒▒▒22▒▒▒▒33"]
    assert timeline_lines([], 1.0, 4) == []


def test_what_waits_in_a_timeline_in_letters_is_a_dot():
    run = [Span(0, 0, "F", 0, 0.0, 1.0), Span(0, 0, "F", 11, 3.0, 4.4)]
    assert timeline_lines(run, 6.0, 6) == ["0··1··"]


def test_filling_and_draining_are_idle_time_of_the_whole_run():
    """GPipe's idle share, (K-1)/(M+K-1), with what overlaps here: only the forwards fill the pipe."""
    run = pipelined(4, 10, f=1.0, b=0.0, u=0.0)
    assert busy_shares(run, (0.0, 13.0)) == pytest.approx(dict.fromkeys(range(4), 10 / 13))


def test_one_after_the_other_shares_the_time():
    run = sequential(4, 100)
    assert busy_shares(run, (0.0, 400.0)) == pytest.approx(dict.fromkeys(range(4), 0.25))
    assert busy_shares(run, steady(run)) == pytest.approx(dict.fromkeys(range(4), 0.25), abs=0.01)


def test_actions_at_the_same_time_count_once():
    run = [Span(0, 0, "B", 0, 0.0, 2.0), Span(0, 1, "B", 0, 1.0, 3.0), Span(0, 2, "B", 0, 1.2, 1.5)]
    assert busy_shares(run, (0.0, 4.0)) == {0: 0.75}


def test_kernels_of_a_gpu_are_certain_from_when_its_host_has_given_them():
    """Prediction 6 of the GPU reading: a stage was busy for nearly all of the time in which its host opened actions."""
    run = [Span(0, 0, "F", 0, 0.0, 4.0, 3.0), Span(0, 0, "B", 0, 4.0, 8.0, 1.0), Span(0, 0, "U", 0, 8.0, 9.0, 12.0)]
    run.append(Span(1, 1, "F", 0, 0.0, 9.0))  # on a CPU
    assert busy_shares(run, (0.0, 10.0)) == {0: 0.9, 1: 0.9}
    assert kernel_shares(run, (0.0, 10.0)) == {0: 0.5}


@given(spans, st.floats(0, 10), st.floats(0, 10))
def test_a_share_lies_between_0_and_1(run, begin, end):
    assert all(0 <= share <= 1 for share in busy_shares(run, (begin, end)).values())


@given(spans)
def test_the_steady_state_lies_within_the_run(run):
    begin, end = steady(run)
    assert begin <= end
    if run:
        assert min(span.begin for span in run) <= begin
        assert end <= max(span.end for span in run)


def test_stages_that_never_work_at_the_same_time_have_no_steady_state_of_their_own():
    assert steady([Span(0, 0, "F", 0, 0.0, 1.0), Span(1, 1, "F", 0, 1.0, 2.0)]) == (0.0, 2.0)


@pytest.mark.parametrize(
    ("run", "stages"),
    [
        (pipelined(4, 12), 4),
        (sequential(1, 3), 1),
        (pipelined(16, 6), 16),
        ([], 2),
        ([Span(0, 0, "F", 7, 5.0, 5.0)], 1),
        (pipelined(1, 2), 3),  # a stage that did nothing
    ],
    ids=["pipelined", "one", "sixteen", "nothing", "no length", "idle stages"],
)
def test_a_picture_is_drawn_and_nothing_lies_beside_it(tmp_path, run, stages):
    path = tmp_path / "new" / "timeline.png"
    draw_timeline(run, path, title="50 $ a_b $ pipelined", devices=["cpu"] * stages)
    height, width, _ = image.imread(path).shape
    assert width > height > 200
    assert list(path.parent.iterdir()) == [path]


def test_copies_are_drawn_along_the_row_of_their_stage(tmp_path):
    """Brought above, sent below, when they were."""
    run = [Span(0, 0, "F", 0, 0.0, 2.0), Span(1, 1, "F", 0, 0.0, 2.0)]
    copies = [CopySpan(0, 1, Way.BRING, 0, 0.0, 1.0), CopySpan(0, 0, Way.SEND, 0, 1.0, 2.0)]
    draw_timeline(run, tmp_path / "x.png", title="", devices=["cuda:0", "cuda:0"], copies=copies)
    pixels = image.imread(tmp_path / "x.png")[60:, :, :3]  # without the legend

    def place(colour):
        rows, columns = (
            abs(pixels - [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]).max(axis=2) < 0.01
        ).nonzero()
        return rows.mean(), columns.mean()

    brought, sent, work = (place(colour) for colour in (COPIES["bring"][1], COPIES["send"][1], ACTIONS["F"][1]))
    assert brought[0] < sent[0] < work[0] + 1  # the work is that of two stages
    assert brought[1] < work[1] < sent[1]


def test_every_stage_shows_its_own_colours_where_it_worked(tmp_path):
    """Stage 0 works in the first half, stage 1 in the second: blue moves from upper left to lower right."""
    run = [Span(0, 0, "F", 0, 0.0, 1.0), Span(1, 1, "F", 0, 1.0, 2.0)]
    draw_timeline(run, tmp_path / "x.png", title="", devices=["cpu", "cpu"])
    pixels = image.imread(tmp_path / "x.png")[:, :, :3]
    blue = abs(pixels - [0x00 / 255, 0x72 / 255, 0xB2 / 255]).max(axis=2) < 0.01
    blue[: int(150 * 0.4)] = False  # the legend
    rows, columns = blue.nonzero()
    upper = rows < (rows.min() + rows.max()) / 2
    assert columns[upper].max() <= columns[~upper].min() + 2
    assert columns[upper].size == pytest.approx(columns[~upper].size, rel=0.05)
