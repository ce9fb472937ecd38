"""Methods of training the same network, at equal cost and with equally many tries: accuracy or loss, and what it costs.

    python scripts/bench/methods.py --model resnet --dataset cifar10 --data-root DIR --width 0.5 \\
        --methods al,bp,greedy --parts 2 4 8 --tries 3e-4,1e-3,3e-3 --seeds 5 --epochs 10 --budget flops

First every method, in every number of parts, is trained once for each setting to try, for ``--try-epochs`` with a seed
of their own; the best on held-out samples is what it is trained with, once for each seed. Of each training the epoch
counts that is best on held-out samples; its figure on test samples is what the table has. All methods see the same
batches for a seed, and the same samples are held out: differences to BP are paired, and have an interval of 95 %.

A contestant is a method, with options: ``--methods "al,al model.bridges=flat,bp"``. All have as many tries: a learning
rate each, or, where ``--tries-of`` gives one of them settings of its own (rates and options of its heads), so many:
``--tries-of greedy train.lr.base=1e-3,3e-3 model.activation=relu,leaky-relu``.

``--budget`` says what is equal: ``steps``, the batches; ``flops``, the FLOPs of training, and ``time``, the seconds of
training, of BP in ``--epochs`` epochs: dearer methods take fewer batches, cheaper ones more. Seconds are per batch on
one device, measured in turns beforehand, not those of a training while the machine does something else. Tries go by the
same budget. A part of an epoch is taken from all epochs alike, so that the learning rate comes to its end.

With ``--test-once`` test samples are measured by the weights of the best epoch alone: where there are many of them, to
measure them after each epoch takes longer than training. The picture has no curves then.

A row of the file ``--json`` is one training; it is written after each, and what it has is not done again. Rows of other
files, made elsewhere, come in with ``--merge``. methods_report.py prints the file again, and draws the picture. With
``--jobs`` so many trainings are under way at once, in processes of their own: one alone does not fill a GPU.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import islice
from multiprocessing import active_children, get_context, parent_process
from pathlib import Path
from typing import Any, NamedTuple

import torch
from methods_costs import Form, counted, machine, timed
from methods_report import report
from methods_rows import Contestant, Row, Table, best_epoch, best_try, key_of, length, shown
from torch.nn import functional as F

from pipeal.config import RunConfig, TuneConfig, all_values
from pipeal.core.errors import ConfigError, DataError, NonFiniteError, PipealError, first_line
from pipeal.core.methods import BASELINE
from pipeal.core.modules import module_of
from pipeal.core.protocols import TrainableLayer
from pipeal.data import Batch, EpochBatches
from pipeal.engine import Pipeline
from pipeal.engine.devices import fastest_precision
from pipeal.engine.devices.allocator import keep_freed_memory
from pipeal.run.build import Experiment, evaluated_part
from pipeal.run.build_language import CharacterPart
from pipeal.run.duration import at_length
from pipeal.run.form_costs import COUNTING
from pipeal.run.grid import Setting, parse_grid, settings_of, with_setting
from pipeal.run.opening import course_of, new_layers, open_pipeline
from pipeal.run.plan_costs import Wanted, experiment_of, refuse_chosen
from pipeal.training.evaluation import accuracy, inputs_of
from pipeal.training.position import Position
from pipeal.training.row import EpochRow
from pipeal.training.trainer import Scores, fit

BUDGETS = ("steps", "flops", "time")
CHOSEN = {
    "train.mode": "--methods",
    "train.methods": "--methods",
    "model.parts": "--parts",
    "train.lr.base": "--tries",
    "train.seed": "--first-seed and --seeds",
    "train.epochs": "--epochs",
    "train.precision": "--precision",
    "engine.devices": "--device",
    "engine.threads": "--threads",
    "engine.schedule": "none: layers are trained one after the other",
}
"""Keys that have options of their own here."""

_OF_A_ROW = ("train.seed", "train.mode", "train.methods", "train.epochs", "train.lr.base", "model.parts")
_ELSEWHERE_OTHERWISE = ("out", "engine", "tune", "train.checkpoint", "data.root", "data.text", "data.file",
                        "data.test_file", "data.cache", "data.cache_dir", "data.workers", "data.prefetch",
                        "data.download")  # fmt: skip
"""Keys, or sections, that may differ between rows of one table: they change nothing but rounding."""

_OF_ALL = ("engine.packet", "engine.matmul")
"""Keys of these that round so coarsely that all rows have them alike."""

EVALUATED = 64
"""Blocks of a text in a batch of an evaluation."""


@dataclass
class FirstBatches:
    """The first so many batches of each epoch.

    Attributes:
        whole: All of them.
        count: How many.
    """

    whole: EpochBatches
    count: int
    first: int = 0

    def __iter__(self) -> Iterator[Batch]:
        return islice(iter(self.whole), len(self) - self.first)

    def __len__(self) -> int:
        return min(self.count, len(self.whole))

    def set_epoch(self, epoch: int, first: int = 0) -> None:
        self.first = first
        self.whole.set_epoch(epoch, first)

    def close(self) -> None:
        self.whole.close()


@dataclass
class Lines:
    """Tells of every epoch in a line on standard error.

    Attributes:
        label: What is trained.
        samples: That it was trained on.
    """

    label: str
    samples: int = 0

    def begin_epoch(self, epoch: int, *, batches: int, turn: int) -> None:
        pass

    def advance(self, *, samples: int, tokens: int) -> None:  # noqa: ARG002
        self.samples += samples

    def end_epoch(self, row: EpochRow) -> None:
        held, test = figures_of(row)
        told = "" if test is None or math.isnan(test) else f", test {test:.4f}"
        print(f"{self.label}: epoch {row.epoch}, held-out {held:.4f}{told}, {row.epoch_time:.1f} s", file=sys.stderr)


@dataclass
class BestWeights:
    """Those of the epoch that is best by held-out samples.

    Attributes:
        layers: Whose.
        is_loss: Whether less is better.
        held: The figure after each epoch.
        kept: By layer; empty before any epoch was a number.
    """

    layers: Sequence[TrainableLayer]
    is_loss: bool
    held: list[float] = field(default_factory=list)
    kept: list[dict[str, torch.Tensor]] = field(default_factory=list)

    def note(self, held: float) -> None:
        """Keeps the weights as they stand where their epoch is the best so far."""
        self.held.append(held)
        if best_epoch(self.held, is_loss=self.is_loss) == len(self.held) - 1:
            states = (module_of(layer).state_dict() for layer in self.layers)
            self.kept = [{key: one.clone() for key, one in state.items()} for state in states]

    def restore(self) -> None:
        """Gives the layers these weights again."""
        for layer, weights in zip(self.layers, self.kept, strict=True):
            module_of(layer).load_state_dict(weights)


class Training(NamedTuple):
    """One to be done; what it is sent to another process as, so that a contestant is its name.

    Attributes:
        kind: ``try``, which is measured on held-out samples alone, or ``seed``.
        name: Of the contestant.
        parts: Into how many its network is divided.
        setting: Options, and what was tried.
        seed: Of weights and batches.
        epochs: How many.
        batches: Of each epoch.
    """

    kind: Any
    name: str
    parts: int | None
    setting: Setting
    seed: int
    epochs: int
    batches: int

    @property
    def key(self) -> str:
        """That of its row."""
        return key_of(self.kind, self.name, self.parts, dict(self.setting), *self[4:])


def trained(experiment: Experiment, training: Training, *, test_once: bool = False) -> Row:
    """One training, of the data and configuration of an experiment.

    Args:
        experiment: What all trainings share.
        training: Which.
        test_once: Measure test samples with the weights of the best epoch alone, not after each epoch.
    """
    kind, name, parts, setting, seed, epochs, batches = training
    form = Form(Contestant.of(name), parts, setting)
    config = form.config(experiment.config)
    config = replace(config, train=replace(config.train, seed=seed, epochs=epochs))
    config = at_length(config, batches, quiet=True)
    own, position = experiment.under(config), Position()
    is_loss, layers = own.criterion is not None, list(new_layers(own, config, 1))
    once = BestWeights(layers, is_loss) if kind == "seed" and test_once else None
    each_epoch = kind == "seed" and not test_once
    test_of_best: float | None = None

    def evaluate(pipe: Pipeline) -> Scores:
        held = figure(own, pipe, own.held)
        if once is not None:
            once.note(held)
        test = figure(own, pipe, own.test) if each_epoch else math.nan
        if is_loss:
            return Scores(math.nan, math.nan, test_loss=test, held_acc=math.nan, held_loss=held)
        return Scores(math.nan, test, held_acc=held)

    watcher = Lines(f"{kind} {name}, parts {parts or '-'}, {shown(setting)}, seed {seed}")
    failed: str | None = None
    with closing(FirstBatches(own.train_batches(seed), batches)) as feed:
        try:
            with open_pipeline(layers, config, seed) as pipe:
                for _ in fit(pipe, feed, evaluate, course_of(config), watcher, position):
                    pass
                if once is not None and once.kept:
                    once.restore()
                    test_of_best = figure(own, pipe, own.test)
        except NonFiniteError as error:
            failed = f"diverged, {first_line(error)}"
    measured = [(held, test if each_epoch else None) for held, test in map(figures_of, position.rows)]
    best = None if failed else best_epoch([held for held, _ in measured], is_loss=is_loss)
    if best is None and failed is None:
        failed = "diverged"
    if best is not None and once is not None:
        measured[best] = (measured[best][0], test_of_best)
    return Row(
        *(kind, name, parts, dict(setting), seed, epochs, batches, measured, best),
        samples=watcher.samples,
        seconds=sum(row.epoch_time for row in position.rows),
        failed=failed,
        machine=machine(config),
    )


def figures_of(row: EpochRow) -> tuple[float, float | None]:
    """Of held-out and of test samples: losses where there are some, else accuracies."""
    held, test = (row.held_acc, row.test_acc) if row.held_loss is None else (row.held_loss, row.test_loss)
    assert held is not None
    return held, test


def figure(experiment: Experiment, pipe: Pipeline, part: Any) -> float:
    """The accuracy on a part of the data; of a text the mean loss of all its characters but the first, in nats."""
    if isinstance(part, CharacterPart):
        return text_loss(pipe, part.characters, experiment.config.model.block)
    return accuracy(pipe, experiment.in_order(part))


def text_loss(pipe: Pipeline, characters: torch.Tensor, block: int) -> float:
    """The mean loss of all characters of a text but the first: cut into blocks, each with no look at the one before."""
    targets: list[torch.Tensor] = []
    total, count = 0.0, 0
    for logits in pipe.predict_each(inputs_of(blocks_of(characters, block), targets)):
        y = targets.pop(0).to(logits.device)
        total += float(F.cross_entropy(logits.float().flatten(0, 1), y.flatten(), reduction="sum").double())
        count += y.numel()
    return total / count


def blocks_of(characters: torch.Tensor, block: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields a text as batches of blocks, each with the characters that come next; the last block may be shorter.

    >>> [(x.tolist(), y.tolist()) for x, y in blocks_of(torch.arange(6), 3)]
    [([[0, 1, 2]], [[1, 2, 3]]), ([[3, 4]], [[4, 5]])]
    """
    x, y = characters[:-1].long(), characters[1:].long()
    whole = len(x) // block * block
    pairs = zip(x[:whole].view(-1, block).split(EVALUATED), y[:whole].view(-1, block).split(EVALUATED), strict=True)
    yield from pairs
    if whole < len(x):
        yield x[whole:].unsqueeze(0), y[whole:].unsqueeze(0)


