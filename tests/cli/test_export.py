"""What ``pipeal export`` leaves loads without the run and answers as its model does; refusals leave nothing."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from pipeal.cli import text, vision
from pipeal.cli.export import FORMS, command
from pipeal.run import export as exports
from pipeal.run.trained import Trained, load_trained
from tests.cli.running import run_command, told_one_line
from tests.training.run_folders import make_run

SMALL = ("--devices=cpu", "--epochs=1", "--set=engine.threads=1", "--set=train.precision=fp32")
OF_TEXTS = ("--set=model.embedding_dim=8", "--set=model.x_hid=8", "--set=model.y_hid=8", "--max-len=8")

leaves = partial(run_command, command)


def trained(folder: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> Path:
    """The folder of a run of one epoch."""
    train = vision.command if "toyimages" in arguments else text.command
    code, _, err = run_command(train, capsys, *arguments, *SMALL, f"--out={folder}")
    assert code == 0, err
    (run,) = (path for path in folder.iterdir() if path.is_dir())
    return run


def of_texts(folder: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> Path:
    """As :func:`trained`, on 80 texts."""
    path = folder / "news.csv"
    rows = [f"{'good fine' if n % 2 else 'bad poor'} word{n % 7},{'Yes' if n % 2 else 'Nö'}" for n in range(80)]
    path.write_text("\n".join(["text,label", *rows]), encoding="utf-8")
    return trained(folder / "runs", capsys, str(path), *arguments, *OF_TEXTS)


def program_of(run: Path) -> tuple[torch.nn.Module, dict[str, str]]:
    """The program that lies in a run's folder, and what it says of itself."""
    files = {exports.FACTS: ""}
    program = torch.export.load(run / "model.pt2", extra_files=files)
    return program.module(), json.loads(files[exports.FACTS])


def tokens(found: Trained, rows: int, length: int) -> torch.Tensor:
    """Texts, or parts of one."""
    return torch.randint(1, 8, (rows, length), generator=torch.Generator().manual_seed(rows))


def test_forms_of_a_comparison_leave_their_weights_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = of_texts(tmp_path, capsys, "transformer", "--mode=compare", "--methods=bp,greedy", "--set=model.n_heads=2")
    told_one_line(r"it compares several; name .*/bp or .*/greedy", *leaves(capsys, str(run), "--to=safetensors"))
    for form in ("bp", "greedy"):
        code, out, err = leaves(capsys, str(run / form), "--to=safetensors")
        assert code == 0, err
        path = run / form / "model.safetensors"
        assert out.startswith(f"{path}: ")
        found, weights = load_trained(run / form), load_file(path)
        plain = exports.plain_model(found)
        plain.load_state_dict({name: torch.zeros_like(tensor) for name, tensor in weights.items()})
        plain.load_state_dict(weights)
        x = tokens(found, 3, 5)
        torch.testing.assert_close(plain(x), load_trained(run / form).package.infer(x), rtol=0, atol=0)
        with safe_open(path, "pt") as file:
            facts = file.metadata()
        assert json.loads(facts["classes"]) == ["Nö", "Yes"]
        assert (facts["dataset"], facts["model"], facts["method"]) == ("file", "transformer", form)
        assert facts["trained"] == "epoch 1"
    # Those of backpropagation are the network's own, without anything around it.
    assert not any(name.startswith("f.") for name in load_file(run / "bp" / "model.safetensors"))


