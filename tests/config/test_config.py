"""The configuration that comes out is the one that was asked for; anything else is one line that says what is not."""

import re
import tempfile
from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path
from typing import get_type_hints

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from pipeal.config import (
    BatchingConfig,
    EngineConfig,
    GroupingConfig,
    ImageDataConfig,
    LanguageConfig,
    LrConfig,
    TextConfig,
    TextDataConfig,
    TextModelConfig,
    TrainConfig,
    VisionConfig,
    VisionModelConfig,
    dump_config,
    find_config,
    given_keys,
    load_config,
)
from pipeal.config.load import REMOVED
from pipeal.config.methods import MethodsConfig
from pipeal.core.errors import ConfigError
from pipeal.core.methods import MODES, with_all

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))

SCHEMAS = (LanguageConfig, TextConfig, VisionConfig)

text = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1)
count = st.integers(1, 2**31 - 1)
positive = st.floats(min_value=0, exclude_min=True, allow_infinity=False)
share = st.floats(0, 1, exclude_max=True)
common = {
    "dataset": text,
    "out": text,
    "train": st.builds(
        TrainConfig,
        mode=st.sampled_from(MODES),
        seed=st.integers(0, 2**63 - 1),
        lr=st.builds(
            LrConfig,
            base=positive,
            end=st.none() | st.floats(min_value=0, allow_infinity=False),
            decay=st.sampled_from(["none", "cosine"]),
        ),
    ),
    "engine": st.builds(
        EngineConfig,
        schedule=st.sampled_from(["sequential", "backward-overlap", "al-fm", "pipelined", "gpipe", "1f1b"]),
        devices=text | st.lists(text, min_size=1).map(tuple),
        sizes=st.none() | st.lists(count, min_size=1).map(tuple),
        compile=st.sampled_from(["none", "static", "dynamic"]),
        replicas=count,
        stall_timeout_s=positive,
        peer_timeout_s=st.floats(0, 604_800, exclude_min=True),
    ),
}
text_configs = st.builds(
    TextConfig,
    **common,
    model=st.builds(
        TextModelConfig,
        name=text,
        x_hid=count,
        dropout=share,
        pretrained=st.sampled_from(["none", "glove", "fasttext"]),
        vectors=st.none() | text,
        grouping=st.builds(
            GroupingConfig,
            thresholds=st.integers(0, 2**31 - 1),
            cost=st.sampled_from(["length", "square"]),
            layers=st.none() | st.lists(count, min_size=1, max_size=4).map(tuple),
        ),
    ),
    data=st.builds(
        TextDataConfig,
        root=st.none() | text,
        download=st.booleans(),
        held_out=share,
        max_len=st.none() | count,
        batching=st.builds(
            BatchingConfig,
            kind=st.sampled_from(["fixed", "bucket", "size-aware", "token-budget", "plan", "stream"]),
            max_samples=st.none() | count,
            oversize=st.sampled_from(["raise", "drop", "single"]),
            shapes=st.none() | count,
        ),
    ),
)
vision_configs = st.builds(
    VisionConfig,
    **common,
    model=st.builds(
        VisionModelConfig,
        name=text,
        y_hid=count,
        width=st.floats(0, 64, exclude_min=True),
        bridges=st.sampled_from(["pooled", "flat", "lookahead", "mlp"]),
        labels=st.sampled_from(["inverse", "published", "codes", "one-hot"]),
        channels_last=st.booleans(),
    ),
    data=st.builds(
        ImageDataConfig,
        root=st.none() | text,
        size=st.integers(1, 64).map(lambda sixteenths: 16 * sixteenths),
        augmentation=st.sampled_from(["none", "basic", "strong"]),
        workers=st.none() | st.integers(0, 2**31 - 1),
        on_broken=st.sampled_from(["raise", "skip"]),
    ),
)
configs = text_configs | vision_configs


def write(folder, content):
    path = Path(folder) / "x.yaml"
    path.write_text(content, encoding="utf-8")
    return path


def leaves(config, path=""):
    """Dotted path and value of everything in a configuration."""
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value):
            yield from leaves(value, f"{path}{field.name}.")
        else:
            yield path + field.name, value


