"""Text as characters: what is read, how it is divided, and blocks that follow from where one is."""

from __future__ import annotations

import gzip
import os
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeal.core.errors import ConfigError, DataError
from pipeal.data import Alphabet, RandomBlocks, Share, find_shakespeare, read_characters
from pipeal.data.text import characters

TEXT = torch.arange(100, dtype=torch.uint8)


def blocks(**changes: object) -> RandomBlocks:
    return RandomBlocks(TEXT, **{"block": 8, "batch_size": 4, "batches": 5, "seed": 0} | changes)  # type: ignore[arg-type]


@given(st.text(min_size=2, max_size=60).filter(lambda text: not any(0xD800 <= ord(letter) < 0xE000 for letter in text)))
def test_a_text_comes_back_from_its_numbers(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(text.encode())
    if len(text.removeprefix("\ufeff").replace("\r\n", "\n")) < 2:
        return
    read = read_characters(path)
    whole = read.alphabet.decode(torch.cat((read.train, read.validation)))
    assert whole == text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    assert torch.equal(read.alphabet.encode(whole), torch.cat((read.train, read.validation)).long())


def test_nine_tenths_are_trained_on_and_the_end_validates(tmp_path):
    path = tmp_path / "text.txt.gz"
    path.write_bytes(gzip.compress(b"abcdefghij" * 10))
    read = read_characters(path)
    assert (len(read.train), len(read.validation)) == (90, 10)
    assert read.alphabet.characters == "abcdefghij"
    path.write_bytes(gzip.compress(b"abcdefghij" * 9 + b"abcdefghjj"))
    assert read_characters(path).fingerprint != read.fingerprint


def test_an_alphabet_of_more_than_256_characters_keeps_its_numbers_apart(tmp_path):
    text = "".join(map(chr, range(0x4E00, 0x4E00 + 1000)))
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    read = read_characters(tmp_path / "text.txt")
    assert read.alphabet.decode(read.train) == text[:900]


def test_a_text_in_many_pieces_is_that_in_one(tmp_path, monkeypatch):
    text = "zz\r\ny\n" + "".join(chr(0x4E00 + 400 - n) + "\n" * (n % 3) for n in range(400)) + "\r\nend\r"
    (tmp_path / "text.txt").write_bytes(text.encode())
    whole = read_characters(tmp_path / "text.txt")
    assert whole.alphabet.decode(torch.cat((whole.train, whole.validation))) == text.replace("\r\n", "\n").replace(
        "\r", "\n"
    )
    for size in (1, 2, 7, 100):
        monkeypatch.setattr(characters, "_PIECE", size)
        read = read_characters(tmp_path / "text.txt")
        assert read.alphabet.characters == whole.alphabet.characters
        assert torch.equal(read.train, whole.train)
        assert torch.equal(read.validation, whole.validation)
        assert read.fingerprint == whole.fingerprint


def test_an_alphabet_with_a_bare_carriage_return_keeps_it():
    assert Alphabet("\n\ra").encode("\ra").tolist() == [1, 2]


def test_a_character_that_was_never_seen_is_named():
    with pytest.raises(DataError, match=r"never seen, such as '☃é'; it knows 'abc'"):
        Alphabet("abc").encode("a☃b☃éa")


@pytest.mark.parametrize("characters", ["", "ba", "aab"])
def test_an_alphabet_has_each_character_once_and_in_order(characters):
    with pytest.raises(DataError, match="in rising order"):
        Alphabet(characters)


def test_an_alphabet_is_saved_and_read_back(tmp_path):
    alphabet = Alphabet("\n\"'\\aé☃")
    alphabet.save(tmp_path / "alphabet.json")
    assert Alphabet.load(tmp_path / "alphabet.json").characters == alphabet.characters


@pytest.mark.parametrize(
    "content", ["", "[]", '{"format": "pipeal-alphabet-1"}', '{"format": "other", "characters": "ab"}',
                '{"format": "pipeal-alphabet-1", "characters": "ba"}', "[" * 5000]
)  # fmt: skip
def test_a_file_that_is_no_alphabet_is_one_line(tmp_path, content):
    (tmp_path / "alphabet.json").write_text(content)
    with pytest.raises(DataError, match="not a saved alphabet"):
        Alphabet.load(tmp_path / "alphabet.json")
    with pytest.raises(DataError, match="cannot read"):
        Alphabet.load(tmp_path / "elsewhere.json")


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"a", "a text of 1 characters"), (b"", "a text of 0 characters"), (b"ab\xff", "line 1.*not UTF-8")],
)
def test_a_text_that_cannot_be_trained_on_is_one_line(tmp_path, content, message):
    (tmp_path / "text.txt").write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_characters(tmp_path / "text.txt")


