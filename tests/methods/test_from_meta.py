"""Networks on the meta device: converted by shapes, made real layer by layer, and then as any other."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from pipeal import AE, AL, ENC, ALPackage, ConfigError, DataError, Encoder, Pipeline, PlacementError, set_device
from pipeal.core.materialize import is_on_meta, materialize
from pipeal.engine.distributed.pipeline import DistributedPipeline, serve
from pipeal.engine.distributed.world import World
from pipeal.engine.state import disk_offload
from pipeal.engine.state.mapped_file import MappedFile
from pipeal.methods.cutting.inplace import OnACopy
from tests.engine.distributed.lines import on_each, thread_ranks
from tests.integration.test_converted_exactness import NETWORKS

VECTORS = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 2, 1, 0])


def mlp(depth: int = 3) -> nn.Sequential:
    blocks = [nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU(inplace=True)) for _ in range(depth)]
    return nn.Sequential(*blocks, nn.Linear(6, 3))


def on_meta(build: Callable[[], Any]) -> Any:
    with torch.device("meta"):
        return build()


def converted(build: Callable[[], Any] = mlp, split: Any = ("2",), **options: Any) -> ALPackage:
    return ALPackage.from_bp(on_meta(build), VECTORS, 3, split=split and list(split), **options)


def state(package: nn.Module) -> dict[str, Tensor]:
    """With the buffers that a state dict leaves out."""
    return {**package.state_dict(), **dict(package.named_buffers())}


def assert_alike(one: nn.Module, other: nn.Module) -> None:
    mine, theirs = state(one), state(other)
    assert list(mine) == list(theirs)
    assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 8)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 12, batch_first=True) for _ in range(3))
        self.head = nn.Linear(8, 3)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class PreActivation(nn.Module):
    """Writes into its input, and reads it again."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.ReLU(inplace=True)
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.act(x))


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24}
    return BertForSequenceClassification(BertConfig(vocab_size=20, max_position_embeddings=12, num_labels=3, **sizes))


@dataclass(frozen=True)
class Case:
    build: Callable[[], nn.Module]
    sample: Any
    begins: list[str]
    """Where layers may begin."""
    init_weights: Callable[[nn.Module], Any] = lambda _: None


IDS = torch.randint(20, (4, 7), generator=torch.Generator().manual_seed(0))
MASK = torch.ones(4, 7, dtype=torch.long).index_put((torch.tensor([1, 1]), torch.tensor([5, 6])), torch.tensor(0))
IMAGES = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
CASES = {
    "mlp": Case(mlp, VECTORS, ["1", "2", "3"]),
    "preactivation": Case(
        lambda: nn.Sequential(*(PreActivation() for _ in range(3)), nn.Linear(6, 3)), VECTORS, list("123")
    ),
    "words": Case(Words, IDS, ["blocks.0", "blocks.1", "blocks.2", "head"]),
    "bert": Case(
        bert,
        {"input_ids": IDS, "attention_mask": MASK},
        [f"bert.encoder.layer.{n}" for n in (0, 1, 2)],
        lambda part: bert()._init_weights(part),
    ),
    **{name: Case(case.build, IMAGES, case.split) for name, case in NETWORKS.items()},
}


def trained(package: ALPackage, sample: Any, **options: Any) -> None:
    package.train()
    with Pipeline(package, "cpu", "sequential", threads=1, **options) as pipe:
        pipe.run([(sample, LABELS)] * 3)


@pytest.mark.parametrize("split", [0, 1])
@pytest.mark.parametrize("name", CASES)
def test_it_learns_what_the_network_built_whole_learns(name: str, split: int, tmp_path: Path) -> None:
    if name == "bert":
        pytest.importorskip("transformers")
    case = CASES[name]
    begins = [case.begins[-1:], case.begins][split]
    torch.manual_seed(1)
    net = case.build()
    save_file({key: value.contiguous() for key, value in net.state_dict().items()}, tmp_path / "net.safetensors")
    whole = ALPackage.from_bp(net, case.sample, 5 if name in NETWORKS else 3, split=begins)
    found = ALPackage.from_bp(
        on_meta(case.build),
        case.sample,
        5 if name in NETWORKS else 3,
        split=begins,
        weights=tmp_path / "net.safetensors",
        init_weights=case.init_weights,
    )
    assert all(parameter.is_meta for parameter in found.parameters())
    assert [row.cells()[:-1] for row in found.summary().layers] == [row.cells()[:-1] for row in whole.summary().layers]
    blocks = found.materialize(7).state_dict()
    assert all(torch.equal(value, blocks[key]) for key, value in whole.state_dict().items() if ".enc.f." in key)
    whole.load_state_dict(blocks)  # those that are new
    trained(found, case.sample)
    trained(whole, case.sample)
    assert_alike(found, whole)


