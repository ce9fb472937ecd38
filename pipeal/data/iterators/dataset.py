"""Pipelines in a PyTorch ``DataLoader`` with any number of workers, resumed exactly.

    shards      0   1   2   3          a pipeline each; the order of items is that of the shards in turn
    workers     0   1   0   1          how many there are changes nothing but the speed
    items       (0, state, x) (1, state, x) (2, state, x) ...

Workers run ahead of the consumer, so every item travels with the state of its shard after it. The loader keeps the
latest state of each shard that the consumer has seen; that is its own state.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from itertools import compress
from typing import Any, Generic, TypeAlias, TypeVar

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from pipeal.core.errors import ConfigError, DataError, ScheduleError, a_type, add_note
from pipeal.data.checks import at_least
from pipeal.data.iterators.base import CheckpointableIterator, State, check_frame
from pipeal.data.iterators.checks import check_instance
from pipeal.data.iterators.shards import ShardIterator
from pipeal.data.loading.workers import serve_parent, starting_workers, watch_workers, worker_context

__all__ = ["CheckpointableLoader", "IterableCheckpointedDataset"]

T = TypeVar("T")
Pipeline: TypeAlias = CheckpointableIterator[T] | Callable[[int, int], CheckpointableIterator[T]]

_VERSION = 1
"""Of the format of the loader's states."""


class IterableCheckpointedDataset(IterableDataset[T]):
    """A pipeline as a data set for a plain ``DataLoader(dataset, batch_size=None)``, batches made already.

    With several workers each runs the whole pipeline and serves every n-th item, so that the order is the same for
    any number of them; to share out the work as well, and to resume with workers, use :class:`CheckpointableLoader`.

    Args:
        source: The pipeline. Without workers the data set iterates over it, and ``source.getstate()`` is the state.
        should_reset: Begin each pass where the source stood at construction; else go on. To train
            without end, go on; to validate, begin again. In workers it goes on in their copies, which end with
            the pass: ``source`` stays where it is.
    """

    def __init__(self, source: CheckpointableIterator[T], should_reset: bool = False) -> None:
        super().__init__()
        if not isinstance(source, CheckpointableIterator):
            raise ConfigError(f"source is of type {type(source).__name__}; wanted a CheckpointableIterator")
        self._source = source
        self._source_state = source.getstate()
        self._should_reset = should_reset

    def __iter__(self) -> Iterator[T]:
        if self._should_reset:
            self._source.setstate(self._source_state)
        worker = get_worker_info()
        if worker is None or worker.num_workers == 1:
            return self._source
        state = self._source.getstate()
        share = ShardIterator(self._source, worker.num_workers, worker.id, "keep")
        self._source.setstate(state)  # to build over a pipeline has sent it to its beginning
        return share