def test_a_text_that_changes_while_it_is_read_is_one_line(tmp_path, monkeypatch):
    """It is read a second time for its numbers."""
    (tmp_path / "text.txt").touch()
    pieces = iter([["some text"], []])
    monkeypatch.setattr(characters, "_pieces", lambda _: next(pieces))
    with pytest.raises(DataError, match="0 of 9 characters when read a second time"):
        read_characters(tmp_path / "text.txt")


def test_a_text_may_come_out_of_a_pipe(tmp_path):
    """As ``--text <(…)`` gives it. Symptom: it was refused, or waited for ever. Cause: it was opened a second time."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=("some text",), daemon=True)
    writer.start()
    read = read_characters(pipe)
    assert read.alphabet.decode(torch.cat((read.train, read.validation))) == "some text"


def test_targets_are_the_inputs_one_character_on_and_reach_both_ends():
    seen = set()
    for batch in blocks(batches=200):
        assert batch.x.shape == batch.y.shape == (4, 8)
        assert torch.equal(batch.x[:, 1:], batch.y[:, :-1])
        assert torch.equal(batch.y, batch.x + 1)
        assert batch.x[:, 0].tolist() == batch.indices
        assert batch.tokens == batch.padded == 32
        seen |= {*batch.indices}
    assert seen == set(range(92)), "from the first place to the last that a block and its target fit in"


def test_what_comes_next_depends_on_nothing_but_where_one_is():
    whole = blocks()
    whole.set_epoch(3)
    expected = [batch.x for batch in whole]
    for first in range(6):
        resumed = blocks()
        resumed.set_epoch(3, first)
        rest = [batch.x for batch in resumed]
        assert len(rest) == 5 - first
        assert all(map(torch.equal, rest, expected[first:]))


def test_epochs_and_seeds_draw_others_but_an_estimate_the_same():
    def drawn(epoch: int, **changes: object) -> list[int]:
        source = blocks(**changes)
        source.set_epoch(epoch)
        return [index for batch in source for index in batch.indices]

    assert drawn(0) != drawn(1)
    assert drawn(0) != drawn(0, seed=1)
    assert drawn(0, same=True) == drawn(1, same=True) == drawn(0)


def test_the_shortest_text_has_one_block():
    (batch,) = blocks(block=99, batches=1, batch_size=2)
    assert batch.indices == [0, 0]
    with pytest.raises(DataError, match="100 characters, but a block of 100 with its targets takes 101"):
        blocks(block=100)


@pytest.mark.parametrize("name", ["block", "batch_size", "batches"])
def test_sizes_below_one_are_refused(name):
    with pytest.raises(ConfigError, match=f"{name} is 0"):
        blocks(**{name: 0})


def test_shakespeare_is_found_under_either_name_or_told_where_to_put(tmp_path, real_data: Path):
    with pytest.raises(DataError, match=r"fetch https://.*put it there"):
        find_shakespeare(tmp_path, download=False)
    (tmp_path / "shakespeare.txt.gz").write_bytes(gzip.compress(b"To be"))
    assert find_shakespeare(tmp_path, download=False).name == "shakespeare.txt.gz"
    read = read_characters(find_shakespeare(real_data, download=False))
    assert (len(read.alphabet), len(read.train), len(read.validation)) == (65, 1_003_854, 111_540)


def test_the_shares_of_all_ranks_are_the_whole_batch():
    (whole,) = blocks(batches=1)
    shares = [next(iter(blocks(batches=1, share=Share(rank, 2)))) for rank in range(2)]
    assert sorted(row for share in shares for row in share.x[:, 0].tolist()) == sorted(whole.indices)
    for share in shares:
        assert (share.indices, share.tokens) == (whole.indices, whole.tokens), "the counts are those of the whole batch"
