"""Keys that do not go together: refused where they contradict each other, told where one has no effect.

Tables, which :mod:`pipeal.run.configure` checks where a command reads its options.

Only what was given on the command line is told: a file describes an experiment in whichever form and on whatever
devices it is carried out later, and a run's own ``config.yaml`` holds every key.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields
from typing import Any, NamedTuple

from pipeal.config.language import LanguageConfig
from pipeal.config.load import all_values, value_at
from pipeal.config.methods import AugLocalConfig, MethodsConfig
from pipeal.config.schema import AheadConfig, RunConfig
from pipeal.config.text import KINDS, BatchingConfig, ColumnsConfig, TextConfig
from pipeal.config.vision import VisionConfig
from pipeal.core.errors import ConfigError
from pipeal.core.methods import COMPARE, METHODS
from pipeal.core.names import (
    BACKPROP_SCHEDULES,
    FILE,
    HF,
    LANGUAGE,
    LAYER_SCHEDULES,
    TEXT,
    TORCHVISION,
    WITH_HEADS,
    source_of,
)


class Idle(NamedTuple):
    """Where another option has one of some values, these have no effect.

    Attributes:
        where: The other option, or ``processes``: how many there are to be.
        values: Those of its values.
        options: Those without an effect then.
        unless: A third option, and a value of it with which they do have an effect.
    """

    where: str
    values: tuple[object, ...]
    options: tuple[str, ...]
    unless: tuple[str, object] | None = None


_NO_LABELS = tuple(name for name, method in METHODS.items() if not method.has_labels)
_NO_EXITS = tuple(name for name, method in METHODS.items() if not method.has_exits)
_NO_HEADS = tuple(name for name in TEXT.models if name not in WITH_HEADS)
_PUBLISHED = tuple(name for name in TEXT.datasets if name != FILE)
_WHOLE = tuple(name for name, method in METHODS.items() if method.is_whole)


def _keys(section: str, options: Any) -> tuple[str, ...]:
    """The dotted keys of a section."""
    return tuple(f"{section}.{option.name}" for option in fields(options))


_AHEAD = _keys("model.ahead", AheadConfig)
_LOOKING_AHEAD = (*_AHEAD, *_keys("methods.auglocal", AugLocalConfig))
"""Of copies of blocks still to come, which the last part has none of; ``same_start`` is of its own head as well."""

_OF_IMAGES = (
    *("methods.predsim.std", "methods.predsim.decoder", "methods.scpl.cells"),
    *("methods.deinforeg.width", "methods.deinforeg.cells"),
)
"""Of what methods make of images alone; texts go through no such maps."""

_NOT_PROJECTED = Idle("methods.scpl.projector", (None,), ("methods.scpl.hidden", "methods.scpl.width"))
"""Texts, where nothing else is asked for; images go through two maps then."""

_OF_METHODS = [(section, f"methods.{section}", options) for section, options in vars(MethodsConfig()).items()]
"""The methods that have options, where these stand, and what they are."""

IDLE: Mapping[type[RunConfig], tuple[Idle, ...]] = {
    RunConfig: (
        Idle("train.mode", _NO_LABELS, ("train.lr.ae", *_AHEAD)),
        Idle("train.mode", _NO_EXITS, ("train.exit_tolerance",)),
        # One layer is at work all the time: nothing could leave memory.
        Idle(
            "train.mode",
            _WHOLE,
            ("engine.schedule", "engine.within_stage", "engine.offload", "engine.packet", "model.parts"),
        ),
        *(
            Idle("train.mode", tuple(name for name in METHODS if METHODS[name].module != section), _keys(key, options))
            for section, key, options in _OF_METHODS
        ),
        Idle("model.parts", (1,), tuple(key for key in _LOOKING_AHEAD if not key.endswith(".same_start"))),
        Idle("methods.auglocal.depth", (None,), ("methods.auglocal.pyramid",)),
        Idle("methods.scpl.projector", ("identity",), ("methods.scpl.hidden", "methods.scpl.width")),
        Idle("methods.scpl.projector", ("linear",), ("methods.scpl.hidden",)),
        Idle("train.lr.decay", ("none",), ("train.lr.end", "train.lr.per")),
        Idle("data.held_out", (0,), ("train.exit_tolerance",)),
        Idle("engine.schedule", LAYER_SCHEDULES, ("engine.micro_batches",)),
        Idle("engine.schedule", BACKPROP_SCHEDULES, ("engine.queue_depth",)),
        Idle("engine.offload", ("none", "host"), ("engine.offload_folder",)),
        Idle("processes", (1,), ("engine.peer_timeout_s",)),
    ),
    TextConfig: (
        Idle("train.mode", _NO_LABELS, ("model.y_hid", "model.bridges")),
        Idle("model.bridges", ("pooled",), _AHEAD),
        Idle("model.parts", (1,), ("model.bridges",), unless=("model.ahead.same_start", True)),
        Idle("model.name", (*TEXT.models, *TEXT.sources), _OF_IMAGES),
        _NOT_PROJECTED,
        Idle("model.name", _NO_HEADS, ("model.n_heads",)),
        Idle(
            "model.name",
            (HF,),
            (
                *(f"model.{key}" for key in ("embedding_dim", "x_hid", "n_heads", "dropout", "pretrained", "vectors")),
                *("data.vocab_size", "data.min_frequency", "data.drop_stop_words"),
            ),
        ),
        Idle("model.pretrained", ("none",), ("data.cache_dir",)),
        Idle("dataset", _PUBLISHED, ("data.test_file", "data.test_share", *_keys("data.columns", ColumnsConfig))),
    ),
    VisionConfig: (
        Idle(
            "train.mode",
            _NO_LABELS,
            ("model.x_hid", "model.y_hid", "model.bridges", "model.labels"),
        ),
        Idle("model.bridges", ("pooled", "flat", "mlp"), _AHEAD),
        Idle("model.labels", ("codes", "one-hot"), ("model.x_hid",), unless=("model.bridges", "mlp")),
        Idle("model.labels", ("one-hot",), ("model.y_hid",)),
        Idle("model.name", (HF, TORCHVISION), ("model.width", "model.activation")),
        Idle("data.cache", (False,), ("data.cache_dir",)),
        Idle("dataset", ("toyimages",), ("data.cache", "data.cache_dir")),
    ),
    LanguageConfig: (
        Idle("train.mode", _WHOLE, ("model.per_layer",)),
        Idle("train.mode", _NO_LABELS, ("model.code", "model.labels", "model.bridges")),
        Idle("model.bridges", ("linear", "block"), _AHEAD),
        Idle("model.parts", (1,), ("model.bridges",), unless=("model.ahead.same_start", True)),
        Idle("model.name", tuple(LANGUAGE.models), _OF_IMAGES),
        _NOT_PROJECTED,
    ),
}
"""Of every run, and of each kind."""

_OF_ANY: Mapping[str, tuple[object, ...]] = {
    "model.bridges": ("pooled", "flat"),
    "model.labels": ("inverse", "published"),
    "model.embedding_updates": ("dense",),
    "model.grouping.thresholds": (0,),
}
"""What a model of another library can be told, where pipeal's own can be told more."""

