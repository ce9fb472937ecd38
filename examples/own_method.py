"""A method of your own, from nothing: each part learns to keep the classes apart, with no classifier before the last.

python examples/own_method.py      trains on one stage and on four: the weights are the same, bit for bit
"""

import torch
from torch import nn

from pipeal import ALPackage, Pipeline
from pipeal.core.protocols import TURN, UP
from pipeal.methods.layer import LocalLayer
from pipeal.methods.optimizers import open_optimizer


class Apart(LocalLayer):
    """Pulls the features of a class to their mean, and pushes the means of different classes apart."""

    def __init__(self, f, width, classes):
        super().__init__()
        self.f, self.head, self.classes = f, nn.Linear(width, classes), classes
        self.opt = open_optimizer(None, self, lr=3e-3)  # fused Adam over all parameters of the layer

    def forward(self, x, y):
        out = self.f(x)
        member = nn.functional.one_hot(y, self.classes).to(out.dtype)  # no y.unique(), for which a GPU would wait
        means = member.t() @ out / member.sum(0).clamp_min(1).unsqueeze(1)
        within = (out - means[y]).square().mean()
        between = torch.exp(-torch.pdist(means)).mean()
        answer = nn.functional.cross_entropy(self.head(out.detach()), y)  # a probe: it changes nothing of the features
        self.keep(answer, within + between)  # the losses; the engine calls backward() and update()
        return out.detach(), y  # what the next part gets: nothing flows back

    def blocks(self):
        return {UP: self.f, TURN: self.head}  # what an answer goes through: up, and at the exit


def batches(count=200, samples=64):
    drawn = torch.Generator().manual_seed(1)
    centres = torch.randn(3, 16, generator=drawn)
    for _ in range(count):
        y = torch.randint(3, (samples,), generator=drawn)
        yield centres[y] + torch.randn(samples, 16, generator=drawn), y


def train(devices, depth=4, width=64):
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(width if n else 16, width), nn.ReLU()) for n in range(depth)]
    package = ALPackage([Apart(block, width, classes=3) for block in blocks])
    with Pipeline(package, devices, threads=1) as pipe:
        report = pipe.run(batches())
        x, y = next(batches(1, 1000))
        right = (pipe.predict(x).argmax(1) == y).float().mean()
        print(f"{devices}: losses {report.losses[-1][-1].tolist()}, accuracy {right:.3f}")
    return package.state_dict()


if __name__ == "__main__":
    one, four = train("cpu"), train("cpu*4")
    print("the same weights on one stage and on four:", all(torch.equal(one[name], four[name]) for name in one))