@settings(max_examples=15, deadline=None)
@given(
    depth=st.integers(1, 4),
    cuts=st.sets(st.integers(1, 4)),
    task=st.sampled_from(["classification", "multilabel", "regression"]),
    hidden=st.sampled_from([None, 5]),
    labels=st.sampled_from(["inverse", "published"]),
    seed=st.integers(0, 2**62),
    data=st.data(),
)
def test_one_by_one_gives_what_all_at_once_gives(
    depth: int, cuts: set[int], task: Any, hidden: int | None, labels: Any, seed: int, data: st.DataObject
) -> None:
    split = [str(cut) for cut in sorted(cuts) if cut <= depth] or None

    def make() -> ALPackage:
        return converted(lambda: mlp(depth), split, task=task, hidden=hidden, labels=labels)

    package, again = make(), make()
    before = torch.get_rng_state()
    package.materialize(seed)
    for number in data.draw(st.permutations(range(len(again)))):
        materialize(again[number], seed, number)
        torch.rand(3)  # where the default generator stands makes no difference
    assert torch.equal(before, torch.get_rng_state()) is False
    assert_alike(package, again)
    materialized = copy.deepcopy(package).materialize(seed + 1)
    assert_alike(package, materialized)  # what is real is left alone


@pytest.mark.parametrize("offload", ["none", "disk"])
def test_a_pipeline_makes_its_layers_real_by_its_seed(offload: str, tmp_path: Path) -> None:
    options = {"offload": offload} | ({"offload_folder": tmp_path} if offload == "disk" else {})
    wanted, found, other = (converted(split=["1", "2", "3"]) for _ in range(3))
    held = [[id(p) for group in layer.enc_opt.param_groups for p in group["params"]] for layer in found]
    before = torch.get_rng_state()
    wanted.materialize(5)
    Pipeline(found, seed=5, threads=1, **options)  # one stage per layer, where they are: on the CPU, by then
    Pipeline(other, "cpu", seed=6, threads=1, **options)
    assert torch.equal(before, torch.get_rng_state())
    assert_alike(wanted, found)
    assert not torch.equal(found[0].enc.f[0][0].weight, other[0].enc.f[0][0].weight)
    assert not torch.equal(found[1].enc.f[0][0].weight, found[2].enc.f[0][0].weight)  # alike but for their number
    assert held == [list(map(id, layer.enc.parameters())) for layer in found]  # optimizers hold what is trained
    for package in (wanted, found):
        with Pipeline(package, "cpu", threads=1, seed=5) as pipe:
            pipe.run([(VECTORS, LABELS)] * 2)
    assert_alike(wanted, found)
    assert all(len(layer.enc_opt.state) == len(list(layer.enc.parameters())) for layer in found)


