"""The file of a line: its stages, where they listen, their keys, and what they train.

::

    line.yaml        for every stage; holds no secret
    stage-0.key      for stage 0 alone, as stage-1.key is for stage 1: who has it can speak as that stage
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import zmq
from pydantic import ConfigDict, Field, TypeAdapter

from pipeal.config import document
from pipeal.core.atomic import write_whole
from pipeal.core.checked import checked
from pipeal.core.errors import ConfigError, refusals_told
from pipeal.line.link import CONNECTIONS, MOST_CONNECTIONS, Keys

_KEY = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
_NAME = r"(?![_\-])[0-9a-zA-Z_\-]{1,63}(?:\.[0-9a-zA-Z_\-]{1,63})*\.?"  # ZeroMQ and Python raise at others
_ADDRESS = re.compile(rf"(?:{_NAME}|\[[0-9a-fA-F:.]+\]):([1-9][0-9]{{0,4}})")

_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class LineStage:
    """A stage.

    Attributes:
        key: Its public key.
        address: ``host:port``, where it listens for the stage before; the first one listens for none. A host is a name,
            an address of IPv4, or one of IPv6 in brackets: ``[fd00::2]:7001``.
        device: ``auto`` is the first GPU of its machine, or else the CPU.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    key: str
    address: str | None = None
    device: str = "auto"


