"""What is thrown at the commands: a case is a command line and a folder with everything that it names.

Made from a seed and the number of the case alone. Left out: what only takes long (many epochs, compilation, great
sizes that still fit), paths that lead out of the folder, and checkpoints forged so that their sums fit.
"""

from __future__ import annotations

import io
import json
import random
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from PIL import Image

SMALL_RUN = [
    "--epochs=1",
    "--set=train.precision=fp32",
    "--set=train.train_accuracy_samples=30",
    "--set=model.x_hid=6",
    "--set=model.y_hid=5",
]
SMALL = {
    "nlpmain.py": [*SMALL_RUN, "--set=model.embedding_dim=6", "--set=model.n_heads=2"],
    "cvmain.py": [*SMALL_RUN, "--size=16", "--set=model.width=0.05"],
}
RUNS = {
    "nlpmain.py": ["agnews", "lstm", *SMALL["nlpmain.py"], "--epochs=2", "--devices=cpu"],
    "cvmain.py": ["cifar10", "resnet", *SMALL["cvmain.py"], "--epochs=2", "--devices=cpu*2"],
}
RUNS = {command: [*line, "--set=train.checkpoint.every=1"] for command, line in RUNS.items()}
"""Command lines whose finished runs are damaged, taken up again and reported on."""