def test_offloaded_each_is_in_its_file_before_the_next_becomes_real(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = partial(mlp, 3)
    save_file(build().state_dict(), tmp_path / "net.safetensors")
    package = converted(build, "123", weights=tmp_path / "net.safetensors")
    seen: list[tuple[int, int]] = []

    def watched(layer: nn.Module, seed: int, number: int) -> None:
        on = [is_on_meta(layer) for layer in package]
        seen.append((number, on.index(True)))
        assert on == [other >= number for other in range(4)]
        for other in range(number):
            large = [tensor for tensor in package[other].parameters() if tensor.nbytes >= 1024]
            assert large
            assert all(files[other].holds(tensor) for tensor in large)
        materialize(layer, seed, number)

    files: dict[int, MappedFile] = {}
    monkeypatch.setattr(disk_offload, "materialize", watched)
    assert len(list(disk_offload.one_by_one(package, tmp_path, files, 0))) == 4
    assert seen == [(number, number) for number in range(4)]


RSS = """
import torch
from pathlib import Path
from safetensors.torch import save_file
from torch import nn
from pipeal import ALPackage, Pipeline
from pipeal.core.host_memory import give_freed_memory_back, status_bytes
from pipeal.core.weights import Weights

torch.set_num_threads(1)
WIDE, DEPTH = 1024, 12
folder, seen, fill = Path(sys.argv[1]), [], Weights.fill

def build(depth):
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDE, WIDE), nn.ReLU()) for _ in range(depth)))

def watched(*arguments):
    fill(*arguments)
    seen.append(status_bytes("RssAnon"))  # here are all numbers of a layer, and those of no other

def trained(depth):
    weights = folder / f"{depth}.safetensors"
    save_file(build(depth).state_dict(), weights)
    give_freed_memory_back()
    seen[:] = [status_bytes("RssAnon")]
    with torch.device("meta"):
        net = build(depth)
    x, y = torch.randn(4, WIDE), torch.randint(3, (4,))
    package = ALPackage.from_bp(net, x, 3, weights=weights, optimizer=torch.optim.SGD)
    with Pipeline(package, "cpu", threads=1, offload="disk", offload_folder=folder) as pipe:
        pipe.run([(x, y)] * 2, on_batch=lambda _: seen.append(status_bytes("RssAnon")))
    return package

Weights.fill = watched
trained(1)  # what is made once, whatever is trained
package = trained(DEPTH)
print((max(seen) - seen[0]) / sum(parameter.nbytes for parameter in package[1].parameters()))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="what is resident is counted on Linux alone")
def test_offloaded_no_more_than_a_layer_is_in_memory(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import sys{RSS}", str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert 0.9 < float(done.stdout) < 3, done.stdout


def test_each_rank_makes_its_own_layers_real() -> None:
    """Ranks of threads, which make theirs at the same time; none draws from the default generator."""
    wanted = converted(split="123")
    with Pipeline(wanted, "cpu", seed=5, threads=1) as pipe:
        pipe.run([(VECTORS, LABELS)] * 2)
    packages = [converted(split="123") for _ in range(4)]

    def work(world: World) -> None:
        if world.rank:
            return serve(packages[world.rank], world, seed=5, threads=1)
        with DistributedPipeline(packages[0], world, seed=5, threads=1) as pipe:
            pipe.run([(VECTORS, LABELS)] * 2)
        return None

    with thread_ranks(4) as worlds:
        on_each(worlds, work)
    for rank, package in enumerate(packages):
        assert [is_on_meta(layer) for layer in package] == [layer != rank for layer in range(4)]
        assert_alike(package[rank], wanted[rank])


@pytest.mark.parametrize(
    "options",
    [{"precision": "bf16"}, {"recompute": "blocks"}, {"on_oom": "split"}, {"on_non_finite": "skip"}],
    ids=str,
)
def test_with_what_else_is_around_a_layer(options: dict[str, Any]) -> None:
    seen: list[int] = []
    packages = [converted(lambda: nn.Sequential(nn.Linear(6, 6), nn.Dropout(), nn.Linear(6, 3)), ["2"]) for _ in "ab"]
    packages[0].materialize(0)
    for package in packages:
        package[1].enc.f.register_forward_hook(lambda *_: seen.append(1))
        trained(package, VECTORS, **options)
    assert_alike(*packages)
    assert len(seen) >= 6


def test_saved_and_loaded_and_planned(tmp_path: Path) -> None:
    package = converted()
    placement = Pipeline(copy.deepcopy(package), "cpu", threads=1)  # a copy has a life of its own
    assert is_on_meta(package)
    assert placement.sizes == [2]
    package.materialize(1)
    with Pipeline(package, "cpu", threads=1) as pipe:
        pipe.run([(VECTORS, LABELS)])
        pipe.save(tmp_path / "saved")
    with Pipeline.load(tmp_path / "saved", other := converted(), "cpu", threads=1):
        pass
    assert_alike(package, other)


def test_layers_by_hand() -> None:
    def layer() -> AL:
        f = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.LSTM(6, 6))
        f[2] = nn.PReLU()
        return AL(ENC(f, nn.Linear(6, 6)), AE(nn.Linear(6, 6), nn.Linear(6, 6)))

    package, again = (ALPackage([on_meta(layer) for _ in range(2)]) for _ in "ab")
    with Pipeline(package, "cpu", seed=3, threads=1) as pipe:
        pipe.run([(VECTORS, VECTORS)])
    with on_meta(lambda: torch.device("meta")):  # the caller may be anywhere
        again.materialize(3)
    with Pipeline(again, "cpu", seed=3, threads=1) as pipe:
        pipe.run([(VECTORS, VECTORS)])
    assert_alike(package, again)


def test_attention_starts_as_pytorch_starts_it() -> None:
    """Its projection has zero biases, which the linear map that it is would not give it."""
    attention = on_meta(lambda: nn.MultiheadAttention(8, 2))
    materialize(attention, 0, 0)
    assert not attention.out_proj.bias.any()
    assert not attention.in_proj_bias.any()
    assert attention.in_proj_weight.std() > 0.1


def test_what_is_written_in_place_is_kept_from_it_as_in_a_real_network() -> None:
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.linear = nn.ReLU(inplace=True), nn.ReLU(inplace=True), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.two(self.linear(self.one(x)))

    for build, copies in ((Chain, False), (PreActivation, True)):
        for device in ("cpu", "meta"):
            with torch.device(device):
                net = [nn.Linear(6, 6), build()]
            f = ALPackage.from_bp(net, VECTORS, 3)[1].enc.f
            assert isinstance(f, OnACopy) == copies
            inplace = [part.inplace for part in f.modules() if isinstance(part, nn.ReLU)]
            assert inplace == ([True] if copies else [False, True]), (build, inplace)


def test_of_lists_and_encoders_weights_have_names_too() -> None:
    def parts() -> list[nn.Module]:
        return [nn.Linear(6, 5), nn.Sequential(nn.ReLU(), nn.Linear(5, 3))]

    weights = nn.ModuleList(parts()).state_dict()
    package = converted(parts, None, weights=weights).materialize()
    assert torch.equal(package[1].enc.f[1].weight, weights["1.1.weight"])

    class Block(nn.Linear):
        def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:  # type: ignore[override]
            return super().forward(x)

    def encoder() -> Encoder:
        return Encoder(nn.Embedding(20, 8), [Block(8, 8), Block(8, 8)], nn.Linear(8, 8))

    names = ["embedding.weight", "blocks.0.weight", "blocks.0.bias", "blocks.1.weight", "blocks.1.bias"]
    values = {name: torch.randn(8, 8) if "weight" in name else torch.randn(8) for name in names}
    values |= {"embedding.weight": torch.randn(20, 8), "head.weight": torch.randn(8, 8), "head.bias": torch.randn(8)}
    package = ALPackage.from_bp(on_meta(encoder), (IDS, MASK.bool()), 3, weights=values).materialize()
    assert torch.equal(package[2].enc.f.blocks[0].weight, values["blocks.1.weight"])
    assert torch.equal(package[2].enc.f.head.bias, values["head.bias"])


def tied() -> nn.Sequential:
    net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3))
    net[2].weight = net[0].weight
    return net


def test_what_is_shared_within_a_layer_stays_shared(tmp_path: Path) -> None:
    package = converted(tied, ["3"]).materialize()
    assert package[0].enc.f[0].weight is package[0].enc.f[2].weight
    weights = {name: value for name, value in tied().state_dict().items() if name != "0.weight"}
    save_file(weights, tmp_path / "net.safetensors")  # as others save them: once
    package = converted(tied, ["3"], weights=tmp_path / "net.safetensors").materialize()
    assert package[0].enc.f[0].weight is package[0].enc.f[2].weight
    assert torch.equal(package[0].enc.f[0].weight, weights["2.weight"])
    with pytest.raises(ConfigError, match="layers 0 and 1 would share a parameter"):
        converted(tied, ["2"])


def test_two_names_of_one_tensor_have_equal_weights(tmp_path: Path) -> None:
    """The last was taken without a word."""
    weights = tied().state_dict()
    weights["2.weight"] = weights["0.weight"].clone()  # equal ones are fine, bfloat16 or not, also without a number
    weights["0.weight"][0, 0] = weights["2.weight"][0, 0] = torch.nan
    for equal in (weights, {name: value.bfloat16() for name, value in weights.items()}):
        converted(tied, ["3"], weights=equal).materialize()
    weights["2.weight"][0, 1] += 1
    save_file(weights, tmp_path / "net.safetensors")
    for both in (weights, tmp_path / "net.safetensors"):
        with pytest.raises(ConfigError, match=r"'0\.weight' and '2\.weight' are one tensor .* pass one of") as caught:
            converted(tied, ["3"], weights=both)
        assert "\n" not in str(caught.value)


def test_weights_of_several_files_and_other_types(tmp_path: Path) -> None:
    weights = mlp().state_dict()
    halves = {name: value.to(torch.bfloat16) if value.is_floating_point() else value for name, value in weights.items()}
    items = list(halves.items())
    paths = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    save_file(dict(items[:5]), paths[0])
    save_file(dict(items[5:]), paths[1])
    package = converted(weights=paths).materialize()
    assert torch.equal(package[0].enc.f[0][0].weight, halves["0.0.weight"].float())
    save_file(halves, paths[1])
    with pytest.raises(DataError, match=r"b\.safetensors and .*a\.safetensors both have the weights '0\."):
        converted(weights=paths)


def wrong(change: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    weights = mlp().state_dict()
    change(weights)
    return weights


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (wrong(lambda w: w.pop("1.0.bias")), "weights lack 1 of the network's parameters and buffers: '1.0.bias'"),
        (wrong(lambda w: w.clear()), r"lack 23 of .*: '0.0.weight', '0.0.bias', '0.1.weight', '0.1.bias' and 19 more"),
        (wrong(lambda w: w.update({"module.x": w.pop("3.bias")})), r"lack 1 .*: '3.bias'"),
        (wrong(lambda w: w.update({"3.Bais": w.pop("3.bias")})), r"lack 1 .*: '3.bias' \(they have '3.Bais'\);"),
        (wrong(lambda w: w.update(head=torch.ones(2))), "have 1 names that the network has not: 'head'"),
        (wrong(lambda w: w.update({"3.bias": torch.ones(1)})), r"'3.bias' has the shape \(1,\), the network's is \(3"),
        (wrong(lambda w: w.update({"3.bias": torch.ones(3, device="meta")})), "'3.bias' is on the meta device, withou"),
        (wrong(lambda w: w.update({"3.bias": [1.0]})), "'3.bias' is .*list.*; expected a tensor of numbers"),
        (
            wrong(lambda w: w.update({"3.bias": torch.ones(3, dtype=torch.complex64)})),
            "'3.bias' is of torch.complex64, the network's of torch.float32; pass that type",
        ),
        (wrong(lambda w: w.update({"3.bias": torch.ones(3, dtype=torch.int64)})), "'3.bias' is of torch.int64, the ne"),
        (
            wrong(lambda w: w.update({"0.1.num_batches_tracked": torch.tensor(1.0)})),
            "'0.1.num_batches_tracked' is of torch.float32, the network's of torch.int64",
        ),
        (3, "weights is .*; expected a state dict, or the path of a .safetensors file or of several"),
    ],
)
def test_weights_that_do_not_fit_are_one_line(weights: Any, message: str) -> None:
    net = on_meta(mlp)
    with pytest.raises(ConfigError, match=message) as caught:
        ALPackage.from_bp(net, VECTORS, 3, split=["2"], weights=weights)
    assert "\n" not in str(caught.value)
    assert net[0][2].inplace  # a conversion that fails leaves the network as it was


def test_files_that_do_not_fit_are_one_line(tmp_path: Path) -> None:
    path = tmp_path / "net.safetensors"
    with pytest.raises(DataError, match=r"net\.safetensors: .*; expected a \.safetensors file"):
        converted(weights=path)
    torch.save(mlp().state_dict(), path)
    with pytest.raises(DataError, match=r"net\.safetensors: .*; expected a \.safetensors file"):
        converted(weights=str(path))
    save_file(mlp().state_dict(), path)
    package = converted(weights=path)
    package.materialize()
    package = converted(weights=path)
    save_file(wrong(lambda w: w.update({"3.bias": torch.ones(1)})), path)
    with pytest.raises(ConfigError, match=r"'3.bias' has the shape \(1,\)"):
        package.materialize()
    other = wrong(lambda w: w.update({"3.bias": torch.ones(3, dtype=torch.int32)}))
    save_file(other, path)
    with pytest.raises(ConfigError, match=r"'3\.bias' is of torch\.int32, the network's of"):
        package.materialize()
    with pytest.raises(ConfigError, match=r"'3\.bias' is of torch\.int32, the network's of"):
        converted(weights=path)
    save_file(wrong(lambda w: w.pop("3.bias")), path)
    with pytest.raises(DataError, match=r"has changed: '3\.bias'"):
        package.materialize()
    save_file(mlp().state_dict(), path)
    assert is_on_meta(package[1])
    assert not is_on_meta(package.materialize())


class Places(nn.Module):
    """A table that no state dict holds, and a mask."""

    def __init__(self, fill: Callable[[Places], Any] | None = None) -> None:
        super().__init__()
        self.register_buffer("table", torch.linspace(0, 1, 6), persistent=False)
        self.register_buffer("mask", torch.arange(6) > 2, persistent=False)
        if fill is not None:
            self.reset_parameters = lambda: fill(self)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table * self.mask


def assigned(part: Any) -> None:
    part.table, part.mask = torch.linspace(0, 1, 6), torch.arange(6) > 2


def written(part: Any) -> None:
    part.table.data.copy_(torch.linspace(0, 1, 6))
    part.mask[:] = torch.arange(6) > 2


def with_places(fill: Callable[[Any], Any] | None = None) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(6, 6), Places(fill), nn.Linear(6, 3))


@pytest.mark.parametrize("fill", [assigned, written])
def test_buffers_that_a_module_fills_by_itself(fill: Callable[[Any], Any]) -> None:
    weights = with_places()().state_dict()
    for options in ({}, {"weights": weights}, {"init_weights": lambda part: isinstance(part, Places) and fill(part)}):
        build = with_places(fill if "init_weights" not in options else None)
        package = converted(build, ["2"], **options)
        table = package[0].enc.f[1].table
        package.materialize()
        assert table is package[0].enc.f[1].table
        assert torch.equal(table, torch.linspace(0, 1, 6))
        assert package[0].enc.f[1].mask.tolist() == [False] * 3 + [True] * 3
    package = converted(with_places(), ["2"], weights={**weights, **dict(with_places()().named_buffers())})
    assert torch.equal(package.materialize()[0].enc.f[1].table, torch.linspace(0, 1, 6))


def forgets(name: str) -> Callable[[Any], Any]:
    def fill(part: Any) -> None:
        before = getattr(part, name)
        assigned(part)
        setattr(part, name, before)

    return fill


def half(part: Any) -> None:
    written(part)
    part.table = torch.linspace(0, 1, 6)[:3]


def but_one(part: Any) -> None:
    part.mask.fill_(True)
    part.table[1:] = 1.0


@pytest.mark.parametrize(
    ("fill", "name"),
    [(None, "table"), (forgets("table"), "table"), (forgets("mask"), "mask"), (half, "table"), (but_one, "table")],
)
def test_buffers_that_nothing_fills_are_told_by_name(fill: Callable[[Any], Any] | None, name: str) -> None:
    for options in ({}, {"weights": with_places()().state_dict()}):
        with pytest.raises(ConfigError, match=rf"layer 0: nothing fills 'enc\.f\.1\.{name}', \(6,\) .*; give its modu"):
            converted(with_places(fill), ["2"], **options).materialize()
    net = on_meta(with_places(fill))
    net[1].table, net[1].mask = torch.ones(6), torch.ones(6).bool()  # as accelerate's init_empty_weights leaves them
    package = ALPackage.from_bp(net, VECTORS, 3, split=["2"]).materialize()
    assert torch.equal(package[0].enc.f[1].table, torch.ones(6))


def test_parameters_that_nothing_fills_are_told_by_name() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(6))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 6), Scale(), nn.Linear(6, 3))

    with pytest.raises(ConfigError, match=r"layer 0: nothing fills 'enc\.f\.1\.scale', \(6,\)"):
        converted(build, ["2"])

    def ones(part: Any) -> None:
        if hasattr(part, "scale"):
            nn.init.ones_(part.scale)

    class Cut(Scale):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(super().forward(self.first(x)))

    assert torch.equal(converted(Cut, ["last"], init_weights=ones).materialize()[0].enc.f.scale, torch.ones(6))
    package = converted(build, ["2"], init_weights=ones)
    assert torch.equal(package.materialize()[0].enc.f[1].scale, torch.ones(6))
    good, bad = (
        on_meta(lambda f=f: AL(ENC(f(), nn.Linear(6, 6)), AE(nn.Linear(6, 6), nn.Linear(6, 6))))
        for f in (nn.Identity, Scale)
    )
    with pytest.raises(ConfigError, match=r"layer 1: nothing fills 'enc\.f\.scale'"):
        ALPackage([good, bad]).materialize()
    assert is_on_meta(good)  # told before anything is made


def test_a_reset_that_raises_leaves_the_layer_on_meta_and_may_be_tried_again() -> None:
    fails = [True]

    class Moody(nn.Linear):
        def reset_parameters(self) -> None:
            super().reset_parameters()
            if fails and not self.weight.is_meta:
                raise ValueError("not today")

    package = converted(lambda: nn.Sequential(nn.Linear(6, 6), Moody(6, 3)), ["1"])
    weight = package[1].enc.f[0].weight
    with pytest.raises(ConfigError, match=r"reset_parameters of 'enc\.f\.1', a Moody, raises ValueError: not today"):
        package.materialize()
    assert not is_on_meta(package[0])
    assert all(parameter.is_meta for parameter in package[1].parameters())
    fails.clear()
    package.materialize()
    assert package[1].enc.f[0].weight is weight
    assert weight.isfinite().all()
    assert_alike(package, converted(lambda: nn.Sequential(nn.Linear(6, 6), Moody(6, 3)), ["1"]).materialize())


def test_parameters_that_a_reset_replaces_are_still_the_optimizers() -> None:
    class Replaced(nn.Linear):
        def reset_parameters(self) -> None:
            self.weight = nn.Parameter(torch.full((3, 6), 2.0))
            self.bias = nn.Parameter(torch.zeros(3))

    package = converted(lambda: nn.Sequential(nn.Linear(6, 6), Replaced(6, 3)), ["1"]).materialize()
    weight = package[1].enc.f[0].weight
    assert (weight == 2).all()
    assert any(weight is parameter for parameter in package[1].enc_opt.param_groups[0]["params"])


def test_what_cannot_be_converted_on_meta_is_one_line() -> None:
    class Looks(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if x.sum() > 0 else x

    with pytest.raises(ConfigError, match=r"does not fit layer 1 .* and no numbers to look at: build the model on a r"):
        converted(lambda: nn.Sequential(nn.Linear(6, 6), Looks(6, 6)), ["1"])
    for options in ({"weights": mlp().state_dict()}, {"init_weights": print}):
        with pytest.raises(
            ConfigError, match=f"{next(iter(options))} is for a network on the meta device, and this on"
        ):
            ALPackage.from_bp(mlp(), VECTORS, 3, **options)
    with pytest.raises(ConfigError, match="init_weights is str; expected a function that is called with each module"):
        converted(init_weights="xavier")  # it was told with the first layer
    package = converted()
    for seed in (-1, 2**63, 1.5, "one"):
        with pytest.raises(ConfigError, match=r"seed is .*; expected a whole number, at least 0"):
            package.materialize(seed)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=r"seed is .*; expected a whole number, at least 0"):
            Pipeline(package, seed=seed)  # type: ignore[arg-type]
    assert all(map(is_on_meta, package))
    with pytest.raises(ConfigError, match="layer 0: the optimizer Adagrad has made its state of parameters on the met"):
        converted(optimizer=torch.optim.Adagrad)
    package = converted()
    moves: list[Callable[[], Any]] = [
        lambda: package.to("cpu"),
        lambda: package.double().float().cpu(),
        lambda: package.to_empty(device="cpu"),
        lambda: set_device(package, ["cpu", "cpu"]),
    ]
    for move in moves:
        with pytest.raises(PlacementError, match=r"is on the meta device, .*; call materialize\(seed\) of its package"):
            move()
    package(VECTORS, LABELS)  # of which a graph is left
    with pytest.raises(ConfigError, match=r"layer 0: '.*' cannot become real: .* may hold what is on the meta device"):
        package.materialize()
    lazy = on_meta(lambda: AL(ENC(nn.LazyLinear(3), nn.Linear(3, 3)), AE(nn.Linear(3, 3), nn.Linear(3, 3))))
    with pytest.raises(ConfigError, match=r"layer 0: 'enc\.f\.weight' is lazy"):
        ALPackage([lazy]).materialize()


def test_what_is_real_takes_its_weights_too() -> None:
    """As accelerate's init_empty_weights builds it: its buffers are real."""
    weights = mlp().state_dict()
    weights["0.1.running_mean"] += 3
    net, real = on_meta(mlp), mlp()
    for name, buffer in real.named_buffers():
        owner, _, key = name.rpartition(".")
        net.get_submodule(owner)._buffers[key] = buffer + 1
    package = ALPackage.from_bp(net, VECTORS, 3, split=["2"], weights=weights).materialize()
    assert torch.equal(package[0].enc.f[0][1].running_mean, weights["0.1.running_mean"])
    assert not package[0].enc.f[0][1].running_mean.equal(real[0][1].running_mean)
    package = converted(mlp, "2", weights=weights)
    package[0].ae.h.bias = nn.Parameter(torch.ones(3))  # beside the others of its module, which are reset
    assert (package.materialize()[0].ae.h.bias == 1).all()


def test_a_number_of_layers_is_counted_on_meta_as_on_a_real_network() -> None:
    case = NETWORKS["resnet10"]
    found = ALPackage.from_bp(on_meta(case.build), IMAGES, 5, split=3)
    assert list(found.state_dict()) == list(ALPackage.from_bp(case.build(), IMAGES, 5, split=3).state_dict())


def test_lazy_modules_take_their_sizes_from_the_sample() -> None:
    package = converted(lambda: nn.Sequential(nn.LazyLinear(5), nn.ReLU(), nn.LazyLinear(3)), ["2"]).materialize()
    assert package[1].enc.f[0].weight.shape == (3, 5)
    trained(package, VECTORS)


def test_blocks_of_a_users_keep_their_numbers_or_start_by_themselves() -> None:
    def blocks() -> Mapping[int, Mapping[str, nn.Module]]:
        return {0: {"b": nn.Linear(6, 128)}, 1: {"g": nn.Linear(128, 16), "h": nn.Linear(16, 128)}}

    real = blocks()
    kept = copy.deepcopy(real)
    package = converted(blocks=real).materialize()
    for number, letters in kept.items():
        for letter, block in letters.items():
            assert_alike(package[number].blocks()[letter], block)
    package = converted(blocks=on_meta(blocks)).materialize()
    assert package[1].ae.g.weight.std() > 0.01
    package = converted(blocks={0: {"g": nn.Linear(3, 128)}}, pool={1: nn.Linear(3, 4)}).materialize()
    assert 0.01 < package[0].ae.h.weight.std() < 0.1  # as the label side starts it: 8 / 128
    trained(package, VECTORS)


def test_new_blocks_start_as_they_do_beside_a_real_network() -> None:
    torch.manual_seed(0)
    for task in ("classification", "multilabel", "regression"):
        for made, wanted in zip(
            converted(task=task).materialize(),
            ALPackage.from_bp(mlp(), VECTORS, 3, split=["2"], task=task),
            strict=True,
        ):
            for name, value in wanted.ae.named_parameters():
                found = made.ae.get_parameter(name)
                torch.testing.assert_close(found.std(), value.std(), rtol=0.3, atol=0.01)
                assert ("bias" not in name) or torch.equal(found, value)
    images = torch.randn(2, 3, 4, 4)
    net = on_meta(lambda: nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 5, 3, padding=1)))
    package = ALPackage.from_bp(net, images, 5, task="per-place").materialize()
    turn = package[1].ae.h.weight
    torch.testing.assert_close(turn @ turn.t(), torch.eye(len(turn)))
    package(images, torch.randint(5, (2, 4, 4)))


