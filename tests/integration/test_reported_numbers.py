"""Law 8: the split, the samples, the seed and the epoch behind every figure of a run are what the figure says.

Each run here is held against figures that are found by hand: from the files of the data set, as the test reads them,
and from the weights in the run's last checkpoint.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import click
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from pipeal import ALPackage
from pipeal.cli import text, vision
from pipeal.config import LanguageConfig, RunConfig, TextConfig, VisionConfig, load_config
from pipeal.data import ImageSplit, Vocab, clean, load_images
from pipeal.run.build import evaluated_part, hold_out
from pipeal.run.build_language import language_experiment
from pipeal.run.build_text import TextExperiment, text_experiment
from pipeal.run.build_vision import vision_experiment
from pipeal.run.opening import open_pipeline
from pipeal.training.checkpoint.resume import ResumedTraining
from pipeal.training.checkpoint.store import CheckpointStore
from tests.cli.running import run_command

SAMPLES, HELD_OUT, EVALUATED = 150, 0.2, 23
PLAIN = (
    "--devices=cpu", "--set=engine.threads=1", "--set=train.precision=fp32", "--set=train.lr.warmup=0",
    "--set=train.lr.decay=none",
)  # fmt: skip
TEXTS = (
    *PLAIN, "--set=model.embedding_dim=12", "--set=model.x_hid=8", "--set=model.y_hid=8", "--set=model.dropout=0",
    "--set=data.batching.kind=fixed", "--set=data.batching.batch_size=16",
)  # fmt: skip
IMAGES = (
    *PLAIN, "--set=model.width=0.0625", "--set=model.x_hid=16", "--set=model.y_hid=8", "--size=16",
    "--set=data.batch_size=100", "--epochs=2",
)  # fmt: skip
CHARACTERS = (
    *PLAIN, "--set=model.block=8", "--set=model.width=16", "--set=model.heads=2", "--set=data.steps=40",
    "--set=data.batch_size=16", "--set=data.estimate_batches=6", "--epochs=2",
)  # fmt: skip


@dataclass(frozen=True)
class Left:
    """What a run left: its folder, its rows, and the model of its last checkpoint."""

    folder: Path
    config: RunConfig
    rows: list[dict[str, float]]
    model: ALPackage

    @property
    def last(self) -> dict[str, float]:
        """The last row."""
        return self.rows[-1]

    def json(self, name: str) -> Any:
        """What a file of the run holds."""
        return json.loads((self.folder / name).read_text())


def run(
    capsys: pytest.CaptureFixture[str], command: click.Command, kind: Any, make: Any, out: Path, *arguments: str
) -> Left:
    """Carries out a command, and reads what it left."""
    code, _, err = run_command(command, capsys, *arguments, f"--out={out}")
    assert code == 0, err
    (folder,) = out.iterdir()
    config = load_config(kind, folder / "config.yaml")
    saved = CheckpointStore(folder / "checkpoints").newest(print)
    assert saved is not None
    model = make(config).package(config.train.mode, 0)
    ResumedTraining.of(saved).load_into(model)
    with (folder / "epochs.csv").open() as file:
        rows = [{key: float(value) for key, value in row.items() if value} for row in csv.DictReader(file)]
    return Left(folder, config, rows, model.eval())


def share_right(model: ALPackage, x: Tensor, y: Tensor, exit_at: int | None = None) -> float:
    with torch.no_grad():
        return float((model.infer(x, exit_at).argmax(-1) == y).double().mean())


# -- texts -------------------------------------------------------------------------------------------------------


def write_news(folder: Path) -> Path:
    """An AG News whose classes are told by a word, mislabelled in a third of the test texts; each text has a word that
    no other has, ``train7`` or ``test7``."""
    home = folder / "ag_news_csv"
    home.mkdir(parents=True)
    draw = np.random.default_rng(1)
    for split, count in (("train", SAMPLES), ("test", SAMPLES // 2)):
        labels = draw.integers(1, 5, count)
        topics = np.where(draw.random(count) < (0.9 if split == "train" else 0.6), labels, draw.integers(1, 5, count))
        filler = [" news" * int(more) for more in draw.integers(0, 6, count)]
        rows = [
            f'"{label}","topic{topic}","{split}{n} topic{topic}{more}"'
            for n, (label, topic, more) in enumerate(zip(labels, topics, filler, strict=True))
        ]
        (home / f"{split}.csv").write_text("\n".join(rows) + "\n")
    return folder


def read_news(path: Path, vocab: Vocab) -> tuple[Tensor, Tensor]:
    """All texts of a split as the model takes them, read without the code that reads them for a run."""
    with path.open() as file:
        rows = list(csv.reader(file))
    words = [clean(f"{title} {body}") for _, title, body in rows]
    numbers = [[vocab.indices.get(word, vocab.unk_index) for word in one] for one in words]
    longest = max(map(len, numbers))
    x = torch.tensor([one + [vocab.pad_index] * (longest - len(one)) for one in numbers])
    return x, torch.tensor([int(label) - 1 for label, _, _ in rows])


def news(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, *arguments: str, model: str = "lstm", out: str = "runs"
) -> tuple[Left, Path]:
    root = tmp_path / "data"
    if not root.exists():
        write_news(root)
    found = run(
        capsys, text.command, TextConfig, text_experiment, tmp_path / out, "agnews", model, f"--data-root={root}",
        f"--set=data.held_out={HELD_OUT}", *TEXTS, *arguments,
    )  # fmt: skip
    return found, root / "ag_news_csv"


@pytest.mark.parametrize("mode", ["al", "bp"])
def test_accuracies_of_texts_are_those_of_their_splits(
    mode: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    left, files = news(capsys, tmp_path, f"--mode={mode}", "--epochs=3", "--set=train.lr.base=1e-2")
    vocab = Vocab.load(left.folder / "vocab.json")
    x, y = read_news(files / "train.csv", vocab)
    kept, out = (torch.from_numpy(rows) for rows in hold_out(SAMPLES, HELD_OUT))
    train = share_right(left.model, x[kept], y[kept])
    held = share_right(left.model, x[out], y[out])
    test = share_right(left.model, *read_news(files / "test.csv", vocab))
    assert len({train, held, test, share_right(left.model, x, y)}) == 4, "else a wrong split would not show"
    assert left.last["train_acc"] == pytest.approx(train)
    assert left.last["test_acc"] == pytest.approx(test)
    assert left.last["held_acc"] == pytest.approx(held)
    if mode == "al":
        exits, depths = left.json("exits.json"), range(1, len(left.model) + 1)
        by_exit = [share_right(left.model, *read_news(files / "test.csv", vocab), depth) for depth in depths]
        assert [row["accuracy"] for row in exits["rows"][:-1]] == pytest.approx(by_exit)
        by_exit = [share_right(left.model, x[out], y[out], depth) for depth in depths]
        assert exits["calibration"]["held_out_accuracy_by_exit"] == pytest.approx(by_exit)
        assert (exits["samples"], exits["calibration"]["held_out_samples"]) == (SAMPLES // 2, len(out))


def test_the_training_accuracy_is_taken_on_as_many_samples_as_configured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    left, files = news(capsys, tmp_path, "--mode=bp", "--epochs=1", f"--set=train.train_accuracy_samples={EVALUATED}")
    found = left.last["train_acc"] * EVALUATED
    assert found == pytest.approx(round(found), abs=1e-9), "a share of so many samples, and of no other number"
    vocab = Vocab.load(left.folder / "vocab.json")
    x, y = read_news(files / "train.csv", vocab)
    kept = torch.from_numpy(hold_out(SAMPLES, HELD_OUT)[0])
    of_all = share_right(left.model, x[kept], y[kept]) * EVALUATED
    assert abs(of_all - round(of_all)) > 1e-3, "else the share of all would be taken for it"


def experiment_of(folder: Path, **batching: Any) -> TextExperiment:
    values: dict[str, Any] = {
        "dataset": "agnews",
        "model": {"name": "lstm"},
        "data": {"root": str(write_news(folder / "data")), "held_out": HELD_OUT, "batching": batching},
    }
    return text_experiment(load_config(TextConfig, values=values))


def test_the_vocabulary_is_of_the_texts_that_are_trained_on(tmp_path: Path) -> None:
    experiment_of(tmp_path).save(tmp_path)
    words = set(Vocab.load(tmp_path / "vocab.json").words)
    kept, _ = hold_out(SAMPLES, HELD_OUT)
    assert {word for word in words if word.startswith(("train", "test"))} == {f"train{row}" for row in kept}


def test_test_texts_are_read_as_training_texts_are(tmp_path: Path) -> None:
    root = write_news(tmp_path / "data")
    files = root / "ag_news_csv" / "train.csv", root / "ag_news_csv" / "test.csv"
    for path in files:
        path.write_text('"1","of the topic1","and the news of it"\n"2","of the topic2","and the news of it"\n' * 5)
    for drops in (True, False):
        data = {"root": str(root), "drop_stop_words": drops, "max_len": 6, "held_out": 0.0}
        config = load_config(TextConfig, values={"dataset": "agnews", "model": {"name": "lstm"}, "data": data})
        experiment = text_experiment(config)
        train, test = (next(iter(part)) for part in (experiment.train_evaluation(), experiment.test_evaluation()))
        assert train.x.tolist() == test.x.tolist()
        assert train.x.shape[1] == (2 if drops else 6)


def test_facts_tell_every_part_of_the_data_apart(tmp_path: Path) -> None:
    """By them a run refuses to go on with other data than it began with."""
    facts = experiment_of(tmp_path).facts
    prints = [facts[name] for name in ("fingerprint", "held_out_fingerprint", "test_fingerprint")]
    assert len(set(prints)) == 3
    kept, out = hold_out(SAMPLES, HELD_OUT)
    counts = [facts[f"{part}_samples"] for part in ("train", "held_out", "test")]
    assert counts == [len(kept), len(out), SAMPLES // 2]
    train, test = (tmp_path / "data" / "ag_news_csv" / f"{part}.csv" for part in ("train", "test"))
    for changed, path, row in ((1, train, out[0]), (2, test, 0)):
        rows = path.read_text().splitlines()
        rows[row] = rows[row].replace('"topic', '"topic1 topic')
        path.write_text("\n".join(rows))
        config = {"root": str(tmp_path / "data"), "held_out": HELD_OUT}
        values = {"dataset": "agnews", "model": {"name": "lstm"}, "data": config}
        now = text_experiment(load_config(TextConfig, values=values)).facts
        prints_now = [now[name] for name in ("fingerprint", "held_out_fingerprint", "test_fingerprint")]
        assert [one != other for one, other in zip(prints, prints_now, strict=True)] == [n == changed for n in range(3)]
        prints = prints_now


def test_runs_of_all_seeds_are_tested_on_the_same_samples(tmp_path: Path) -> None:
    """Of IMDb, whose test set is drawn here."""
    home = tmp_path / "imdb"
    home.mkdir()
    rows = [f'"review{n}","{("positive", "negative")[n % 2]}"' for n in range(40)]
    (home / "IMDB_Dataset.csv").write_text("\n".join(["review,sentiment", *rows]))
    found = []
    for seed in (0, 1):
        values: dict[str, Any] = {
            "dataset": "imdb",
            "model": {"name": "lstm"},
            "data": {"root": str(tmp_path), "held_out": 0.25},
            "train": {"seed": seed},
        }
        experiment = text_experiment(load_config(TextConfig, values=values))
        assert len(experiment.test) == 8
        found.append(experiment.facts)
    assert found[0] == found[1]


def rows_of(experiment: TextExperiment, batches: Iterable[Any]) -> list[str]:
    """The texts of batches, in order, by the words that each of them has alone."""
    words = experiment.vocab.words
    texts = [[words[number] for number in row] for batch in batches for row in batch.x.tolist()]
    return [next((word for word in row if word.startswith(("train", "test"))), "unknown") for row in texts]


@pytest.mark.parametrize("kind", ["fixed", "bucket", "size-aware", "token-budget", "plan", "stream"])
def test_every_epoch_trains_on_each_kept_text_once(kind: str, tmp_path: Path) -> None:
    options = {"batch_size": 16} if kind in ("fixed", "bucket") else {"budget_tokens": 256}
    experiment = experiment_of(tmp_path, kind=kind, **options)
    wanted = sorted(f"train{row}" for row in hold_out(SAMPLES, HELD_OUT)[0])
    orders = []
    for seed, epoch in ((0, 0), (0, 1), (1, 0)):
        batches = experiment.train_batches(seed)
        batches.set_epoch(epoch)
        orders.append(rows_of(experiment, batches))
        batches.close()
        assert sorted(orders[-1]) == wanted
    assert len(set(map(tuple, orders))) == 3, "another order in each epoch and for each seed"


def test_losses_and_speeds_of_a_row_are_those_of_its_epoch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same training by hand: layer by layer, with no engine."""
    left, _ = news(capsys, tmp_path, "--epochs=2", "--set=train.lr.base=1e-2", "--set=train.seed=5")
    experiment = text_experiment(left.config)  # type: ignore[arg-type]
    model, batches = experiment.package("al", 5), experiment.train_batches(5)
    tokens = padded = 0
    for row in left.rows:
        losses = []
        batches.set_epoch(int(row["epoch"]) - 1)
        for batch in batches:
            model(batch.x, batch.y)
            losses.append([layer.loss() for layer in model])
            tokens += int((batch.x != experiment.vocab.pad_index).sum())
            padded += batch.x.numel()
            model.backward()
            model.update()
        for number in range(len(model)):
            for part, name in enumerate(("enc", "ae")):
                by_hand = mean(float(batch[number][part]) for batch in losses)  # type: ignore[index]
                assert row[f"loss_{number + 1}_{name}"] == pytest.approx(by_hand, rel=1e-4)
        assert row["samples_per_s"] * row["epoch_time"] == pytest.approx(SAMPLES - SAMPLES * HELD_OUT)
    assert sum(row["tokens_per_s"] * row["epoch_time"] for row in left.rows) == pytest.approx(tokens)
    assert left.last["train_time"] == pytest.approx(sum(row["epoch_time"] for row in left.rows))
    summary = left.json("summary.json")
    assert summary["seconds_per_epoch"] == pytest.approx(left.last["train_time"] / 2)
    assert summary["padding_share"] == pytest.approx(1 - tokens / padded)
    assert summary["tokens_per_s"] == pytest.approx(tokens / left.last["train_time"])
    effective, affiliated = model.effective_parameters(), model.affiliated_parameters()
    assert (summary["training_parameters"], summary["inference_parameters"]) == (effective + affiliated, effective)