NAMES = {
    "nlpmain.py": (["agnews"] * 12 + ["AG_NEWS", "toynews", "imdb", "dbpedia"], ["lstm", "transformer", "LSTMAL"]),
    "cvmain.py": (["cifar10"] * 12 + ["CIFAR-10", "cifar100", "tinyimagenet"], ["vgg", "resnet", "ResnetAL", "VGG"]),
}
COMMON = {
    "data.download": ["true", "false"],
    "data.held_out": ["0", "0.2", "0.5", "0.999", "1e-9"],
    "engine.devices": ["cpu", "[cpu, cpu]", "cpu*2", "auto"],
    "engine.matmul": ["highest", "high", "medium"],
    "engine.on_oom": ["raise", "split"],
    "engine.packet": ["as_is", "bf16", "int8", "int8-stochastic"],
    "engine.peer_timeout_s": ["60", "1e-9"],
    "engine.queue_depth": ["1", "7"],
    "engine.replicas": ["1", "2"],
    "engine.micro_batches": ["null", "1", "8"],
    "engine.schedule": ["sequential", "backward-overlap", "al-fm", "pipelined", "gpipe", "1f1b"],
    "engine.sizes": ["null", "[1, 3]", "[4]", "[1]"],
    "engine.stall_timeout_s": ["60", "1e-9"],
    "engine.threads": ["1", "2"],
    "engine.trace_batches": ["1", "3"],
    "out": ["runs", "a/b"],
    "train.accumulate": ["1", "2", "5"],
    "train.checkpoint.every": ["1", "null"],
    "train.checkpoint.keep": ["1", "3"],
    "train.epochs": ["1", "2"],
    "train.exit_tolerance": ["0", "0.9"],
    "train.lr.ae": ["null", "1e-2"],
    "train.lr.base": ["1e-3", "1e30"],
    "train.lr.decay": ["none", "cosine"],
    "train.lr.end": ["0", "1e-4"],
    "train.lr.per": ["epoch", "batch"],
    "train.lr.warmup": ["0", "3"],
    "train.methods": ["[al, bp]", "bp,al", "[greedy, al]"],
    "train.mode": ["al", "bp", "greedy", "compare"],
    "train.on_non_finite": ["raise", "skip", "stop-and-rewind"],
    "train.precision": ["auto", "fp32", "bf16", "fp16"],
    "train.repeat": ["1", "2"],
    "train.seed": ["0", str(2**63 - 1)],
    "train.tensorboard": ["false", "true"],
    "train.train_accuracy_samples": ["1", "null"],
}
KEYS = {
    "nlpmain.py": COMMON
    | {
        "data.batching": ["{kind: fixed, batch_size: 8}", "{kind: bucket}", "{kind: stream, budget_tokens: 512}"],
        "data.batching.bounds": ["4", "64"],
        "data.batching.budget_tokens": ["256", "20", "1"],
        "data.batching.kind": ["fixed", "bucket", "size-aware", "token-budget", "plan", "stream"],
        "data.batching.largest_first": ["true", "false"],
        "data.batching.max_samples": ["1", "null"],
        "data.batching.oversize": ["raise", "drop", "single"],
        "data.batching.shapes": ["2", "null"],
        "data.batching.spare_batches": ["0", "4"],
        "data.drop_stop_words": ["true", "false"],
        "data.max_len": ["1", "20", "null"],
        "data.min_frequency": ["1", "3"],
        "data.prefetch": ["0", "2", "null"],
        "data.vocab_size": ["1", "2", "50"],
        "model.dropout": ["0", "0.999"],
        "model.embedding_dim": ["6", "2"],
        "model.embedding_updates": ["dense", "touched"],
        "model.grouping": ["{thresholds: 2}", "{thresholds: 1, layers: [2], cost: square}"],
        "model.n_heads": ["1", "2", "3"],
        "model.pretrained": ["none", "glove", "fasttext"],
        "model.vectors": ["null", "data/glove.6B.6d.txt", "nowhere.txt", "config.yaml", "data"],
        "model.x_hid": ["6", "1"],
        "model.y_hid": ["5", "1"],
    },
    "cvmain.py": COMMON
    | {
        "data.augmentation": ["none", "basic", "strong"],
        "data.batch_size": ["1", "7", "64"],
        "data.cache": ["true", "false", "cache"],
        "data.on_broken": ["raise", "skip"],
        "data.size": ["16", "32"],
        "data.workers": ["0", "1", "null"],
        "model.activation": ["relu", "leaky-relu"],
        "model.bridges": ["pooled", "flat", "lookahead", "mlp"],
        "model.channels_last": ["true", "false"],
        "model.labels": ["inverse", "published", "codes", "one-hot"],
        "model.width": ["0.05", "1e-9"],
        "model.x_hid": ["6", "1"],
        "model.y_hid": ["5", "1"],
    },
}
OPTIONS = {
    "--mode": "train.mode",
    "--method": "train.mode",
    "--methods": "train.methods",
    "--schedule": "engine.schedule",
    "--devices": "engine.devices",
    "--epochs": "train.epochs",
    "-r": "train.repeat",
    "--seed": "train.seed",
    "--out": "out",
    "--size": "data.size",
    "--batch-size": "data.batch_size",
    "--augmentation": "data.augmentation",
    "--max-len": "data.max_len",
}
WRONG = [
    *("", " ", "-1", "0", "1.5", "-0.0", ".nan", ".inf", "-.inf", "1e999", "1e-320", "1e308", "2147483648", "9" * 30),
    *("9" * 5_000, "true", "no", "null", "~", "''", "text", "'3'", "[]", "[0]", "[1, two]", "[[[1]]]", "{}", "{a: 1}"),
    *("{[1]: 2}", "{base: {base: 1}}", "{kind: plan, kind: fixed}", "&a [*a]", "&a {b: *a}", "*nowhere", "!!int x"),
    *("!!python/object/apply:os.getcwd []", "!!binary x", "!!binary aGk=", "!!set {a}", "!!omap [a: 1]", "!x y"),
    *("2020-02-30", "2020-02-03", "1:30", "0o17", "0x1F", "1_0", "\u2028", "é", "\0", "\udcff", "{", "]", "'", '"'),
    *("[" * 3_000, "{a: " * 400, "<<: 1", "{<<: {a: 1}}", "? a", "%YAML 9.1", "--- 1\n--- 2", "@x", "`x", "a: b: c"),
    *(
        "\t1",
        "# nothing",
        "=",
        "cpu,,cpu",
        "cpu*0",
        "cpu*999",
        "cuda:99",
        "meta",
        "tpu",
        "😀",
        "\x1b[31m",
        "a\nb",
        "a\rb",
    ),
    *(
        "x" * 5_000,
        "é" * 300,
        "config.yaml",
        "config.yaml/x",
        "/dev/null",
        "/dev/null/x",
        "a/../b",
        "--help",
        "-",
        "--",
    ),
]
HUGE = ["2147483647", "1000000000", "300000000"]
NOT_HUGE = ("train.epochs", "train.repeat", "engine.threads", "data.workers", "data.size", "train.seed", "data.cache")
"""Keys whose great values are no mistake but take long, or make files of such names elsewhere."""