def test_attributes_of_parameters_stay() -> None:
    net = on_meta(lambda: nn.Linear(6, 6))
    net.weight.no_decay = True
    net.bias.requires_grad_(False)
    materialize(net, 0, 0)
    assert net.weight.no_decay
    assert type(net.weight) is nn.Parameter
    assert (net.weight.requires_grad, net.bias.requires_grad) == (True, False)
    image = on_meta(lambda: nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last))
    materialize(image, 0, 0)
    assert image.weight.is_contiguous(memory_format=torch.channels_last)


def test_what_is_real_beside_it_keeps_its_numbers_however_it_lies() -> None:
    """Symptom: "more than one element of the written-to tensor refers to a single memory location"."""

    class Masked(nn.Linear):
        def reset_parameters(self) -> None:
            super().reset_parameters()
            if hasattr(self, "scale"):
                self.scale.zero_()

    net = on_meta(lambda: Masked(6, 6))
    net.register_buffer("mask", torch.ones(1).expand(6))
    net.register_buffer("scale", torch.full((6,), 2.0))
    net.register_buffer("graph", torch.eye(6).to_sparse())
    with torch.inference_mode():  # in which weights could not be made that learn
        materialize(net, 0, 0)
    assert (net.mask.unique().tolist(), net.scale.unique().tolist()) == ([1], [2])
    assert torch.equal(net.graph.to_dense(), torch.eye(6))
    assert not net.weight.is_inference()