def fails(*args, schema=TextConfig, **kwargs):
    with pytest.raises(ConfigError) as caught:
        load_config(schema, *args, **kwargs)
    assert str(caught.value).isprintable()
    return str(caught.value)


# -- what comes out ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schema", SCHEMAS)
def test_the_defaults_are_valid(schema):
    assert load_config(schema) == schema()


@given(configs)
def test_a_dumped_configuration_loads_to_an_equal_one(config):
    with tempfile.TemporaryDirectory() as folder:
        assert load_config(type(config), write(folder, dump_config(config))) == config


@given(st.tuples(text_configs, text_configs) | st.tuples(vision_configs, vision_configs))
def test_each_source_wins_over_the_weaker_ones(both):
    low, high = both
    with tempfile.TemporaryDirectory() as folder:
        assert load_config(type(low), write(folder, dump_config(low)), values=asdict(high)) == high


@given(configs)
def test_a_single_override_changes_nothing_else(config):
    changed = load_config(type(config), values=asdict(config), overrides=["train.lr.ae=2e-3"])
    assert changed == replace(config, train=replace(config.train, lr=replace(config.train.lr, ae=2e-3)))


def test_the_order_is_defaults_file_values_overrides(tmp_path):
    path = write(tmp_path, "train: {epochs: 2, repeat: 2, seed: 2}")
    config = load_config(
        TextConfig, path, values={"train": {"repeat": 3, "seed": 3}}, overrides=["train.seed=4", "train.seed=5"]
    )
    assert (config.train.epochs, config.train.repeat, config.train.seed) == (2, 3, 5)
    assert config.train.mode == "al"


def test_an_override_may_set_several_keys_of_a_section():
    config = load_config(TextConfig, overrides=["data.batching={kind: fixed, batch_size: 8}"])
    assert config.data.batching == BatchingConfig(kind="fixed", batch_size=8)


@pytest.mark.parametrize("content", ["", "# only a comment", "train:\n  # epochs: 3\n", "---\n"])
def test_an_empty_document_or_section_sets_nothing(tmp_path, content):
    assert load_config(TextConfig, write(tmp_path, content)) == TextConfig()


def test_whole_numbers_are_numbers_and_lists_become_tuples():
    config = load_config(
        TextConfig, overrides=["train.lr.base=1", "engine.sizes=[1, 3]", "engine.devices=[cpu, 'cuda:0']"]
    )
    assert isinstance(config.train.lr.base, float)
    assert config.engine.sizes == (1, 3)
    assert config.engine.devices == ("cpu", "cuda:0")


def test_a_configuration_can_be_hashed_and_not_changed():
    config = load_config(TextConfig, overrides=["engine.sizes=[1, 3]"])
    assert hash(config) == hash(load_config(TextConfig, overrides=["engine.sizes=[1, 3]"]))
    with pytest.raises(AttributeError):
        config.out = "elsewhere"