def test_every_turn_has_a_seed_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def losses(rows: Sequence[dict[str, float]], turn: int) -> list[list[float]]:
        chosen = [row for row in rows if row["turn"] == turn]
        return [[row[key] for key in sorted(row) if key.startswith("loss")] for row in chosen]

    dropout = "--set=model.dropout=0.3"
    left, _ = news(capsys, tmp_path, "--mode=bp", "--epochs=2", "-r", "3", "--set=train.seed=4", dropout)
    turns = [losses(left.rows, turn) for turn in (1, 2, 3)]
    assert len({repr(turn[0]) for turn in turns}) == 3
    alone, _ = news(capsys, tmp_path, "--mode=bp", "--epochs=2", "--set=train.seed=6", dropout, out="alone")
    assert losses(alone.rows, 1) == turns[2], "a turn can be repeated alone, by its own seed"
    assert len(left.model) == len(alone.model)
    for name, value in left.model.state_dict().items():
        assert torch.equal(value, alone.model.state_dict()[name])


def test_exits_are_those_of_the_last_turn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    left, files = news(capsys, tmp_path, "--mode=al", "--epochs=2", "-r", "2", "--set=train.lr.base=1e-2", "--seed=1")
    x, y = read_news(files / "test.csv", Vocab.load(left.folder / "vocab.json"))
    by_exit = [share_right(left.model, x, y, depth) for depth in range(1, len(left.model) + 1)]
    exits = left.json("exits.json")
    assert [row["accuracy"] for row in exits["rows"][:-1]] == pytest.approx(by_exit)
    assert (exits["seed"], exits["epoch"]) == (2, 2)
    first, last = (row["test_acc"] for row in left.rows if row["epoch"] == 2)
    assert by_exit[-1] == pytest.approx(last) != pytest.approx(first), "else the turns could not be told apart"


