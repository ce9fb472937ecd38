"""The file of a layer's state: all bits come back, and nothing that is not plain."""

from __future__ import annotations

import json
import zlib
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from pipeal.core.errors import DataError
from pipeal.engine.state.layer_file import read_layer, write_layer


def there_and_back(folder: Path, state: dict[str, Any], *, mapped: bool = False) -> dict[str, Any]:
    write_layer(folder / "layer", state)
    found = read_layer(folder / "layer", mapped=mapped)
    if mapped:
        (folder / "layer").unlink()
    return found


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


TENSORS = {
    "plain": torch.randn(3, 5),
    "transposed": torch.randn(3, 5).t(),
    "channels last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "expanded": torch.randn(2).expand(3, 2),
    "with gaps": torch.arange(20.0)[1::3],
    "of no dimension": torch.tensor(3.5),
    "empty": torch.empty(0, 3),
    "odd": torch.tensor([True, False, True]),
    "half": torch.randn(3, dtype=torch.bfloat16),
    "eighth": torch.randn(5).to(torch.float8_e4m3fn),
    "complex": torch.randn(3, dtype=torch.complex64),
    "unsigned": torch.tensor([7, 2**16 - 1], dtype=torch.uint16),
    "not finite": torch.tensor([float("nan"), -float("inf"), -0.0]),
    "whole": torch.tensor([2**63 - 1, -(2**63)]),
}


@pytest.mark.parametrize("mapped", [False, True])
def test_tensors_come_back_with_their_bits_and_strides(mapped: bool, tmp_path: Path) -> None:
    found = there_and_back(tmp_path, TENSORS, mapped=mapped)
    assert list(found) == list(TENSORS)
    for name, wanted in TENSORS.items():
        one = found[name]
        assert (one.dtype, one.shape, one.stride()) == (wanted.dtype, wanted.shape, wanted.stride()), name
        assert bits(one) == bits(wanted), name


@pytest.mark.filterwarnings("ignore:Sparse")
def test_a_default_device_changes_no_file(tmp_path: Path) -> None:
    """Symptom: after ``torch.set_default_device`` a checkpoint was neither written nor read: "the devices must
    match"."""
    plain, coo, csr = torch.randn(3, 5), torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr()
    with torch.device("meta"):
        found = there_and_back(tmp_path, {"plain": plain, "coo": coo, "csr": csr})
    assert torch.equal(found["plain"], plain)
    assert all(torch.equal(found[name].to_dense(), torch.eye(3)) for name in ("coo", "csr"))


def test_one_that_repeats_its_memory_very_often_is_kept_whole(tmp_path: Path) -> None:
    """A file that says so of a few bytes is refused: its copy took the memory of the machine, with a traceback."""
    wanted = torch.randn(3).expand(2**17, 3)
    found = there_and_back(tmp_path, {"w": wanted})["w"]
    assert torch.equal(found, wanted)
    assert found.is_contiguous()


def test_conjugated_and_negated_ones_have_their_values(tmp_path: Path) -> None:
    z = torch.randn(4, dtype=torch.complex64)
    found = there_and_back(tmp_path, {"conjugated": z.conj(), "negated": z.conj().imag})
    assert torch.equal(found["conjugated"], z.conj())
    assert torch.equal(found["negated"], -z.imag)


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("to", ["to_sparse", "to_sparse_csr", "to_sparse_csc"])
def test_sparse_gradients_come_back(to: str, tmp_path: Path) -> None:
    wanted = getattr(torch.eye(4), to)()
    found = there_and_back(tmp_path, {"w": wanted})["w"]
    assert found.layout is wanted.layout
    assert torch.equal(found.to_dense(), torch.eye(4))


def test_a_sparse_gradient_that_counts_a_row_twice_still_does(tmp_path: Path) -> None:
    doubled = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), torch.tensor([2.0, 3.0]), (4,), check_invariants=True)
    found = there_and_back(tmp_path, {"w": doubled})["w"]
    assert not found.is_coalesced()
    assert found._values().tolist() == [2.0, 3.0]


def test_tensors_that_share_memory_share_it_again_and_others_do_not(tmp_path: Path) -> None:
    whole = torch.arange(20.0)
    found = there_and_back(tmp_path, {"tied": [whole, whole], "part": whole[3:7], "other": whole.clone()})
    found["tied"][0][4] = -1.0
    assert found["tied"][1][4] == found["part"][1] == -1.0
    assert found["other"][4] == 4.0
    assert (tmp_path / "layer").stat().st_size < 2 * 80 + 1500


