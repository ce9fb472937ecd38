"""Commands on a file of the user's own texts and labels."""

from __future__ import annotations

import json
import random
from functools import partial
from pathlib import Path

import pytest

from pipeal.cli.main import command as group
from pipeal.cli.text import command
from pipeal.config import TextConfig, load_config
from tests.cli.running import run_command, told_one_line

TOPICS = {"sport": "goal team match win cup", "money": "bank market stock price fund"}
SMALL = (
    "--text-column=headline", "--text-column=body", "--label-column=topic", "--devices=cpu,cpu",
    "--set=model.embedding_dim=12", "--set=model.n_heads=2", "--set=model.x_hid=16", "--set=model.y_hid=16",
    "--set=data.batching.budget_tokens=256", "--set=engine.threads=1", "--set=train.precision=fp32",
)  # fmt: skip

leaves = partial(run_command, command)


@pytest.fixture
def news(tmp_path: Path) -> Path:
    """Texts of two topics that any model can tell apart."""
    draw = random.Random(0)
    rows = []
    for number in range(200):
        topic = draw.choice([*TOPICS])
        words = TOPICS[topic].split()
        rows.append(f"{number},{draw.choice(words)},{' '.join(draw.choices(words, k=6))},{topic}")
    path = tmp_path / "news.csv"
    path.write_text("\n".join(["id,headline,body,topic", *rows]) + "\n")
    return path


def test_a_file_is_trained_on_tested_on_a_share_and_taken_up_again(
    news: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = news.parent / "runs"
    code, _, err = leaves(capsys, str(news), "transformer", *SMALL, "--epochs=4", f"--out={out}")
    assert code == 0, err
    assert "2 classes (money, sport); tested on 0.2 of it, drawn by seed 0" in err
    folder = out / "news-transformer-al-001"
    summary = json.loads((folder / "summary.json").read_text())
    assert json.loads((folder / "classes.json").read_text()) == {"classes": ["money", "sport"]}
    assert (summary["data"]["train_samples"], summary["data"]["held_out_samples"]) == (152, 8)
    assert (summary["data"]["test_samples"], summary["data"]["labels"]) == (40, "money, sport")
    assert summary["data"]["tested_on"] == "0.2 of it, drawn by seed 0"
    rows = [json.loads(line) for line in (folder / "epochs.jsonl").read_text().splitlines()]
    assert rows[-1]["test_acc"] > 0.8, "they differ in every word"

    moved = news.rename(news.with_name("moved.csv"))
    again = (str(moved), "transformer", *SMALL, "--epochs=5", f"--out={out}", f"--resume={folder}")
    code, _, err = leaves(capsys, *again)
    assert code == 0, err
    assert f"going on with {folder}" in err
    text = moved.read_text()
    moved.write_text(text.replace(",sport\n", ",zzz\n").replace(",money\n", ",sport\n").replace(",zzz\n", ",money\n"))
    told_one_line(r"the data has (fingerprint|test_fingerprint) .* put the data back", *leaves(capsys, *again))
    moved.write_text(text.replace(",sport\n", ",tennis\n"))
    told_one_line("the data has labels money, tennis, but had money, sport", *leaves(capsys, *again))


@pytest.mark.slow
def test_it_may_be_tested_on_another_file_and_named_in_a_configuration(
    news: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    test = news.with_name("test.jsonl")
    lines = [{"headline": "goal", "body": "cup", "topic": "sport"}, {"headline": "b", "body": "", "topic": "money"}] * 5
    test.write_text("\n".join(json.dumps(line) for line in lines))
    out = news.parent / "runs"
    arguments = (str(news), "LSTM", *SMALL, f"--test-file={test}", "--epochs=1", f"--out={out}")
    code, _, err = leaves(capsys, *(one for one in arguments if "n_heads" not in one))
    assert code == 0, err
    folder = out / "news-lstm-bp-001"
    found = json.loads((folder / "summary.json").read_text())["data"]
    assert (found["train_samples"], found["test_samples"], found["tested_on"]) == (190, 10, "a file of its own")
    config = load_config(TextConfig, folder / "config.yaml")
    assert (config.data.file, config.data.test_file) == (str(news), str(test))
    assert (config.data.columns.text, config.data.columns.label) == (("headline", "body"), "topic")
    code, _, err = leaves(capsys, "file", "lstm", f"--config={folder / 'config.yaml'}", "--resume=never")
    assert code == 0, err
    assert (folder.parent / "news-lstm-bp-002" / "epochs.csv").is_file()


def test_texts_that_are_trained_on_are_told_where_they_are_tested_on(
    news: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = news.read_text().splitlines(keepends=True)
    part = news.with_name("part.csv")
    part.write_text("".join([lines[0], *lines[5:9]]))
    small = [one for one in SMALL if "n_heads" not in one]
    given = (str(news), "lstm", *small, f"--test-file={part}", "--set=engine.sizes=[9]", f"--out={news.parent}")
    code, told, err = leaves(capsys, *given)
    told_one_line("sizes", code, told, err)
    assert "part.csv: all of its texts are in" in err


def test_memory_looks_at_a_model_on_a_file(news: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = news.parent / "memory"
    own = ("--set=data.columns.text=[headline, body]", "--set=data.columns.label=topic", *SMALL[4:9])
    code, _, err = run_command(
        group, capsys, "memory", f"--dataset={news}", "--model=transformer", *own, f"--out={out}"
    )
    assert code == 0, err
    assert json.loads((out / "memory.json").read_text())["facts"]["dataset"] == "file"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("none.csv", "lstm"), r"cannot read none\.csv: No such file"),
        (("NEWS", "lstm"), r"news\.csv, line 1: no column 'text' in the header, 'id', 'headline', 'body', 'topic';"),
        (("NEWS", "charlm"), r"news\.csv is for lstm and transformer; expected shakespeare, text for charlm"),
        (("news.tsv", "lstm"), r"unknown data set 'news\.tsv'.*file"),
        (("file", "lstm"), r"data\.file: found null, but the data set is file; name it in its place"),
        (("agnews", "lstm", "--set=data.file=x.csv"), r"data\.file: found x\.csv, but the data set is agnews"),
        (("NEWS", "lstm", *SMALL, "--set=data.test_share=0"), r"0 of its 200 texts is 0 to test on"),
        (("NEWS", "lstm", *SMALL, "--test-file=NEWS.gz"), r"cannot read .*news\.csv\.gz"),
        (("NEWS", "lstm", *SMALL, "--test-file=NEWS"), r"data\.test_file: .*news\.csv holds just the texts of .*news"),
        (("NEWS", "lstm", "--text-column="), r"data\.columns\.text: found .*, expected a list of texts"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(
    arguments: tuple[str, ...], line: str, news: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [one.replace("NEWS", str(news)) for one in arguments if "n_heads" not in one]
    told_one_line(line, *leaves(capsys, *given, f"--out={news.parent / 'runs'}"))
    assert not (news.parent / "runs").exists()


def test_options_of_files_are_told_where_they_have_no_effect(news: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, _, err = leaves(
        capsys, "agnews", "lstm", "--label-column=x", "--set=data.download=false", "--data-root=/nowhere"
    )
    assert "data.columns.label x: without effect, since dataset is agnews" in err
    _, _, err = leaves(capsys, "none.csv", "lstm", "--test-file=x.csv", "--set=data.test_share=0.3")
    assert "data.test_share 0.3: without effect, since data.test_file is x.csv" in err
