"""An ordered set of self-training layers: how it trains, infers, reports and is placed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, overload

import torch
from torch import Tensor, nn

from pipeal.core.errors import LayerError, PlacementError, name_of
from pipeal.core.materialize import InitWeights, check_fillable, materialize
from pipeal.core.methods import DEFAULT, Maker
from pipeal.core.modules import device_of, layers_of, module_of
from pipeal.core.protocols import DOWN, TURN, UP, TrainableLayer
from pipeal.core.rng import check_seed
from pipeal.core.tree import Tree, move
from pipeal.core.weights import Given
from pipeal.methods.al.bridges import BridgeStyle
from pipeal.methods.al.codes import LabelStyle, Task
from pipeal.methods.al.conversion import Conversion, OwnBlocks, PerPlace, Pools
from pipeal.methods.al.convert import convert
from pipeal.methods.al.inference_path import InferencePath
from pipeal.methods.al.layers import AL
from pipeal.methods.al.source import Model, network_mode
from pipeal.methods.al.summary import LayerShapes, Summary, find_shapes, summarize
from pipeal.methods.cutting.arguments import Arguments
from pipeal.methods.optimizers import LearningRates, OptimizerFactory


class ALPackage(nn.Module):
    """Layers that train themselves, in order.

    Called layer by layer it is the reference that every schedule of the engine must equal::

        package(x, y); package.backward(); package.update()

    A subclass may instead set its layers as attributes, as one writes any ``nn.Module``: each child is a layer,
    in the order of assignment.

    Args:
        layers: :class:`pipeal.AL` layers, or anything that fulfils :class:`pipeal.core.protocols.TrainableLayer`.

    Raises:
        PlacementError: ``layers`` is empty.
        LayerError: It is nothing to iterate over, or a layer in it is no module, such as a class.
    """

    _arguments: Arguments | None = None

    def __init__(self, layers: Iterable[TrainableLayer] | None = None) -> None:
        super().__init__()
        self._shapes: list[LayerShapes] | None = None
        self._notes: list[str] = []
        if not isinstance(layers, Iterable | None):
            raise LayerError(f"expected layers in order, such as [AL(enc, ae), AL(enc, ae)], found {name_of(layers)}")
        given = [] if layers is None else [module_of(layer) for layer in layers]
        if layers is not None and not given:
            raise PlacementError("an ALPackage needs at least one layer, found none")
        if len(set(given)) < len(given):
            raise PlacementError("a layer is given twice; each layer learns once per batch, so pass distinct layers")
        for number, layer in enumerate(given):
            self.add_module(str(number), layer)

    @classmethod
    def from_bp(
        cls,
        model: Model,
        sample: Tree,
        outputs: int,
        *,
        task: Task | PerPlace = "classification",
        split: Sequence[str] | int | None = None,
        method: str | Maker = DEFAULT.name,
        method_options: Mapping[str, Any] | None = None,
        code: int | None = None,
        hidden: int | None = None,
        labels: LabelStyle = "inverse",
        bridges: BridgeStyle = "pooled",
        class_dim: int | None = None,
        ignore_index: int | None = None,
        pool: Pools | None = None,
        blocks: OwnBlocks | None = None,
        lr: LearningRates = 1e-3,
        optimizer: OptimizerFactory | None = None,
        weights: Given | None = None,
        init_weights: InitWeights | None = None,
    ) -> ALPackage:
        """A network made for backpropagation as layers of AL, or of another method.

        >>> net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU())
        >>> package = ALPackage.from_bp(net, torch.randn(4, 6), outputs=3, split=["2"])  # a layer begins at each name
        >>> len(package), package.infer(torch.randn(5, 6)).shape
        (2, torch.Size([5, 3]))

        Its submodules are taken, not copied: they, with the weights they have, become the ``f`` of the layers and train
        there. ``sample`` is run once, in evaluation mode; weights, buffers, modes and the random numbers of the caller
        are left alone, but for what new blocks draw from the default generator to start with (so ``torch.manual_seed``
        before makes a conversion repeatable). Modules that would write in place into what a layer receives are
        switched to work out of place. A package of a network that is in evaluation mode, as pretrained ones mostly
        come, is in it, too, and a pipeline that is to train it warns: call ``package.train()``.

        Any other method trains the same pieces: ``method="greedy"`` gives a package of its layers, with a head for each
        piece that answers from what AL's bridges would see. Heads that look ahead hold copies of the pieces still to
        come, with weights of their own by ``reset_parameters``. Layers hand targets on as they are; so per place,
        padding must be labelled below zero, and exits answer with their classes last. ``method="bp"`` trains the
        network itself, not cut, as one layer: with its own answer where that has the shape of the task's, else with a
        linear head.

        Whatever draws random numbers draws them as :mod:`pipeal.core.rng` says. A class outside of ``torch.nn`` that
        does not say whether it draws is watched, operator by operator, which costs some microseconds each. Where its
        own forward draws nothing (its submodules answer for themselves), one line says so::

            torchvision.models.resnet.BasicBlock.draws_from_default = False

        A network larger than memory is built on the meta device, where it has shapes alone::

            with torch.device("meta"):
                net = torchvision.models.resnet18()
            package = ALPackage.from_bp(net, sample, 10, split=["layer2", "layer3"], weights="resnet18.safetensors")
            with Pipeline(package, offload="disk") as pipe: ...

        Its layers, new blocks and all, stay there until :class:`pipeal.Pipeline` places them, or :meth:`materialize` is
        called: then they become real one after the other, by the layer's number and the seed of that. Without
        ``weights``, each module starts by its ``reset_parameters``: what the network's own constructor does beyond
        that, such as to scale or to zero some weights, is lost, so that for networks with a start of their own
        ``weights`` or ``init_weights`` are better. What is real in such a network (buffers, mostly), and not among the
        weights, keeps its numbers.
        What compares numbers is left out: that the parts together give those of the network. ``sample`` may be real;
        what the forward computes of it alone, such as masks, is, too, but it may not look at any other numbers. Per
        place, the last bridge does not start by giving the network's own answers.

        Args:
            model: An ``nn.Sequential`` or a list, each child a layer; any module, cut where ``split`` says; or an
                :class:`pipeal.Encoder`. Of a module that ``split`` cuts, and of one alone in a list, the forward may
                take several arguments (see ``sample``); an argument ``target``, ``targets``, ``label``, ``labels`` or
                ``y`` without a default is None, and ``use_cache`` is false. Of a ``ModelOutput``, another dataclass, a
                dict or a named tuple the answer is ``logits``, ``out`` or ``last_hidden_state``; of a tuple, the one
                item that is not None.
            sample: A batch of inputs, of two rows or more, as ``model`` takes: one argument (any nesting of tensors); a
                dict of arguments by their names, ``{"input_ids": …, "attention_mask": …}``; or a tuple of arguments by
                their places. Batches are to be alike: an argument that is None here is so in all of them. An argument
                called a mask, ``(B, T)``, false on padding, goes with the features to all bridges.
            outputs: How many classes, labels or numbers to predict.
            task: ``classification``, ``multilabel`` or ``regression``, one target for each input (see
                :func:`pipeal.methods.al.codes.target_side` for their shapes); or ``per-place``, class numbers ``(B,
                T)`` or ``(B, H, W)`` for a model that answers ``(B, T, C)`` or ``(B, C, H, W)``: language models,
                tagging, segmentation (:mod:`pipeal.methods.al.place_codes`). Answers of all exits have the shape of the
                model's own. Where features have fewer places than the answer, or more, their bridge resamples its
                answers, images bilinearly. Which dimension of features is that of the places is told by their number:
                take a sample in which it is not that of the features, too.
            split: Names of submodules, in the order of their calls; a layer begins at each. What comes before the first
                is a layer, too. Or a number: so many layers of about equal cost, counted on the sample
                (:mod:`pipeal.methods.cutting.shares`). Several values may cross a cut, such as the skips of a U-Net:
                they are handed on, detached, as a tuple that begins with what the named submodule takes
                (:mod:`pipeal.methods.cutting.graph`). How many devices train the layers is :class:`pipeal.Pipeline`'s
                choice.
            method: A name of :data:`pipeal.core.methods.METHODS`, or a function ``make_layers(network, lr, optimizer)``
                of your own, which yields a layer for each of ``network.parts()``. ``code``, ``hidden``, ``labels``,
                ``bridges`` and ``blocks`` are AL's alone, and ``bp`` leaves ``split`` aside.
            method_options: The method's own, as keyword arguments of its ``make_layers``.
            code: The width of the label codes; None for 128, or ``per-place`` for four times as many as there are
                classes, at most 512.
            hidden: The width of a hidden layer in the bridges; None for none.
            labels: ``inverse``, or ``published``: how label sides are built (:mod:`pipeal.methods.al.codes`). Not per
                place.
            bridges: ``pooled``, or ``flat``, as published (:mod:`pipeal.methods.al.bridges`). Not per place.
            class_dim: Per place: the dimension of the answer that is the classes', 1 or -1; None for the one of these
                that has ``outputs`` entries, or where the answer is no more than features, the last of ``(B, T, D)``
                and the second of others.
            ignore_index: Per place: the label of places that have none, beside all below zero; None for -100. Padding
                has none either, where a mask goes with the features, by AL. Other methods but ``bp`` want it below
                zero.
            pool: From what an ``f`` gives to ``(B, D)``, where that is no image, sequence or vector; per place, to
                features laid out as the answer is. One for all layers, or by the layer's number. Of a module, each
                layer trains a copy. Images with their channels last need one, too, such as ``lambda x: x.mean((1,
                2))``, and what 1-D convolutions give, ``(B, C, T)``, such as ``lambda x: x.mean(2)``: nothing tells
                them from others. Where several values cross, it is given the first, and with a mask ``(first, mask)``.
            blocks: In the place of built ones, by the layer's number, from 0, and the block's letter: ``{2: {"b":
                my_bridge}}``. A bridge is given what a pool is; per place it gives codes ``(B, T, K)`` or ``(B, H, W,
                K)``, and ``g`` and ``h`` are replaced together.
            lr: One learning rate, or for AL ``{"enc": …, "ae": …}``.
            optimizer: Called for each optimizer of each layer as ``optimizer(parameter_groups, lr=…)``; fused Adam if
                None.
            weights: Of a network on the meta device, by the names of its ``state_dict()``: such a dict, the path of a
                safetensors file, or the paths of several. All of them, and what ``state_dict()`` leaves out
                (buffers that are not persistent) as one likes. Floating-point numbers may be of another width, such as
                bfloat16 of a network in float32; other types are the network's. Of a list of modules, names begin with
                the item's number, of an :class:`pipeal.Encoder` with ``embedding``, ``blocks.0`` and so on, and
                ``head``. None for a new network.
            init_weights: What one would give to ``model.apply``: called with each module of the network, after all are
                reset and before ``weights``, to fill its own parameters and buffers. A module that is cut is stood for
                by another, which has those that its part needs. Of a model of ``transformers``, that is its
                ``model._init_weights``.

        Raises:
            DataError: A file of ``weights`` cannot be read.
            ConfigError: A name in ``split`` does not exist or cannot begin a layer (the message says why); the sample
                or a block of the user's does not fit; there is no bridge for a shape; the parts together give
                other numbers than the network, which writes in place between the cuts; two layers would share a
                parameter; the method cannot train such a network, or is given options of another; ``weights`` are
                missing, superfluous, of another shape or kind of number, or differ for two names of one tensor; nothing
                would fill something on the meta device; or an argument is out of range.
        """
        how = Conversion(
            outputs=outputs,
            task=task,
            method=method,
            method_options={} if method_options is None else method_options,
            code=code,
            hidden=hidden,
            labels=labels,
            bridges=bridges,
            class_dim=class_dim,
            ignore_index=ignore_index,
            pool=pool,
            blocks=blocks,
            lr=lr,
            optimizer=optimizer,
        )
        layers, shapes, notes = convert(model, sample, how, split, weights, init_weights)
        package = cls(layers)
        package._shapes, package._notes = shapes, notes
        package._arguments = Arguments(sample, model)
        package.training = network_mode(model)
        return package

    def require_input(self, x: Tree) -> None:
        """Asks that the input of a batch is like the sample that a network was converted with; a pipeline asks of each.

        Raises:
            DataError: It is a tensor, a tuple or a dict where the sample is another of them, or lacks an argument.
        """
        if self._arguments is not None:
            self._arguments.require(x)

    def materialize(self, seed: int = 0) -> ALPackage:
        """Makes layers on the meta device real, all at once, on the CPU; those that are real are left alone.

        A :class:`pipeal.Pipeline` does so by itself, one layer at a time; with the same seed, both give the same bits.

        Args:
            seed: With the layer's number, the key of what its modules' ``reset_parameters`` draw.

        Returns:
            The package.

        Raises:
            ConfigError: The seed is no whole number from 0 up to 2^63; or nothing fills some parameter or buffer, where
                layers before that one may be real.
            DataError: The weights cannot be read any more.
        """
        check_seed(seed)
        for number, layer in enumerate(self):
            check_fillable(layer, number)
        for number, layer in enumerate(self):
            materialize(layer, seed, number)
        return self

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[AL]:
        return self.children()  # type: ignore[return-value]

    @overload
    def __getitem__(self, index: int) -> AL: ...
    @overload
    def __getitem__(self, index: slice) -> ALPackage: ...
    def __getitem__(self, index: int | slice) -> AL | ALPackage:
        """One layer, or a package that shares the layers of a slice."""
        if isinstance(index, slice):
            return ALPackage(list(self)[index])
        return list(self)[index]

    def forward(self, x: Tree, y: Tree) -> tuple[Tree, Tree]:
        """Takes a batch through all layers, each on its device, and returns the last ``f(x)`` and ``g(y)``."""
        for layer in self:
            device = device_of(layer)
            x, y = layer(move(x, device), move(y, device))
        return x, y

    def backward(self) -> None:
        """Backward of every layer's own losses."""
        for layer in self:
            layer.backward()

    def update(self) -> None:
        """Optimizer step of every layer."""
        for layer in self:
            layer.update()

    def losses(self) -> list[tuple[float, ...]]:
        """The local losses of the last forward, by layer. Waits for the devices: not for the hot path."""
        return [tuple(float(loss) for loss in layer.loss() or ()) for layer in self]

    def infer(self, x: Tree, exit_at: int | None = None) -> Tensor:
        """Infers along ``f1 … fk, bk, hk … h1``.

        Args:
            x: The input of the first layer.
            exit_at: How many layers to climb before the bridge, from 1 to ``len(self)``; None for all.

        Returns:
            What the first layer's ``h`` returns: for classification, logits ``(B, classes)``; per place, as the
            network that was converted gives them.

        Raises:
            PlacementError: There is no such exit.
        """
        way = list(self)[: self._depth(exit_at)]
        for layer in way:
            x = layer.inference(move(x, device_of(layer)), UP)
        code = way[-1].inference(x, TURN)
        for layer in reversed(way):
            code = layer.inference(move(code, device_of(layer)), DOWN)
        return code

    def to_bp(self, exit_at: int | None = None, device: str | torch.device | None = None) -> nn.Module:
        """The way of an inference as one plain module, to be exported (``torch.export``) or saved.

        Save its ``state_dict()``, the package's, or what ``torch.export`` gives. ``torch.save`` of the module or the
        package itself keeps the parts of a network that was cut at names as bare ``torch.fx.GraphModule`` objects:
        they compute the same, but what they say of random numbers is lost (see :func:`pipeal.core.draws.may_draw`). Nor
        can ``torch.save`` keep a ``pool`` that is a lambda: pass a named function or a module.

        Args:
            exit_at: How many layers to climb before the bridge; None for all.
            device: Where it is to be; None for where the first layer is.

        Returns:
            A copy, in evaluation mode, that gives what :meth:`infer` gives in evaluation mode, but for rounding: linear
            maps that follow each other at its end are one (:mod:`pipeal.methods.al.folding`). Several arguments are
            given as in the sample of :meth:`from_bp`, by place or by name, or together as its tuple or dict.

        Raises:
            PlacementError: There is no such exit.
            ConfigError: A layer has an inference of its own, which no chain of blocks stands for.
        """
        return InferencePath(list(self)[: self._depth(exit_at)], device, self._arguments)

    def summary(self, sample: Tree | None = None) -> Summary:
        """Shapes, parameters and devices by layer; ``print(package.summary())`` shows a table.

        Of a network that :meth:`from_bp` cut into a number of layers, a line below has the names at which they begin.

        Args:
            sample: A batch of inputs, run once in evaluation mode to find the shapes. None for those that
                :meth:`from_bp` found; other packages are then shown without.
        """
        layers = list(self)
        shapes = self._shapes if sample is None else find_shapes(layers, sample)
        known = shapes if shapes and len(shapes) == len(layers) else [None] * len(layers)
        return summarize(layers, known, self._notes)

    def set_lr(self, which: str | Iterable[str], lr: float) -> None:
        """Gives the named sides of every layer a new base learning rate."""
        sides = [which] if isinstance(which, str) else list(which)
        for layer in self:
            layer.set_lr(sides, lr)

    def scale_lr(self, factor: float) -> None:
        """Sets every layer's learning rates to ``factor`` times their base values."""
        for layer in self:
            layer.scale_lr(factor)

    def effective_parameters(self) -> int:
        """How many parameters a full inference uses."""
        return sum(layer.effective_parameters(last=layer is self[-1]) for layer in self)

    def affiliated_parameters(self) -> int:
        """How many parameters serve training alone."""
        return sum(layer.affiliated_parameters(last=layer is self[-1]) for layer in self)

    def _depth(self, exit_at: int | None) -> int:
        depth = len(self) if exit_at is None else exit_at
        if not 1 <= depth <= len(self):
            raise PlacementError(f"exit {depth} does not exist; this package has exits 1 to {len(self)}")
        return depth


def set_device(model: nn.Module, devices: Sequence[str | torch.device]) -> None:
    """Puts each layer of a model on its device.

    Args:
        model: An :class:`ALPackage`, or any module whose children are its layers.
        devices: One device per layer; devices may repeat.

    Raises:
        PlacementError: The lengths differ.
    """
    layers = layers_of(model)
    if len(devices) != len(layers):
        raise PlacementError(
            f"{len(devices)} devices for {len(layers)} layers of {type(model).__name__}; "
            "pass one device per layer (a device may repeat)"
        )
    for layer, device in zip(layers, devices, strict=True):
        module_of(layer).to(device)
