"""What is read of torchrun's environment."""

from __future__ import annotations

import pytest

from pipeal.core.errors import ConfigError
from pipeal.engine.distributed.launch import Launch

FOUND = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a"}
FOUND |= {"MASTER_PORT": "29500", "TORCHELASTIC_USE_AGENT_STORE": "True"}


def test_what_torchrun_says_is_read() -> None:
    assert Launch.found(FOUND) == Launch(3, 4, 1, 2, "a", 29500, hosted=True)
    assert Launch.found({}) is None
    assert Launch.found({"WORLD_SIZE": "4"}) is None, "as a batch system may say it of itself"
    assert Launch.found({"WORLD_SIZE": "1", "MASTER_ADDR": "a"}) is None


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"RANK": "4"}, "RANK is 4, WORLD_SIZE 4"),
        ({"RANK": "x"}, "RANK is 'x'; expected a whole number"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT is '0'"),
        (
            {"MASTER_PORT": "70000"},
            "MASTER_PORT is '70000'; expected a whole number from 1 to 65535",
        ),  # was a TypeError
        ({"RANK": "9" * 5000}, "RANK is '9{39}; expected"),
        ({"MASTER_PORT": None}, "MASTER_PORT is not set"),
        ({"MASTER_ADDR": None}, "MASTER_ADDR is not"),
        ({"RANK": None}, "RANK is not; start the command with torchrun"),  # each trained all, alone
    ],
)
def test_what_torchrun_would_not_say_is_refused(change: dict[str, str | None], line: str) -> None:
    environment = {key: value for key, value in {**FOUND, **change}.items() if value is not None}
    with pytest.raises(ConfigError, match=line):
        Launch.found(environment)
