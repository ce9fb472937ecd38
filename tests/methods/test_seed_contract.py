"""What the published ALPackage promised: its pseudo-code runs as written, with instances where it wrote classes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeal import AE, AL, ENC, ALPackage, LabelAE, Pipeline, PlacementError, set_device


def MyBPLayer() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh())


def Linear() -> nn.Module:
    return nn.Linear(6, 6)


def layer() -> AL:
    f = MyBPLayer()
    b = Linear()
    g = Linear()
    h = Linear()
    enc = ENC(f, b)
    ae = AE(g, h)
    return AL(enc, ae)


class MyALModel(nn.Module):
    """The seed's model, word for word but for the instances."""

    def __init__(self) -> None:
        super().__init__()
        self.l1 = layer()
        self.l2 = layer()
        self.l3 = layer()
        self.l4 = layer()

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x, y = self.l1(x, y)
        x, y = self.l2(x, y)
        x, y = self.l3(x, y)
        x, y = self.l4(x, y)
        return x, y


class MyALPackage(ALPackage):
    """The same, as a package: it can be iterated over."""

    def __init__(self) -> None:
        super().__init__()
        self.l1 = layer()
        self.l2 = layer()
        self.l3 = layer()
        self.l4 = layer()


def batches(count: int = 3) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(0)
    return [(torch.randn(5, 6, generator=draw), torch.randn(5, 6, generator=draw)) for _ in range(count)]


def built(model: type[nn.Module]) -> Any:
    torch.manual_seed(0)
    return model()


def weights(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def same(one: list[Tensor], two: list[Tensor]) -> bool:
    return len(one) == len(two) and all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def by_hand(model: Any) -> None:
    for x, y in batches():
        for al in (model.l1, model.l2, model.l3, model.l4):
            x, y = al(x, y)
            al.backward()
            al.update()


def by_threads(model: Any) -> None:
    for x, y in batches():
        thread = []
        for layer in model:
            x, y = layer(x, y)  # do forward
            thread.append(threading.Thread(target=layer.backward_and_update))  # wrap backward & update
            thread[-1].start()

        [thread[i].join() for i in range(len(thread))]  # wait until all layers complete


def by_model(model: Any) -> None:
    for x, y in batches():
        model(x, y)
        for al in (model.l1, model.l2, model.l3, model.l4):
            al.backward()
            al.update()


def by_package(model: Any) -> None:
    for x, y in batches():
        model(x, y)
        model.backward()
        model.update()


def by_engine(model: Any) -> None:
    with Pipeline(model, ["cpu"] * 4, threads=torch.get_num_threads()) as pipe:
        pipe.run(batches())


WAYS: list[tuple[type[nn.Module], Callable[[Any], None]]] = [
    (MyALPackage, by_threads),
    (MyALPackage, by_model),
    (MyALPackage, by_package),
    (MyALPackage, by_engine),
    (MyALModel, by_hand),
    (MyALModel, by_model),
    (MyALModel, by_engine),
]


@pytest.mark.parametrize(("model", "train"), WAYS, ids=lambda value: value.__name__)
def test_every_way_of_training_leaves_the_same_weights(model: type[nn.Module], train: Callable[[Any], None]) -> None:
    wanted, found = built(MyALPackage), built(model)
    start = weights(found)
    by_hand(wanted)
    train(found)
    assert same(weights(found), weights(wanted))
    assert not same(weights(found), start)


def test_the_published_inference_path() -> None:
    model, x = built(MyALModel), batches()[0][0]
    value = model.l1.inference(x, "f")
    value = model.l2.inference(value, "f")
    value = model.l3.inference(value, "f")
    value = model.l4.inference(value, "f")
    value = model.l4.inference(value, "b")
    value = model.l4.inference(value, "h")
    value = model.l3.inference(value, "h")
    value = model.l2.inference(value, "h")
    value = model.l1.inference(value, "h")
    package = built(MyALPackage)
    assert torch.equal(package.infer(x), value)
    assert torch.equal(Pipeline(model, threads=torch.get_num_threads()).predict(x), value)


@pytest.mark.parametrize("model", [MyALModel, MyALPackage])
def test_set_device_wants_one_device_per_layer(model: type[nn.Module]) -> None:
    built_model = built(model)
    set_device(built_model, ["cpu"] * 4)
    for count in (0, 3, 5):
        with pytest.raises(PlacementError, match=f"{count} devices for 4 layers of {model.__name__}"):
            set_device(built_model, ["cpu"] * count)


def test_set_device_places_layers_and_forward_follows_them() -> None:
    """``meta`` is a device without data: a placement that every machine can see."""
    model = built(MyALPackage)
    set_device(model, ["cpu", "meta", "meta", "meta"])
    assert [next(al.parameters()).device.type for al in model] == ["cpu", "meta", "meta", "meta"]
    x, y = model(*batches()[0])
    assert (x.device.type, y.device.type) == ("meta", "meta")


def test_tuple_inputs_by_a_subclass_of_al() -> None:
    """The published LSTM hands ``(features, lengths)`` from layer to layer by overriding AL."""

    class PairAL(AL):
        def forward(self, x: Any, y: Any) -> tuple[Any, Any]:
            out, code = super().forward(x[0], y)
            return (out, x[1] + 1), code

        def inference(self, x: Any, path: Any) -> Any:
            return (super().inference(x[0], path), x[1]) if path == "f" else super().inference(_head(x), path)

    def pairs() -> ALPackage:
        torch.manual_seed(0)
        return ALPackage([PairAL(ENC(MyBPLayer(), Linear()), AE(Linear(), Linear())) for _ in range(3)])

    wanted, found = pairs(), pairs()
    data = [((x, torch.tensor([3])), y) for x, y in batches()]
    for x, y in data:
        (_, count), _ = wanted(x, y)
        assert count.item() == 6
        wanted.backward()
        wanted.update()
    with Pipeline(found, threads=torch.get_num_threads()) as pipe:
        pipe.run(data)
        prediction = pipe.predict(data[0][0])
    assert same(weights(found), weights(wanted))
    wanted.eval()
    assert torch.equal(prediction, wanted.infer(data[0][0]))


def _head(x: Any) -> Any:
    return x[0] if isinstance(x, tuple) else x


def test_a_first_layer_for_classes_takes_numbers_one_hot_or_probabilities() -> None:
    torch.manual_seed(0)
    side, y = LabelAE(nn.Linear(3, 4), nn.Linear(4, 3), 3), torch.tensor([0, 2, 1])
    loss, code = side(y)
    soft_loss, soft_code = side(nn.functional.one_hot(y, 3).float())
    assert torch.equal(code, soft_code)
    assert torch.allclose(loss, soft_loss)
