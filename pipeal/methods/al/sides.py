"""The blocks that a conversion builds around each ``f``: for one target of a whole input, or one of each place.

Both are asked layer after layer, from the first; a block of the user's takes the place of a built one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from pipeal.core.errors import ConfigError
from pipeal.core.tree import Tree, describe, shapes_of
from pipeal.methods.al.bridges import BridgeStyle, Pool, as_module, bridge_for, tried
from pipeal.methods.al.codes import LabelStyle, Task, recode_side, target_side
from pipeal.methods.al.layers import AE, ENC
from pipeal.methods.al.place_codes import ClassCodes, OnwardCodes, Resample, WhichCode, padding_of
from pipeal.methods.cutting.piece import Features

Own = Mapping[str, nn.Module]
"""The user's blocks of a layer, by their letters."""


class WholeInput:
    """One target of each input: bridges average over places (:mod:`pipeal.methods.al.bridges`).

    Args:
        task: See :func:`pipeal.methods.al.codes.target_side`.
        outputs: How many classes, labels or numbers there are.
        code: The width of the codes.
        hidden: The width of a hidden layer in the bridges; None for none.
        labels: The style of label sides.
        bridges: The style of bridges.
        rows: Of the sample.
    """

    def __init__(
        self,
        task: Task,
        outputs: int,
        code: int,
        *,
        hidden: int | None,
        labels: LabelStyle,
        bridges: BridgeStyle,
        rows: int,
    ) -> None:
        self.task, self.outputs, self.code = task, outputs, code
        self.hidden, self.labels, self.bridges, self.rows = hidden, labels, bridges, rows
        self.below = torch.zeros(2, outputs)  # the target stands where later layers have the code of the one before

    def label_side(self, number: int, own: Own, place: Mapping[str, Any]) -> AE:
        """``g`` and ``h`` of a layer.

        Args:
            number: Of the layer.
            own: The user's blocks of it.
            place: ``device`` and ``dtype``, as ``Tensor.to`` takes them.
        """
        below = self.below.to(**place)
        width = _width_of(number, own, below, self.code)
        if number == 0:
            side = target_side(self.task, self.outputs, width, style=self.labels)
        else:
            side = recode_side(below.shape[-1], width, style=self.labels)
        self.below = _with_own(number, side, own, below)
        return side

    def encoder_side(
        self, number: int, where: str, f: nn.Module, view: nn.Module | None, out: Tree, own: Own, pool: Pool | None
    ) -> ENC:
        """The encoder side of a layer whose label side is built.

        Args:
            number: The layer's.
            where: It, for messages.
            f: Its forward block.
            view: What bridges see of what ``f`` gives; None for all of it.
            out: That, for the sample.
            own: The user's blocks.
            pool: The user's, in front of a built bridge.
        """
        wanted = (self.rows, self.below.shape[-1])
        bridge = own.get("b")
        if bridge is not None:
            tried(f"b of layer {number}", bridge.to(self.below.device), out, wanted)
        else:
            try:
                bridge = bridge_for(
                    out, wanted[1], hidden=self.hidden, style=self.bridges, labels=self.labels, pool=pool
                )
            except ConfigError as error:
                raise ConfigError(f"{where}: {error}") from error
            bridge.to(device=self.below.device, dtype=self.below.dtype)
            if pool is not None:
                tried(f"b, after the pool, of layer {number}", bridge, out, wanted)
        return ENC(f, bridge if view is None else nn.Sequential(view, bridge))


