"""A cut network as every method takes it (:class:`pipeal.methods.network.Network`): its pieces are units.

::

    pieces   f0 │ f1  │ f2        taken, with the weights that they have, a part each
    ahead       │ f1' │ f2'       fresh copies, for heads that look ahead: drawn by reset_parameters, or as they are
    pool     f0 ──► vectors       of one sample's features on the meta device, by their shape or by the user
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from math import nan

import torch
from torch import Tensor, nn

from pipeal.core.errors import ConfigError, a_type, first_line
from pipeal.core.materialize import is_on_meta, reset_of
from pipeal.core.tree import Tree, describe, map_tensors, shapes_of
from pipeal.methods.al.answer_losses import ClassLoss, NumbersLoss, PlaceLoss
from pipeal.methods.al.bridges import vectors_from
from pipeal.methods.al.conversion import Conversion
from pipeal.methods.al.layers import AE, ENC
from pipeal.methods.al.sides import Forward, Places, Sides
from pipeal.methods.cutting.probe import ShapesAlone, probing
from pipeal.methods.network import Network, Part, Unit, in_a_row

_META = torch.device("meta")


def as_network(
    how: Conversion, sample: Tree, pieces: Sequence[Forward], sides: Sides, places: Places | None
) -> Network:
    """What a method makes its layers of.

    Args:
        how: What is asked for.
        sample: What the first piece reads.
        pieces: In order, as the sample found them; each is a unit, and a part.
        sides: What builds AL's encoder and label sides.
        places: Where the network answers, if it does so at each place.
    """
    method, last = how.known, pieces[-1]
    features = [map_tensors(_one_sample, piece.gives) for piece in pieces]
    pools = _Pools(how, pieces, features, places)
    has_head = _is_answer(last.picked(None)[1], how.outputs, places)

    def enc_and_ae(part: Part) -> tuple[ENC, AE]:
        label_side = sides.label_side(pieces[part.number])  # first: it says how wide the bridge's code is
        return sides.encoder_side(pieces[part.number]), label_side

    def whole() -> nn.Module:
        row = [piece.f for piece in pieces]
        if has_head:
            return in_a_row([*row, *last.picked(None)[0]])
        pool, width = pools(features[-1])
        return in_a_row([*row, pool, nn.Linear(width, how.outputs)])

    def unit(number: int, piece: Forward) -> Unit:
        fresh, same = (
            partial(_fresh, copied, piece, features[number - 1], features[number], pools) if number else None
            for copied in (_drawn_copy, _same_copy)
        )
        return Unit(partial(_itself, piece), features[number], fresh, same)

    units = [unit(number, piece) for number, piece in enumerate(pieces)]
    class_dim = places.class_dim if places is not None and has_head and method.is_whole else -1
    return Network(
        units,
        [1] * len(units),
        _none if method.has_labels else pools,
        enc_and_ae,
        whole,
        how.outputs,
        _criterion(how, class_dim),
        per_place=places is not None,
        has_classes=how.task in ("classification", "per-place"),
        reads=map_tensors(_one_sample, sample),
        pick=pools.pick,
        is_given=True,
    )


class _Pools:
    """Makes vectors of the features of pieces and of fresh copies of them, as AL's bridges do."""

    def __init__(
        self, how: Conversion, pieces: Sequence[Forward], features: Sequence[Tree], places: Places | None
    ) -> None:
        self._how, self._places = how, places
        self._own = list(zip(features, pieces, strict=True))
        self._of_copies: list[tuple[Tree, Forward]] = []

    def know(self, features: Tree, piece: Forward) -> None:
        """Takes note of what a copy of a piece gives where it reads other features than the piece."""
        self._of_copies.append((features, replace(piece, out=features if piece.view is None else piece.view(features))))

    def __call__(self, features: Tree) -> tuple[nn.Module, int]:
        """The module, and the width of its vectors; of a user's own pool that is a module, a copy.

        Raises:
            ConfigError: Nothing is known that makes vectors of such features, or a user's pool does not.
        """
        for one, piece in (*self._own, *self._of_copies):
            if one is features:
                return self._vectors(piece)
        # Of what a method makes by itself.
        pool = None if isinstance(self._how.pool, Mapping) else self._how.pool
        return self._vectors(replace(self._own[0][1], view=None, out=features, pool=pool))

    def pick(self, features: Tree) -> tuple[Sequence[nn.Module], Tree]:
        """As :attr:`pipeal.methods.network.Network.pick`, of the pieces."""
        piece = next(piece for one, piece in self._own if one is features)
        return (() if piece.view is None else (piece.view,)), map_tensors(_one_sample, piece.out)

    def _vectors(self, piece: Forward) -> tuple[nn.Module, int]:
        pool = deepcopy(piece.pool) if isinstance(piece.pool, nn.Module) else piece.pool
        if self._places is None:
            try:
                means, width = vectors_from(piece.out, "pooled", pool)
            except ConfigError as error:
                raise ConfigError(f"{piece.where}: {error}") from error
            modules = [*([] if piece.view is None else [piece.view]), *means]
        else:
            before, features = piece.picked(pool)
            last, width, resampled = self._places.read(features, piece.where)
            is_answer = piece is self._own[-1][1] and width == self._how.outputs
            modules = [*before, *last, *([] if is_answer else [nn.LayerNorm(width)]), *resampled]
        return in_a_row(modules), width


