"""What every iterator here is: a stream that can say where its consumer stands, and go back there.

A state is a small dict of JSON values. It names the kind of iterator and the version of its format, holds the
states of what the iterator reads from, and is refused by any other pipeline. It does not hold the data.

    source ──► map ──► window ──► batches            state of the whole = state of the last one
"""

from __future__ import annotations

import copy
import random
import secrets
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar

from pipeal.core.errors import ConfigError, DataError, ScheduleError
from pipeal.core.rng import key_seed
from pipeal.data.checks import at_least

__all__ = ["CheckpointableIterator"]

T = TypeVar("T")
State: TypeAlias = dict[str, Any]


class CheckpointableIterator(ABC, Iterator[T], Generic[T]):
    """An iterator with a state. Own ones need ``__next__``, ``getstate`` and ``setstate``.

    An iterator belongs to the one that is built over it: nothing else may draw from it. Building resets it to its
    beginning. ``close`` (or ``with``, or garbage collection) ends what the pipeline has started.
    """

    def __iter__(self) -> CheckpointableIterator[T]:
        return self

    @abstractmethod
    def __next__(self) -> T: ...

    @abstractmethod
    def getstate(self) -> State:
        """Where the consumer stands, for this iterator and all that it reads from; what was read ahead is not counted.

        The value survives JSON. It is not to be changed: later states share parts with it.
        """

    @abstractmethod
    def setstate(self, checkpoint: State | None) -> None:
        """Goes to where ``checkpoint`` was taken; None is the beginning. Costs nothing until the next item.

        Raises:
            DataError: The state is that of another pipeline or of another version of the format.
        """

    def prepare(self) -> None:
        """Starts the worker processes of the pipeline now, for a caller that is about to start threads."""

    def close(self) -> None:
        """Ends every thread and process of the pipeline; a second call does nothing."""

    def __enter__(self) -> CheckpointableIterator[T]:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


