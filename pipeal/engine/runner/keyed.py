"""Keyed randomness: what a layer draws in an action follows from the seed, the layer, the batch and the action."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from pipeal.core.draws import dropouts, drops, may_draw, updates_may_draw
from pipeal.core.packet import Packet
from pipeal.core.rng import key_seed, keyed
from pipeal.engine.runner.layer import Around
from pipeal.engine.schedule import Action

_WHOLE = {Action.FORWARD: (), Action.BACKWARD: (1,), Action.UPDATE: (2,)}
_PART = {Action.FORWARD: 3, Action.BACKWARD: 4}
ROUNDING = 5
"""The last part of the key by which what a layer hands on is rounded: (seed, layer, batch, this)."""


@dataclass
class Seeds:
    """The seed of all layers of a stage.

    Attributes:
        seed: A loaded file brings its own.
        replica: Which of several that learn together this is.
    """

    seed: int
    replica: int = 0

    def of(self, action: Action) -> int:
        """Replicas draw alike only where they must stay alike."""
        if self.replica == 0 or action is Action.UPDATE:
            return self.seed
        return key_seed(self.seed, self.replica)


@dataclass(eq=False)
class Keyed(Around):
    """Runs every action under its key.

    A forward's key is (seed, layer, batch) alone for a whole batch: what anyone can redo by hand with
    :func:`pipeal.core.rng.keyed`.

    Attributes:
        index: The layer's number.
        module: The layer; what it may draw from is looked up once, but for dropouts of zero, which may be raised later.
        seeds: Those of its stage.
        draws: Whether its forward or backward may draw from PyTorch's default generators.
    """

    index: int
    module: nn.Module
    seeds: Seeds

    def __post_init__(self) -> None:
        self.draws = may_draw(self.module)
        self._update_draws = updates_may_draw(self.module)
        self._dropouts = [] if self.draws else dropouts(self.module)

    def around(self, action: Action, packet: Packet, rows: range | None) -> keyed:
        """The key of (seed, layer, batch), and of the action and the rows."""
        key = _WHOLE[action] if rows is None else (_PART[action], rows.start, rows.stop)
        if action is Action.UPDATE:
            draws = self._update_draws
        else:
            draws = self.draws = self.draws or any(map(drops, self._dropouts))
        return keyed(self.seeds.of(action), self.index, packet.batch, *key, whole_default=draws)
