"""One stage of a line from start to end: taken up from its last snapshot, and saved again and again."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from torch import Tensor

from pipeal.config import document, load_config
from pipeal.core.errors import ConfigError, DataError, Interrupted, LineError, PeerLostError, require_usable
from pipeal.engine.devices import all_devices, make_current, parse_device
from pipeal.engine.devices.threads import intra_op_threads
from pipeal.engine.execution.collector import libraries_left_out
from pipeal.engine.runner.attention import attention_without_plans
from pipeal.engine.runner.compiling import check_compile
from pipeal.engine.runner.precision import check_precision, matmul_precision
from pipeal.engine.sizes import layers_of_stages
from pipeal.engine.state.layer_state import State
from pipeal.line.beginning import (
    end_of_epoch,
    first_item,
    kept_choice,
    require_same_config,
    require_same_data,
    require_same_fixed,
    require_same_stages,
)
from pipeal.line.failures import Failures
from pipeal.line.feed import Feed, FeedPosition
from pipeal.line.items import BEGIN, END, STATE, Item, Packed
from pipeal.line.line_file import LineFile, keys_of
from pipeal.line.neighbours import LOOK_S, Neighbours, shown
from pipeal.line.parting import LEFT, Parting, Partings
from pipeal.line.retained import Retained
from pipeal.line.snapshots import Snapshots
from pipeal.line.status import StageStatus, Status
from pipeal.line.top import Top, take_folder
from pipeal.line.worker import StageWorker
from pipeal.run.build import Experiment
from pipeal.run.stopping import StopRequest, worker_failures
from pipeal.run.train import KINDS
from pipeal.training.checkpoint.resume import ResumedTraining
from pipeal.training.checkpoint.store import Checkpoint

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Place:
    """Where a stage keeps what it has.

    Attributes:
        folder: Of its snapshots and its status.
        key: The file with its secret key.
        run: On the last stage, the run's folder.
    """

    folder: Path
    key: Path
    run: Path


class StageRun:
    """A stage, taken up and run.

    Args:
        line: The line.
        number: Of the stage.
        place: Where it keeps what it has.
        stop: Whether it is to end.
    """

    def __init__(self, line: LineFile, number: int, place: Place, stop: StopRequest) -> None:
        self.line = line
        self.number = number
        self.place = place
        self._stop = stop
        self._is_last = number == len(line.stages) - 1
        self._schema, self._kind = KINDS[line.kind]
        self._device = _device(line.stages[number].device)
        self._failures = Failures(place.folder, number)
        self._snapshots = Snapshots(place.folder / "snapshots", line.line, number)
        self._begin: Mapping[str, Any] | None = None
        self._files: Mapping[str, Tensor] | None = None
        self._given: dict[int, State] = {}
        self._worker: StageWorker | None = None
        self._top: Top | None = None
        self._feed: Feed | None = None
        self._before_line: ResumedTraining | None = None
        self._retained = Retained(line.retain_bytes)
        self._neighbours = Neighbours(line, number, place.key)
        self._done = 0
        self._ended = self._finished = False
        self._failed_at_item = False
        self._wanted = False
        self._saved_at = monotonic()
        self._open = ExitStack()
        self._status = Status(place.folder, number)

    def run(self) -> None:
        """Takes the stage up, or begins it, and has it do its part to the end of the line.

        Raises:
            Interrupted: It was asked to end, and has saved.
            LineError: Another stage has failed for good.
            PeerLostError: A neighbour was away for longer than ``wait_s``.
            Exception: What this stage failed with.
        """
        with self._open:
            self._open.enter_context(self._snapshots)
            saved = self._snapshots.newest()
            # No more is ever said to be saved, and no item asked for that the stage before may have let go.
            self._done = 0 if saved is None else saved.position["item"]
            if saved is not None:
                self._begin = saved.state["begin"]
                self._neighbours.set_begun(self._begin["begun"])
            if (why := self._failures.stopped_by) is not None:
                self._stop_line(why)
                raise LineError(f"{why}; once its cause is mended, start every stage with --again")
            if saved is not None and self._is_over(saved.state):
                _log.info(f"stage {self.number} had done its part before; to begin the line again, remove its folder")
                return
            if saved is None and self._is_last:
                run = self.place.run  # told at once, and of this stage alone
                require_usable(run, f"{run}: cannot be made", "; name another folder by --run")
                if run.exists():
                    take_folder(run, self.line.line).release()
            experiment = None
            if self.number == 0:
                # Told before any data is read.
                keys_of(self.line, self.place.key, 0, 1)
                if saved is None and self.line.resume is not None:
                    self._before_line = end_of_epoch(Path(self.line.resume))
                experiment = self._read()
            if saved is not None:
                self._take_up(saved, experiment)
            elif experiment is not None:
                self._begin_feed(experiment)
            try:
                self._neighbours.connect(self._done, self._retained)
                if not self._ended:
                    self._work()
                self._finish()
            except (Interrupted, PeerLostError):
                raise
            except Exception as error:
                if not (self._failed_at_item or isinstance(error, LineError)):
                    raise  # such as a full disk
                if (why := self._failures.keep(error, self._done)) is not None:
                    self._stop_line(why)
                raise
            finally:
                self._neighbours.leave()
        self._failures.forget()

    def _is_over(self, state: Mapping[str, Any]) -> bool:
        """Whether the stage of a snapshot has nothing to do or to say any more. Of the first one, what was edited since
        has to be told yet."""
        neighbours = [n for n in (self.number - 1, self.number + 1) if 0 <= n < len(self.line.stages)]
        if not state["ended"] or any(self._partings.of(one) != LEFT for one in neighbours):
            return False
        try:
            if self.number == 0:
                require_same_config(load_config(self._schema, values=self.line.config), state["begin"]["asked"])
                require_same_fixed(self.line, state["fixed"])
                self._config_of(state["begin"])
        except ConfigError:
            return False
        return True

    def _stop_line(self, why: str) -> None:
        """Has all other stages end; those that are away now, when they come while this one is started again."""
        _log.warning(f"the line is stopped: {why}")
        self._neighbours.connect(self._done, self._retained)
        self._neighbours.stop(why)

    def _read(self) -> Experiment:
        config = load_config(self._schema, values=self.line.config)
        return self._kind.read(config)

    def _begin_feed(self, experiment: Experiment) -> None:
        config, begun = kept_choice(self.place.folder, self.line, experiment, self._device)
        before = self._before(experiment)
        first = first_item(experiment, config, begun, None if before is None else before.position)
        position = FeedPosition() if before is None else FeedPosition.after(before.position)
        self._feed = self._feed_of(experiment, first, position, before)

    def _feed_of(
        self, experiment: Experiment, first: Item, position: FeedPosition, before: ResumedTraining | None
    ) -> Feed:
        states = None if before is None else before.states
        return Feed(experiment, self._config_of(first.facts), first, position, states, self.line.checkpoint_epochs)

    def _before(self, experiment: Experiment) -> ResumedTraining | None:
        """The training that the line goes on with, if any."""
        if self.line.resume is None:
            return None
        found = self._before_line or end_of_epoch(Path(self.line.resume))
        require_same_data(experiment, found.facts)
        return found

    def _config_of(self, begin: Mapping[str, Any]) -> Any:
        """With every choice made, for the stages that the line began with."""
        config = self._parsed(begin["config"])
        require_same_stages(self.line, config)
        return config

    def _parsed(self, text: str) -> Any:
        return load_config(self._schema, values=document.parse(text, source="stage 0"))

    def _take_up(self, saved: Checkpoint, experiment: Experiment | None) -> None:
        """Goes on from a snapshot.

        Raises:
            DataError: It is of another line, or of other data.
        """
        state, counted = saved.state, saved.epoch()
        begin = state["begin"]
        if experiment is not None:
            require_same_config(experiment.config, begin.get("asked"))
            require_same_data(experiment, begin["facts"])
            position = FeedPosition.of(state["feed"])
            require_same_fixed(self.line, state["fixed"])
            before = None if position.handed is None else self._before(experiment)
            self._feed = self._feed_of(experiment, Item(BEGIN, begin), position, before)
        kept = [Packed.of_state(one) for one in counted["retained"]]
        self._retained = Retained(self.line.retain_bytes, state["first"], kept)
        self._ended = state["ended"]
        self._build(begin, saved.layers())
        assert self._worker is not None
        self._worker.go_on(counted["worker"])
        if self._top is not None:
            self._top.go_on(counted["top"], ended=self._ended)
            self._worker.take_decoders(counted["decoders"])
        _log.info(f"stage {self.number} goes on after {self._done} items, {self._worker.next_batch} of them batches")

    def _begin_with(self, item: Item) -> None:
        """The first item: the stage is built, unless what its layers go on with is still to come."""
        self._begin, self._files = item.facts, item.tree
        self._neighbours.set_begun(item.facts["begun"])
        if not item.facts["batches"]:
            self._build(item.facts, None)
        if not self._is_last:
            self._emit(item)

    def _take_state(self, item: Item) -> None:
        """What a layer goes on with. Those of this stage come before those of the next ones, and build it."""
        if item.kind != STATE or self._begin is None:
            raise DataError(f"an item of the kind {item.kind} came first; begin the line anew")
        config, number = self._config_of(self._begin), item.facts["layer"]
        own = layers_of_stages(config.engine.sizes)[self.number]
        if number not in own:
            raise DataError(f"the state of layer {number} came to a stage of the layers {[*own]}; begin the line anew")
        self._given[number] = item.tree
        if len(self._given) == len(own):
            self._build(self._begin, self._given)
            self._given = {}

    def _build(self, begin: Mapping[str, Any], states: Mapping[int, State] | None) -> None:
        """Makes the layers, as new or as saved; the engine's settings hold from here on."""
        config = self._config_of(begin)
        models = (
            self._kind.models(config, begin["blueprint"])
            if self._feed is None  # as on all stages but the first
            else self._feed.experiment.models.under(config)
        )
        device = make_current(self._device)
        check_precision(config.train.precision, [device])
        check_compile(config.engine.compile, [device])
        own = layers_of_stages(config.engine.sizes)[self.number]
        if self._is_last:
            self._top = Top(self.place.run, self.line.line, config, begin["facts"], models.criterion)
            self._open.callback(self._top.close)
        self._open.enter_context(intra_op_threads(config.engine.threads))
        self._open.enter_context(matmul_precision(config.engine.matmul))
        self._open.enter_context(attention_without_plans({device.type}))
        self._worker = StageWorker(
            self.number, models, config, own, self._device, self._emit, states, self._top, begin["batches"]
        )
        self._open.callback(self._worker.close)
        self._open.enter_context(libraries_left_out())
        if self._top is not None and self._files is not None:
            self._top.begin(self._parsed(begin["asked"]), self._files)
            self._files = None

    def _work(self) -> None:
        items = None if self._feed is None else self._open.enter_context(closing(self._feed.items()))
        came = True
        while not self._ended:
            # Amid the batches of an update nothing can be saved: the others of them are done first, while they come.
            gathers = self._worker is not None and self._worker.gathers
            if (code := self._stop.code()) is not None and not (gathers and came):
                self._interrupt(code)
            self._tell()
            with self._at_item():
                self._save_if_due()
            came = self._step(items)

    def _step(self, items: Iterator[Item] | None) -> bool:
        """Does what the next item asks for; says whether there was one."""
        item = self._next(items)
        if item is None:
            return False
        if item.kind == BEGIN:
            self._config_of(item.facts)  # a line's file that was edited is of this stage alone, and not of the item
        with self._at_item():
            if item.kind == BEGIN:
                self._begin_with(item)
            elif self._worker is None:
                self._take_state(item)
            else:
                self._worker.handle(item)
        self._done += 1
        self._ended = item.kind == END
        return True

    @contextmanager
    def _at_item(self) -> Iterator[None]:
        """What goes wrong within is of the item, and comes again with it; but for a disk, a link or a signal."""
        try:
            yield
        except (Interrupted, LineError, PeerLostError):
            raise
        except Exception as error:
            self._failed_at_item = not (
                isinstance(error.__cause__ or error, OSError) or self._neighbours.failure is not None
            )
            raise

    def _next(self, items: Iterator[Item] | None) -> Item | None:
        if items is not None:
            try:
                with self._at_item(), worker_failures(self._stop, "the same command"):
                    return next(items)
            except Interrupted:  # a worker process has heard it first: what there is gets saved
                return None
        assert self._neighbours.before is not None
        found = self._neighbours.before.take(LOOK_S)
        if found is None:
            self._neighbours.require()
            return None
        number, packed = found
        if number != self._done:
            raise DataError(f"item {number} came, where item {self._done} was expected; begin the line anew")
        return packed.item()

    def _emit(self, item: Item) -> None:
        """Gives an item to the next stage; waits while too many wait for a snapshot there."""
        packed, asked_at = Packed.of(item), 0.0
        if packed.largest > self.line.largest_bytes:
            raise DataError(
                f"a tensor for the next stage takes {packed.largest / 2**20:.1f} MiB there, more than largest_mib, "
                f"{self.line.largest_mib:g}; raise that in the line's file, on all machines"
            )
        assert self._neighbours.after is not None
        # Amid an update, or what its layers begin with, the next stage cannot save: all of it has to come first.
        while item.kind != STATE and (self._worker is None or not self._worker.gathers):
            with self._retained.changed:
                room = self._retained.changed.wait_for(
                    lambda: self._retained.has_room(packed.size) or self._neighbours.failure is not None, LOOK_S
                )
            self._neighbours.raise_failure()
            if room:
                break
            if (code := self._stop.code()) is not None:
                raise Interrupted("interrupted while the next stage took nothing; the last snapshot stands", code)
            if monotonic() - asked_at > 1.0:
                asked_at = monotonic()
                self._neighbours.after.ask_for_snapshot()
            self._neighbours.require()
            self._tell()
        self._retained.add(packed)
        self._neighbours.after.tell()

    def _interrupt(self, code: int) -> None:
        if self._worker is not None and not self._worker.gathers:
            self._save()
            self._snapshots.settle(must=True)
        on = "begins it" if self._snapshots.saved is None else "goes on from its snapshot"
        raise Interrupted(f"stage {self.number} was interrupted; the same command {on}", code)

    def _save_if_due(self) -> None:
        if self._neighbours.before is not None and self._neighbours.before.wants_snapshot:
            self._neighbours.before.wants_snapshot, self._wanted = False, True
        due = self._wanted or monotonic() - self._saved_at > self.line.snapshot_s
        if due and not self._snapshots.is_writing and self._worker is not None and not self._worker.gathers:
            self._wanted = False
            self._save()

    def _save(self) -> None:
        """Copies what there is, and has it written on a thread of its own."""
        assert self._worker is not None
        states, counted = self._worker.state()
        first, kept = self._retained.all()
        state = {
            "begin": self._begin,
            "first": first,
            "ended": self._ended,
            "fixed": self.line.fixed,
            "feed": None if self._feed is None else self._feed.position.state(),
        }
        tensors = {
            "worker": counted,
            "retained": [packed.state() for packed in kept],
            "top": None if self._top is None else self._top.state(),
            "decoders": {} if self._top is None else self._worker.decoders(),
        }
        told = self._neighbours.before.tell_saved if self._neighbours.before is not None else lambda _: None
        self._snapshots.save(self._done, states, state, tensors, told)
        self._saved_at = monotonic()

    def _finish(self) -> None:
        """Saves, and leaves once the neighbours need nothing more."""
        parting = Parting(self.number, self._neighbours, self._partings, self._stop, self._tell)
        self._save()
        self._snapshots.settle(must=True)
        if self._neighbours.after is not None:
            parting.hand_over(self._retained)
            self._save()  # without what the next stage has: started again, this one waits for nobody who is done
            self._snapshots.settle(must=True)
        self._finished = True
        self._tell(at_once=True)  # before the last word: the next stage shows it
        parting.part()
        self._tell(at_once=True)

    @property
    def _partings(self) -> Partings:
        assert self._begin is not None
        return Partings(self.place.folder, self._begin["begun"])

    def _tell(self, *, at_once: bool = False) -> None:
        if not self._finished:  # then the others may leave
            self._neighbours.look()
        before, after = self._neighbours.before, self._neighbours.after
        self._status.tell(
            lambda: StageStatus(
                stage=self.number,
                state="finished" if self._finished else "working",
                items=self._done,
                batches=0 if self._worker is None else self._worker.next_batch,
                saved=self._snapshots.saved,
                saved_at=self._snapshots.saved_at,
                retained=self._retained.next - self._retained.first,
                retained_mib=self._retained.size / 2**20,
                waiting=0 if before is None else len(before),
                window=0 if after is None else after.window.size,
                before=shown(before),
                after=shown(after),
                total=None if self._feed is None else self._feed.total,
            ),
            below={} if before is None else before.statuses,
            pass_on=None if after is None else after.tell_status,
            at_once=at_once,
        )


def _device(name: str) -> str:
    if name != "auto":
        parse_device(name)
        return name
    return all_devices()[0]