@dataclass
class Bench:
    """What is compared, and how.

    Attributes:
        experiment: With data and a configuration in which all but method, parts, setting, seed and length is chosen.
        table: What was found so far.
        tries: By contestant, the settings to try, options included; all have as many.
        parts: The numbers of parts.
        batches: Of an epoch.
        options: What was asked for, which other processes open the experiment by.
    """

    experiment: Experiment
    table: Table
    tries: dict[str, list[Form]]
    parts: Sequence[int]
    batches: int
    options: argparse.Namespace

    def forms(self) -> list[list[Form]]:
        """Every contestant in every number of parts, once where that makes no difference: what is tried of each."""
        found: dict[tuple[str, int | None], list[Form]] = {}
        for parts in self.parts:
            for name, forms in self.tries.items():
                own = [form._replace(parts=form.contestant.parts(parts)) for form in forms]
                found[name, own[0].parts] = own
        return list(found.values())

    def check(self) -> None:
        """Makes every model, without weights: what cannot be trained is told before anything is.

        Raises:
            ConfigError: One cannot; with the contestant and the parts.
        """
        for form in (form for forms in self.forms() for form in forms):
            config = form.config(self.experiment.config)
            try:
                for _ in self.experiment.under(config).layers(config.train.mode, 0, here=()):
                    pass
            except PipealError as error:
                where = f"{form.contestant.name} in {form.parts} parts" if form.parts else form.contestant.name
                raise ConfigError(f"{where}: {error}") from error

    def count(self) -> None:
        """Counts what every form costs, and BP, which budgets are those of; and again what was counted by other rules.

        Raises:
            DataError: There are trainings whose length went by what was counted so.
        """
        costs = self.table.costs
        stale = {key: Form.of(key) for key, cost in costs.items() if cost.get("counting") != COUNTING}
        if stale and self.table.rows and self.options.budget == "flops":
            raise DataError(
                f"{self.table.path}: its budgets go by FLOPs counted by other rules; name another file with --json"
            )
        wanted = {form.key: form for form in (self.baseline, *(form for forms in self.forms() for form in forms))}
        for key, form in {**wanted, **stale}.items():
            if key in stale or key not in costs:
                costs[key] = counted(self.experiment, form)
                self.table.write()

    def clock(self) -> None:
        """Measures the time of every form whose time is not known, beside BP's."""
        for parts in self.parts:
            every = {form.key: form for forms in self.forms() for form in forms if form.parts in (parts, None)}
            wanted = {self.time_key(form, parts): form for form in every.values()}
            missing = [form for key, form in wanted.items() if key not in self.table.times]
            if missing:
                found = timed(self.experiment, missing, parts)
                self.table.times |= {self.time_key(form, parts): found[form.key] for form in missing}
                self.table.write()

    @staticmethod
    def time_key(form: Form, parts: int) -> str:
        """Where the times of a form stand, and its forecast for so many devices."""
        return key_of(form.key, parts)

    @property
    def baseline(self) -> Form:
        """BP as it comes, which budgets are those of."""
        return Form(Contestant.of(BASELINE.name), None, {})

    def length(self, form: Form, epochs: int) -> tuple[int, int]:
        """How many epochs of how many batches a form trains, where BP trains for so many whole ones."""
        budget = self.table.of["budget"]
        share = 1.0
        if budget == "flops":
            share = self._flops(self.baseline) / self._flops(form)
        elif budget == "time":
            found = self.table.times[self.time_key(form, form.parts or self.parts[0])]
            share = found["bp_batch_s"] / found["batch_s"]
        return length(epochs * share, self.batches)

    def _flops(self, form: Form) -> float:
        return float(self.table.costs[form.key]["training_flops_per_sample"])

    def run(self, seeds: Sequence[int]) -> None:
        """Tries, chooses and trains whatever the table has not, seed by seed: differences are paired early."""
        of = self.table.of
        with nullcontext() if self.options.jobs == 1 else _workers(self.options.jobs) as pool:
            tries = (form for forms in self.forms() for form in forms)
            self._train(pool, (self._training(form, "try", of["try_seed"]) for form in tries))
            chosen = [form for forms in self.forms() if (form := self.chosen(forms)) is not None]
            self._train(pool, (self._training(form, "seed", seed) for seed in seeds for form in chosen))

    def chosen(self, forms: Sequence[Form]) -> Form | None:
        """The form whose try was best; None where all diverged."""
        first, is_loss = forms[0], self.table.of["measure"] == "loss"
        best = best_try(self.table.rows.values(), first.contestant.name, first.parts, is_loss=is_loss)
        return None if best is None else first._replace(setting=best.setting)

    def _training(self, form: Form, kind: str, seed: int) -> Training:
        length = self.length(form, self.table.of["try_epochs" if kind == "try" else "epochs"])
        return Training(kind, form.contestant.name, form.parts, form.setting, seed, *length)

    def _train(self, pool: ProcessPoolExecutor | None, trainings: Iterable[Training]) -> None:
        """What the table has not: in order, or by the processes of a pool."""
        missing = {one.key: one for one in trainings if one.key not in self.table.rows}.values()
        if pool is None:
            for training in missing:
                self._keep(trained(self.experiment, training, test_once=self.options.test_once))
            return
        for future in as_completed([pool.submit(_trained, self.options, training) for training in missing]):
            self._keep(future.result())

    def _keep(self, row: Row) -> None:
        self.table.add(row)
        if row.failed is not None:
            print(f"{row.kind} {row.name}, {shown(row.setting)}: {row.failed}", file=sys.stderr)