# -- what is refused --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("train: {lr: {base: fast}}", "train.lr.base: found 'fast', expected a number above 0"),
        ("train: {lr: {base: 0}}", "train.lr.base: found 0, expected a number above 0"),
        ("train: {lr: {base: .inf}}", "train.lr.base: found inf, expected a number above 0"),
        ("train: {lr: {end: .nan}}", "train.lr.end: found nan, expected a number, at least 0, or null"),
        ("train: {epochs: '3'}", "train.epochs: found '3', expected a whole number, at least 1"),
        ("train: {epochs: 3.0}", "train.epochs: found 3.0, expected a whole number, at least 1"),
        ("train: {epochs: true}", "train.epochs: found true, expected a whole number, at least 1"),
        ("train: {epochs: null}", "train.epochs: found null, expected a whole number, at least 1"),
        ("train: {seed: -1}", "train.seed: found -1, expected a whole number, at least 0 and below 2^63"),
        ("train: {mode: fast}", "train.mode: unknown method 'fast' (known: al, auglocal, bp, compare, "),
        ("train: {mode: AugLocal}", "train.mode: unknown method 'AugLocal'; did you mean 'auglocal'?"),
        ("train: {mode: 1}", f"train.mode: found 1, expected {with_all(MODES)}"),
        (
            "train: {lr: {decay: cosin}}",
            "train.lr.decay: found 'cosin', expected none or cosine; did you mean 'cosine'?",
        ),
        ("model: {dropout: 1}", "model.dropout: found 1, expected a number, at least 0 and below 1"),
        ("data: {download: 1}", "data.download: found 1, expected true or false"),
        ("engine: {queue_depth: 0}", "engine.queue_depth: found 0, expected a whole number, at least 1"),
        ("engine: {devices: []}", "engine.devices: found [], expected text, or a list of texts"),
        (
            "engine: {peer_timeout_s: 1e+14}",
            "engine.peer_timeout_s: found 100000000000000.0, expected a number above 0, ",
        ),
        ("engine: {sizes: [1, a]}", "engine.sizes: found [1, 'a'], expected a list of whole numbers, each at"),
        ("out: 2020-01-01", "out: found 2020-01-01, expected text (put it in quotes to make it text)"),
        ("out: {a: b}", "out: found a mapping, expected text"),
        ("train: 3", "train: found 3, expected a mapping with keys of mode, methods, epochs,"),
        ("- 1", "found [1], expected a mapping with keys of dataset, model,"),
    ],
)
def test_a_wrong_value_gives_file_path_found_and_wanted(tmp_path, content, line):
    path = write(tmp_path, content)
    assert fails(path).startswith(f"{path}: {line}")


def test_a_bare_no_where_text_is_wanted_is_explained(tmp_path):
    """YAML 1.1 reads `pretrained: no` as false; the author meant none."""
    assert "a bare yes, no, on or off is false in YAML" in fails(write(tmp_path, "model: {pretrained: no}"))


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("train.lr=null", "train.lr: found null, expected a mapping with keys of base, end, ae, decay, per, warmup"),
        ("model.ahead=", "model.ahead: found null, expected a mapping with keys of depth, width, shared, same_start"),
    ],
)
def test_an_override_of_a_section_with_nothing_is_refused(override, line):
    """It was taken, as an empty section of a file is, and changed nothing."""
    assert fails(overrides=[override]) == f"--set {line}"


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("train: {lr: {bse: 1}}", "train.lr.bse: unknown key; did you mean 'train.lr.base'?"),
        ("trian: {epochs: 1}", "trian: unknown key; did you mean 'train'?"),
        ("epochs: 3", "epochs: unknown key; did you mean 'train.epochs'?"),
        ("train: {lr: {zzz: 1}}", "train.lr.zzz: unknown key; expected one of base, end, ae, decay, per, warmup"),
        ("3: 3", "3: unknown key; expected one of dataset, model, data, train, engine, tune, methods, out"),
    ],
)
def test_an_unknown_key_gives_the_nearest_one(tmp_path, content, line):
    path = write(tmp_path, content)
    assert fails(path) == f"{path}: {line}"


@given(st.sampled_from([path for path, _ in leaves(TextConfig())]), st.integers(0, 40))
def test_a_key_with_a_letter_dropped_is_still_recognised(path, at):
    *section, key = path.split(".")
    others = {name.rpartition(".")[2] for name, _ in leaves(TextConfig())} - {key}
    if len(key) > 3:
        at = 1 + at % (len(key) - 1)  # not the first: without it, x_hid and y_hid are one word
        typo = key[:at] + key[at + 1 :]
        assume(not any(typo == other[:i] + other[i + 1 :] for other in others for i in range(len(other))))
        line = fails(overrides=[".".join([*section, typo]) + "=1"])
        assert re.fullmatch(rf"--set [\w.]+: unknown key; did you mean '{path}'\?", line)


