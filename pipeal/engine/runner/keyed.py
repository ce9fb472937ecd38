"""Keyed randomness: what a layer draws in an action follows from the seed, the layer, the batch and the action."""

from __future__ import annotations

from torch import nn

from pipeal.core.packet import Packet
from pipeal.core.rng import key_seed, keyed, may_draw, updates_may_draw
from pipeal.core.tree import Tree
from pipeal.engine.runner.layer import Passed, Runner
from pipeal.engine.schedule import Action


class Seeds:
    """The seed of all layers of a stage.

    Attributes:
        seed: A loaded file brings its own.
        replica: Which of several that learn together this is.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.replica = 0

    def of(self, action: Action) -> int:
        """Replicas draw alike only where they must stay alike."""
        if self.replica == 0 or action is Action.UPDATE:
            return self.seed
        return key_seed(self.seed, self.replica)


class Keyed:
    """Runs every action under its key.

    Args:
        inner: What is run.
        index: The layer's number.
        module: The layer; what it may draw from is looked up once.
        seeds: Those of its stage.

    Attributes:
        draws: Whether its forward may draw from PyTorch's default generators.
    """

    def __init__(self, inner: Runner, index: int, module: nn.Module, seeds: Seeds) -> None:
        self._inner = inner
        self._index = index
        self._seeds = seeds
        self.draws = may_draw(module)
        self._update_draws = updates_may_draw(module)

    def forward(self, packet: Packet, x: Tree, y: Tree, rows: range | None = None) -> Passed:
        """A whole batch's key is (seed, layer, batch) alone: what anyone can redo by hand with
        :func:`pipeal.core.rng.keyed`."""
        key = () if rows is None else (3, rows.start, rows.stop)
        with self._keyed(Action.FORWARD, packet, key, self.draws):
            return self._inner.forward(packet, x, y)

    def backward(self, packet: Packet, rows: range | None = None) -> None:
        """As :meth:`Runner.backward`."""
        key = (1,) if rows is None else (4, rows.start, rows.stop)
        with self._keyed(Action.BACKWARD, packet, key, self.draws):
            self._inner.backward(packet)

    def update(self, packet: Packet) -> None:
        """As :meth:`Runner.update`."""
        with self._keyed(Action.UPDATE, packet, (2,), self._update_draws):
            self._inner.update(packet)

    def _keyed(self, action: Action, packet: Packet, key: tuple[int, ...], draws: bool) -> keyed:
        return keyed(self._seeds.of(action), self._index, packet.batch, *key, whole_default=draws)