class CheckpointableLoader(Generic[T]):
    """Iterates over a pipeline through a ``DataLoader``; its state is what the consumer has seen.

    After a pass that ended, the next begins at the start. After one that was broken off it does so too or, without
    ``should_reset``, goes on where the consumer stood. After ``setstate`` it goes on from that state. A pass ends where
    the next one begins: what still iterates over it gets a ``ScheduleError``.

    Args:
        source: Either a pipeline, which each shard runs whole, from its beginning, to serve every n-th item of it;
            items then come in the order of the pipeline. Or, to share out the work, a function ``(num_instances,
            instance_rank) -> pipeline`` that gives a share, such as one with a :func:`create_source_iterator` of
            these arguments. Worker processes get it by fork or by pickling.
        num_workers: Processes; 0 works in this one.
        shards: How many pipelines there are, a multiple of ``num_workers``; by default as many as workers. With
            the same number of shards the order and the states are the same for any number of workers.
        num_instances: How many ranks share the data; wants a function as the source.
        instance_rank: Which rank this is.
        should_reset: Each pass begins at the start.
        pin_memory: As in ``DataLoader``.
        prefetch_factor: As in ``DataLoader``: how far each worker runs ahead.
        multiprocessing_context: As in ``DataLoader``: ``"fork"``, ``"spawn"``, ``"forkserver"``.
        timeout_s: As ``timeout`` in ``DataLoader``; 0 waits without end.

    Raises:
        ConfigError: A setting out of range.
    """

    _next: int
    _states: list[State | None]
    _restored: bool
    _ended: bool

    def __init__(
        self,
        source: Pipeline[T],
        num_workers: int = 0,
        *,
        shards: int | None = None,
        num_instances: int = 1,
        instance_rank: int = 0,
        should_reset: bool = False,
        pin_memory: bool = False,
        prefetch_factor: int | None = None,
        multiprocessing_context: str | None = None,
        timeout_s: float = 0,
    ) -> None:
        workers = at_least("num_workers", num_workers, 0)
        shards = max(1, workers) if shards is None else at_least("shards", shards, 1)
        if shards % max(1, workers):
            raise ConfigError(f"{shards} shards for {workers} workers; wanted a multiple of the workers")
        num_instances, instance_rank = check_instance(num_instances, instance_rank)
        if isinstance(source, CheckpointableIterator):
            if num_instances > 1:
                raise ConfigError(
                    f"num_instances is {num_instances}, but source is a pipeline, which cannot be shared out; "
                    "pass a function (num_instances, instance_rank) -> pipeline, or a ShardIterator"
                )
        elif not callable(source):
            raise ConfigError(f"source is of type {type(source).__name__}; wanted a pipeline or a function giving one")
        self._source = source
        self._shards = shards
        self._setup = {"shards": shards, "num_instances": num_instances, "instance_rank": instance_rank}
        self._should_reset = should_reset
        self._options: dict[str, Any] = {
            "num_workers": workers,
            "pin_memory": pin_memory,
            "prefetch_factor": prefetch_factor if workers else None,
            "timeout": timeout_s,
        }
        self._start_method = multiprocessing_context
        self._runs = 0
        self._running: Generator[T, None, None] | None = None
        self.setstate(None)

    def __iter__(self) -> Iterator[T]:
        if not self._restored and (self._should_reset or self._ended):
            self.setstate(None)
        self._restored = self._ended = False
        # Now, and not when its garbage is collected: its end sends the source, which this pass reads, to its beginning.
        self.close()
        self._running = self._run()
        return self._handed_out(self._running, self._runs)

    def getstate(self) -> State:
        """Where the consumer stands: JSON values, one pipeline's state for each shard; None for one not begun."""
        return {
            "kind": type(self).__name__,
            "version": _VERSION,
            "setup": dict(self._setup),
            "ended": self._ended,
            "next": self._next,
            "shards": list(self._states),
        }

    def setstate(self, checkpoint: State | None) -> None:
        """Lets the next pass go on where ``checkpoint`` was taken, with any number of workers; None: at the beginning.

        Raises:
            DataError: The state of something else, of another version, or of another number of shards or ranks.
        """
        if checkpoint is not None:
            self._check(checkpoint)
        self.close()
        self._restored = checkpoint is not None and not checkpoint["ended"]
        self._ended = checkpoint is not None and checkpoint["ended"]
        self._next = checkpoint["next"] if checkpoint else 0
        self._states = list(checkpoint["shards"]) if checkpoint else [None] * self._shards

    state_dict = getstate
    load_state_dict = setstate

    def close(self) -> None:
        """Ends the pass that is going on, and with it its workers. Another pass can begin."""
        self._runs += 1
        if self._running is not None:
            self._running.close()
            self._running = None

    def __enter__(self) -> CheckpointableLoader[T]:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _check(self, state: Any) -> None:
        kind = type(self).__name__
        check_frame(state, kind, _VERSION, self._setup)
        shards, turn = state.get("shards"), state.get("next")
        whole = isinstance(shards, list) and len(shards) == self._shards and type(state.get("ended")) is bool
        if not whole or type(turn) is not int or not 0 <= turn < self._shards:
            raise DataError(
                f"a damaged state of {kind}; wanted {', '.join(self.getstate())}, and a state for each shard"
            )

    def _handed_out(self, running: Iterator[T], number: int) -> Iterator[T]:
        while True:
            if number != self._runs:
                raise ScheduleError(
                    "this pass is over: another pass has begun, or the loader was closed or sent to a state; one at a "
                    "time, iterate over the loader again to read on"
                )
            try:
                item = next(running)
            except StopIteration:
                return
            yield item

    def _run(self) -> Generator[T, None, None]:
        num_workers = self._options["num_workers"]
        served = _Shards(self._source, self._setup, self._next, list(self._states))
        # Without batches of its own, and with what arrives handed on as it is.
        loader = DataLoader(
            served,
            batch_size=None,
            collate_fn=_as_it_is,
            worker_init_fn=serve_parent,
            multiprocessing_context=worker_context(self._start_method) if num_workers else None,
            **self._options,
        )
        with starting_workers(self._start_method):
            arriving: Any = iter(loader)
        over = threading.Event()
        if num_workers:
            _watch(arriving, over)
        due = 0
        try:
            for shard, state, item in arriving:
                if state is not None:
                    self._states[shard], self._next = state, (shard + 1) % self._shards
                    due += 1
                    yield item
        except Exception as failure:
            add_note(failure, f"raised when item {due} of this pass of CheckpointableLoader was due, from 0")
            raise
        finally:
            # Left to garbage collection, the workers would live as long as the traceback of an exception.
            if num_workers:
                arriving._shutdown_workers()  # and the thread that pins memory, which may wait for a message
            over.set()
        self._ended = True


