"""A stage at work, alone: what it does with an item that does not belong there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from left_behind import same
from torch import nn

from pipeal import AE, AL, ENC
from pipeal.core.errors import DataError
from pipeal.engine.stage import bring_to_rest
from pipeal.line.feed import Feed, FeedPosition
from pipeal.line.items import BATCH, CHECKPOINT, DECODER, LAYER, Item
from pipeal.line.line_file import read_line
from pipeal.line.stage_run import StageRun
from pipeal.line.worker import _on_the_way_down
from pipeal.run.stopping import StopRequest
from tests.line.lines import place_of
from tests.line.test_line_exactness import text_line

pytestmark = [pytest.mark.usefixtures("one_thread")]


@contextmanager
def stage_0(line: Path) -> Iterator[tuple[Any, list[Item]]]:
    """The first stage of a line, which has read what it begins with, and the items that it sends."""
    found: list[Item] = []
    run = StageRun(read_line(line), 0, place_of(line, 0), StopRequest())
    run.place.folder.mkdir()
    run._emit = found.append  # type: ignore[assignment, method-assign]
    with run._open:
        run._begin_feed(run._read())
        yield run, found


def items_of_stage_0(line: Path, count: int) -> list[Item]:
    """The first items that the first stage sends."""
    with stage_0(line) as (run, found):
        items = run._feed.items()
        while len(found) < count:
            run._step(items)
    return found


def test_how_many_batches_there_are_is_known_wherever_the_feed_goes_on(tmp_path: Path) -> None:
    """Symptom: a first stage that was started again behind its last batch told of "12" batches, not of "12 of 12"."""
    line = text_line(tmp_path, "lstm", 2, "train.epochs=2")
    with stage_0(line) as (run, _):
        feed = run._feed
        totals = []
        for item in feed.items():
            position = FeedPosition.of(feed.position.state())
            again = Feed(feed.experiment, feed._config, item, position)
            next(again.items(), None)
            totals.append((feed.total, again.total))
    assert feed.total == feed.position.batches
    begun = totals.index((feed.total, feed.total))
    assert totals[begun:] == [(feed.total, feed.total)] * (len(totals) - begun)
    assert begun <= 2, "but for the first item, before which nothing is known"


def test_items_that_do_not_belong_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = text_line(tmp_path, "lstm", 2, "engine.sizes=[1,3]")
    begin, first, second = items_of_stage_0(line, 3)
    run = StageRun(read_line(line), 1, place_of(line, 1), StopRequest())
    with run._open:
        with pytest.raises(DataError, match="an item of the kind batch came first; begin the line anew"):
            run._step(iter([first]))
        run._step(iter([begin]))
        run._step(iter([first]))
        for wrong, told in (
            (first, "batch 0 came, where batch 1 was expected"),
            (Item(BATCH, {**second.facts, "batch": 5}, second.tree), "batch 5 came, where batch 1 was expected"),
            (Item(DECODER, {"layer": 7}, {}), "what comes down of layer 7 came; this stage begins at"),
            (Item(DECODER, {"layer": 0}, {"a": first.tree[0]}), "is not that of this line's model"),
        ):
            with pytest.raises(DataError, match=told):
                run._step(iter([wrong]))
        run._step(iter([second]))
        worker: Any = run._worker
        assert worker.next_batch == 2


def test_files_that_lead_elsewhere_are_refused(tmp_path: Path) -> None:
    """On another machine's word the last stage writes files, but none outside of its folder."""
    line = text_line(tmp_path, "lstm", 2, "engine.sizes=[1,3]")
    (begin,) = items_of_stage_0(line, 1)
    for name in ("../elsewhere", "/tmp/elsewhere", ".hidden", "a/b", ".."):
        run = StageRun(read_line(line), 1, place_of(line, 1), StopRequest())
        files = {**begin.tree, name: next(iter(begin.tree.values()))}
        with run._open, pytest.raises(DataError, match="expected plain names"):
            run._step(iter([Item(begin.kind, begin.facts, files)]))
    assert not (tmp_path / "elsewhere").exists()


def test_what_a_checkpoint_takes_is_copied_while_training_goes_on(tmp_path: Path) -> None:
    """It may wait long for the neighbour; updates, which come next, must not reach it."""
    line = text_line(tmp_path, "lstm", 2, "train.epochs=2")
    with stage_0(line) as (run, found):
        items = run._feed.items()
        while not found or found[-1].kind != CHECKPOINT:
            run._step(items)
        layers = [item for item in found if item.kind == LAYER]
        before, learnt = deepcopy([item.tree for item in layers]), run._worker.next_batch
        while run._worker.next_batch == learnt:
            run._step(items)
        bring_to_rest([run._worker._stage])
    assert layers
    assert same([item.tree for item in layers], before)


def test_what_answers_come_down_through_is_copied_when_the_epoch_ends() -> None:
    layer = AL(ENC(nn.Linear(4, 4), nn.Linear(4, 4)), AE(nn.Linear(4, 4), nn.Linear(4, 4)))
    found = _on_the_way_down(layer)
    assert found
    before = {name: tensor.clone() for name, tensor in found.items()}
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(1.0)
    assert all(torch.equal(found[name], tensor) for name, tensor in before.items())