def test_dropout_follows_from_the_seed_of_the_turn(tmp_path: Path) -> None:
    experiment = experiment_of(tmp_path)
    chosen = {"engine": {"devices": ["cpu"], "sizes": [4], "threads": 1}, "train": {"precision": "fp32"}}
    config = load_config(TextConfig, values={"dataset": "agnews", "model": {"name": "lstm"}, **chosen})
    batch = next(iter(experiment.train_batches(0)))

    def losses(seed: int) -> list[list[float]]:
        with open_pipeline(experiment.package("al", 0), config, seed) as pipe:
            return [rows.tolist() for rows in pipe.run([batch]).losses]

    assert losses(1) == losses(1)
    assert losses(1) != losses(2)


# -- parts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("samples", [10, 150, 1000])
def test_a_held_out_part_is_the_configured_share_and_the_same_for_every_seed(samples: int) -> None:
    kept, out = hold_out(samples, HELD_OUT)
    np.random.seed(samples)
    torch.manual_seed(samples)
    for one, again in zip((kept, out), hold_out(samples, HELD_OUT), strict=True):
        assert one.tolist() == again.tolist(), "it follows from nothing but the number of samples and the share"
    assert len(out) == samples * HELD_OUT
    assert sorted([*kept.tolist(), *out.tolist()]) == list(range(samples)), "each sample is in one part"
    assert out.max() >= samples / 2 > out.min(), "drawn from all of a file, which may be sorted by class"


