"""Label sides: targets that their codes can tell apart, and that come back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pipeal import ConfigError
from pipeal.methods.al.codes import TASKS, class_side, recode_side, target_side


def least_distance(codes: Tensor) -> float:
    """Between the codes of any two classes, per unit of the code (root mean square)."""
    return float(torch.pdist(codes.detach()).min() / codes.shape[1] ** 0.5)


@given(
    classes=st.integers(2, 60), code=st.sampled_from([64, 100, 256]), depth=st.integers(1, 4), seed=st.integers(0, 99)
)
def test_near_inverses_decode_every_class_before_any_training(classes: int, code: int, depth: int, seed: int) -> None:
    torch.manual_seed(seed)
    sides = [class_side(classes, code), *(recode_side(code, code) for _ in range(depth - 1))]
    value = torch.eye(classes)
    for side in sides:
        value = side.g(value)
    assert least_distance(value) > 0.3
    for side in reversed(sides):
        value = side.h(value)
    assert torch.equal(value.argmax(1), torch.arange(classes))


def test_published_sides_hardly_tell_classes_apart() -> None:
    """Why they are not the default; if this fails, the docstring is wrong."""
    torch.manual_seed(0)
    first, second = class_side(200, 700, style="published"), recode_side(700, 700, style="published")
    code = first.g(torch.eye(200))
    assert 0.005 < least_distance(code) < 0.02
    assert least_distance(second.g(code)) < least_distance(code) / 2
    assert least_distance(class_side(200, 700).g(torch.eye(200))) > 0.5


@pytest.mark.parametrize(("code_in", "code_out"), [(64, 64), (64, 100), (64, 48)])
def test_codes_may_change_their_width(code_in: int, code_out: int) -> None:
    torch.manual_seed(0)
    side = recode_side(code_in, code_out)
    y = torch.tanh(torch.randn(8, code_in))
    loss, code = side(y)
    assert code.shape == (8, code_out)
    assert loss < 0.6 * y.var()


def test_class_numbers_and_probabilities_are_the_same_target() -> None:
    for style in ("inverse", "published"):
        torch.manual_seed(0)
        side = class_side(5, 16, style=style)  # type: ignore[arg-type]
        y = torch.tensor([0, 3, 4, 1])
        loss, code = side(y)
        soft_loss, soft_code = side(torch.nn.functional.one_hot(y, 5).float())
        assert torch.equal(code, soft_code)
        torch.testing.assert_close(loss, soft_loss)


def test_published_class_loss_is_mean_squared_error_of_one_hot_targets() -> None:
    torch.manual_seed(0)
    side = class_side(3, 8, style="published")
    loss, code = side(torch.tensor([2, 0]))
    answer = side.h(code)
    assert ((answer > 0) & (answer < 1)).all()
    wanted = torch.tensor([[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]])
    torch.testing.assert_close(loss, (answer - wanted).square().mean())


@given(labels=st.integers(1, 12), seed=st.integers(0, 99))
def test_labels_come_back_before_any_training(labels: int, seed: int) -> None:
    torch.manual_seed(seed)
    side = target_side("multilabel", labels, 256)
    y = (torch.rand(50, labels) < 0.3).float()
    loss, code = side(y)
    assert ((side.h(code) > 0) == (y > 0)).float().mean() > 0.85
    assert loss < 0.35 < 0.69  # what answering one half everywhere costs
    assert torch.equal(side(y.long())[1], code)


@given(numbers=st.integers(1, 8), seed=st.integers(0, 99))
def test_numbers_come_back_before_any_training(numbers: int, seed: int) -> None:
    torch.manual_seed(seed)
    side = target_side("regression", numbers, 128)
    y = torch.randn(200, numbers)
    loss, code = side(y)
    assert loss < 0.3
    assert code.abs().max() < 1
    answered = torch.corrcoef(torch.stack([side.h(code).flatten(), y.flatten()]))[0, 1]
    assert answered > 0.95


def test_a_plain_row_of_numbers_is_one_number_per_sample() -> None:
    """Symptom: a loss over (B, B). Cause: (B,) broadcasts against (B, 1)."""
    torch.manual_seed(0)
    side = target_side("regression", 1, 32)
    y = torch.randn(6)
    loss, code = side(y)
    torch.testing.assert_close(loss, (side.h(code).squeeze(1) - y).square().mean())
    assert torch.equal(loss, side(y.unsqueeze(1))[0])


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("style", ["inverse", "published"])
def test_every_label_side_learns(task: Any, style: Any) -> None:
    torch.manual_seed(0)
    side = target_side(task, 4, 24, style=style)
    y = torch.randint(4, (64,)) if task == "classification" else torch.rand(64, 4).round()
    optimizer = torch.optim.Adam(side.parameters(), lr=0.01)
    first = side(y)[0].item()
    for _ in range(100):
        optimizer.zero_grad()
        loss, _ = side(y)
        loss.backward()
        optimizer.step()
    assert loss < 0.7 * first


def test_mistakes_are_told_in_one_line() -> None:
    with pytest.raises(ConfigError, match="unknown task 'multi-label'; did you mean 'multilabel'"):
        target_side("multi-label", 3, 8)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="unknown style of label sides 'publish'; did you mean 'published'"):
        recode_side(3, 8, style="publish")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="outputs is 0; expected a whole number, at least 1"):
        target_side("regression", 0, 8)