STRANGE_KEYS = [
    *(
        "",
        ".",
        "..",
        "train",
        "train.",
        ".train",
        "model..x_hid",
        "train.epoch",
        "trian.epochs",
        "model.grouping.layers.0",
    ),
    *("train.lr", "train.lr.base.x", "epochs", "batch_size", "é.ü", "\0", "a" * 3_000, "data.batching.kind.x", "[1]"),
    *("__class__", "train.__dict__", " train.epochs ", "train. epochs", "model", "data", "engine", "\n", "\udcff"),
]
STRANGE_NAMES = [
    *("", " ", "agnew", "lst", "AGNEWS\n", "😀", "\udcff", "\0", "x" * 3_000, "..", "a/b", "-", "--", "\x1b[1m")
]
STRANGE_ARGUMENTS = [
    *("--resume=never", "--resume=auto", "--resume=", "--resume=data", "--resume=\0", "--resume=\udcff"),
    *("", "--", "x", "--help", "--set", "--no-such", "-r", "--epochs", "\udcff", "-x"),
]
STRANGE_GROUPS: list[list[str]] = [
    *([], ["--help"], ["--version"], ["trian-text"], ["runs", "--help"], ["report"], [""], ["\0"], ["--", "runs"]),
    *(["train-text"], ["train-vision", "--help"], ["runs", "a", "b"], ["--no-such"], ["\udcff"]),
]
STRANGE_FOLDERS = ["", "no", "file", "file/x", ".", "\0", "\udcff", "x" * 400, "/dev/null", "a\nb", "--", "\x1b[31m"]
STRANGE_PAGES = [
    *("page.html", "a/b.html", "", ".", "\0", "run-0", "run-0/x", "/dev/null/x", "x" * 400, "\udcff.html", "😀"),
]
ARCHIVES = [
    *("cifar-10-python.tar.gz", "cifar-100-python.tar.gz", "cifar-10-images.zip", "tiny-imagenet-200.zip"),
    *("dbpedia_csv.tar.gz", "aclImdb_v1.tar.gz", "glove.6B.6d.txt", "crawl-6d-2M.vec", "train.csv", "test.csv"),
]
ROWS = [
    *(b"", b"\n\n", b'"1","a","b"\n', b'"1","the","of"\n"2","and","or"\n', b'"1","a', b"1,2\n", b"\xff\xfe", b"\0\n"),
    *(
        b'\xef\xbb\xbf"1","a","b"\r\n',
        b'"1","' + b"x" * 200_000 + b'","y"\n',
        b"text,positive\n" * 30,
        b'"9","a","b"\n',
    ),
    *(b'"1","a","b"\n' * 30, b'"1","' + b"word " * 9_000 + b'","b"\n', '"1","é 😀","\u2028"\n'.encode() * 9),
]
CONFIGS = [
    *("", "\n", "3", "[]", "null", "- a\n- b", "a: 1\na: 2", "a: &a [*a]", "&a {model: *a}", "train: &t {lr: *t}"),
    *(
        "model: 3",
        "model: [x_hid]",
        "train:\n\tepochs: 1",
        "train: {epochs: 1",
        "%YAML 9.9\n---\ntrain: {}",
        "\ufefftrain: {}",
    ),
    *(
        "---\ntrain: {}\n---\ntrain: {}",
        "!!python/object/apply:os.getcwd []",
        "? [a, b]\n: 1",
        "1: 2",
        "null: 2",
        "~: {}",
    ),
    *("<<: {train: {epochs: 1}}", "<<: 3", "train: {<<: {epochs: 1}}", "[" * 5_000, "{a: " * 5_000, "- " * 5_000),
    *(
        "a: 2020-13-45",
        "? ",
        "train: !!binary x",
        "model: !!set {name}",
        "dataset: 3",
        "dataset: other\nmodel: {name: x}",
    ),
    "a: &a [x, x]\n"
    + "".join(f"a{n}: &a{n} [*a{n - 1 or ''}, *a{n - 1 or ''}, *a{n - 1 or ''}]\n" for n in range(1, 30)),
    "a: &a {k: 1}\n"
    + "".join(f"b{n}: &b{n} {{<<: [*{'b' + str(n - 1) if n else 'a'}], k{n}: 1}}\n" for n in range(200)),
]