def test_the_evaluated_part_is_drawn_once_and_without_repetition() -> None:
    part = evaluated_part(100, 60)
    assert part is not None
    assert len(set(part.tolist())) == 60
    assert set(part.tolist()) <= set(range(100))
    assert part.tolist() != list(range(60)), "the first of a file may be of one class"
    assert (evaluated_part(100, None), evaluated_part(100, 100), evaluated_part(100, 200)) == (None, None, None)


# -- images ------------------------------------------------------------------------------------------------------


def test_accuracies_of_images_are_those_of_their_splits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    left = run(
        capsys, vision.command, VisionConfig, vision_experiment, tmp_path, "toyimages", "vgg", *IMAGES,
        f"--set=data.held_out={HELD_OUT}", f"--set=train.train_accuracy_samples={EVALUATED}", "--augmentation=strong",
    )  # fmt: skip
    data = load_images("toyimages", size=16)
    train, test = data.train, data.test
    kept, out = hold_out(len(train), HELD_OUT)
    mean, std = (torch.tensor(one).view(3, 1, 1) for one in (data.mean, data.std))

    def some(split: ImageSplit, rows: Any) -> tuple[Tensor, Tensor]:
        pixels = torch.from_numpy(np.array(split.pixels[rows])).permute(0, 3, 1, 2)
        return (pixels / 255 - mean) / std, torch.from_numpy(split.labels[rows])

    of_test = share_right(left.model, *some(test, np.arange(len(test))))
    assert left.last["test_acc"] == pytest.approx(of_test)
    exits, depths = left.json("exits.json"), range(1, len(left.model) + 1)
    held = [share_right(left.model, *some(train, out), depth) for depth in depths]
    assert exits["calibration"]["held_out_accuracy_by_exit"] == pytest.approx(held)
    assert left.last["held_acc"] == pytest.approx(held[-1])
    by_exit = [share_right(left.model, *some(test, np.arange(len(test))), depth) for depth in depths]
    assert [row["accuracy"] for row in exits["rows"][:-1]] == pytest.approx(by_exit)
    part = torch.cat([batch.x for batch in vision_experiment(left.config).train_evaluation()])  # type: ignore[arg-type]
    seen = ((part * std + mean) * 255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
    row_of = {image.tobytes(): row for row, image in enumerate(train.pixels)}
    rows = [row_of[np.ascontiguousarray(image).tobytes()] for image in seen]  # a KeyError: it was augmented
    assert len(set(rows)) == EVALUATED
    assert set(rows) <= set(kept.tolist())
    of_train = share_right(left.model, *some(train, rows))
    assert left.last["train_acc"] == pytest.approx(of_train)
    assert len({of_test, held[-1], of_train}) == 3, "else a wrong split would not show"


def test_training_images_are_augmented_anew_in_every_epoch() -> None:
    values: dict[str, Any] = {
        "dataset": "toyimages",
        "model": {"name": "vgg"},
        "data": {"size": 16, "batch_size": 400, "augmentation": "basic", "held_out": HELD_OUT},
    }
    experiment = vision_experiment(load_config(VisionConfig, values=values))

    def first(seed: int, epoch: int) -> dict[int, Tensor]:
        batches = experiment.train_batches(seed)
        batches.set_epoch(epoch)
        batch = next(iter(batches))
        return dict(zip(batch.indices, batch.x, strict=True))

    plain = {row: image for batch in experiment.train_evaluation() for row, image in zip(batch.indices, batch.x)}  # noqa: B905
    passes = [first(0, 0), first(0, 1), first(1, 0)]
    for found in passes:
        changed = sum(not torch.equal(image, plain[row]) for row, image in found.items())
        assert changed > 0.9 * len(found), "one of 162 is cut where it was and not mirrored"
    for one, other in ((0, 1), (0, 2)):
        both = passes[one].keys() & passes[other].keys()
        assert list(passes[one]) != list(passes[other]), "another order"
        same = sum(torch.equal(passes[one][row], passes[other][row]) for row in both)
        assert same < 0.1 * len(both), "augmented otherwise in each epoch and for each seed"
    again = first(1, 0)
    assert all(torch.equal(again[row], image) for row, image in passes[2].items())


# -- characters --------------------------------------------------------------------------------------------------


def test_losses_of_characters_are_those_of_their_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The end of the text, on which it is validated, has letters that its beginning has not; of that, the end is held
    out."""
    draw = np.random.default_rng(0)
    beginning = "".join(draw.choice(list("abcdefgh \n"), 3600))
    end = "".join(draw.choice(list("stuvwxyz \n"), 400))
    file = tmp_path / "letters.txt"
    file.write_text(beginning + end, encoding="utf-8")
    left = run(
        capsys, text.command, LanguageConfig, language_experiment, tmp_path / "runs", "text", "charlm",
        f"--text={file}", *CHARACTERS,
    )  # fmt: skip
    experiment = language_experiment(left.config)  # type: ignore[arg-type]
    alphabet, trained_on = experiment.alphabet, set[str]()
    for batch in experiment.train_batches(left.config.train.seed):
        trained_on |= {alphabet.decode(row) for row in batch.x}
    count = round(left.config.data.held_out * len(beginning))
    kept, held = beginning[:-count], beginning[-count:]
    assert all(block in kept for block in trained_on)
    for part, name, evaluation in (
        (kept, "train", experiment.train_evaluation()),
        (held, "held", experiment.held_out()),
        (end, "test", experiment.test_evaluation()),
    ):
        losses, right, blocks = [], [], []
        assert evaluation is not None
        for batch in evaluation:
            with torch.no_grad():
                logits = left.model.infer(batch.x)
            losses.append(float(F.cross_entropy(logits.flatten(0, 1), batch.y.flatten())))
            right.append(float((logits.argmax(-1) == batch.y).double().mean()))
            blocks += [alphabet.decode(torch.cat((x[:1], y))) for x, y in zip(batch.x, batch.y, strict=True)]
        assert all(block in part for block in blocks), "each with the character that comes after it"
        assert len(blocks) == 6 * 16
        assert left.last[f"{name}_loss"] == pytest.approx(mean(losses), rel=1e-4)
        assert left.last[f"{name}_acc"] == pytest.approx(mean(right))
        if name == "train":
            assert {block[:-1] for block in blocks} != trained_on, "they are blocks of its own draw"
    assert left.last["train_loss"] < 0.9 * left.last["test_loss"]


def test_estimates_of_all_epochs_are_of_the_same_blocks(tmp_path: Path) -> None:
    file = tmp_path / "letters.txt"
    file.write_text("".join(np.random.default_rng(0).choice(list("abcdefgh \n"), 4000)), encoding="utf-8")
    values: dict[str, Any] = {
        "dataset": "text",
        "model": {"name": "charlm", "block": 8},
        "data": {"text": str(file), "batch_size": 4, "steps": 5, "estimate_batches": 3},
    }
    experiment = language_experiment(load_config(LanguageConfig, values=values))

    def starts(batches: Any, epoch: int) -> list[int]:
        batches.set_epoch(epoch)
        return [start for batch in batches for start in batch.indices]

    for estimate in (experiment.train_evaluation, experiment.held_out, experiment.test_evaluation):
        assert starts(estimate(), 0) == starts(estimate(), 1)
    orders = [starts(experiment.train_batches(seed), epoch) for seed, epoch in ((0, 0), (0, 1), (1, 0))]
    assert len({tuple(order) for order in orders}) == 3
    estimated = starts(experiment.train_evaluation(), 0)
    assert all(estimated != order[: len(estimated)] for order in orders), "a draw of its own, not the first trained on"