IDLE_IN_ONE_PROCESS = (
    Idle("train.mode", _WHOLE, ("engine.queue_depth", "engine.stall_timeout_s")),
    Idle("engine.schedule", ("sequential",), ("engine.queue_depth", "engine.stall_timeout_s")),
)
"""Where the caller's own thread does the work, nothing waits and nothing is watched; between processes there are always
packets on their way."""

_NAMED_INSTEAD: Mapping[str, str] = {"data.test_file": "data.test_share", "data.cache": "data.cache_dir"}
"""Keys that, where they are a path, leave another one without an effect."""

_ONE_PROCESS = "there is one process"

_SHIPPED = ("budget_tokens",)
"""Set by the configurations that come with pipeal, which serve every kind."""


def check_effects(config: RunConfig, given: Collection[str], *, processes: int = 1) -> list[str]:
    """Asks whether each option does something beside the others.

    Args:
        config: With everything that was given.
        given: The dotted keys that the command line gave.
        processes: That carry out the run.

    Returns:
        A line for each reason why some of ``given`` have no effect, or have another than usual.

    Raises:
        ConfigError: A value makes no sense beside another: a rate that decays to a higher one, an option of another
            kind of batching.
    """
    refuse_rising(config)
    _refuse_of_own(config)
    if isinstance(config, TextConfig):
        _refuse_other_kinds(config.data.batching, given)
    if config.engine.schedule in BACKPROP_SCHEDULES:
        given = {*given} - {"engine.schedule"}  # refused where it cannot be meant
    lines = []
    for table in (*_of(type(config)), *([IDLE_IN_ONE_PROCESS] if processes == 1 else [])):
        by_reason: dict[str, list[str]] = {}
        for where, values, options, unless in table:
            if unless is not None and value_at(config, unless[0]) == unless[1]:
                continue
            found, reason = ({processes}, _ONE_PROCESS) if where == "processes" else _found(config, where)
            idle = [f"{option} {_shown(value_at(config, option))}" for option in options if option in given]
            if idle and found <= {*values}:
                by_reason.setdefault(reason, []).extend(idle)
        lines += [f"{', '.join(idle)}: without effect, since {reason}" for reason, idle in by_reason.items()]
    has = all_values(config)
    for where, option in _NAMED_INSTEAD.items():
        if option in given and isinstance(path := has.get(where), str):
            lines.append(f"{option} {_shown(has[option])}: without effect, since {where} is {path}")
    return [*lines, *_told_of_parts(config)]


