"""What a user meets in the first hour: mistakes that everybody makes once, each with one clear line."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from pipeal import AE, AL, ENC, ALPackage, ConfigError, DataError, LabelAE, LayerError, Pipeline, PlacementError
from pipeal.core.samples import pair_of
from pipeal.engine import RunReport

from .traps import nothing, quick

X, Y = torch.randn(8, 6), torch.arange(8) % 3


def first(**options: Any) -> AL:
    return AL(ENC(nn.Linear(6, 4), nn.Linear(4, 3)), LabelAE(nn.Linear(3, 3), nn.Linear(3, 3), 3), **options)


def package() -> ALPackage:
    return ALPackage([first(), AL(ENC(nn.Linear(4, 4), nn.Linear(4, 3)), AE(nn.Linear(3, 3), nn.Linear(3, 3)))])


@dataclass
class InputsOnly:
    x: Tensor


NO_PAIRS: dict[str, tuple[Any, str]] = {
    "dicts": (
        [{"text": X, "label": Y}],
        r"found a dict with 'text': \(8, 6\) float32, 'label': \(8,\) int64; expected a pair \(x, y\) .*: "
        r"pass \(\(b\['text'\], b\['label'\]\) for b in batches\)",
    ),
    "a dict of two names": ([{"x": X, "y": Y}], "found a dict with 'x'"),
    "tensors": ([X, X], r"found a tensor \(8, 6\) float32; expected a pair .*: zip\(inputs, targets\) joins"),
    "tensors of two rows": ([X[:2]], r"found a tensor \(2, 6\) float32"),
    "one tensor": (X, r"found a tensor \(6,\) float32"),
    "a pair in the place of batches": ((X, Y), r"found a tensor \(8, 6\) .* a single one is \[\(x, y\)\]"),
    "triples": (
        [(X, Y, Y)],
        r"found a tuple of 3: \(8, 6\) float32, \(8,\) int64, \(8,\) int64; .*: several inputs are joined as",
    ),
    "a loader without targets": (
        DataLoader(TensorDataset(X), batch_size=4),
        r"found a (list|tuple) of 1: \(4, 6\) float32; .*: the targets are missing",
    ),
    "a loader of triples": (DataLoader(TensorDataset(X, Y, Y), batch_size=4), "of 3: .* several inputs are joined"),
    "an object without targets": ([InputsOnly(X)], "found a InputsOnly; expected a pair"),
    "names": ({"train": [(X, Y)]}, r"found a str; expected a pair \(x, y\)"),
    "nothing": (None, "the batches are given as None; expected an iterable of pairs"),
    "a function": (lambda: [(X, Y)], "the batches are given as function; .*; call it"),
}


@pytest.mark.parametrize("name", NO_PAIRS)
def test_a_batch_that_is_no_pair_is_named_and_harms_nothing(name: str) -> None:
    batches, words = NO_PAIRS[name]
    with Pipeline(package(), threads=1) as pipe:
        with pytest.raises(DataError, match=words) as caught:
            pipe.run(batches)
        assert "\n" not in str(caught.value)
        assert pipe.run([(X, Y)]).batches == 1


@dataclass
class Pair:
    x: Any
    y: Any


@pytest.mark.parametrize("batch", [(1, 2), [1, 2], Pair(1, 2)])
def test_pairs_and_objects_are_batches(batch: Any) -> None:
    assert pair_of(batch) == (1, 2)


def assert_told(error: type[Exception], build: Callable[[], object], words: str) -> None:
    """What builds something ends with an error of that type, in one line with these words."""
    with pytest.raises(error, match=words) as caught:
        build()
    assert "\n" not in str(caught.value)


NO_LAYERS: dict[str, tuple[Callable[[], Any], str]] = {
    "ENC of classes": (
        lambda: ENC(nn.Linear, nn.Linear),
        r"the class Linear itself instead of Linear\(…\) for f",
    ),  # type: ignore[arg-type]
    "ENC of None": (lambda: ENC(nn.Linear(2, 2), None), "found None for b of ENC; expected a module"),  # type: ignore[arg-type]
    "a loss's class": (lambda: ENC(nn.ReLU(), nn.ReLU(), nn.MSELoss), "the class MSELoss itself .* for cri of ENC"),  # type: ignore[arg-type]
    "AE of classes": (lambda: AE(nn.Linear, nn.Linear), "the class Linear itself .* for g of AE"),  # type: ignore[arg-type]
    "LabelAE of classes": (lambda: LabelAE(nn.ReLU(), nn.ReLU, 3), "the class ReLU itself .* for h of LabelAE"),  # type: ignore[arg-type]
    "AL of classes": (lambda: AL(ENC, AE), r"found the class ENC itself instead of ENC\(…\) for enc"),  # type: ignore[arg-type]
    "AL the other way round": (
        lambda: AL(AE(nn.ReLU(), nn.ReLU()), ENC(nn.ReLU(), nn.ReLU())),
        r"found AE for enc; expected a side of the layer, such as ENC\(f, b\)",
    ),
    "AL of blocks": (
        lambda: AL(nn.Linear(2, 2), nn.Linear(2, 2)),
        "found Linear for enc; expected a side",
    ),
    "a package of classes": (lambda: ALPackage([AL, AL]), r"found the class AL itself instead of AL\(…\)"),  # type: ignore[list-item]
    "a package of one": (lambda: ALPackage(first()), r"expected layers in order, such as \[.*, found AL"),  # type: ignore[arg-type]
    "a package's class": (lambda: Pipeline(ALPackage), "found the class ALPackage itself"),  # type: ignore[arg-type]
    "no model": (lambda: Pipeline(None), "expected a model, or layers in order, found None"),  # type: ignore[arg-type]
    "one layer": (lambda: Pipeline(first()), r"layer 0 is of the class ENC, which does not train itself: .*\[layer\]"),
    "a network": (
        lambda: Pipeline(nn.Sequential(nn.Linear(6, 4), nn.ReLU())),
        r"layer 0 is of the class Linear, which does not train itself: it has no backward\(\); .* ALPackage.from_bp",
    ),
}


@pytest.mark.parametrize("name", NO_LAYERS)
def test_what_is_no_layer_is_told_at_once(name: str) -> None:
    assert_told(LayerError, *NO_LAYERS[name])


def test_a_module_without_layers() -> None:
    with pytest.raises(PlacementError, match="found 0 layers in the model"):
        Pipeline(nn.Linear(2, 2))


@pytest.mark.parametrize("y", [Y, nn.functional.one_hot(Y, 3), Y > 1], ids=["numbers", "one-hot", "bool"])
@pytest.mark.parametrize("g", [nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.ReLU())])
def test_whole_number_labels_into_a_plain_ae_name_the_side_for_them(y: Tensor, g: nn.Module) -> None:
    layer = AL(ENC(nn.Linear(6, 4), nn.Linear(4, 3)), AE(g, nn.Linear(3, 3)))
    words = r"whole numbers, .*; use LabelAE\(g, h, classes\) .* else y.float\(\)"
    with pytest.raises(DataError, match=words), Pipeline([layer]) as pipe:
        pipe.run([(X, y)])


def test_whole_number_labels_that_are_embedded_are_fine() -> None:
    side = AE(nn.Embedding(3, 3), nn.Linear(3, 3), nn.CrossEntropyLoss())
    with Pipeline([AL(ENC(nn.Linear(6, 4), nn.Linear(4, 3)), side)]) as pipe:
        assert pipe.run([(X, Y)]).batches == 1


@pytest.mark.parametrize("y", [Y.tolist(), Y.numpy()], ids=["list", "numpy"])
def test_labels_that_are_no_tensor(y: Any) -> None:
    words = r"targets are given as (list|ndarray); expected a tensor: torch.as_tensor"
    with pytest.raises(DataError, match=words), Pipeline(package()) as pipe:
        pipe.run([(X, y)])


@pytest.mark.parametrize("x", [X.double(), X.long()], ids=["float64", "int64"])
def test_inputs_of_another_type_say_what_to_do(x: Tensor) -> None:
    with pytest.raises(RuntimeError, match="dtype") as caught, Pipeline(package()) as pipe:
        pipe.run([(x, Y)])
    assert "the layer's weights are float32: convert what differs, as x.to(torch.float32)" in caught.value.__notes__[0]


def test_errors_of_shapes_say_nothing_of_types() -> None:
    with pytest.raises(RuntimeError) as caught, Pipeline(package()) as pipe:
        pipe.run([(X[:, :5], Y)])
    assert caught.value.__notes__[0].endswith("input (8, 5) float32, (8,) int64")


OPTIMIZERS: dict[str, tuple[Callable[[], Any], str]] = {
    "made already": (lambda: torch.optim.SGD([nn.Parameter(X)], 0.1), "optimizer is an SGD that was made already"),
    "a name": (lambda: "adam", "optimizer is 'adam'; expected what makes one, such as torch.optim.SGD"),
    "a module": (lambda: nn.Linear, "optimizer is <class .*Linear.*expected what makes one"),
    "one that goes back itself": (lambda: torch.optim.LBFGS, "optimizer LBFGS computes losses by itself"),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_that_no_layer_can_use(name: str) -> None:
    make, words = OPTIMIZERS[name]
    with pytest.raises(ConfigError, match=words) as caught:
        first(optimizer=make())
    assert "\n" not in str(caught.value)


def test_a_closed_pipeline_says_how_it_is_opened_again() -> None:
    with Pipeline(quick(2)) as pipe:
        pipe.run(nothing(1))
    with pytest.raises(RuntimeError, match=r"not open: .*, or once more `with pipe:`"):
        pipe.run(nothing(1))


def report() -> RunReport:
    with Pipeline([*package(), *quick(1)], "cpu*2", threads=1, sizes=[1, 2]) as pipe:
        return pipe.run([(X, Y)] * 3)


def test_a_report_is_printed_as_a_short_table_that_lines_up() -> None:
    found = report()
    lines = str(found).splitlines()
    assert lines[0].startswith("3 batches, 24 samples in ")
    assert lines[0].endswith(" samples/s)")
    assert lines[1].split("  ")[0] == "stage"
    assert [line.split()[:3] for line in lines[1:4]] == [
        ["stage", "device", "layers"], ["0", "cpu", "0"], ["1", "cpu", "1-2"],
    ]  # fmt: skip
    ends = [lines[1].index(head) + len(head) for head in ("stage", "device", "layers", "busy")]
    assert all(line[end] == " " != line[end - 1] for line in lines[2:4] for end in ends[:3])
    assert lines[2][: ends[3]].endswith(f"{found.busy_share[0]:.0%}")
    assert lines[4] == "layer  losses of the last batch"
    wanted = [[str(number), *(f"{loss:#.4g}" for loss in found.losses[number][-1].tolist())] for number in (0, 1)]
    assert [line.split() for line in lines[5:]] == wanted
    assert len({len(line) for line in lines[5:]}) == 1


def test_a_layer_without_losses_does_not_shift_the_others() -> None:
    with Pipeline([*quick(1), first()], threads=1) as pipe:
        found = pipe.run([(X, Y)])
    assert found.layers == [1]
    assert str(found).splitlines()[-1].startswith("    1  ")


def test_a_report_says_what_each_stage_waited_for_and_what_was_left_out() -> None:
    found = report()
    times = replace(found.stages[1], waiting={"input": 0.5, "space": 0.0, "join": 0.25, "saving": 0.001})
    lines = str(replace(found, seconds=1.0, stages=[found.stages[0], times], splits=[0, 2, 0])).splitlines()
    assert lines[3].endswith("input 50%, join 25%")
    assert lines[-1] == "learnt from in parts, by layer: [0, 2, 0]"


def test_a_report_of_nothing_says_why_that_may_be() -> None:
    """An iterator is exhausted in the second epoch, and nothing is learnt, without a word."""
    batches = iter([(X, Y)])
    with Pipeline(package(), threads=1) as pipe:
        pipe.run(batches)
        assert str(pipe.run(batches)) == "no batches since the last report; an iterator gives its batches only once"


def test_the_representation_of_a_report_is_one_line() -> None:
    assert repr(report()).startswith("RunReport(batches=3, samples=24, seconds=")
    assert "\n" not in repr(report())


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ids, self.first, self.last = nn.Embedding(9, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        kept = torch.relu(self.first(self.ids(ids))) * mask[..., None]
        return self.last(kept.sum(1))


class Row(nn.Module):
    def __init__(self, **more: nn.Module) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.many = nn.ModuleList([nn.Linear(6, 6)])
        for name, module in more.items():
            self.add_module(name, module)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.many[0](self.middle(self.first(x))))


class Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.reads, self.last = nn.Linear(6, 6), nn.GRU(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.reads(self.first(x).transpose(0, 1))[0][-1])


class Texts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True)
        self.ids, self.encoder, self.last = nn.Embedding(9, 6), nn.TransformerEncoder(layer, 2), nn.Linear(6, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.last(self.encoder(self.ids(ids), src_key_padding_mask=ids == 0).mean(1))


IDS = torch.ones(8, 5, dtype=torch.long)
NO_SAMPLES: dict[str, tuple[Callable[[], Any], str]] = {
    "with targets": (
        lambda: ALPackage.from_bp(Row(), (X, Y), 3, split=2),
        r"Row does not take the sample, \(8, 6\) .*without",
    ),
    "a loader": (lambda: ALPackage.from_bp(Row(), DataLoader(TensorDataset(X)), 3, split=2), "sample, no tensor: .*"),
    "too narrow": (
        lambda: ALPackage.from_bp(Row(), X[:, :5], 3, split=2),
        r"sample, \(8, 5\) .* without their targets",
    ),
    "one of two inputs": (
        lambda: ALPackage.from_bp(Both(), IDS, 3, split=2),
        r"Both.forward takes ids, mask, and the sample is a Tensor, \(8, 5\) int64; pass .* \{'ids': …, 'mask': …\}",
    ),
    "a misspelt input": (
        lambda: ALPackage.from_bp(Both(), {"ids": IDS, "msk": IDS > 0}, 3, split=["last"]),
        "takes ids, mask, and the sample is a dict of ids, msk",
    ),
    "no cuts": (lambda: ALPackage.from_bp(Row(), X, 3), r"pass a number of layers \(split=3\), or split=\[\.\.\.\]"),
    "a list's name": (
        lambda: ALPackage.from_bp(Row(), X, 3, split=["many"]),
        r"'many' is not called .* called once \(the submodules of many: many.0\)",
    ),
    "the batch second": (
        lambda: ALPackage.from_bp(Turned(), torch.randn(8, 5, 6), 3, split=3),
        r"only 2 parts .*: first, last; 'reads' is given \(5, 8, 6\) float32 for a batch of 8, not the batch first",
    ),
    "within a TransformerEncoder": (
        lambda: ALPackage.from_bp(Texts(), IDS, 3, split=["encoder.layers.1"]),
        "call the modules of model.encoder.layers one after the other",
    ),
}


@pytest.mark.parametrize("name", NO_SAMPLES)
def test_what_from_bp_cannot_convert_says_what_it_wants(name: str) -> None:
    assert_told(ConfigError, *NO_SAMPLES[name])


def test_layers_of_a_transformer_encoder_are_cut_where_the_forward_calls_them() -> None:
    """What the message above advises."""

    class OneByOne(Texts):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.ids(ids)
            for layer in self.encoder.layers:
                x = layer(x, src_key_padding_mask=ids == 0)
            return self.last(x.mean(1))

    package = ALPackage.from_bp(OneByOne(), IDS, 3, split=["encoder.layers.1"])
    with Pipeline(package, threads=1) as pipe:
        assert pipe.run([(IDS, Y)]).batches == 1


def test_a_parametrized_module_is_no_obstacle() -> None:
    """Spectral norm is given no input of the batch: its weight is made of its weight."""
    large = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 512)), nn.ReLU(), nn.Linear(512, 6))
    model = Row(middle=large)  # so costly that it is looked into
    with Pipeline(ALPackage.from_bp(model, X, 3, split=3), threads=1) as pipe:
        assert pipe.run([(X, Y)]).batches == 1


REFUSED: dict[str, tuple[Callable[[], Any], Any, Any, str]] = {
    "a label too many": (package, X, Y + 1, r"class numbers go from 0 .*look at y.min\(\)"),
    "a label too many, BP": (lambda: ALPackage.from_bp(Row(), X, 3, method="bp"), X, Y + 1, "class numbers go from 0"),
    "a label below 0": (package, X, Y - 1, "class numbers go from 0"),
    "a label of -100, BP": (lambda: ALPackage.from_bp(Row(), X, 3, method="bp"), X, Y - 100, "class numbers go from 0"),
    "a word too many": (
        lambda: ALPackage.from_bp(Both(), (IDS, IDS > 0), 3, split=2),
        (IDS * 9, IDS > 0),
        Y,
        r"an embedding has fewer rows than .*max\(\)",
    ),
    "one sample and batch norm": (
        lambda: ALPackage.from_bp(Row(middle=nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))), X, 3, split=2),
        X[:1],
        Y[:1],
        "leave a last batch that small out",
    ),
    "an image of bytes": (
        lambda: ALPackage.from_bp(nn.Sequential(nn.Conv1d(6, 6, 1), nn.Flatten()), X[..., None], 3),
        X[..., None].byte(),
        Y,
        r"convert what differs, as x.to\(torch.float32\)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_numbers_that_an_operator_refuses_come_with_what_to_do(name: str) -> None:
    build, x, y, words = REFUSED[name]
    with pytest.raises((RuntimeError, IndexError, ValueError)) as caught, Pipeline(build(), threads=1) as pipe:
        pipe.run([(x, y)])
    assert re.search(words, caught.value.__notes__[0])


def test_a_second_input_of_a_prediction_is_not_taken_for_an_exit() -> None:
    built = ALPackage.from_bp(Both(), (IDS, IDS > 0), 3, split=2)
    with Pipeline(built, threads=1) as pipe:
        assert pipe.predict((IDS, IDS > 0)).shape == (8, 3)
        with pytest.raises(ConfigError, match=r"exit_at is given as Tensor; .*: predict\(\(ids, mask\)\)"):
            pipe.predict(IDS, IDS > 0)  # type: ignore[arg-type]
        assert pipe.predict((IDS, IDS > 0), exit_at=np.int64(1)).shape == (8, 3)  # type: ignore[call-overload, arg-type, unused-ignore]


def test_a_file_without_a_model_says_that_it_takes_one() -> None:
    with pytest.raises(ConfigError, match=r"Pipeline.load\(path, model"):
        Pipeline.load("net.pipeal")


def test_training_in_evaluation_mode_is_told_once_it_begins() -> None:
    """A pretrained network comes in evaluation mode: its dropout dropped nothing, without a word."""
    net = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6)).eval()
    built = ALPackage.from_bp(net, X, 3)
    with (
        Pipeline(built, threads=1) as pipe,
        pytest.warns(UserWarning, match=r"in evaluation mode, .* call its train\(\)"),
    ):
        pipe.run([(X, Y)])
    with warnings.catch_warnings(), Pipeline(built.train(), threads=1) as pipe:
        warnings.simplefilter("error")
        pipe.run([(X, Y)])
        pipe.predict(X)
        pipe.run([(X, Y)])
    with (
        Pipeline(ALPackage.from_bp([nn.Linear(6, 6).eval()], X, 3), threads=1) as pipe,
        pytest.warns(match="evaluation"),
    ):
        pipe.run([(X, Y)])


@pytest.mark.parametrize("method", ["bp", "greedy", "al"])
def test_targets_may_be_the_answers_of_a_teacher(method: str) -> None:
    """Symptom: a target with a graph was told as what a forward had not detached."""
    teacher, x = nn.Linear(8, 3), torch.randn(6, 8)
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    with Pipeline(ALPackage.from_bp(net, x, 3, split=2, method=method), threads=1) as pipe:
        pipe.run([(x, teacher(x).softmax(1)) for _ in range(2)])
    assert teacher.weight.grad is None