@pytest.mark.parametrize("schema", SCHEMAS)
def test_a_removed_key_is_passed_over_at_its_default_and_refused_otherwise(schema, tmp_path):
    """A run, and a checkpoint in it, was begun by an earlier version: its files hold every key that there was."""
    assert REMOVED.keys() >= {"engine.cuda_graphs"}
    assert not REMOVED.keys() & {path for path, _ in leaves(schema())}
    old = write(tmp_path, dump_config(schema()).replace("engine:\n", "engine:\n  cuda_graphs: false\n"))
    assert "cuda_graphs" in old.read_text()
    assert load_config(schema, old) == schema()
    assert load_config(schema, overrides=["engine.cuda_graphs=false"]) == schema()
    assert given_keys(schema, overrides=["engine.cuda_graphs=false", "engine.threads=1"]) == {"engine.threads"}
    said = "CUDA graphs were removed after commit 05345d3; expected false, or no key"
    new = write(tmp_path, "engine: {cuda_graphs: true}")
    assert fails(new, schema=schema) == f"{new}: engine.cuda_graphs: found true, but {said}"
    for value in ("true", "0", "null"):
        line = fails(schema=schema, overrides=[f"engine.cuda_graphs={value}"])
        assert line == f"--set engine.cuda_graphs: found {value}, but {said}"


def test_an_error_names_the_source_that_set_the_value(tmp_path):
    path = write(tmp_path, "train: {epochs: 0, seed: 1}")
    assert fails(path).startswith(f"{path}: train.epochs: found 0")
    assert fails(path, values={"train": {"epochs": -1}}).startswith("train.epochs: found -1")
    assert fails(path, overrides=["train.epochs=-2"]).startswith("--set train.epochs: found -2")
    assert load_config(TextConfig, path, overrides=["train.epochs=2"]).train.epochs == 2


@pytest.mark.parametrize("override", ["train.epochs", "", "=", "=3", "train"])
def test_an_override_without_key_or_value_is_refused(override):
    assert fails(overrides=[override]).startswith(f"--set {override!r}: expected a key, '=' and a value")


def test_bad_yaml_in_an_override_is_placed():
    assert fails(overrides=["engine.sizes=[1"]).startswith("--set engine.sizes:1:3: expected ',' or ']'")


def test_files_that_cannot_be_read(tmp_path):
    assert fails(tmp_path / "none.yaml") == f"{tmp_path / 'none.yaml'}: no such file; expected a YAML configuration"
    assert fails(tmp_path) == f"{tmp_path}: cannot be read: Is a directory"
    (tmp_path / "latin.yaml").write_bytes(b"out: caf\xe9")
    assert "cannot be read as UTF-8 text" in fails(tmp_path / "latin.yaml")


def test_a_mapping_that_holds_itself_ends(tmp_path):
    assert "train.train: unknown key" in fails(write(tmp_path, "train: &a {train: *a}"))


some_paths = st.sampled_from(["train", "data.batching", *(path for path, _ in leaves(TextConfig()))])
some_values = st.sampled_from(
    ["", "1", "-1", "1e400", "yes", "null", "[1, 2]", "[[]]", "{a: 1}", "*a", "!!set {a}", "cpu"]
)


@given(st.lists(st.builds("{}={}".format, some_paths | st.text(), some_values | st.text()) | st.text(), max_size=3))
def test_any_overrides_give_a_configuration_or_a_one_line_error(overrides):
    line = ""
    try:
        assert isinstance(load_config(TextConfig, overrides=overrides), TextConfig)
    except ConfigError as error:
        line = str(error)
    assert line.isprintable()
    assert len(line) < 400 + sum(map(len, overrides)) * 12  # \U00012345 for one letter


# -- what comes with pipeal -------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_each_shipped_file_is_valid_and_named_after_what_it_holds(path):
    dataset, model, *preset = path.stem.split("-")
    schema = {"charlm": LanguageConfig, "vgg": VisionConfig, "resnet": VisionConfig}.get(model, TextConfig)
    config = load_config(schema, path)
    assert (config.dataset, config.model.name) == (dataset, model)
    assert find_config(dataset, "-".join((model, *preset))) == path


def test_no_file_for_an_unknown_pair():
    assert CONFIGS
    assert find_config("agnews", "nothing") is None
    assert find_config("text", "charlm") == find_config("shakespeare", "charlm") is not None


def test_every_key_is_documented():
    sections = [*SCHEMAS]
    for section in sections:
        for name, kind in get_type_hints(section).items():
            words = "".join(base.__doc__ for base in section.__mro__ if is_dataclass(base))
            assert f"        {name}: " in words, f"{section.__name__}.{name} has no words"
            if is_dataclass(kind):
                sections.append(kind)
    assert len(set(sections)) == 19 + len(fields(MethodsConfig))
