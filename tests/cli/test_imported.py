"""Models of other libraries in the commands: what a run of one leaves, and the one line for each mistake."""

from __future__ import annotations

import csv
import json
import sys
from functools import partial
from pathlib import Path

import pytest

from pipeal.cli import plan, text, vision
from tests.cli.running import run_command, told_one_line

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

SIZES = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"class{label}" for label in range(1, 5)), "news", "of", "the", "day"]

trains_text = partial(run_command, text.command)
trains_vision = partial(run_command, vision.command)


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    """A folder of a small BERT with 12 words and places for 10."""
    folder = tmp_path / "bert tiny"
    transformers.BertConfig(vocab_size=len(WORDS), max_position_embeddings=10, **SIZES).save_pretrained(folder)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(dict(zip(WORDS, range(99), strict=False)), "[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="[UNK]", pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]"
    ).save_pretrained(folder)
    return folder


@pytest.fixture
def agnews(tmp_path: Path) -> Path:
    """A small AG News; some texts are longer than the model takes."""
    home = tmp_path / "data" / "ag_news_csv"
    home.mkdir(parents=True)
    rows = [f'"{1 + n % 4}","class{1 + n % 4}","news of the day {"day " * (n % 7)}"' for n in range(80)]
    for name in ("train.csv", "test.csv"):
        (home / name).write_text("\n".join(rows) + "\n")
    return tmp_path / "data"


@pytest.mark.slow
def test_a_folder_of_transformers_trains_and_keeps_what_reads_its_input(
    bert: Path, agnews: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "agnews", f"hf:{bert}", "--epochs", "2", "--devices", "cpu,cpu", "--data-root", str(agnews),
        "--out", str(tmp_path / "runs"), "--set=data.batching.budget_tokens=128", "--set=engine.threads=1",
        "--set=train.precision=fp32",
    ]  # fmt: skip
    code, _, err = trains_text(capsys, *arguments)
    assert code == 0, err
    assert "texts are cut after 10 tokens, not 128" in err
    run = tmp_path / "runs" / "agnews-hf-bert_tiny-al-001"
    assert [row["epoch"] for row in csv.DictReader((run / "epochs.csv").open())] == ["1", "2"]
    assert json.loads((run / "summary.json").read_text())["data"]["longest"] == 10
    kept = transformers.AutoConfig.from_pretrained(run / "hf")
    assert [kept.id2label[number] for number in range(4)] == ["World", "Sports", "Business", "Sci/Tech"]
    assert transformers.AutoTokenizer.from_pretrained(run / "hf")("class2 day")["input_ids"] == [2, 5, 11, 3]


def test_mistakes_of_texts_are_told_in_one_line(
    bert: Path, agnews: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(line: str, *arguments: str) -> None:
        told_one_line(line, *trains_text(capsys, *arguments, "--out", str(tmp_path / "runs")))

    data = ("--data-root", str(agnews), "--devices=cpu")
    refused("hf:/none: /none is no folder; expected the folder of a transformers model", "agnews", "hf:/none", *data)
    refused("model 'hf:' names none; expected hf:FOLDER", "agnews", "hf:", *data)
    refused("a model of torchvision is for images; expected lstm", "agnews", "torchvision:resnet18", *data)
    refused("model.embedding_updates: found touched", "agnews", f"hf:{bert}", "--set=model.embedding_updates=touched")
    refused("model.bridges: found lookahead, which hf:", "agnews", f"hf:{bert}", "--set=model.bridges=lookahead", *data)
    (bert / "tokenizer.json").unlink()
    (bert / "tokenizer_config.json").unlink()
    refused("has no tokenizer that transformers can load", "agnews", f"hf:{bert}", *data)
    monkeypatch.setitem(sys.modules, "transformers", None)
    refused(r"needs transformers, which cannot be imported .*pip install", "agnews", f"hf:{bert}", *data)
    assert not (tmp_path / "runs").exists()


def test_mistakes_of_other_commands_are_told_in_one_line(
    bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told_one_line(
        "unknown model 'resnet_18' of torchvision .*; did you mean 'resnet18'",
        *trains_vision(capsys, "toyimages", "torchvision:resnet_18", "--devices=cpu", "--out", str(tmp_path / "runs")),
    )
    told_one_line(
        "'fasterrcnn_resnet50_fpn' of torchvision .* is none that can be trained here; ",
        *trains_vision(capsys, "toyimages", "torchvision:fasterrcnn_resnet50_fpn", "--out", str(tmp_path / "runs")),
    )
    told_one_line(
        "may be for texts or for images; expected the data set",
        *run_command(plan.command, capsys, "--model", f"hf:{bert}", "--out", str(tmp_path / "plan")),
    )