def test_what_is_no_tensor_comes_back_with_its_type(tmp_path: Path) -> None:
    state = {
        "ordered": OrderedDict(b=1, a=2),
        "keys": {0: "zero", (1, "x"): None, True: 1.5},
        "numbers": (0.1, -0.0, 2**70, float("inf"), 1e-310, 3 - 2j, False),
        "texts": ["ä\n", b"\x00\xff", "\ud800"],
        "torch": [torch.float16, torch.device("cuda:1"), torch.Size([2, 3])],
        "empty": [{}, [], ()],
    }
    found = there_and_back(tmp_path, state)
    assert repr(found) == repr(state)
    assert type(found["torch"][2]) is torch.Size


def test_half_a_surrogate_pair_in_a_name_comes_back(tmp_path: Path) -> None:
    """Symptom: a file that was written and counted as good, and that no reader could open."""
    write_layer(tmp_path / "layer", {"\ud800": torch.ones(2)})
    assert torch.equal(read_layer(tmp_path / "layer")["\ud800"], torch.ones(2))


def test_other_readers_find_tensors_by_name_mapped_and_aligned(tmp_path: Path) -> None:
    state = {
        "module": {"f.weight": torch.randn(8, 16), "f.bias": torch.randn(3), "n": torch.tensor(7), "__metadata__": 1},
        "module.n": torch.ones(2),
    }
    size, crc32 = write_layer(tmp_path / "layer", state)
    data = (tmp_path / "layer").read_bytes()
    assert (len(data), zlib.crc32(data)) == (size, crc32)
    found = load_file(tmp_path / "layer")
    assert torch.equal(found["module.f.weight"], state["module"]["f.weight"])
    assert found["module.n"].shape == ()
    assert torch.equal(found["module.n'"], state["module.n"])
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert (length + 8) % 64 == 0
    for name, entry in header.items():
        if name != "__metadata__":
            assert entry["data_offsets"][0] % (64 if name == "module.f.weight" else found[name].element_size()) == 0


def altered(path: Path, change: Any) -> None:
    """Writes another description of the state, with the same data."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    told = json.loads(header["__metadata__"]["pipeal"])
    change(told)
    header["__metadata__"]["pipeal"] = json.dumps(told)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


@pytest.mark.parametrize(
    "form",
    [
        ["r", "pipeal.training.position:Part", ["seconds", 1]],
        ["n", "torch.return_types:max", ["T"], 1],
        ["p", "collections:deque", 3, 1],
        ["y", "load"],
    ],
)
def test_a_file_that_names_a_class_is_refused(form: Any, tmp_path: Path) -> None:
    write_layer(tmp_path / "layer", {"w": torch.ones(2)})
    altered(tmp_path / "layer", lambda told: told["tree"].append(["x", form]))
    with pytest.raises(DataError, match=r"layer is refused: .*nothing in it was run"):
        read_layer(tmp_path / "layer")


@pytest.mark.parametrize(
    "change",
    [
        lambda told: told.update(format=3),
        lambda told: told["tensors"].clear(),
        lambda told: told["tensors"].append(told["tensors"][0]),
        lambda told: told["tensors"][0].__setitem__(0, "another"),
        lambda told: told["tensors"][0].__setitem__(1, "float64"),
        lambda told: told["tensors"][0].__setitem__(2, 1),
        lambda told: told["tensors"][0].__setitem__(2, -1),
        lambda told: told["tensors"][0].__setitem__(3, [3]),
        lambda told: told["tensors"][0].__setitem__(4, [2]),
        lambda told: told.pop("tree"),
        lambda told: told["tensors"][0].__setitem__(1, "qint8"),
        lambda told: told["tensors"][0].__setitem__(1, "bits16"),
        lambda told: told["tensors"][0].__setitem__(slice(3, 5), [[10**12], [0]]),
        lambda told: told["tensors"][0].__setitem__(slice(3, 5), [[2, 10**6], [1, 0]]),
    ],
)
def test_a_description_that_does_not_fit_is_refused(change: Any, tmp_path: Path) -> None:
    write_layer(tmp_path / "layer", {"w": torch.ones(2)})
    altered(tmp_path / "layer", change)
    with pytest.raises(DataError, match=r"layer is refused"):
        read_layer(tmp_path / "layer")


@pytest.mark.parametrize("data", [b"", b"x" * 7, b"\xff" * 100, (2).to_bytes(8, "little") + b"{}"])
def test_what_is_no_such_file_is_refused(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "layer").write_bytes(data)
    with pytest.raises(DataError, match=r"layer is refused"):
        read_layer(tmp_path / "layer")
    with pytest.raises(DataError, match=r"gone is refused"):
        read_layer(tmp_path / "gone")


def test_what_no_file_keeps_is_told_with_its_place(tmp_path: Path) -> None:
    for value in (torch.empty(2, device="meta"), torch.ones(2).to_mkldnn()):
        with pytest.raises(DataError, match=r"^module\.w (is a tensor|has the layout)"):
            write_layer(tmp_path / "layer", {"module": {"w": value}})
        assert not (tmp_path / "layer").exists()
