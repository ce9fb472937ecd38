"""Networks that other libraries have, by name: built or loaded, cut where their blocks begin, trained by any method.

::

    hf:FOLDER          config.json ──► transformers' own classifier ──► embedding │ block │ block │ … │ block, head
                       *.safetensors, if it has any                     the row of like blocks that has most weights
    torchvision:NAME   torchvision.models.get_model ──────────────────► parts of about equal cost

Backpropagation trains it as it is. Layers of other methods answer by themselves, so that the last linear map of the
network, from features to classes, is left out: through it, AL's top bridge would see no more than a number per class.
Texts come in as ``(B, T)`` tokens, padded on the right, of which :class:`Words` makes the mask; images as
``(B, 3, S, S)``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from pipeal.core.errors import ConfigError, did_you_mean, first_line
from pipeal.core.materialize import without_numbers
from pipeal.core.methods import METHODS
from pipeal.core.names import HF, source_of
from pipeal.core.protocols import TrainableLayer
from pipeal.core.tree import Tree
from pipeal.methods.al import ALPackage, LearningRates
from pipeal.methods.al.bridges import BridgeStyle
from pipeal.methods.al.codes import LabelStyle
from pipeal.methods.al.convert import check_same
from pipeal.methods.cutting.cut import cut
from pipeal.methods.cutting.probe import probing
from pipeal.methods.cutting.shares import names_for
from pipeal.methods.network import part_sizes
from pipeal.methods.norm import replace_batch_norms
from pipeal.models.hf_folder import classifier, folder_of, text_limits
from pipeal.models.weights import fill_network

USUAL_PARTS = 4
"""Of a network without a row of blocks; fewer where there are fewer places to cut it at."""

_SAMPLE_ROWS, _SAMPLE_LENGTH = 4, 8


@dataclass(frozen=True)
class Imported:
    """A network of another library, for a task.

    Attributes:
        name: ``hf:FOLDER`` or ``torchvision:NAME``.
        classes: How many classes there are.
        pad_index: The token that pads; None where the inputs are images.
        size: The side of images, in pixels.
        parts: Into how many parts the network is cut; None for the usual ones.
        weights: A safetensors file of starting weights, by the names that the library has for them.
    """

    name: str
    classes: int
    pad_index: int | None = None
    size: int = 32
    parts: int | None = None
    weights: str | None = None

    def layers(
        self,
        method: str,
        *,
        code: int,
        hidden: int | None = None,
        labels: LabelStyle = "inverse",
        bridges: BridgeStyle = "pooled",
        lr: LearningRates = 1e-3,
        method_options: Mapping[str, Any] | None = None,
        network: nn.Module | None = None,
    ) -> Iterator[TrainableLayer]:
        """The layers that train it by a method. All are made when the first is asked for, whatever device is current.

        Where the current device is the meta device when a layer is asked for, it is given without its weights.

        Args:
            method: A name of :data:`pipeal.core.methods.METHODS`.
            code: The width of AL's label codes.
            hidden: That of a hidden layer in AL's bridges.
            labels: See :meth:`pipeal.ALPackage.from_bp`, as for what follows.
            bridges: See there.
            lr: See there.
            method_options: See there.
            network: What :meth:`network` gave, whose modules the layers then train, but for the head, which methods
                other than backpropagation put :class:`torch.nn.Identity` in the place of; None makes it.

        Raises:
            ConfigError: There is no such network, it cannot be cut, or the method cannot train it.
            DataError: Its weights cannot be read.
        """
        of_al = {"code": code, "hidden": hidden, "labels": labels, "bridges": bridges}
        with torch.device("cpu"):
            network, sample = self.network() if network is None else network, self.sample()
            try:
                package = ALPackage.from_bp(
                    self.pieces(network, sample, with_head=METHODS[method].is_whole),
                    sample,
                    self.classes,
                    method=method,
                    method_options=method_options,
                    lr=lr,
                    **(of_al if METHODS[method].has_labels else {}),  # type: ignore[arg-type]
                )
            except ConfigError as error:
                raise ConfigError(f"model.name: {self.name}: {error}") from error
        for layer in package.train():
            if torch.empty(0).is_meta:
                without_numbers(layer)
            yield layer

    def network(self) -> nn.Module:
        """It, with its weights: one module, from an input to logits ``(B, classes)``.

        Its batch norms take a last batch of one sample, too, of which deep ones see one value per channel.

        Raises:
            ConfigError: There is no such network.
            DataError: Its weights cannot be read.
        """
        if source_of(self.name) == HF:
            model = classifier(folder_of(self.name), self.classes, self.pad_index)
            network: nn.Module = OnImages(model) if self.pad_index is None else OnTokens(model, self.pad_index)
        else:
            network = model = _of_torchvision(self.name.partition(":")[2], self.classes, self.size)
        if self.weights is not None:
            fill_network(model, self.weights, self.classes)
        replace_batch_norms(network)
        return network.train()

    def sample(self) -> Tensor:
        """A small batch of such inputs, always the same; of texts, some are padded."""
        random = torch.Generator().manual_seed(0)
        if self.pad_index is None:
            return torch.randn(2, 3, self.size, self.size, generator=random)
        limits = text_limits(self.name)
        length = min(_SAMPLE_LENGTH, limits.positions or _SAMPLE_LENGTH)
        tokens = torch.randint(limits.vocab_size, (_SAMPLE_ROWS, length), generator=random)
        tokens[1:, length // 2 :] = self.pad_index
        return tokens

    def pieces(self, network: nn.Module, sample: Tensor, with_head: bool = True) -> list[nn.Module]:
        """The parts that it is cut into, in order; together they are the network, which is cut alike with its head.

        Args:
            network: What :meth:`network` gave.
            sample: What :meth:`sample` gave.
            with_head: False leaves :class:`torch.nn.Identity` in the network, where its head was.

        Raises:
            ConfigError: It cannot be cut.
        """
        what = f"images of {self.size} pixels" if self.pad_index is None else f"texts of {sample.shape[1]} tokens"
        try:
            with probing(network):
                network(sample)
        except Exception as error:  # whatever its forward raises
            way = "; another data.size (--size) may do" if self.pad_index is None else ""
            raise ConfigError(f"it does not take {what}: {first_line(error)}{way}") from error
        head = head_of(network, self.classes)
        if head is not None:
            answer = network.get_submodule(head)
            network.set_submodule(head, nn.Identity())
        names = self._names(network, sample)
        if head is not None and with_head:
            network.set_submodule(head, answer)
        pieces = [part.module for part in cut([network] if names is None else network, names, sample)]
        x: Tree = sample
        try:
            for piece in pieces:
                with probing(piece):
                    x = piece(x)
        except Exception as error:
            raise ConfigError(f"it cannot be cut: a part of it, on its own, raises {first_line(error)}") from error
        check_same(network, sample, x)
        return pieces

    def _names(self, network: nn.Module, sample: Tensor) -> list[str] | None:
        """Where parts begin, but for the first; None of one part. The network is without its head."""
        if self.parts == 1:
            return None
        row = _row_of_blocks(network) if source_of(self.name) == HF else None
        if row is None:
            return self._by_cost(network, sample)
        name, blocks = row
        sizes = part_sizes(blocks + 1, self.parts)  # what comes before the first block is one, too
        return [f"{name}.{start - 1}" for start in list(accumulate(sizes))[:-1]]

    def _by_cost(self, network: nn.Module, sample: Tensor) -> list[str]:
        """Where parts of about equal cost begin; costs are counted, so that they are the same in every process."""
        key = (self.name, self.classes, self.size, self.parts)
        refusal = None
        for count in (self.parts,) if self.parts else range(USUAL_PARTS, 1, -1):  # as many as there can be
            try:
                if key not in _BY_COST:
                    _BY_COST[key] = names_for(network, count, sample, asked="model.parts")
            except ConfigError as error:
                refusal = refusal or error
        if refusal is not None and key not in _BY_COST:
            raise refusal
        return _BY_COST[key]


def head_of(network: nn.Module, classes: int) -> str | None:
    """The name of the linear map that gives a network's answer; None where it has none.

    >>> head_of(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), classes=3)
    '2'
    """
    maps = [name for name, part in network.named_modules() if isinstance(part, nn.Linear)]
    last = maps[-1] if maps else ""
    return last if last and network.get_submodule(last).out_features == classes else None


_BY_COST: dict[tuple[str, int, int, int | None], list[str]] = {}
"""Where networks are cut, by what does not change it: to find it takes longer than all else."""


class Words(nn.Module):
    """Which tokens are words: all up to the last one that does not pad, and the first.

    A token that pads may also be one that a text has, such as GPT-2's end of a text.

    Args:
        pad_index: The token that pads.
    """

    gives_mask = True  # it goes to all bridges: see pipeal.methods.cutting.crossing
    draws_from_default = False

    def __init__(self, pad_index: int) -> None:
        super().__init__()
        self.pad_index = pad_index

    def forward(self, tokens: Tensor) -> Tensor:
        """``(B, T)`` tokens to 1 and 0, int64, as tokenizers give masks."""
        mask = tokens.ne(self.pad_index).flip(1).cumsum(1).flip(1).gt(0)
        mask[:, :1].fill_(True)
        return mask.long()


class OnTokens(nn.Module):
    """A classifier of texts of ``transformers``, from tokens to logits.

    Args:
        model: It.
        pad_index: The token that pads.
    """

    def __init__(self, model: nn.Module, pad_index: int) -> None:
        super().__init__()
        self.words, self.model = Words(pad_index), model

    def forward(self, tokens: Tensor) -> Tensor:
        """``(B, T)`` int64."""
        return self.model(input_ids=tokens, attention_mask=self.words(tokens)).logits


class OnImages(nn.Module):
    """A classifier of images of ``transformers``, from images to logits.

    Args:
        model: It.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        """``(B, 3, S, S)``."""
        return self.model(pixel_values=images).logits


