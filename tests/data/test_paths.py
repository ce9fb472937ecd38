"""Where files are named, a text does as well as a path."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pipeal.data import (
    Vocab,
    find_shakespeare,
    find_vectors,
    list_vectors,
    load_images,
    load_text,
    load_text_file,
    load_vectors,
    read_characters,
)

ROWS = '"1","A","b c"\n"2","D","e"\n"3","F","g"\n"4","H","i"\n'


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder of data with a file of each kind."""
    for name in ("train.csv", "test.csv"):
        (tmp_path / name).write_text(ROWS)
    (tmp_path / "own.csv").write_text("text,label\n" + "a b,good\nc,bad\n" * 5)
    (tmp_path / "glove.6B.3d.txt").write_text("the 1 2 3\n")
    (tmp_path / "shakespeare.txt").write_text("to be or not\n")
    for split in ("train", "test"):
        for name in ("cat", "dog"):
            place = tmp_path / "cifar-10-images" / split / name
            place.mkdir(parents=True)
            Image.fromarray(np.zeros((32, 32, 3), np.uint8)).save(place / "0.png")
    return tmp_path


def test_every_reader_takes_a_text(root: Path) -> None:
    """Symptom: "'str' object has no attribute 'name'" of ``load_text_file("reviews.csv")``."""
    there = str(root)
    own = load_text_file(f"{there}/own.csv", f"{there}/own.csv")
    assert (len(own.train), len(own.test)) == (10, 10)
    assert len(load_text("agnews", there, download=False).train) == 4
    assert find_shakespeare(there, download=False) == root / "shakespeare.txt"
    assert len(read_characters(f"{there}/shakespeare.txt").alphabet) == 8
    vectors = find_vectors(there, "glove", 3)
    assert list_vectors(there) == {("glove", 3): vectors}
    table = load_vectors(str(vectors), Vocab(["<pad>", "<unk>", "the"]), cache=f"{there}/kept")
    assert table.weight[2].tolist() == [1, 2, 3]
    assert len(load_images("cifar10", there, download=False, cache=f"{there}/kept").train) == 2
    assert len(list((root / "kept").iterdir())) > 1
