"""Models that are made from a configuration and a seed, and how they are configured to learn."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeal.config import GroupingConfig, LanguageConfig, TextConfig, VisionConfig, find_config, load_config
from pipeal.core.modules import module_of
from pipeal.core.protocols import TrainableLayer
from pipeal.data import find_thresholds
from pipeal.engine.state.layer_state import layer_state
from pipeal.models import VGG, VisionDims, build_vision
from pipeal.run.build import Models, rates
from pipeal.run.build_language import LanguageModels
from pipeal.run.build_text import TextModels, _thresholds
from pipeal.run.build_vision import VisionModels
from pipeal.run.opening import course_of
from pipeal.training.learning_rate import epoch_scale
from tests.methods.refusing import skipped_where_refused
from tests.methods.test_greedy import CASES


@pytest.mark.parametrize(("cost", "power"), [("length", 1), ("square", 2)])
def test_layers_are_grouped_by_the_cost_that_is_configured(cost: Any, power: int) -> None:
    lengths = np.random.default_rng(2).integers(1, 60, 200)
    wanted = {power: find_thresholds(lengths, lambda length, power=power: length**power, 2) for power in (1, 2)}  # type: ignore[misc]
    assert wanted[1] != wanted[2], "else one could not be told from the other"
    assert _thresholds(lengths, GroupingConfig(thresholds=2, cost=cost)) == wanted[power]


@pytest.mark.parametrize(
    ("models", "config", "dataset", "blueprint"),
    [
        (
            TextModels,
            TextConfig,
            "toynews-lstm",
            {"vocab_size": 50, "classes": 4, "pad_index": 0, "thresholds": [], "pretrained": None},
        ),
        (VisionModels, VisionConfig, "toyimages-resnet", {"classes": 4}),
        (LanguageModels, LanguageConfig, "shakespeare-charlm", {"characters": 65}),
    ],
)
def test_first_weights_follow_from_the_seed_alone(
    models: Any, config: type[Any], dataset: str, blueprint: dict[str, Any]
) -> None:
    """Symptom: a process that torchrun starts, with one intra-op thread, began with other weights than a single one."""
    maker = models(load_config(config, find_config(*dataset.split("-", 1))), **blueprint)
    found = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            torch.manual_seed(threads)
            found.append(maker.package("al", 3).state_dict())
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    one, other = found
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


VECTORS = np.random.default_rng(0).standard_normal((30, 12), np.float32)
TEXT = {"embedding_dim": 12, "x_hid": 8, "y_hid": 6}
VISION = {"width": 0.05, "x_hid": 8, "y_hid": 6}
CHARLM = {"width": 8, "heads": 2, "layers": 3, "bridges": "block"}


def maker_of(name: str) -> Models:
    """A small model; with all that touches values while it is built."""
    sizes = {"lstm": TEXT, "transformer": {**TEXT, "n_heads": 2, "embedding_updates": "touched"}}
    if name in sizes:
        text = load_config(TextConfig, values={"dataset": "toynews", "model": {"name": name, **sizes[name]}})
        return TextModels(text, 30, 3, 0, [2, 9] if name == "lstm" else [], VECTORS)
    if name == "charlm":
        return LanguageModels(load_config(LanguageConfig, values={"model": CHARLM}), 11)
    narrow = {"deinforeg": {"width": 16}}
    return VisionModels(load_config(VisionConfig, values={"model": {"name": name, **VISION}, "methods": narrow}), 4)


def shapes_of(layer: TrainableLayer) -> dict[str, Any]:
    return {name: (value.shape, value.stride(), value.dtype) for name, value in module_of(layer).state_dict().items()}


@pytest.mark.parametrize(("name", "method"), CASES)
@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_layers_made_alone_have_the_bits_of_the_whole(name: str, method: str, data: st.DataObject) -> None:
    maker, seed = maker_of(name), data.draw(st.integers(0, 2**63 - 1))
    with skipped_where_refused(method):
        whole = list(maker.package(method, seed))
    here = data.draw(st.sets(st.sampled_from(range(len(whole)))))
    before = torch.get_rng_state()
    found = list(maker.layers(method, seed, here))
    assert torch.equal(torch.get_rng_state(), before), "the caller's generator is left as it is"
    assert len(found) == len(whole)
    for number, (layer, wanted) in enumerate(zip(found, whole, strict=True)):
        assert shapes_of(layer) == shapes_of(wanted)
        tensors = [*module_of(layer).parameters(), *module_of(layer).buffers()]
        assert all(tensor.is_meta == (number not in here) for tensor in tensors)
        if number in here:
            state, other = (torch.utils._pytree.tree_flatten(layer_state(one)) for one in (layer, wanted))
            assert state[1] == other[1]
            assert all(
                torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y
                for x, y in zip(state[0], other[0], strict=True)
            )


def test_a_layer_is_made_when_it_is_asked_for_under_a_key_of_its_own() -> None:
    layers = maker_of("charlm").layers("al", 7)
    _, one, torch_state = next(layers), next(layers), torch.get_rng_state()
    torch.rand(3)  # what the caller draws between them changes nothing
    two = next(layers)
    whole = maker_of("charlm").package("al", 7)
    torch.set_rng_state(torch_state)
    for layer, wanted in ((one, whole[1]), (two, whole[2])):
        assert all(torch.equal(x, y) for x, y in zip(module_of(layer).parameters(), wanted.parameters(), strict=True))
    alike = [(x, y) for x, y in zip(module_of(one).parameters(), module_of(two).parameters(), strict=False) if x.std()]
    assert not any(torch.equal(x, y) for x, y in alike), "layers of one shape begin with weights of their own"


@pytest.mark.parametrize("method", ["al", "greedy"])
def test_vision_models_that_are_built_by_a_call_keep_their_bits(method: str) -> None:
    """They draw from the default generator, all blocks first: a seed gives what it always gave."""
    dims = VisionDims(width=0.05, hidden=8, code=6)
    torch.manual_seed(0)
    blocks = [weight for unit in VGG.units(dims) for module in unit.make() for weight in module.parameters()]
    torch.manual_seed(0)
    package = build_vision("vgg", method, classes=2, dims=dims)
    found = [parameter for layer in package for parameter in module_of(layer).blocks()["f"].parameters()]
    assert all(torch.equal(one, other) for one, other in zip(found, blocks, strict=True))


def test_each_side_has_the_rate_that_is_configured() -> None:
    for rate, wanted in (({}, 0.1), ({"ae": 0.01}, 0.01)):
        values: dict[str, Any] = {"train": {"lr": {"base": 0.1, **rate}}}
        lr = load_config(TextConfig, values={"dataset": "toynews", "model": {"name": "lstm"}, **values}).train.lr
        assert rates(lr, "al") == {"enc": 0.1, "ae": wanted}
        assert rates(lr, "bp") == 0.1


@pytest.mark.parametrize(("end", "share"), [(None, 0.0), (0.01, 0.05)])
def test_a_rate_decays_from_its_base_to_its_end(end: float | None, share: float) -> None:
    lr = {"base": 0.2, "end": end, "decay": "cosine", "per": "batch", "warmup": 0}
    values = {"dataset": "toynews", "model": {"name": "lstm"}, "train": {"lr": lr, "epochs": 3}}
    course = course_of(load_config(TextConfig, values=values))
    scale = epoch_scale(course, epoch=2, batches=10, first_batch=20)
    assert scale(30) == pytest.approx(share), "after the last batch"
    assert scale(20) > scale(29) > share


ON_META = """
import sys
from pipeal.config import LanguageConfig, load_config
from pipeal.run.build_language import LanguageModels

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch._dynamo":
            print("the compiler is imported")

def build(models, mode):
    print("a layer is made")
    yield from made(models, mode)

sys.meta_path.insert(0, Watch())
made, LanguageModels.build = LanguageModels.build, build
config = load_config(LanguageConfig, overrides=["dataset=shakespeare", "model.name=charlm", "model.width=24"])
print(len(list(LanguageModels(config, 5).layers("al", 0, here=()))))
"""


def test_no_compiler_is_imported_on_the_meta_device() -> None:
    """Symptom: under PyTorch 2.6 every run under torchrun ended with "Tensor.item() cannot be called on meta tensors"
    from within that import."""
    done = subprocess.run([sys.executable, "-c", ON_META], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["the compiler is imported", "a layer is made", "2"]