def _of_torchvision(name: str, classes: int, size: int) -> nn.Module:
    import torchvision  # not with the module: it takes a second, and texts have no use for it

    known = torchvision.models.list_models(module=torchvision.models)
    if name not in known:
        of = f"of torchvision {torchvision.__version__}"
        others = "torchvision.models.list_models(module=torchvision.models) has all that can be, classifiers of images"
        if name in torchvision.models.list_models():
            raise ConfigError(f"model.name: {name!r} {of} is none that can be trained here; {others}")
        raise ConfigError(f"model.name: unknown model {name!r} {of}{did_you_mean(name, known) or f'; {others}'}")
    options: dict[str, Any] = {}
    if name.startswith("vit_"):
        options["image_size"] = size
    if name in ("googlenet", "inception_v3"):
        options |= {"aux_logits": False, "init_weights": True}
    try:
        model: nn.Module = torchvision.models.get_model(name, weights=None, num_classes=classes, **options)
    except Exception as error:  # an image that no patch divides, say
        raise ConfigError(
            f"model.name: torchvision:{name} for images of {size} pixels (data.size, --size): {first_line(error)}"
        ) from error
    return model


def _row_of_blocks(network: nn.Module) -> tuple[str, int] | None:
    """The name of the row of blocks that are alike which has most of a network's weights, and how many they are."""
    rows = {
        name: row
        for name, row in network.named_modules()
        if isinstance(row, nn.ModuleList) and len(row) > 1 and len({type(block) for block in row}) == 1
    }
    if not rows:
        return None
    name = max(rows, key=lambda name: sum(weight.numel() for weight in rows[name].parameters()))
    return name, len(rows[name])
