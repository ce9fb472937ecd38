"""The precision of matrix products: a setting of the process, for as long as a pipeline is open."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, get_args

import pytest
import torch
from torch import nn

from pipeal import BP, ConfigError, Pipeline
from pipeal.core.options import Matmul
from pipeal.engine import SCHEDULES
from pipeal.engine.runner import precision as settings

from .cases import Case, Layer, Outcome, cosine, outcome

CASE = Case((Layer("linear", width=9), Layer("pipeal.Dropout", width=8), Layer("batch norm")), rows=(5, 5, 3))


own_settings = pytest.mark.skipif(
    not hasattr(torch.backends, "fp32_precision"), reason="backends have none of their own"
)


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    before = torch.get_float32_matmul_precision(), of_backends()
    yield
    assert (torch.get_float32_matmul_precision(), of_backends()) == before


def of_backends() -> list[str]:
    if not hasattr(torch.backends, "fp32_precision"):
        return []
    return [torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision]


@contextmanager
def set_to(where: Any, precision: str) -> Iterator[None]:
    """A user's own setting, of one backend or of all."""
    before = where.fp32_precision
    where.fp32_precision = precision
    try:
        yield
    finally:
        where.fp32_precision = before


class Asking(nn.Linear):
    """Notes the setting that it runs under."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.seen: list[str] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(torch.get_float32_matmul_precision())
        return super().forward(x)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_it_holds_in_every_worker_and_in_predictions_and_ends_with_the_pipeline(schedule: str) -> None:
    asking = Asking()
    x, y = torch.ones(2, 3), torch.tensor([0, 1])
    with Pipeline([BP(asking)], ["cpu"], schedule, matmul="medium") as pipe:
        pipe.run([(x, y)])
        pipe.predict(x)
    assert asking.seen == ["medium"] * 2
    asking(x)
    assert asking.seen[2:] == ["highest"]


def test_what_the_process_has_is_left_where_nothing_is_asked_for() -> None:
    asking = Asking()
    with settings.matmul_precision("high"), Pipeline([BP(asking)], ["cpu"]) as pipe:
        pipe.predict(torch.ones(2, 3))
    assert asking.seen == ["high"]


def test_it_ends_with_a_pipeline_that_fails() -> None:
    with pytest.raises(ZeroDivisionError), Pipeline([BP(Asking())], matmul="high"):
        raise ZeroDivisionError


def test_pipelines_that_overlap_leave_what_was_before_the_first() -> None:
    """The second to be opened put back, when it was closed last, what the first had set: for ever."""
    first, second = (Pipeline([BP(Asking())], matmul="medium") for _ in range(2))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert torch.get_float32_matmul_precision() == "medium"
    second.__exit__(None, None, None)
    assert torch.get_float32_matmul_precision() == "highest"


@own_settings
@pytest.mark.parametrize("matmul", get_args(Matmul))
def test_what_the_user_has_set_for_a_backend_holds_again_afterwards(matmul: Matmul) -> None:
    """Such a pipeline could not be opened: asked for one word for all backends, torch raises where they differ."""
    for backend in (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul):
        with set_to(backend, "tf32"):
            before = of_backends()
            with Pipeline([BP(asking := Asking())], matmul=matmul) as pipe:
                pipe.predict(torch.ones(2, 3))
            assert asking.seen == [matmul]
            assert of_backends() == before


@own_settings
def test_backends_follow_afterwards_what_is_set_for_all_of_them() -> None:
    """A pipeline left each with a setting of its own, which hid what the user then said of all."""
    with set_to(torch.backends.cuda.matmul, "none"), set_to(torch.backends.mkldnn.matmul, "none"):
        for before in ("none", "tf32"):
            with set_to(torch.backends, before):
                with Pipeline([BP(Asking())], matmul="medium"):
                    assert of_backends() == ["tf32", "bf16"]
                for later in ("tf32", "ieee"):
                    with set_to(torch.backends, later):
                        assert of_backends() == [later] * 2


def test_another_precision_while_one_holds_is_refused_and_leaves_it() -> None:
    with Pipeline([BP(Asking())], matmul="medium"):
        with pytest.raises(ConfigError, match=r"matmul is 'high', but another .* is open with 'medium'"):
            Pipeline([BP(Asking())], matmul="high").__enter__()
        assert torch.get_float32_matmul_precision() == "medium"


@pytest.mark.parametrize("matmul", get_args(Matmul))
def test_every_schedule_leaves_the_same(matmul: Matmul) -> None:
    def trained(schedule: str, stages: int) -> Outcome:
        package = CASE.build()
        with Pipeline(package, ["cpu"] * stages, schedule, threads=1, matmul=matmul) as pipe:
            report = pipe.run(CASE.batches(), cosine)
        return outcome(package, report.losses, [])

    wanted = trained("sequential", 1)
    for schedule in SCHEDULES:
        assert trained(schedule, 3).differences(wanted) == []


def test_an_unknown_precision_is_named() -> None:
    with pytest.raises(ConfigError, match="matmul 'tf32'"):
        Pipeline([BP(Asking())], matmul="tf32")  # type: ignore[arg-type]


@pytest.mark.cuda
def test_high_is_tf32_where_a_gpu_has_it() -> None:
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("no TF32 before compute capability 8.0")
    torch.manual_seed(0)
    net, x = nn.Linear(256, 256).cuda(), torch.randn(64, 256, device="cuda")
    found = []
    for matmul in ("highest", "high"):
        with Pipeline([BP(net)], ["cuda:0"], matmul=matmul) as pipe:  # type: ignore[arg-type]
            found.append(pipe.predict(x).cpu())
    assert not torch.equal(*found)
    torch.testing.assert_close(*found, rtol=1e-2, atol=1e-2)