class EachPlace:
    """A target of each place, of one dimension or more (:mod:`pipeal.methods.al.place_codes`).

    Args:
        outputs: How many classes there are.
        code: The width of the codes.
        hidden: The width of a hidden layer in the bridges; None for none.
        answer: What the network gives for the sample: ``(B, T, C)`` or ``(B, C, H, W)``.
        class_dim: Which of its dimensions is that of the classes, 1 or -1; None to find it.
        ignore_index: The label of places that have none.
        layers: How many there are.

    Raises:
        ConfigError: The answer has no places, or its dimension of classes cannot be told.
    """

    def __init__(
        self,
        outputs: int,
        code: int,
        *,
        hidden: int | None,
        answer: Tree,
        class_dim: int | None,
        ignore_index: int,
        layers: int,
    ) -> None:
        answer = _features(answer)
        if not isinstance(answer, Tensor) or answer.dim() < 3 or not answer.is_floating_point():
            raise ConfigError(
                f"the model gives {describe(shapes_of(answer))}; expected an answer for each place, floats (B, T, C) "
                "or (B, C, H, W), for task='per-place'"
            )
        self.outputs, self.code, self.hidden, self.layers = outputs, code, hidden, layers
        self.ignore_index = ignore_index
        self.class_dim = _class_dim(answer, outputs) if class_dim is None else class_dim
        self.places = tuple(answer.movedim(self.class_dim, -1).shape[1:-1])
        self.rows = len(answer)
        self.below = torch.eye(outputs)  # codes of classes, of which each layer makes others

    def label_side(self, number: int, own: Own, place: Mapping[str, Any]) -> AE:
        """As that of :class:`WholeInput`."""
        if ("g" in own) != ("h" in own):
            raise ConfigError(
                f"blocks of layer {number} has one of 'g' and 'h'; per place they are one weight, used both ways: pass "
                "both or neither"
            )
        below = self.below.to(**place)
        width = _width_of(number, own, below, self.code)
        side: AE
        if number == 0:
            side = ClassCodes(self.outputs, width, class_dim=self.class_dim, ignore_index=self.ignore_index)
        else:
            side = OnwardCodes(below.shape[-1], width)
        self.below = _with_own(number, side, own, below)
        return side

    def encoder_side(
        self, number: int, where: str, f: nn.Module, view: nn.Module | None, out: Tree, own: Own, pool: Pool | None
    ) -> ENC:
        """As that of :class:`WholeInput`."""
        masked = padding_of(out) is not None
        mask_at = (view.mask_at if isinstance(view, Features) else 1) if masked else None
        before: list[nn.Module] = [] if view is None else [view]
        wanted = (self.rows, *self.places, self.below.shape[-1])
        if "b" in own:
            tried(f"b of layer {number}", own["b"].to(self.below.device), out, wanted)
            return WhichCode(f, nn.Sequential(*before, own["b"]), mask_at)
        if pool is not None:
            before.append(as_module(pool))
            out = tried(f"pool of layer {number}", before[-1], out, dims=None)
        elif masked:
            before.append(Features())
            out = out[0]
        bridge = nn.Sequential(*before, *self._bridge(number, where, out))
        bridge.to(device=self.below.device, dtype=self.below.dtype)
        return WhichCode(f, bridge, mask_at)

    def _bridge(self, number: int, where: str, features: Tree) -> list[nn.Module]:
        """From features to codes at all places."""
        dims = len(self.places) + 2
        if not isinstance(features, Tensor) or features.dim() != dims or not features.is_floating_point():
            layout = "(B, T, D)" if dims == 3 else "(B, D, h, w), places as the model's answers have them"
            raise ConfigError(
                f"{where}: no bridge per place for an output of {describe(shapes_of(features))}: expected floats "
                f"{layout}; pass pool=…, a function from this output to such"
            )
        channels = _channel_dim(features, self.places, self.class_dim)
        found = features.movedim(channels, -1).shape
        width = found[-1]
        answer = nn.Linear(self.hidden or width, self.below.shape[-1])
        answers = number == self.layers - 1 and width == self.outputs and self.hidden is None
        modules: list[nn.Module] = [] if channels == -1 else [ChannelsLast(channels)]
        if answers:  # the network's own: at first, the way down says the same
            with torch.no_grad():
                answer.weight.copy_(torch.linalg.pinv(self.below.float() / self.below.shape[-1] ** 0.5))
                answer.bias.zero_()
        else:
            modules.append(nn.LayerNorm(width))
        if self.hidden is not None:
            modules += [nn.Linear(width, self.hidden), nn.ReLU()]
        resampled = [] if tuple(found[1:-1]) == self.places else [Resample(tuple(found[1:-1]), self.places)]
        return [*modules, answer, *resampled]


Sides: TypeAlias = WholeInput | EachPlace
"""Both have ``below``: what codes look like above the layer asked for last; at first, what targets do: ``(2, K)`` of a
whole input, ``(V, K)`` per place."""


class ChannelsLast(nn.Module):
    """Puts the features of each place last, as linear maps take them.

    Args:
        channels: The dimension that they are found in.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = channels

    def forward(self, x: Tensor) -> Tensor:
        """``(B, D, h, w)`` to ``(B, h, w, D)``."""
        return x.movedim(self.channels, -1)

    def extra_repr(self) -> str:
        """Shown by ``print(module)``."""
        return str(self.channels)


def _width_of(number: int, own: Own, below: Tensor, code: int) -> int:
    """How wide the codes of a layer are."""
    return tried(f"g of layer {number}", own["g"].to(below.device), below).shape[-1] if "g" in own else code


def _with_own(number: int, side: AE, own: Own, below: Tensor) -> Tensor:
    """Puts the user's blocks into a label side, and gives what codes look like above it."""
    side.to(device=below.device, dtype=below.dtype)
    side.g, side.h = own.get("g", side.g), own.get("h", side.h).to(below.device)
    above = tried(f"g of layer {number}", side.g, below)
    tried(f"h of layer {number}", side.h, above, wanted=below.shape)
    return above


def _features(out: Tree) -> Tree:
    return out if padding_of(out) is None else out[0]


def _class_dim(answer: Tensor, outputs: int) -> int:
    """Where the classes are: after the batch, as images have them, or last, as sequences do."""
    first, last = answer.shape[1] == outputs, answer.shape[-1] == outputs
    if first and last:
        raise ConfigError(
            f"the model gives {describe(shapes_of(answer))} for {outputs} classes; which dimension is theirs? pass "
            "class_dim=1 or class_dim=-1, or a sample of another size"
        )
    return 1 if first or (answer.dim() > 3 and not last) else -1


def _channel_dim(features: Tensor, places: Sequence[int], class_dim: int) -> int:
    """Where the features of each place are: where there are as many places as the answer has, else as the answer."""
    as_last, as_first = tuple(features.shape[1:-1]) == tuple(places), tuple(features.shape[2:]) == tuple(places)
    if as_last != as_first:
        return -1 if as_last else 1
    return class_dim