def test_masks_of_a_real_sample_are_looked_at() -> None:
    class Masked(nn.Linear):
        def forward(self, x: tuple[Tensor, Tensor]) -> Tensor:  # type: ignore[override]
            features, mask = x
            places = torch.arange(mask.shape[1], device=features.device)
            mask = mask if mask.all() else mask & (places < mask.sum(1, keepdim=True).max())
            return (super().forward(features) * mask.to(features.device)[..., None]).sum(1)

    class First(nn.Embedding):
        def forward(self, x: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            return super().forward(x[0]), x[1]

    package = ALPackage.from_bp(on_meta(lambda: [First(20, 6), Masked(6, 3)]), (IDS, MASK.bool()), 3).materialize()
    assert package.infer((IDS, MASK.bool())).shape == (4, 3)


def test_the_registrys_blocks_start_as_they_are_built() -> None:
    from pipeal.models.causal import CausalBlock, CharacterEmbedding
    from pipeal.models.transformer import TransformerBlock

    for build in (
        lambda: CausalBlock(16, 2, depth=8),
        lambda: CharacterEmbedding(9, 16, block=12),
        lambda: TransformerBlock(16, 24, 2),
    ):
        torch.manual_seed(0)
        made, wanted = on_meta(build), build()
        materialize(made, 0, 0)
        for mine, its in zip(made.parameters(), wanted.parameters(), strict=True):
            torch.testing.assert_close(mine.std(), its.std(), rtol=0.3, atol=0.001)
            assert not re.search("nan", str(mine))


def test_functional_forwards_see_real_tensors_made_within() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            gate = torch.ones(6, device=x.device)
            return F.relu(self.weight(x)) * (gate if gate.sum() > 3 else 0 * gate)

    assert converted(lambda: nn.Sequential(Own(), nn.Linear(6, 3)), ["1"]).materialize().infer(VECTORS).shape == (4, 3)
