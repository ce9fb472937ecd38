"""What each rank of a run holds: its own layers, from their files or from rank 0, one at a time; a mistake ends all."""

from __future__ import annotations

import errno
import gc
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pipeal import AE, AL, ENC, ALPackage, DataError, PipealError
from pipeal.core.host_memory import give_freed_memory_back, status_bytes
from pipeal.engine.distributed.handed_states import Asked, hand_out
from pipeal.engine.distributed.pipeline import _Line
from pipeal.engine.distributed.world import World
from pipeal.engine.sizes import layers_of_stages
from pipeal.engine.state.layer_file import read_layer, write_layer
from pipeal.engine.state.layer_state import State, layer_state, load_layer_state

from .processes import run

WIDE, LAYERS, SIZES = 768, 8, [4, 4]
LAYER_BYTES = 4 * WIDE * WIDE * 4


def layer(number: int, wide: int = 24) -> AL:
    torch.manual_seed(number)
    return AL(ENC(nn.Linear(wide, wide), nn.Linear(wide, wide)), AE(nn.Linear(wide, wide), nn.Linear(wide, wide)), 0.01)


def trained() -> list[State]:
    """The states of small layers after a batch."""
    package = ALPackage([layer(number) for number in range(LAYERS)])
    draw = torch.Generator().manual_seed(1)
    package(torch.randn(4, 24, generator=draw), torch.randn(4, 24, generator=draw))
    package.backward()
    package.update()
    return [layer_state(one) for one in package]


def going_on(world: World, states: Mapping[int, State], wide: int = 24) -> Iterator[AL]:
    """New layers, those of this rank with their states, and all others on the meta device."""
    own = layers_of_stages(SIZES)[world.mesh.stage_of(world.rank)]
    for number in range(LAYERS):
        with torch.device("cpu" if number in own else "meta"):
            one = layer(number + 100, wide)
        if number in own:
            load_layer_state(one, states[number])
        yield one


def line(world: World, states: Mapping[int, State], tell: Callable[[int], object] = int, **options: Any) -> _Line:
    """This rank's part of a pipeline; on rank 1 the states come from rank 0."""

    def layers() -> Iterator[AL]:
        if world.rank == 0:
            hand_out(world, [1], states)
            yield from going_on(world, states)
            return
        with closing(Asked(world)) as asked:
            for number, one in enumerate(going_on(world, asked)):
                tell(number)
                yield one

    return _Line(layers(), world, sizes=SIZES, threads=1, **options)


def error_of(work: Callable[[], object]) -> str:
    try:
        work()
    except PipealError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


class Damaged(dict[int, State]):
    """One of them cannot be read."""

    def __getitem__(self, number: int) -> State:
        if number == 5:
            raise DataError("layer-005.safetensors is refused")
        return super().__getitem__(number)


def job(world: World) -> dict[str, Any]:
    states = dict(enumerate(trained()))
    found: dict[str, Any] = {}

    own = layers_of_stages(SIZES)[world.rank]
    for name, options in (("in memory", {}), ("offloaded", {"offload": "disk", "offload_folder": "."})):
        stage = line(world, states, **options)._stage
        loaded = {number: layer_state(one) for number, one in stage.layers}
        assert list(loaded) == list(own)
        found[name] = all(alike(loaded[number], states[number]) for number in own)
    found["damaged"] = error_of(lambda: line(world, Damaged(states)))

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    reserve = os.posix_fallocate

    def fill(number: int) -> None:
        os.posix_fallocate = full if number == 6 else reserve

    found["full"] = error_of(lambda: line(world, states, fill, offload="disk", offload_folder="."))
    os.posix_fallocate = reserve

    # Of a larger model, from files that all see.
    if world.rank == 0:
        for number in range(LAYERS):
            write_layer(Path(f"{number}.safetensors"), layer_state(layer(number, WIDE)))
    world.gather(None)

    class Files(dict[int, State]):
        def __missing__(self, number: int) -> State:
            return read_layer(Path(f"{number}.safetensors"), mapped=True)

    for name, options in (("held", {}), ("held offloaded", {"offload": "disk", "offload_folder": "."})):
        gc.collect()
        give_freed_memory_back()
        before, held = status_bytes("RssAnon"), []

        def watched() -> Iterator[AL]:
            for one in going_on(world, Files(), WIDE):
                held.append(status_bytes("RssAnon") - before)  # noqa: B023
                yield one

        last = _Line(watched(), world, sizes=SIZES, threads=1, **options)
        found[name] = max(*held, status_bytes("RssAnon") - before)
        del last
    return found


def alike(one: State, other: State) -> bool:
    mine, theirs = flat(one), flat(other)
    return len(mine) == len(theirs) > 10 and all(map(torch.equal, mine, theirs))


def flat(state: Any) -> list[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        return [state]
    parts = state.values() if isinstance(state, dict) else state if isinstance(state, list | tuple) else ()
    return [tensor for part in parts for tensor in flat(part)]


pytestmark = pytest.mark.slow  # two processes


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Processes are slow to start: once for all of it."""
    return run(job, 2, tmp_path_factory.mktemp("ranks"))


def test_ranks_go_on_from_what_rank_0_hands_out(found: list[dict[str, Any]]) -> None:
    assert [(one["in memory"], one["offloaded"]) for one in found] == [(True, True)] * 2


def test_what_rank_0_cannot_read_ends_all_with_one_error(found: list[dict[str, Any]]) -> None:
    assert [one["damaged"] for one in found] == ["DataError: layer-005.safetensors is refused"] * 2


def test_a_disk_that_is_full_where_one_rank_loads_ends_all_with_one_error(found: list[dict[str, Any]]) -> None:
    one, other = (rank["full"] for rank in found)
    assert one == other
    assert "No space left on device" in one


def test_each_rank_holds_its_share_of_a_model_or_when_offloaded_a_layer_of_it(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert 0.8 * LAYER_BYTES * SIZES[0] < rank["held"] < LAYER_BYTES * (SIZES[0] + 1.5)
        assert rank["held offloaded"] < 2 * LAYER_BYTES
