"""What ``torchrun`` tells each process it starts, in its environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from pipeal.core.errors import ConfigError


@dataclass(frozen=True)
class Launch:
    """Which of the processes this is, and where they meet.

    Attributes:
        rank: Its number, from 0.
        size: How many there are.
        local_rank: Its number on its machine.
        local_size: How many there are on its machine.
        address: Where they meet.
        port: Likewise.
        hosted: Whether someone else, such as ``torchrun`` itself, hosts the store there; else rank 0 does.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    address: str
    port: int
    hosted: bool = False

    @classmethod
    def found(cls, environment: Mapping[str, str] = os.environ) -> Launch | None:
        """What the environment says; None where this process was started alone.

        Raises:
            ConfigError: It says something else than ``torchrun`` would.
        """
        if "WORLD_SIZE" not in environment or "RANK" not in environment:
            if "MASTER_ADDR" in environment and environment.get("WORLD_SIZE", "1") != "1":
                raise ConfigError(
                    "WORLD_SIZE and MASTER_ADDR are set, but RANK is not; start the command with torchrun, or set the "
                    "rank of each process; to train in this one alone, unset WORLD_SIZE"
                )
            return None
        size = _number(environment, "WORLD_SIZE", 1)
        rank = _number(environment, "RANK", 0)
        if rank >= size:
            raise ConfigError(f"RANK is {rank}, WORLD_SIZE {size}; expected a rank below it, as torchrun sets them")
        if "MASTER_ADDR" not in environment:
            raise ConfigError("WORLD_SIZE is set, but MASTER_ADDR is not; start the command with torchrun")
        return cls(
            rank,
            size,
            _number(environment, "LOCAL_RANK", 0, rank),
            _number(environment, "LOCAL_WORLD_SIZE", 1, size),
            environment["MASTER_ADDR"],
            _number(environment, "MASTER_PORT", 1, most=65535),
            environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        )


def _number(
    environment: Mapping[str, str], name: str, least: int, default: int | None = None, most: int = 2**31 - 1
) -> int:
    text = environment.get(name)
    if text is None and default is not None:
        return default
    # Python makes no number of thousands of digits.
    if text is None or not (text.isascii() and text.isdigit() and len(text) < 20) or not least <= int(text) <= most:
        found = "not set" if text is None else f"{text!r:.40}"
        raise ConfigError(f"{name} is {found}; expected a whole number from {least} to {most}, as torchrun sets it")
    return int(text)