@pytest.mark.slow
def test_a_program_answers_for_any_batch_and_length(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = of_texts(tmp_path, capsys, "transformer", "--set=model.n_heads=2", "--set=model.parts=2")
    code, out, err = leaves(capsys, str(run), "--to=torch-export")
    assert code == 0, err
    assert out == f"{run / 'model.pt2'}: takes (batch, length), and answers as the run's model does\n"
    program, facts = program_of(run)
    found = load_trained(run)
    for rows, length in ((1, 8), (4, 3), (7, 1)):
        x = tokens(found, rows, length)
        torch.testing.assert_close(program(x), found.package.infer(x))
    assert (facts["method"], json.loads(facts["classes"])) == ("al", ["Nö", "Yes"])


@pytest.mark.slow
def test_what_has_one_length_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = of_texts(tmp_path, capsys, "lstm", "--mode=bp", "--set=model.parts=2")
    code, out, err = leaves(capsys, str(run), "--to=torch-export")
    assert code == 0, err
    assert "takes (batch, 8), and answers as the run's model does; pad texts on the right to that length" in out
    program, _ = program_of(run)
    found = load_trained(run)
    x = tokens(found, 3, 8)
    torch.testing.assert_close(program(x), found.package.infer(x))


@pytest.mark.slow
def test_images_and_characters_are_programs_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ("--set=model.width=0.1", "--set=data.batch_size=256", "--set=model.parts=2")
    run = trained(tmp_path / "images", capsys, "toyimages", "vgg", *small)
    code, out, err = leaves(capsys, str(run), "--to=torch-export")
    assert code == 0, err
    program, facts = program_of(run)
    size = load_trained(run).config.data.size
    assert f"takes (batch, 3, {size}, {size})" in out
    assert len(json.loads(facts["classes"])) == program(torch.randn(1, 3, size, size)).shape[1]
    corpus = tmp_path / "verses.txt"
    corpus.write_text("to be or not to be\n" * 60)
    few = ("--set=data.steps=2", "--set=data.estimate_batches=1", "--set=model.layers=1", "--set=model.block=8")
    run = trained(tmp_path / "verses", capsys, "text", "charlm", f"--text={corpus}", *few)
    code, out, err = leaves(capsys, str(run), "--to=torch-export")
    assert code == 0, err
    assert "takes (batch, length)" in out
    program, facts = program_of(run)
    assert json.loads(facts["classes"]) == sorted(set(corpus.read_text()))
    assert program(torch.zeros(2, 5, dtype=torch.int64)).shape == (2, 5, len(set(corpus.read_text())))


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """A small one."""
    return of_texts(tmp_path, capsys, "transformer", "--mode=bp", "--set=model.n_heads=2")


def test_what_is_there_stays_unless_told_and_half_a_file_never_is(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = run.parent / "mine.safetensors"
    assert leaves(capsys, str(run), "--to=safetensors", f"--out={out}")[0] == 0
    # Copies, since the file is written to; its bytes differ, as metadata have no order.
    before = {name: tensor.clone() for name, tensor in load_file(out).items()}
    told_one_line("is there already; give --force", *leaves(capsys, str(run), "--to=safetensors", f"--out={out}"))
    out.write_bytes(b"other")
    monkeypatch.setattr(exports, "load_file", lambda _: {})
    code, _, err = leaves(capsys, str(run), "--to=safetensors", f"--out={out}", "--force")
    assert code == 1
    assert "read back, it is not the run's model" in err
    assert out.read_bytes() == b"other"
    monkeypatch.undo()
    assert leaves(capsys, str(run), "--to=safetensors", f"--out={out}", "--force")[0] == 0
    torch.testing.assert_close(load_file(out), before, rtol=0, atol=0)
    assert leaves(capsys, str(run), "--to=safetensors", f"--out={run.parent}")[0] == 0
    assert (run.parent / "model.safetensors").is_file(), "a folder is written into"
    assert not list(run.parent.rglob(".*aside"))


def test_inputs_that_a_program_is_tried_on_are_padded_at_their_end_alone(run: Path) -> None:
    """Padding within texts, of a small vocabulary, ended the export of every LSTM in torch's words."""
    found = load_trained(run)
    pad, shortest = found.models.pad_index, 4  # type: ignore[attr-defined]
    for length in range(shortest, 40):
        texts = found.inputs(3, length) == pad
        assert not texts[0].any()
        assert torch.equal(texts[1:].int().sort(1).values.bool(), texts[1:])


def test_weights_that_a_run_began_with_are_not_asked_for_again(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begun = tmp_path / "begun.safetensors"
    assert leaves(capsys, str(run), "--to=safetensors", f"--out={begun}")[0] == 0
    folder = tmp_path / "second"
    folder.mkdir()
    own = of_texts(folder, capsys, "transformer", "--mode=bp", "--set=model.n_heads=2", f"--set=model.weights={begun}")
    begun.unlink()
    assert leaves(capsys, str(own), "--to=safetensors")[0] == 0
    again = (
        str(folder / "news.csv"), "transformer", "--mode=bp", "--set=model.n_heads=2", f"--set=model.weights={begun}",
        *OF_TEXTS, *SMALL, f"--resume={own}",
    )  # fmt: skip
    code, _, err = run_command(text.command, capsys, *again, "--epochs=2", f"--out={own.parent}")
    assert code == 0, err
    assert "goes on after epoch 1" in err
    assert f"weights: {begun}" in (own / "config.yaml").read_text()


def test_a_link_to_nowhere_stays(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "link.safetensors"
    out.symlink_to(tmp_path / "nowhere")
    told_one_line("is there already; give --force", *leaves(capsys, str(run), "--to=safetensors", f"--out={out}"))
    assert out.is_symlink()


def test_a_checkpoint_may_be_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (step,) = (run / "checkpoints").glob("step-*")
    assert leaves(capsys, str(step), "--to=safetensors")[0] == 0
    with safe_open(run / "model.safetensors", "pt") as file:
        assert file.metadata()["checkpoint"] == step.name
    # One that is not there was called bad.
    line = f"there is no checkpoint .*step-0000099; there are: {step.name}$"
    told_one_line(line, *leaves(capsys, str(step.with_name("step-0000099")), "--to=safetensors"))


@pytest.mark.parametrize("out", ["config.yaml", "checkpoints", "checkpoints/step-000000001", "stall-1.txt", "../bp/hf"])
@pytest.mark.parametrize("named", ["al", "al/checkpoints/step-000000001"])
def test_what_training_left_is_never_replaced(
    out: str, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With --force a run lost its configuration, and its checkpoints got a file that is none of theirs."""
    monkeypatch.setattr(exports, "load_trained", lambda _: pytest.fail("it was loaded"))
    for form in ("al", "bp"):
        step = make_run(tmp_path / "run" / form) / "checkpoints" / "step-000000001"
        step.mkdir(parents=True)
    (tmp_path / "run" / "asked.yaml").touch()
    before = sorted(tmp_path.rglob("*"))
    (tmp_path / "link").symlink_to(tmp_path / "run")
    place = tmp_path / "link" / "al" / out
    refused = leaves(capsys, str(tmp_path / "run" / named), "--to=safetensors", f"--out={place}", "--force")
    told_one_line("the run's own; name another --out", *refused)
    assert sorted(path for path in tmp_path.rglob("*") if path.name != "link") == before


def test_a_run_of_an_earlier_version_has_no_names_of_classes(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "classes.json").unlink()
    assert leaves(capsys, str(run), "--to=safetensors")[0] == 0
    with safe_open(run / "model.safetensors", "pt") as file:
        assert "classes" not in file.metadata()


def test_a_mistake_is_one_line(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(line: str, *arguments: str) -> None:
        told_one_line(line, *leaves(capsys, *arguments))

    refused("nowhere: no run of one form; name the folder of a run", str(tmp_path / "nowhere"), "--to=safetensors")
    refused("found ''", "", "--to=safetensors")
    refused("--out n+: File name too long; name another", str(run), "--to=safetensors", f"--out={'n' * 300}")
    refused("n: cannot be read: File name too long; name the folder", "n" * 300, "--to=safetensors", "--out=x")
    refused("Invalid value for '--to'", str(run), "--to=onnx")
    (run / "classes.json").write_text("[]")
    refused(r"classes\.json: not as a run writes it", str(run), "--to=safetensors")
    (run / "classes.json").unlink()
    (run / "vocab.json").rename(run / "v.json")
    refused("none of vocab.json, .* one of which a run leaves", str(run), "--to=safetensors")
    (run / "v.json").rename(run / "vocab.json")
    (run / "checkpoints").rename(run / "gone")
    refused("no checkpoint; train until the first one is written", str(run), "--to=safetensors")
    assert not (run / "model.safetensors").exists()


def test_a_folder_without_a_configuration_is_told_as_what_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder of unrelated runs was said to compare them, and of a run it was not said what it lacks."""
    for name in ("a", "b"):
        make_run(tmp_path / name)
    line = rf"no run of one form; it holds runs; name one, such as {tmp_path / 'a'}$"
    told_one_line(line, *leaves(capsys, str(tmp_path), "--to=safetensors"))
    (tmp_path / "a" / "config.yaml").unlink()
    line = r"a: config\.yaml is missing, which a run writes when it begins"
    told_one_line(line, *leaves(capsys, str(tmp_path / "a"), "--to=safetensors"))


def test_the_command_offers_what_there_is() -> None:
    assert tuple(exports.TARGETS) == FORMS


BERT: dict[str, Any] = {
    "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 12,
    "max_position_embeddings": 16,
}  # fmt: skip


def bert(folder: Path) -> Path:
    """A small model with a tokenizer of whole words."""
    library = pytest.importorskip("transformers")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "fine", "bad", "poor", "word1", "word2", "word3"]
    folder.mkdir()
    (folder / "words.txt").write_text("\n".join(words))
    library.BertConfig(**BERT).save_pretrained(folder)
    tokenizers = pytest.importorskip("tokenizers")
    own = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: n for n, word in enumerate(words)}, "[UNK]"))
    own.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    library.PreTrainedTokenizerFast(tokenizer_object=own, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(folder)
    return folder


@pytest.mark.parametrize("method", ["al", pytest.param("bp", marks=pytest.mark.slow), "greedy"])
def test_a_model_of_transformers_goes_back_to_it(
    method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = bert(tmp_path / "bert")
    library = pytest.importorskip("transformers")
    run = of_texts(tmp_path, capsys, f"hf:{folder}", f"--mode={method}")
    if method == "greedy":  # it goes on: copies of layers without weights, by which a checkpoint is checked, fit it
        again = (str(tmp_path / "news.csv"), f"hf:{folder}", f"--mode={method}", *OF_TEXTS, *SMALL, f"--resume={run}")
        code, _, err = run_command(text.command, capsys, *again, "--epochs=2", f"--out={run.parent}")
        assert code == 0, err
        assert "goes on after epoch 1" in err
    folder.rename(tmp_path / "gone")  # a run has all that it needs
    code, out, err = leaves(capsys, str(run), "--to=hf")
    assert code == 0, err
    found, left = load_trained(run), run / "model-hf"
    assert ("go through bridges and h, which it does not have: its head is new" in out) == (method == "al")
    assert ("the hidden states and the logits of the run's model" in out) == (method != "al")
    model = library.AutoModelForSequenceClassification.from_pretrained(left).eval()
    assert model.config.id2label == {0: "Nö", 1: "Yes"}
    tokenizer = library.AutoTokenizer.from_pretrained(left)
    batch = tokenizer(["good fine", "bad"], padding=True, return_tensors="pt")
    given = model(**{key: batch[key] for key in ("input_ids", "attention_mask")}, output_hidden_states=True)
    if method != "al":
        torch.testing.assert_close(given.logits, found.package.infer(batch["input_ids"]))
    else:
        features = found.package[0].inference(batch["input_ids"], "f")
        words = next(part for part in features if part.dim() == 3)
        torch.testing.assert_close(words[0], given.hidden_states[0][0])
    base = library.AutoModel.from_pretrained(left).eval()
    torch.testing.assert_close(base(input_ids=batch["input_ids"]).last_hidden_state[0], given.hidden_states[-1][0])
    told_one_line("is there already; give --force", *leaves(capsys, str(run), "--to=hf"))
    assert leaves(capsys, str(run), "--to=hf", "--force")[0] == 0
    assert leaves(capsys, str(run), "--to=safetensors")[0] == 0
    if method == "bp":
        model.load_state_dict(load_file(run / "model.safetensors"))  # by its own names
    other = tmp_path / "mine"
    other.mkdir()
    (other / "letter.txt").write_text("dear")
    (other / "config.json").write_text("{}")
    refused = leaves(capsys, str(run), "--to=hf", f"--out={other}", "--force")
    told_one_line("holds letter.txt, which no export writes; name another --out", *refused)
    assert (other / "letter.txt").read_text() == "dear"


def test_a_model_of_pipeal_is_none_of_transformers(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = "its model is transformer, which transformers does not have; expected the run of a model hf:FOLDER"
    told_one_line(line, *leaves(capsys, str(run), "--to=hf"))
    assert not (run / "model-hf").exists()
