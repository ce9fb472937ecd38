"""What a checkpoint in the middle of an epoch knows of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeal import Pipeline
from pipeal.engine.rescue import SplitWarning
from pipeal.train.checkpoint import CheckpointStore
from pipeal.train.keeper import CheckpointKeeper, TakenUp
from pipeal.train.position import Part, Position
from pipeal.train.saver import Saver
from tests.engine.test_out_of_memory import data, model


@pytest.mark.filterwarnings("ignore", category=SplitWarning)
def test_batches_learnt_from_in_parts_before_a_kill_are_counted_after_it(tmp_path: Path) -> None:
    """Only the report at an epoch's end told them, and a run that was taken up forgot those before the checkpoint."""
    batches = data(6, 4, 6, 6, 4)
    position: Any = Position(part=Part(0.5, 3, 16, 0, 0))
    with CheckpointStore(tmp_path) as store, Saver(store, pytest.fail) as saver:
        keeper = CheckpointKeeper(saver, 3, lambda: None, {})
        with Pipeline(model(5, "B"), threads=1, on_oom="split") as pipe:
            pipe.run(batches[:1])
            position.totals.splits = 1
            for x, y in batches[1:4]:
                pipe.submit(x, y)
            position.batches = 3
            assert keeper.after_batch(pipe, position) is False
            assert saver.flush(20)
            taken_up = TakenUp.of(store.newest(pytest.fail))  # type: ignore[arg-type]
            assert taken_up.position.totals.splits == 3
            assert sum(pipe.run(batches[4:]).splits) == 2
            position.totals.splits = 3
            keeper._save(pipe, position)
            assert saver.flush(20)
        assert TakenUp.of(store.newest(pytest.fail)).position.totals.splits == 3  # type: ignore[arg-type]