def _none(_: Tree) -> tuple[nn.Module, int]:
    """AL's bridges make vectors by themselves, of what the sample gave."""
    return nn.Identity(), 0


def _one_sample(tensor: Tensor) -> Tensor:
    # By its shape, as ShapesAlone keeps the numbers of what is moved.
    return torch.empty(
        (min(1, len(tensor)), *tensor.shape[1:]) if tensor.dim() else (), dtype=tensor.dtype, device=_META
    )


def _itself(piece: Forward) -> list[nn.Module]:
    return [piece.f]


def _fresh(
    copied: Callable[[Forward], nn.Module],
    piece: Forward,
    read: Tree,
    gives: Tree,
    pools: _Pools,
    given: Tree,
    width: float,
) -> tuple[nn.Module, Tree]:
    """As :attr:`pipeal.methods.network.Unit.fresh`, or ``same``, of the piece that reads ``read`` and gives ``gives``.

    Raises:
        ConfigError: Another width than its own is asked for, it cannot be copied so, or it cannot read what is given.
    """
    if width != 1:
        raise ConfigError(
            f"a head is to take a copy of {piece.where} of {width} times its width; expected 1, as a network of your "
            "own is copied as wide as it is: method_options={'width': 1.0}"
        )
    copy = copied(piece)
    if shapes_of(given) == shapes_of(read):
        return copy, gives
    found = _tried_copy(copy, piece, given)
    pools.know(found, piece)
    return copy, found


def _copy(piece: Forward) -> nn.Module:
    copy = deepcopy(piece.f)
    writers = {id(module) for module in piece.writers}
    for name, module in piece.f.named_modules():
        if id(module) in writers:
            copy.get_submodule(name).inplace = False  # type: ignore[assignment]
    return copy


def _same_copy(piece: Forward) -> nn.Module:
    """A copy of a piece with the weights that it has, of which those learn that do so in the piece."""
    if is_on_meta(piece.f):
        raise ConfigError(
            f"a head is to take a copy of {piece.where} that begins with its weights, and it has none yet, on the meta "
            "device; convert a network that is real, or leave same_start out"
        )
    return _copy(piece)


def _drawn_copy(piece: Forward) -> nn.Module:
    """A copy of a piece with weights of its own, which learn; on the meta device they are drawn once that is real."""
    copy = _copy(piece)
    weights = [(name, one) for name, one in copy.named_parameters() if one.is_floating_point() or one.is_complex()]
    for _, weight in weights:
        weight.requires_grad_()
    if is_on_meta(copy):
        return copy
    with torch.no_grad():
        for _, weight in weights:
            weight.fill_(nan)
        for part in reversed(list(copy.modules())):  # children before their parents, as they are constructed
            reset = reset_of(part)
            if reset is not None:
                _called(reset, part, piece)
        left = [name for name, weight in copy.named_parameters() if bool(weight.isnan().any())]
    if left:
        raise ConfigError(
            f"a head is to take a copy of {piece.where} with weights of its own, and nothing draws its {left[0]!r}; "
            "give the module that has it a reset_parameters() that does, or train by a method whose heads copy nothing"
        )
    return copy


def _called(reset: Callable[[], object], part: nn.Module, piece: Forward) -> None:
    try:
        reset()
    except Exception as error:  # whatever a user's function raises
        raise ConfigError(
            f"a copy of {piece.where} draws weights of its own: reset_parameters of {a_type(part)} raises "
            f"{first_line(error)}"
        ) from error


def _tried_copy(copy: nn.Module, piece: Forward, given: Tree) -> Tree:
    """What a copy gives for other features than its piece reads, on the meta device."""
    trial = deepcopy(copy).to(_META)
    try:
        with ShapesAlone(), probing(trial):
            return trial(given)
    except Exception as error:  # whatever a user's block raises
        raise ConfigError(
            f"a head is to take a copy of {piece.where}, which cannot read {describe(shapes_of(given))}: it raises "
            f"{first_line(error)}; choose method_options with which heads copy every piece from the next one on"
        ) from error


def _is_answer(found: Tree, outputs: int, places: Places | None) -> bool:
    """Whether what a network gives is an answer to the task already, so that it needs no head."""
    if not isinstance(found, Tensor) or not found.is_floating_point():
        return False
    if places is None:
        return found.shape[1:] == (outputs,) or (outputs == 1 and found.dim() == 1)
    return found.dim() == len(places.sizes) + 2 and found.shape[places.class_dim] == outputs


def _criterion(how: Conversion, class_dim: int) -> Callable[[], nn.Module]:
    if how.task == "classification":
        return partial(ClassLoss, how.outputs)
    if how.task == "per-place":
        return partial(PlaceLoss, class_dim, how.ignored)
    cri = nn.BCEWithLogitsLoss() if how.task == "multilabel" else nn.MSELoss()
    return partial(NumbersLoss, how.outputs, cri)
