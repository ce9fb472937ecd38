"""How a conversion builds the blocks around each ``f``, in two ways: for one target of a whole input, or one of each
place.

Both are asked layer after layer, from the first; a block of the user's takes the place of a built one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pipeal.core.errors import ConfigError
from pipeal.core.tree import Tree, describe, shapes_of
from pipeal.methods.al.bridges import Pool, as_module, bridge_for, tried
from pipeal.methods.al.codes import recode_side, target_side
from pipeal.methods.al.conversion import Conversion
from pipeal.methods.al.layers import AE, ENC
from pipeal.methods.al.place_codes import ClassCodes, OnwardCodes, Resample, WhichCode, code_width, padding_of
from pipeal.methods.cutting.piece import Features

POOLED_CODE = 128
"""The usual width of label codes."""


@dataclass(frozen=True, slots=True)
class Forward:
    """The forward block of a layer, as the sample found it, and what the user gave to stand around it.

    Attributes:
        number: The layer's.
        name: Where it begins in the network.
        f: The block.
        writers: Its submodules that are to work out of place from the end of the conversion on.
        gives: What it gives for the sample.
        view: What picks from that what bridges see; None if they see all of it.
        out: What bridges see, for the sample.
        own: The user's blocks, by their letters.
        pool: The user's, in front of a built bridge.
        device: That of built blocks.
        dtype: Theirs.
    """

    number: int
    name: str
    f: nn.Module
    writers: Sequence[nn.Module]
    gives: Tree
    view: nn.Module | None
    out: Tree
    own: Mapping[str, nn.Module]
    pool: Pool | None
    device: torch.device
    dtype: torch.dtype

    @property
    def where(self) -> str:
        """The layer, for messages."""
        return f"layer {self.number} ({self.name!r})"

    def picked(self, pool: Pool | None) -> tuple[list[nn.Module], Tree]:
        """What gives the features alone: as a pool lays them out, or without their mask; and those of the sample.

        Raises:
            ConfigError: The pool does not take what ``f`` gives.
        """
        before = [] if self.view is None else [self.view]
        if pool is not None:
            module = as_module(pool)
            return [*before, module], tried(f"pool of layer {self.number}", module, self.out, dims=None)
        return ([*before, Features()], self.out[0]) if padding_of(self.out) is not None else (before, self.out)


class Sides(ABC):
    """What builds the blocks of a network's layers.

    Args:
        how: What is asked for.
        rows: Of the sample.
        code: The width of codes.
        below: What codes look like above the layer asked for last; at first, what targets do: ``(2, K)`` of a whole
            input, ``(V, K)`` per place.
    """

    def __init__(self, how: Conversion, rows: int, code: int, below: Tensor) -> None:
        self.how, self.rows, self.code, self.below = how, rows, code, below

    def label_side(self, layer: Forward) -> AE:
        """``g`` and ``h`` of a layer; to be asked for before its encoder side."""
        number, own = layer.number, layer.own
        if number and "g" not in own and self.below.dtype != layer.dtype:
            raise ConfigError(
                f"{layer.where} gives {layer.dtype}, and the layer before has codes of {self.below.dtype}, which are "
                "handed on: let all parts give one type, or take a method without label sides"
            )
        below = self.below.to(device=layer.device, dtype=layer.dtype)
        code = tried(f"g of layer {number}", own["g"].to(below.device), below).shape[-1] if "g" in own else self.code
        side = self._onward(below.shape[-1], code) if number else self._first(code)
        side.to(device=below.device, dtype=below.dtype)
        side.g, side.h = own.get("g", side.g), own.get("h", side.h).to(below.device)
        self.below = tried(f"g of layer {number}", side.g, below)
        tried(f"h of layer {number}", side.h, self.below, wanted=below.shape)
        return side

    @abstractmethod
    def encoder_side(self, layer: Forward) -> ENC:
        """The encoder side of a layer."""

    @abstractmethod
    def _first(self, code: int) -> AE:
        """The label side of the first layer."""

    @abstractmethod
    def _onward(self, code_in: int, code: int) -> AE:
        """That of a later one."""


class WholeInput(Sides):
    """One target of each input: bridges average over places (:mod:`pipeal.methods.al.bridges`).

    Args:
        how: What is asked for.
        rows: Of the sample.
    """

    def __init__(self, how: Conversion, rows: int) -> None:
        # The target stands where later layers have the code of the one before.
        super().__init__(how, rows, how.code or POOLED_CODE, torch.zeros(2, how.outputs))

    def encoder_side(self, layer: Forward) -> ENC:
        """``f`` and a bridge to vectors."""
        how, wanted = self.how, (self.rows, self.below.shape[-1])
        bridge = layer.own.get("b")
        if bridge is not None:
            tried(f"b of layer {layer.number}", bridge.to(layer.device), layer.out, wanted)
        else:
            try:
                bridge = bridge_for(
                    layer.out, wanted[1], hidden=how.hidden, style=how.bridges, labels=how.labels, pool=layer.pool
                )
            except ConfigError as error:
                raise ConfigError(f"{layer.where}: {error}") from error
            bridge.to(device=layer.device, dtype=layer.dtype)
            if layer.pool is not None:
                tried(f"b, after the pool, of layer {layer.number}", bridge, layer.out, wanted)
        return ENC(layer.f, bridge if layer.view is None else nn.Sequential(layer.view, bridge))

    def _first(self, code: int) -> AE:
        return target_side(self.how.task, self.how.outputs, code, style=self.how.labels)  # type: ignore[arg-type]

    def _onward(self, code_in: int, code: int) -> AE:
        return recode_side(code_in, code, style=self.how.labels)


@dataclass(frozen=True, slots=True)
class Places:
    """Where a network answers at each place.

    Attributes:
        sizes: How many places there are: ``(T,)`` or ``(H, W)``.
        class_dim: The dimension of the answer that is the classes'.
    """

    sizes: tuple[int, ...]
    class_dim: int

    @classmethod
    def of(cls, how: Conversion, answer: Tree) -> Places:
        """Those of what the network gives for the sample: ``(B, T, C)`` or ``(B, C, H, W)``.

        Raises:
            ConfigError: The answer has no places, or its dimension of classes cannot be told.
        """
        answer = answer if padding_of(answer) is None else answer[0]
        if not isinstance(answer, Tensor) or answer.dim() < 3 or not answer.is_floating_point():
            raise ConfigError(
                f"the model gives {describe(shapes_of(answer))}; expected an answer for each place, floats (B, T, C) "
                "or (B, C, H, W), for task='per-place'"
            )
        class_dim = _class_dim(answer, how.outputs) if how.class_dim is None else how.class_dim
        return cls(tuple(answer.movedim(class_dim, -1).shape[1:-1]), class_dim)

    def read(self, features: Tree, where: str) -> tuple[list[nn.Module], int, list[nn.Module]]:
        """What puts the features of each place last, how many these are, and what makes as many places of theirs as
        the answer has, on features or after a linear map alike.

        Raises:
            ConfigError: They have no places.
        """
        dims = len(self.sizes) + 2
        if not isinstance(features, Tensor) or features.dim() != dims or not features.is_floating_point():
            layout = "(B, T, D)" if dims == 3 else "(B, D, h, w), places as the model's answers have them"
            raise ConfigError(
                f"{where}: no bridge per place for an output of {describe(shapes_of(features))}: expected floats "
                f"{layout}; pass pool=…, a function from this output to such"
            )
        channels = _channel_dim(features, self.sizes, self.class_dim)
        *found, width = features.movedim(channels, -1).shape[1:]
        last: list[nn.Module] = [] if channels == -1 else [ChannelsLast(channels)]
        return last, width, [] if tuple(found) == self.sizes else [Resample(tuple(found), self.sizes)]


class EachPlace(Sides):
    """A target of each place, of one dimension or more (:mod:`pipeal.methods.al.place_codes`).

    Args:
        how: What is asked for.
        places: Where the network answers.
        rows: Of the sample.
        layers: How many there are.
    """

    def __init__(self, how: Conversion, places: Places, rows: int, layers: int) -> None:
        # From codes of classes each layer makes others.
        super().__init__(how, rows, how.code or code_width(how.outputs), torch.eye(how.outputs))
        self.places, self.layers = places, layers

    def label_side(self, layer: Forward) -> AE:
        """``g`` and ``h`` of a layer, which are one weight.

        Raises:
            ConfigError: The user gives one of them alone.
        """
        if ("g" in layer.own) != ("h" in layer.own):
            raise ConfigError(
                f"blocks of layer {layer.number} has one of 'g' and 'h'; per place they are one weight, used both "
                "ways: pass both or neither"
            )
        return super().label_side(layer)

    def encoder_side(self, layer: Forward) -> ENC:
        """``f`` and a bridge to each place."""
        view, own = layer.view, layer.own
        masked = padding_of(layer.out) is not None
        mask_at = (view.mask_at if isinstance(view, Features) else 1) if masked else None
        if "b" in own:
            wanted = (self.rows, *self.places.sizes, self.below.shape[-1])
            tried(f"b of layer {layer.number}", own["b"].to(layer.device), layer.out, wanted)
            before: list[nn.Module] = [] if view is None else [view]
            return WhichCode(layer.f, nn.Sequential(*before, own["b"]), mask_at)
        before, features = layer.picked(layer.pool)
        bridge = nn.Sequential(*before, *self._bridge(layer, features))
        bridge.to(device=layer.device, dtype=layer.dtype)
        return WhichCode(layer.f, bridge, mask_at)

    def _first(self, code: int) -> AE:
        how = self.how
        return ClassCodes(how.outputs, code, class_dim=self.places.class_dim, ignore_index=how.ignored)

    def _onward(self, code_in: int, code: int) -> AE:
        return OnwardCodes(code_in, code)

    def _bridge(self, layer: Forward, features: Tree) -> list[nn.Module]:
        """From features to codes at all places."""
        modules, width, resampled = self.places.read(features, layer.where)
        answer = nn.Linear(self.how.hidden or width, self.below.shape[-1])
        answers = layer.number == self.layers - 1 and width == self.how.outputs and self.how.hidden is None
        if answers and not answer.weight.is_meta:  # the network's own: at first, the way down says the same
            with torch.no_grad():
                answer.weight.copy_(torch.linalg.pinv(self.below.float() / self.below.shape[-1] ** 0.5))
                answer.bias.zero_()
        if not answers:
            modules.append(nn.LayerNorm(width))
        if self.how.hidden is not None:
            modules += [nn.Linear(width, self.how.hidden), nn.ReLU()]
        return [*modules, answer, *resampled]


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