@dataclass(frozen=True)
class _Shards(IterableDataset[tuple[int, "State | None", Any]]):
    """What a worker serves: its shards in turn. A shard that has ended leaves gaps, so that the turns stay."""

    source: Pipeline[Any]
    setup: State
    next: int
    states: list[State | None]

    def __iter__(self) -> Iterator[tuple[int, State | None, Any]]:
        worker = get_worker_info()
        workers, number = (1, 0) if worker is None else (worker.num_workers, worker.id)
        shards = self.setup["shards"]
        # A DataLoader asks worker 0 first: the shard whose turn it is must live there.
        turns = [(self.next + place) % shards for place in range(number, shards, workers)]
        pipelines = {shard: self._open(shard, alone=shards == workers) for shard in turns}
        going = True
        try:
            while going:
                going = False
                for shard in turns:
                    try:
                        item = next(pipelines[shard])
                    except StopIteration:
                        yield shard, None, None  # at every further turn, too
                        continue
                    except Exception as failure:
                        add_note(failure, f"raised in shard {shard} of {shards}")
                        raise
                    going = True
                    yield shard, pipelines[shard].getstate(), item
        finally:
            for pipeline in pipelines.values():
                if pipeline is self.source:
                    pipeline.setstate(None)  # ends its threads, but it stays its owner's to close
                else:
                    pipeline.close()

    def _open(self, shard: int, alone: bool) -> CheckpointableIterator[Any]:
        shards, rank = self.setup["shards"], self.setup["instance_rank"]
        if isinstance(self.source, CheckpointableIterator):
            own = self.source if alone else copy.deepcopy(self.source)
            pipeline = own if shards == 1 else ShardIterator(own, shards, shard, "keep")
        else:
            pipeline = self.source(self.setup["num_instances"] * shards, rank * shards + shard)
            if not isinstance(pipeline, CheckpointableIterator):
                raise ConfigError(f"source gave {a_type(pipeline)}; wanted a CheckpointableIterator")
        pipeline.setstate(self.states[shard])
        return pipeline


def _as_it_is(item: T) -> T:
    return item


def _watch(arriving: Any, over: threading.Event) -> None:
    """Ends the wait for workers of a ``DataLoader`` that were killed as they sent an item, or where others must."""
    workers, serving, queue = arriving._workers, arriving._workers_status, arriving._worker_result_queue

    def blocked() -> bool:
        # One that has served all was killed between its last item and the release of the lock.
        try:
            if queue._reader.poll() or not any(worker.exitcode for worker in workers):
                return False
        except OSError:  # closed before the workers end, where memory is pinned
            return False
        free = queue._wlock.acquire(block=False)
        if free:
            queue._wlock.release()
        return not free

    # How those end that have served all does not matter else.
    watch_workers(lambda: list(compress(workers, serving)), queue._writer, over, blocked)
