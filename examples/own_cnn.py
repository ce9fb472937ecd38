"""A CNN of your own, written for backpropagation: cut into four layers that train themselves.

python examples/own_cnn.py         trains on one stage and on four: the weights are the same, bit for bit
"""

import torch
from torch import nn

from pipeal import ALPackage, Pipeline


def block(channels, out, stride):
    return nn.Sequential(nn.Conv2d(channels, out, 3, stride, padding=1), nn.BatchNorm2d(out), nn.ReLU())


class CNN(nn.Module):
    """As one writes it for ``loss.backward()``; nothing in it knows of pipeal."""

    def __init__(self, classes=4):
        super().__init__()
        self.stem, self.middle, self.top = block(1, 16, 1), block(16, 32, 2), block(32, 64, 2)
        self.head = nn.Linear(64, classes)

    def forward(self, images):
        features = self.top(self.middle(self.stem(images)))
        return self.head(features.mean((2, 3)))


def batches(count=60, samples=32):
    """Stripes: their direction is the class, their place and width are chance."""
    drawn = torch.Generator().manual_seed(1)
    rows, columns = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    directions = torch.stack([rows, columns, rows + columns, rows - columns])
    for _ in range(count):
        y = torch.randint(4, (samples,), generator=drawn)
        width, place = torch.rand(2, samples, 1, 1, generator=drawn)
        stripes = torch.sin(directions[y] * (1 + width) + 6.3 * place)
        yield stripes[:, None] + torch.randn(samples, 1, 16, 16, generator=drawn), y


def train(devices):
    torch.manual_seed(0)
    images, _ = next(batches(1))
    package = ALPackage.from_bp(CNN(), images, outputs=4, split=["middle", "top", "head"])
    with Pipeline(package, devices, threads=1) as pipe:
        report = pipe.run(batches())
        x, y = next(batches(1, samples=1000))
        exits = [(pipe.predict(x, exit_at=number).argmax(1) == y).float().mean() for number in (1, 2, 3, 4)]
    print(f"{devices}: {report.seconds:.1f} s, accuracy at each exit", " ".join(f"{share:.3f}" for share in exits))
    return package.state_dict()


if __name__ == "__main__":
    one, four = train("cpu"), train("cpu*4")
    print("the same weights on one stage and on four:", all(torch.equal(one[name], four[name]) for name in one))