class Stage(CheckpointableIterator[T]):
    """What the iterators of this package share: the frame of a state, its check, the end, failure and pickling.

    A stage sets its settings, calls :meth:`_finish`, and keeps everything that moves in what :meth:`_begin` sets.
    What its state holds it names in ``setup`` and ``fields``; the attributes have the same names behind a ``_``.
    Pickling carries the settings and the state (so functions must be importable: lambdas cannot be pickled); what
    moves, threads included, is rebuilt.
    """

    version: ClassVar[int] = 1
    setup: ClassVar[tuple[str, ...]] = ()
    """The settings that decide what comes; a state of other settings is refused."""
    fields: ClassVar[tuple[str, ...]] = ()
    """Whole numbers of at least 0 that move; at the beginning they are 0."""
    _seed: int
    _seed_drawn = False

    def __init__(self, *sources: CheckpointableIterator[Any]) -> None:
        for source in sources:
            if not isinstance(source, CheckpointableIterator):
                raise ConfigError(
                    f"{type(self).__name__} was given a source of type {type(source).__name__}; "
                    "wanted a CheckpointableIterator; wrap data in NativeCheckpointableIterator(data)"
                )
        if len({id(source) for source in sources}) < len(sources):
            raise ConfigError(f"{type(self).__name__} was given one source twice; wanted one iterator for each")
        self._sources = sources
        self._ended = False
        self._closed = False
        self._failure: BaseException | None = None

    def __next__(self) -> T:
        if self._closed:
            raise ScheduleError(f"{type(self).__name__} is closed; build the pipeline again to read on")
        if isinstance(self._failure, Exception):
            raise self._failure
        if self._failure is not None:
            raise ScheduleError(f"{type(self).__name__} was interrupted within an item; restore a state taken before")
        if self._ended:
            raise StopIteration
        try:
            return self._next()
        except StopIteration:
            self._ended = True
            raise
        except BaseException as failure:
            # What follows a failure, Ctrl-C included, must neither look like a clean end nor skip the item.
            self._failure = failure
            raise

    def getstate(self) -> State:
        """See :meth:`CheckpointableIterator.getstate`."""
        if self._failure is not None:
            raise ScheduleError(
                f"{type(self).__name__} has no state after a failure ({type(self._failure).__name__}); "
                "use one taken before it"
            )
        return {
            "kind": type(self).__name__,
            "version": self.version,
            "setup": self._named(self.setup),
            "ended": self._ended,
            "sources": self._source_states(),
            **self._progress(),
        }

    def setstate(self, checkpoint: State | None) -> None:
        """See :meth:`CheckpointableIterator.setstate`."""
        if self._closed:
            raise ScheduleError(f"{type(self).__name__} is closed; build the pipeline again to restore a state")
        if checkpoint is not None:
            self._check(checkpoint)  # before anything moves: a refused state changes nothing
        self._stop()
        self._go_to(checkpoint)

    def prepare(self) -> None:
        """See :meth:`CheckpointableIterator.prepare`."""
        for source in self._sources:
            source.prepare()

    def close(self) -> None:
        """See :meth:`CheckpointableIterator.close`."""
        if not self._closed:
            self._closed = True
            self._stop()
        for source in self._sources:
            source.close()

    @abstractmethod
    def _next(self) -> T:
        """The next item, or StopIteration; not called again after either an end or a failure."""

    def _begin(self, state: State | None) -> None:
        """Sets all that moves from a checked state; the sources already stand where it says."""
        for name in self.fields:
            setattr(self, f"_{name}", state[name] if state else 0)

    def _progress(self) -> State:
        """What the state holds beside the frame."""
        return self._named(self.fields)

    def _named(self, names: tuple[str, ...]) -> State:
        return {name: getattr(self, f"_{name}") for name in names}

    def _source_states(self) -> list[State]:
        return [source.getstate() for source in self._sources]

    def _stop(self) -> None:
        """Ends the threads that this stage has started."""

    def _finish(self) -> None:
        """Ends construction: what exists now are the settings."""
        self._settings = (*vars(self), "_settings")
        self._go_to(None)

    def _go_to(self, state: State | None) -> None:
        if state is not None and self._seed_drawn:
            self._seed = state["setup"]["seed"]
        for index, source in enumerate(self._sources):
            source.setstate(None if state is None else state["sources"][index])
        self._failure = None
        self._ended = state is not None and state["ended"]
        self._begin(copy.deepcopy(state))

    def _check(self, state: Any) -> None:
        kind = type(self).__name__
        check_frame(state, kind, self.version, self._named(self.setup), may_differ="seed" if self._seed_drawn else None)
        sources = state.get("sources")
        if not isinstance(sources, list) or len(sources) != len(self._sources):
            found = len(sources) if isinstance(sources, list) else "no list of"
            raise DataError(f"a state of {kind} with {found} sources; the pipeline has {len(self._sources)} there")
        whole = all(type(state.get(name)) is int and state[name] >= 0 for name in self.fields)
        if not whole or not isinstance(state.get("ended"), bool):
            names = ", ".join((*self.fields, "ended"))
            raise DataError(f"a damaged state of {kind}; wanted whole numbers and a truth value for {names}")
        for source, inner in zip(self._sources, sources, strict=True):
            if isinstance(source, Stage):
                source._check(inner)

    def _take_seed(self, seed: int | None) -> None:
        """Keeps ``seed``; None draws one, which the state remembers and a fresh pipeline takes over from it."""
        self._seed_drawn = seed is None
        self._seed = secrets.randbits(48) if seed is None else at_least("seed", seed, 0)
        if self._seed >= 1 << 63:
            raise ConfigError(f"seed is {seed}; wanted less than 2**63")

    def _random(self, *key: int) -> random.Random:
        """A generator for one place in the stream: a state needs its key only, not its 625 words."""
        return random.Random(self._keyed(*key))

    def _keyed(self, *key: int) -> int:
        # The kind is part of the key: two stages with one seed must not draw the same numbers.
        return key_seed(zlib.crc32(type(self).__name__.encode()), self._seed, *key)

    def __getstate__(self) -> dict[str, Any]:
        settings = {name: value for name, value in vars(self).items() if name in self._settings}
        return {"settings": settings, "state": self.getstate()}

    def __setstate__(self, pickled: dict[str, Any]) -> None:
        vars(self).update(pickled["settings"])
        self._go_to(pickled["state"])


def check_frame(state: Any, kind: str, version: int, setup: State, *, may_differ: str | None = None) -> None:
    """Refuses a state of another kind, of another version or of other settings.

    Args:
        state: What a user gave as a state.
        kind: The class that the state must be of.
        version: The wanted version of its format.
        setup: The wanted settings.
        may_differ: The setting of which any whole number of at least 0 will do: a seed that was drawn.

    Raises:
        DataError: It is such a state.
    """
    if not isinstance(state, dict) or "kind" not in state:
        raise DataError(f"a state of type {type(state).__name__} without a kind; wanted one of {kind}.getstate()")
    if state["kind"] != kind:
        raise DataError(
            f"a state of {state['kind']} where the pipeline has {kind}; "
            "build the pipeline that the state was taken from"
        )
    if state.get("version") != version:
        raise DataError(
            f"a state of {kind} in version {state.get('version')}; wanted version {version}; "
            "restore it with the release of pipeal that wrote it"
        )
    found = state.get("setup")
    if not isinstance(found, dict) or found.keys() != setup.keys():
        raise DataError(f"a damaged state of {kind}; wanted a setup with {', '.join(setup)}")
    for name, value in setup.items():
        adopted = name == may_differ and type(found[name]) is int and found[name] >= 0
        if found[name] != value and not adopted:
            raise DataError(
                f"a state of {kind} with {name} {found[name]!r}; the pipeline has {value!r}; "
                "build it with the settings that the state was taken with"
            )