class Maker:
    """Fills the folder of a case, and gives its command line.

    Args:
        draw: Decides everything.
        folder: Empty.
        templates: Holds finished runs of :data:`RUNS` with the data they were trained on, by command.
        spoilt: The share of values that are wrong; None draws that too.
    """

    def __init__(self, draw: random.Random, folder: Path, templates: Path, spoilt: float | None = None) -> None:
        self.draw = draw
        self.folder = folder
        self.templates = templates
        drawn = 0.0 if draw.random() < 0.15 else draw.choice([0.1, 0.3, 0.7])
        self.spoilt = drawn if spoilt is None else spoilt

    def case(self) -> tuple[str, list[str]]:
        """The command, as a name of ``KEYS`` or ``pipeal``, and its arguments."""
        command = self.draw.choice([*KEYS, *KEYS, "pipeal"])
        if command != "pipeal":
            return command, self.training(command)
        parts: dict[str, Callable[[], list[str]]] = {
            "train-text": lambda: self.training("nlpmain.py"),
            "train-vision": lambda: self.training("cvmain.py"),
            "report": self.report,
            "runs": self.list_runs,
        }
        if self.draw.random() < 0.1:
            return command, self.draw.choice(STRANGE_GROUPS)
        part = self.draw.choice([*parts, "report", "runs"])
        return command, [part, *parts[part]()]

    def training(self, command: str) -> list[str]:
        """Of a new run, or of one to be taken up again."""
        if self.draw.random() < 0.2:
            return self.resumed(command)
        names = [self.but(self.draw.choice(kind), STRANGE_NAMES, 0.1) for kind in NAMES[command]]
        self.data(command)
        given = [self.option(command) for _ in range(self.draw.choice([0, 0, 1, 2]))]
        given += [self.set(command) for _ in range(self.draw.choice([0, 1, 1, 2, 4]))]
        if self.draw.random() < 0.3:
            given.append([f"--config={self.config(command)}"])
        if self.spoilt and self.draw.random() < 0.1:
            given.append([self.draw.choice(STRANGE_ARGUMENTS)])
        self.draw.shuffle(given)
        devices = [] if self.draw.random() < 0.1 else ["--devices=cpu"]
        return [*names, *SMALL[command], *devices, *(word for words in given for word in words)]

    def resumed(self, command: str) -> list[str]:
        """Of a run that ended early, most often damaged."""
        shutil.copytree(self.templates / command, self.folder, dirs_exist_ok=True, symlinks=True)
        (run,) = (self.folder / "runs").iterdir()
        if self.draw.random() < 0.8:
            status = {"status": self.draw.choice(["interrupted", "failed", "running"])}
            (run / "status.json").write_text(json.dumps(status))
        for path in sorted((run / "checkpoints").glob("step-*"))[self.draw.choice([0, 1, 1, 2, 9]) :]:
            shutil.rmtree(path)
        if self.draw.random() < 0.7:
            self.damage(run)
        if self.draw.random() < 0.1:
            shutil.rmtree(self.folder / "data")
            self.data(command)
        named = str(run.relative_to(self.folder))
        more = self.set(command) if self.draw.random() < 0.2 else []
        epochs = ["--epochs=3"] if self.draw.random() < 0.3 else []
        return [*RUNS[command], f"--resume={self.draw.choice(['auto', named, named])}", *epochs, *more]

    def report(self) -> list[str]:
        """Of runs that may be damaged."""
        folders = [self.run_folder() for _ in range(self.draw.choice([0, 1, 1, 1, 2, 3]))]
        return [*folders, *([f"--out={self.draw.choice(STRANGE_PAGES)}"] if self.draw.random() < 0.4 else [])]

    def list_runs(self) -> list[str]:
        """Of runs that may be damaged."""
        found = [self.run_folder() for _ in range(self.draw.choice([0, 1, 2]))]
        return self.draw.choice([["."], found[:1], found])

    def run_folder(self) -> str:
        """The name of a run's folder, or of something else."""
        if self.draw.random() < 0.3:
            (self.folder / "file").write_bytes(b"x")
            return self.draw.choice(STRANGE_FOLDERS)
        name = f"run-{len(list(self.folder.iterdir()))}"
        (run,) = (self.templates / self.draw.choice(list(RUNS)) / "runs").iterdir()
        shutil.copytree(run, self.folder / name, symlinks=True)
        if self.draw.random() < 0.8:
            self.damage(self.folder / name)
        return name

    # Values.

    def but(self, usual: str, strange: list[str], share: float) -> str:
        """Something strange, in a spoilt case, as often as ``share`` says."""
        return self.draw.choice(strange) if self.spoilt and self.draw.random() < share else usual

    def value(self, command: str, key: str) -> str:
        """In YAML."""
        good = self.draw.choice(KEYS[command].get(key, ["1"]))
        if "".join(key.split()) not in NOT_HUGE:
            good = self.but(good, HUGE, 0.15)
        return self.but(good, WRONG, self.spoilt)

    def key(self, command: str) -> str:
        return self.but(self.draw.choice(list(KEYS[command])), STRANGE_KEYS, 0.1)

    def set(self, command: str) -> list[str]:
        key = self.key(command)
        pair = f"{key}{self.but('=', ['', '==', ' = ', ': '], 0.05)}{self.value(command, key)}"
        return self.draw.choice([["--set", pair], [f"--set={pair}"]])

    def option(self, command: str) -> list[str]:
        own = [option for option, key in OPTIONS.items() if key in KEYS[command]]
        option = self.but(self.draw.choice(own), list(OPTIONS), 0.1)
        key = OPTIONS[option]
        value = self.value(command, key)
        if option == "--devices" and value.startswith("["):
            value = "cpu, cpu"
        return [option, value] if option.startswith("-r") or self.draw.random() < 0.5 else [f"{option}={value}"]

    # Files.

    def config(self, command: str) -> str:
        """The name of a YAML file; made here, if it is to be there at all."""
        path = self.folder / "config.yaml"
        pairs = {
            key: self.value(command, key) for key in self.draw.sample(list(KEYS[command]), self.draw.randint(0, 8))
        }
        content = _nested(pairs).encode("utf-8", "surrogatepass")
        if self.spoilt and self.draw.random() < 0.6:
            content = self.draw.choice(
                [
                    self.draw.choice(CONFIGS).encode(),
                    self.draw.choice(CONFIGS).encode("utf-16"),
                    self.mangled(content),
                    self.mangled(
                        yaml.safe_dump({"train": {"epochs": 1, "lr": {"base": 1e-3}}, "out": "runs"}).encode()
                    ),
                    self.draw.randbytes(200),
                ]
            )
        path.write_bytes(content)
        return self.but(
            "config.yaml", ["", "nowhere.yaml", ".", "/dev/null", "\0", "\udcff", "x" * 400, "config.yaml/x"], 0.1
        )

    def data(self, command: str) -> None:
        """A tiny data set under ``data``; in a spoilt case perhaps damaged, of another shape, or none."""
        root = self.folder / "data"
        if command == "nlpmain.py":
            write_news(root)
        else:
            write_images(root)
        if not self.spoilt or self.draw.random() < 0.6:
            return
        match self.draw.randrange(4):
            case 0:
                self.damage(root)
            case 1:
                shutil.rmtree(root)
                self.draw.choice([root.mkdir, root.touch, lambda: root.symlink_to("nowhere"), lambda: None])()
            case 2 if command == "nlpmain.py":
                path = root / "ag_news_csv" / self.draw.choice(["train.csv", "test.csv"])
                path.write_bytes(self.draw.choice(ROWS))
                (root / "imdb" / "IMDB_Dataset.csv").write_bytes(b"review,sentiment\n" + self.draw.choice(ROWS))
            case _:
                shutil.rmtree(root)
                root.mkdir()
                for name in ARCHIVES:
                    (root / name).write_bytes(
                        self.draw.choice([b"", b"PK", self.draw.randbytes(300), _tar(b"\x80\x04N.")])
                    )

    def mangled(self, content: bytes) -> bytes:
        """With a part gone, twice, or other bytes in it."""
        for _ in range(self.draw.randint(1, 4)):
            first, last = sorted(self.draw.randrange(len(content) + 1) for _ in range(2))
            part = content[first:last]
            new = self.draw.choice([b"", part * 2, self.draw.randbytes(3), b"\0", b"\n", b"-", b"{", b"9" * 30])
            content = content[:first] + new + content[last:]
        return content

    def damage(self, folder: Path) -> None:
        """Of one to three files or folders below it."""
        for _ in range(self.draw.randint(1, 3)):
            paths = sorted(path for path in folder.rglob("*") if not path.is_symlink())
            if not paths:
                return
            self.damage_one(self.draw.choice(paths))

    def damage_one(self, path: Path) -> None:
        content = path.read_bytes() if path.is_file() else b""
        if path.is_file() and self.draw.random() < 0.7:
            changed = self.mangled(content)
            if path.suffix == ".json" and self.draw.random() < 0.8:
                changed = self.other_json(content)
            with path.open("wb") as file:
                file.write(self.draw.choice([changed, changed, changed, b"", content[: len(content) // 2]]))
            return
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        new = self.draw.choice(["nothing", "folder", "file", "dangling", "loop"])
        if new == "folder":
            path.mkdir()
        elif new == "file":
            path.write_bytes(self.draw.randbytes(50))
        elif new != "nothing":
            path.symlink_to("nowhere" if new == "dangling" else path.name)

    def other_json(self, content: bytes) -> bytes:
        """One value in it changed."""
        try:
            whole: Any = json.loads(content)
        except ValueError:
            return content
        spots = list(_spots(whole))
        if not spots:
            return b"[]"
        holder, key = self.draw.choice(spots)
        old = holder[key]
        holder[key] = self.draw.choice([None, -1, 10**12, 1e308, float("nan"), "x", [], {}, [old], {"a": old}, True, 0])
        return json.dumps(whole).encode()


def write_news(root: Path) -> None:
    """AG News of 40 texts to train and 12 to test on, and others that are like it; vectors."""
    home = root / "ag_news_csv"
    home.mkdir(parents=True)
    for name, count in (("train.csv", 40), ("test.csv", 12)):
        rows = (
            f'"{1 + n % 4}","{["rain", "goal", "bank", "chip"][n % 4]} {n}","{"news " * (n * n % 20)}"\n'
            for n in range(count)
        )
        (home / name).write_text("".join(rows))
    shutil.copytree(home, root / "dbpedia_csv")
    (root / "imdb").mkdir()
    reviews = (f"{'good ' * n}film,{['positive', 'negative'][n % 2]}\n" for n in range(20))
    (root / "imdb" / "IMDB_Dataset.csv").write_text("".join(["review,sentiment\n", *reviews]))
    (root / "glove.6B.6d.txt").write_text("".join(f"{word} 1 2 3 4 5 6\n" for word in ("news", "rain", "film")))


def write_images(root: Path) -> None:
    """CIFAR-10 as image files: 40 to train and 10 to test on."""
    for split, count in (("train", 40), ("test", 10)):
        for n in range(count):
            path = root / "cifar-10-images" / split / f"class{n % 10}" / f"{n}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (8, 8), (n * 6, 255 - n * 6, n % 10 * 25)).save(path)


def _tar(content: bytes) -> bytes:
    """A CIFAR archive whose files hold that."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name in ("batches.meta", "data_batch_1", "test_batch"):
            member = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return packed.getvalue()


def _nested(pairs: dict[str, str]) -> str:
    """Dotted keys and their values, as they are, in YAML blocks."""
    lines: list[str] = []
    open_now: list[str] = []
    for dotted, value in sorted(pairs.items()):
        *sections, key = dotted.split(".")
        shared = 0
        while shared < min(len(sections), len(open_now)) and sections[shared] == open_now[shared]:
            shared += 1
        lines += [f"{'  ' * depth}{sections[depth]}:" for depth in range(shared, len(sections))]
        lines.append(f"{'  ' * len(sections)}{key}: {value}")
        open_now = sections
    return "\n".join(lines) + "\n"


def _spots(value: Any) -> list[tuple[Any, Any]]:
    """Every place in a JSON value: what holds it, and under what key."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [spot for key in keys for spot in [(value, key), *_spots(value[key])]]