@contextmanager
def _workers(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """Processes that end where something fails, in the midst of what they do."""
    with ProcessPoolExecutor(jobs, get_context("spawn"), _begin) as pool:  # CUDA cannot be used after forking
        try:
            yield pool
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in active_children():
                worker.terminate()
            raise


_opened: list[Experiment] = []
"""Of a process that does trainings for another one, what it was opened with."""


def _begin() -> None:
    threading.Thread(target=_end_with, args=(parent_process(),), daemon=True).start()
    keep_freed_memory()


def _end_with(parent: Any) -> None:
    """Ends this process with the other one, however that ends: what is trained here would be in vain."""
    parent.join()
    os._exit(1)


def _trained(options: argparse.Namespace, training: Training) -> Row:
    if not _opened:
        _opened.append(opened(options))
    return trained(_opened[0], training, test_once=options.test_once)


def tries_of(
    contestants: Iterable[Contestant], rates: str, own: Iterable[Sequence[str]], config: RunConfig
) -> dict[str, list[Form]]:
    """By contestant, the settings to try; in no number of parts yet.

    Args:
        contestants: All of them.
        rates: The learning rates for those that have no settings of their own, with commas between.
        own: Of those that have, the name and keys with values.
        config: What they change.

    Raises:
        ConfigError: A key or a value is none, a name is none of the contestants, or they would have unequal tries.
    """
    grids = {name: tuple(texts) for name, *texts in own}
    found = {}
    for one in contestants:
        with _told_of(f"--methods {one.name!r}:"):
            with_setting(config, one.options)
        with _told_of("--tries-of" if one.name in grids else "--tries"):
            grid = grids.pop(one.name, (f"train.lr.base={rates}",))
            settings = settings_of(parse_grid(replace(config, tune=TuneConfig(grid=grid))))
        found[one.name] = [Form(one, None, {**one.options, **setting}) for setting in settings]
    if grids:
        raise ConfigError(f"--tries-of {next(iter(grids))!r}: expected a contestant of --methods: {', '.join(found)}")
    counts = {name: len(forms) for name, forms in found.items()}
    if len(set(counts.values())) > 1:
        told = ", ".join(f"{name} {count}" for name, count in counts.items())
        raise ConfigError(f"--tries, --tries-of: found unequal numbers of tries ({told}); expected the same for all")
    return found


@contextmanager
def _told_of(option: str) -> Iterator[None]:
    """Has a mistake told of the option that was given here, where the commands have it of theirs."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(str(error).replace("--tune", option, 1)) from None


def shared_facts(experiment: Experiment, options: argparse.Namespace, batches: int) -> dict[str, Any]:
    """What all rows of a table share."""
    config = experiment.config
    defaults, values = all_values(type(config)()), all_values(config)

    def is_own(key: str) -> bool:
        elsewhere = any(key == one or key.startswith(f"{one}.") for one in _ELSEWHERE_OTHERWISE)
        return key in _OF_A_ROW or (elsewhere and key not in _OF_ALL)

    return {
        "dataset": config.dataset,
        "model": config.model.name,
        "measure": "accuracy" if experiment.criterion is None else "loss",
        "budget": options.budget,
        "epochs": options.epochs,
        "try_epochs": options.try_epochs,
        "try_seed": options.try_seed,
        "limit_train": options.limit_train,
        "test_once": options.test_once or None,  # as tables of before have it
        "batches": batches,
        "data": experiment.facts,
        # A key that comes later has its default in tables of before.
        "config": {key: value for key, value in values.items() if not is_own(key) and value != defaults[key]},
    }


def limited(experiment: Experiment, count: int | None) -> Experiment:
    """With a fixed random part of the training samples.

    Raises:
        ConfigError: A text has no samples.
    """
    part = None if count is None else evaluated_part(len(experiment.train), count)
    if part is None:
        return experiment
    if experiment.criterion is not None:
        raise ConfigError("--limit-train: a text is not made of samples; leave it out")
    train = experiment.train.subset(part)
    facts = {**experiment.facts, "train_samples": len(train), "fingerprint": train.fingerprint}
    return replace(experiment, train=train, facts=facts)


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="resnet, vgg, transformer, lstm or charlm")
    parser.add_argument("--dataset", help="default: the embedded one, which charlm has not")
    parser.add_argument("--preset", help="of charlm's sizes")
    parser.add_argument("--data-root", default="data")
    parser.add_argument("--methods", default="al,bp,greedy", help="contestants, with commas between")
    parser.add_argument("--parts", type=int, nargs="+", default=[4])
    parser.add_argument("--budget", choices=BUDGETS, default="steps")
    parser.add_argument("--epochs", type=int, help="of BP; default: those of the configuration")
    parser.add_argument("--seeds", type=int, default=1, help="how many, from --first-seed")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--tries", default="3e-4,1e-3,3e-3", help="learning rates")
    parser.add_argument("--tries-of", nargs="+", action="append", default=[], metavar=("NAME", "KEY=VALUES"))
    parser.add_argument("--try-epochs", type=int, default=3, help="of BP")
    parser.add_argument("--try-seed", type=int, default=1000)
    parser.add_argument("--limit-train", type=int, metavar="N", help="train on N of the samples")
    parser.add_argument("--test-once", action="store_true", help="measure test samples at the best epoch alone")
    parser.add_argument("--width", help="of the network, as model.width")
    parser.add_argument("--precision", default="auto", help="fp32, bf16 or fp16; default: the fastest")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="trainings at once, in processes of their own")
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--times", action="store_true", help="also measure times, and forecast them")
    parser.add_argument("--json", type=Path, metavar="FILE", help="default: runs/methods-DATASET-MODEL.json")
    parser.add_argument("--merge", type=Path, nargs="+", default=[], metavar="FILE", help="rows of other machines")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw accuracy over FLOPs of training there")
    options = parser.parse_args(arguments)
    counts = [
        options.seeds,
        options.jobs,
        options.try_epochs,
        *options.parts,
        options.epochs or 1,
        options.limit_train or 1,
    ]
    if min(counts) < 1:
        parser.error("found a number below 1; expected at least 1 of --seeds, --jobs, --parts and epochs")
    if options.try_seed in range(options.first_seed, options.first_seed + options.seeds):
        parser.error(f"--try-seed: found {options.try_seed}, which is one to report; expected another")
    return options


def opened(options: argparse.Namespace) -> Experiment:
    """The data, and a configuration with all choices made that every training shares."""
    given = {"model.width": options.width, "train.epochs": options.epochs}
    precision = fastest_precision(options.device) if options.precision == "auto" else options.precision
    refuse_chosen(options.overrides, CHOSEN, "methods.py sets")
    methods = list(dict.fromkeys(Contestant.of(text).method.name for text in options.methods.split(",")))
    # So that what is said of options without effect is said of these.
    mode = [f"train.mode={methods[0]}"] if len(methods) == 1 else ["train.mode=compare", f"train.methods={methods}"]
    overrides = [*options.overrides, *mode, f"train.precision={precision}"]
    overrides += [f"{key}={value}" for key, value in given.items() if value is not None]
    wanted = Wanted(options.dataset, options.model, options.preset, options.data_root, tuple(overrides))
    experiment = limited(experiment_of(wanted), options.limit_train)
    config = experiment.config
    engine = replace(config.engine, devices=(options.device,), schedule="sequential", threads=options.threads)
    return experiment.under(replace(config, engine=engine))


def bench(options: argparse.Namespace) -> Path:
    """All of it; gives the file.

    Raises:
        PipealError: A user's mistake, in one line.
    """
    contestants = [Contestant.of(text) for text in options.methods.split(",")]
    experiment = opened(options)
    config = experiment.config
    options.epochs = config.train.epochs
    tries = tries_of(contestants, options.tries, options.tries_of, config)
    path = options.json or Path("runs", f"methods-{config.dataset}-{config.model.name}.json")
    with closing(experiment.train_batches(options.first_seed)) as batches:
        per_epoch = len(batches)
    with Table(path, shared_facts(experiment, options, per_epoch)) as table:
        for other in options.merge:
            table.merge(other)
        found = Bench(experiment, table, tries, options.parts, per_epoch, options)
        found.check()
        found.count()
        if options.times or options.budget == "time":
            found.clock()
        found.run(range(options.first_seed, options.first_seed + options.seeds))
        table.write()
    return path


def main(arguments: Sequence[str] | None = None) -> None:
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    keep_freed_memory()
    options = parsed(arguments)
    try:
        path = bench(options)
        report([path], options.plot)
    except PipealError as error:
        print(f"methods.py: {error}", file=sys.stderr)
        raise SystemExit(2) from error
    except KeyboardInterrupt:
        print("methods.py: interrupted; the same command goes on with the trainings that are missing", file=sys.stderr)
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