def refuse_rising(config: RunConfig) -> None:
    """Asks that a learning rate does not decay to a higher one; one that is still to be chosen is not asked.

    Raises:
        ConfigError: It does.
    """
    lr = config.train.lr
    if lr.decay != "none" and lr.base is not None and lr.end is not None and lr.end > lr.base:
        raise ConfigError(
            f"train.lr.end: found {lr.end:g}, above train.lr.base, which is {lr.base:g}; expected at most that: lower "
            "the end, or raise the base"
        )


def _refuse_of_own(config: RunConfig) -> None:
    """Asks that a model of another library is not told what only pipeal's own can be.

    Raises:
        ConfigError: It is.
    """
    if source_of(config.model.name) is None:
        return
    has = all_values(config)
    for key, values in _OF_ANY.items():
        if key in has and has[key] not in values:
            raise ConfigError(
                f"{key}: found {_shown(has[key])}, which {config.model.name} cannot have, as a model of another "
                f"library; expected {' or '.join(map(_shown, values))}"
            )


def _told_of_parts(config: RunConfig) -> list[str]:
    """What becomes of losses that compare the samples of a batch with each other, where it is learnt from in parts."""
    modes = config.train.methods if config.train.mode == COMPARE else (config.train.mode,)
    labels = [METHODS[mode].label for mode in modes if METHODS[mode].compares_samples]
    parts = {
        "engine.replicas": config.engine.replicas > 1,
        "train.accumulate": config.train.accumulate > 1,
        "engine.on_oom": config.engine.on_oom == "split",
    }
    ways = [f"{key} {_shown(value_at(config, key))}" for key, divides in parts.items() if divides]
    if not labels or not ways:
        return []
    return [
        f"{', '.join(ways)}: {', '.join(labels)} compare the samples of a batch with each other, and then those of a "
        "part alone; it is another loss than that of the whole batch"
    ]


def _refuse_other_kinds(batching: BatchingConfig, given: Collection[str]) -> None:
    for option in fields(batching):
        kinds, value = [kind for kind in KINDS if option.name in KINDS[kind]], getattr(batching, option.name)
        asked = f"data.batching.{option.name}" in given or (value != option.default and option.name not in _SHIPPED)
        if kinds and asked and batching.kind not in kinds:
            raise ConfigError(
                f"data.batching.{option.name}: found {value}, but kind {batching.kind} does not have it; "
                f"it is for {', '.join(kinds)}"
            )


def _found(config: RunConfig, where: str) -> tuple[set[object], str]:
    """What a key is, in a comparison all of its methods; and how that is told."""
    if where == "train.mode" and config.train.mode == COMPARE:
        return {*config.train.methods}, f"train.methods is {', '.join(config.train.methods)}"
    value = value_at(config, where)
    source = source_of(value) if where == "model.name" else None
    return {source or value}, f"{where} is {_shown(value)}"


def _of(schema: type[RunConfig]) -> Iterator[tuple[Idle, ...]]:
    for kind in reversed(schema.__mro__):
        yield IDLE.get(kind, ())


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