@dataclass(frozen=True)
class LineFile:
    """What all stages of a line know.

    Attributes:
        line: Its name: stages of another line are refused.
        kind: Of the data; see :data:`pipeal.run.train.KINDS`.
        config: What is trained, as ``config.yaml`` has it; only the first stage reads the data.
        stages: In order.
        wait_s: How long a stage waits for a neighbour that is gone; None for as long as it takes.
        snapshot_s: How often a stage saves.
        retain_mib: Of items that the next stage has not saved yet, so many wait in memory.
        largest_mib: Of one tensor of an item; who sends more is cut off.
        connections: Of each link, at most.
        checkpoint_epochs: The last stage writes a checkpoint of all layers after each so many epochs; None for none but
            at the end. It takes as many bytes over the links as the layers below have.
        resume: On the first stage's machine, the run, or checkpoint, that the line goes on with.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    line: str
    kind: str
    config: dict[str, Any]
    stages: tuple[LineStage, ...]
    wait_s: _Positive | None = None
    snapshot_s: _Positive = 60.0
    retain_mib: _Positive = 1024.0
    largest_mib: _Positive = 256.0
    connections: Annotated[int, Field(ge=1, le=MOST_CONNECTIONS)] = CONNECTIONS
    checkpoint_epochs: Annotated[int, Field(ge=1)] | None = 1
    resume: str | None = None

    @property
    def fixed(self) -> dict[str, Any]:
        """What decides which items travel: it stays as it was when the line began."""
        return {"checkpoint_epochs": self.checkpoint_epochs, "resume": self.resume}

    @property
    def retain_bytes(self) -> float:
        """:attr:`retain_mib` in bytes."""
        return self.retain_mib * 2**20

    @property
    def largest_bytes(self) -> int:
        """:attr:`largest_mib` in bytes."""
        return int(self.largest_mib * 2**20)

    @property
    def crowd(self) -> int:
        """How many stages share a machine's cores, at most, as addresses tell: those on the loopback do with the first.

        >>> hosts = (None, "127.0.0.1:7001", "localhost:7002", "10.0.0.3:7001")
        >>> LineFile("line", "text", {}, tuple(LineStage("key", host) for host in hosts)).crowd
        3
        """
        hosts = [str(stage.address).rpartition(":")[0] for stage in self.stages[1:]]
        here = sum(host in ("localhost", "[::1]") or host.startswith("127.") for host in hosts)
        return max(1 + here, *map(hosts.count, hosts))

    def check(self) -> None:
        """Refuses what does not fit together.

        Raises:
            ValueError: In one line.
        """
        if len(self.stages) < 2:
            raise ValueError(f"stages: found {len(self.stages)}, expected at least 2")
        for number, stage in enumerate(self.stages):
            if not _KEY.fullmatch(stage.key):
                raise ValueError(f"stages.{number}.key: found {stage.key[:50]!r}, expected the 40 letters of a key")
            if number and not _is_address(stage.address):
                raise ValueError(f"stages.{number}.address: found {stage.address!r}, expected HOST:PORT")


_LINE = TypeAdapter(LineFile)


def read_line(path: Path) -> LineFile:
    """Reads one.

    Raises:
        ConfigError: It is not there, or not as it should be.
    """
    with refusals_told(f"{path}: cannot be read", "; pipeal line init makes one", ConfigError):
        text = path.read_text(encoding="utf-8", errors="replace")
    try:
        values = document.parse(text, source=str(path))
        if not isinstance(values, dict):
            raise ConfigError(f"{path}: found no fields; pipeal line init makes a line's file")
        found = checked(_LINE, values)
        found.check()
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None
    return found


def make_line(
    folder: Path, kind: str, config: Mapping[str, Any], addresses: Sequence[str], settings: Mapping[str, Any]
) -> LineFile:
    """Makes the keys and the file of a new line.

    Args:
        folder: Where to; it may not have a ``line.yaml``.
        kind: As for :class:`LineFile`, as is ``config``.
        config: What is trained.
        addresses: Where each stage but the first listens, ``host:port``.
        settings: Other fields of :class:`LineFile`.

    Raises:
        ConfigError: An address is none, there is a line already, or the system refused to write; no key is left then.
    """
    path = folder / "line.yaml"
    if path.exists():
        raise ConfigError(
            f"{path}: there is a line already; name another folder with --out, or remove it with its keys"
        )
    for address in addresses:
        if not _is_address(address):
            raise ConfigError(f"--stage: found {address!r}, expected HOST:PORT")
    pairs = [tuple(key.decode() for key in zmq.curve_keypair()) for _ in range(1 + len(addresses))]
    stages = tuple(LineStage(public, address) for (public, _), address in zip(pairs, (None, *addresses), strict=True))
    made = LineFile(secrets.token_hex(8), kind, dict(config), stages, **settings)
    with ExitStack() as undo:
        with refusals_told(f"cannot write the line's keys to {folder}", "; choose another --out", ConfigError):
            folder.mkdir(parents=True, exist_ok=True)
            for number, (_, secret) in enumerate(pairs):
                key = key_path(folder, number)
                opened = os.open(key, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                undo.callback(key.unlink)
                with os.fdopen(opened, "w", encoding="ascii") as file:
                    file.write(secret + "\n")
        write_whole(path, document.dump(plain(made)))
        undo.pop_all()
    return made


def _is_address(text: str | None) -> bool:
    found = _ADDRESS.fullmatch(text or "")
    return found is not None and int(found[1]) < 2**16


def plain(line: LineFile) -> dict[str, Any]:
    """As YAML has it."""
    found = asdict(line)
    return {**found, "stages": [{k: v for k, v in stage.items() if v is not None} for stage in found["stages"]]}


def key_path(folder: Path, stage: int) -> Path:
    """Where the secret key of a stage lies."""
    return folder / f"stage-{stage}.key"


def keys_of(line: LineFile, path: Path, stage: int, peer: int) -> Keys:
    """A stage's keys for its link with a neighbour.

    Args:
        line: The line.
        path: Of the file with the stage's secret key.
        stage: Its number.
        peer: The neighbour's.

    Raises:
        ConfigError: The file cannot be read, others can read it too, or it holds another stage's key.
    """
    with refusals_told(f"{path}: cannot be read", "; copy it from where the line was made", ConfigError):
        mode, secret = path.stat().st_mode, path.read_text(encoding="ascii", errors="replace").strip()
    if mode & 0o077:
        raise ConfigError(f"{path}: others can read it; chmod 600 {path}")
    public = line.stages[stage].key
    if not _KEY.fullmatch(secret) or zmq.curve_public(secret.encode()).decode() != public:
        raise ConfigError(f"{path}: it is not the key of stage {stage} of this line")
    return Keys(public, secret, line.stages[peer].key)
