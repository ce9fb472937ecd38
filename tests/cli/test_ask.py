"""``pipeal ask`` answers as the run's model does, on inputs that are read as the run's own; mistakes are one line."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from PIL import Image

from pipeal.cli import text
from pipeal.cli.ask import command
from pipeal.core.errors import ConfigError, DataError
from pipeal.data import Vocab, clean, load_images
from pipeal.run.ask import answers
from pipeal.run.trained import load_trained
from tests.cli.running import run_command, told_one_line
from tests.cli.test_export import SMALL, bert, of_texts, trained

asks = partial(run_command, command)

GOOD, BAD, NEW = "good fine word1", "bad poor word2", "Quite unheard-of."


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """One on texts, whose classes are told apart by their words."""
    few = ("--set=model.n_heads=2", "--set=model.parts=2", "--set=data.batching.budget_tokens=64")
    return of_texts(tmp_path, capsys, "transformer", *few)


def test_texts_are_answered_as_the_run_would(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, err = asks(capsys, str(run), GOOD, BAD, NEW, "--json")
    assert code == 0, err
    rows = [json.loads(line) for line in out.splitlines()]
    found = load_trained(run)
    vocab = Vocab.load(run / "vocab.json")
    for given, row in zip((GOOD, BAD, NEW), rows, strict=True):
        numbers = [vocab.indices.get(word, vocab.unk_index) for word in clean(given)][:8]
        logits = found.package.infer(torch.tensor([numbers or [vocab.unk_index]]))
        wanted = dict(zip(["Nö", "Yes"], logits.softmax(1)[0].tolist(), strict=True))
        assert row["input"] == given
        assert row["probabilities"] == pytest.approx(wanted, abs=1e-5)
        assert next(iter(row["probabilities"])) == row["label"] == max(wanted, key=wanted.__getitem__)
        assert row["probability"] == max(row["probabilities"].values())
    plain = "".join(f"{row['label']}\t{row['probability']:.4f}\t{row['input']}\n" for row in rows)
    assert asks(capsys, str(run), GOOD, BAD, NEW)[1] == plain
    file = tmp_path / "texts.txt"
    file.write_text(f"{GOOD}\n\n{BAD}\r\n {NEW}\n", encoding="utf-8")
    assert asks(capsys, str(run), f"--file={file}")[1] == plain
    for ends in "\n", "\r", "\r\n":  # a pipe is read as a file is: so is a mark of the byte order
        same = f"\ufeff{ends.join((GOOD, BAD, NEW))}".encode()
        file.write_bytes(same)
        assert asks(capsys, str(run), f"--file={file}")[1] == plain
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(same)))
        assert asks(capsys, str(run), "--file=-")[1] == plain
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"sch\xf6n")))
    told_one_line("--file -, line 1: byte 0xf6 at place 4 is not UTF-8", *asks(capsys, str(run), "--file=-"))
    (first,) = answers(found, [GOOD], 1)
    logits = found.package.infer(torch.tensor([[vocab.indices[word] for word in GOOD.split()]]), 1)
    assert first.probabilities[first.label] == pytest.approx(logits.softmax(1).max().item(), abs=1e-5)
    assert json.loads(asks(capsys, str(run), GOOD, "--exit=1", "--json")[1])["probability"] == pytest.approx(
        first.probabilities[first.label], abs=1e-5
    )
    config = replace(found.config, train=replace(found.config.train, mode="bp"))
    with pytest.raises(ConfigError, match=r"--exit: found 1, but the form in .* has no exits; leave it out"):
        next(answers(replace(found, config=config), [GOOD], 1))
    (run / "classes.json").unlink()  # as runs of earlier versions
    assert asks(capsys, str(run), GOOD)[1].split("\t")[0] in ("0", "1")


def test_a_mistake_is_one_line(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(line: str, *arguments: str) -> None:
        told_one_line(line, *asks(capsys, *arguments))

    refused("expected what to ask, after the run, or --file FILE; found neither", str(run))
    refused("found both", str(run), GOOD, "--file=x")
    refused("no run of one form; name the folder of a run", str(tmp_path / "nowhere"), GOOD)
    refused("Invalid value for 'RUN': found '', expected the name of a file or folder", "", GOOD)
    # Both ended with a traceback, in each command that reads a run's model.
    refused("n: cannot be read: File name too long; name the folder of a run", "n" * 300, GOOD)
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    refused("cannot be read: Too many levels of symbolic links; name", str(tmp_path / "circle"), GOOD)
    refused("--exit: found 3, but the model in .* has 2, counted from 1", str(run), GOOD, "--exit=3")
    refused("cannot read .*none.txt: No such file", str(run), f"--file={tmp_path / 'none.txt'}")
    for content in "", "\n \n":  # without a word it ended well
        (tmp_path / "empty.txt").write_text(content)
        refused("--file .*empty.txt: expected .* found none", str(run), f"--file={tmp_path / 'empty.txt'}")
    (tmp_path / "latin.txt").write_bytes("schön".encode("latin-1"))
    refused("latin.txt, line 1: byte 0xf6 .* is not UTF-8", str(run), f"--file={tmp_path / 'latin.txt'}")


def test_a_model_that_diverged_answers_nothing(run: Path) -> None:
    found = load_trained(run)
    with torch.no_grad():
        next(found.package.parameters()).fill_(torch.nan)
    with pytest.raises(DataError, match="the model's answers are not finite: it has diverged"):
        next(answers(found, [GOOD]))


@pytest.mark.slow
def test_images_go_through_what_the_run_has_its_own_go_through(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ("--set=model.width=0.1", "--set=data.batch_size=256", "--set=model.parts=2")
    run = trained(tmp_path / "runs", capsys, "toyimages", "vgg", *small)
    found = load_trained(run)
    data, size = load_images("toyimages", size=found.config.data.size), found.config.data.size
    pixels = data.test.images(range(3))
    paths = [tmp_path / f"{number}.png" for number in range(3)]
    for path, image in zip(paths, pixels, strict=True):
        Image.fromarray(image).save(path)
    code, out, err = asks(capsys, str(run), *map(str, paths), "--json")
    assert code == 0, err
    x = (torch.from_numpy(pixels).permute(0, 3, 1, 2) / 255 - torch.tensor(data.mean)[:, None, None]) / torch.tensor(
        data.std
    )[:, None, None]
    wanted = found.package.infer(x).softmax(1)
    for line, row in zip(out.splitlines(), wanted, strict=True):
        probabilities = json.loads(line)["probabilities"]
        assert [probabilities[name] for name in data.classes] == pytest.approx(row.tolist(), abs=1e-4)
    Image.fromarray(pixels[0]).resize((3 * size, 2 * size)).save(tmp_path / "large.jpg")
    assert asks(capsys, str(run), str(tmp_path / "large.jpg"))[0] == 0
    (tmp_path / "broken.png").write_bytes(paths[0].read_bytes()[:-30])
    told_one_line("broken.png: .*; expected an image", *asks(capsys, str(run), str(tmp_path / "broken.png")))
    told_one_line("cannot read .*none.png: No such file", *asks(capsys, str(run), str(tmp_path / "none.png")))


@pytest.mark.slow
def test_a_tokenizer_of_transformers_reads_texts_and_a_language_model_reads_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    run = of_texts(tmp_path, capsys, f"hf:{bert(tmp_path / 'bert')}")
    code, out, err = asks(capsys, str(run), GOOD, "--json")
    assert code == 0, err
    logits = load_trained(run).package.infer(torch.tensor([[5, 6, 9]]))  # the words of the folder, by their numbers
    assert json.loads(out)["probability"] == pytest.approx(logits.softmax(1).max().item(), abs=1e-5)
    corpus = tmp_path / "verses.txt"
    corpus.write_text("to be or not to be\n" * 60)
    few = ("--set=data.steps=2", "--set=data.estimate_batches=1", "--set=model.layers=1", "--set=model.block=8")
    verses = tmp_path / "verses"
    code, _, err = run_command(
        text.command, capsys, "text", "charlm", f"--text={corpus}", *few, *SMALL, f"--out={verses}"
    )
    assert code == 0, err
    (run,) = verses.iterdir()
    told_one_line("a language model; pipeal generate asks it", *asks(capsys, str(run), GOOD))
