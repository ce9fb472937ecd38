"""A training that is cut off and resumed, elsewhere: it ends with what one has that was never interrupted.

python examples/resumed.py         dropout, a falling learning rate and Adam's states included, bit for bit
"""

import tempfile
from pathlib import Path

import torch
from torch import nn

from pipeal import ALPackage, Pipeline

BATCHES, CUT = 120, 50


def new_package():
    torch.manual_seed(0)
    parts = [nn.Sequential(nn.Linear(20 if not n else 64, 64), nn.ReLU(), nn.Dropout(0.2)) for n in range(4)]
    net = nn.Sequential(*parts, nn.Linear(64, 4))
    return ALPackage.from_bp(net, torch.randn(8, 20), outputs=4, split=4)


def batches(first=0, end=BATCHES):
    """Each batch follows from its number: a training that goes on at batch 50 needs none of those before it."""
    for number in range(first, end):
        drawn = torch.Generator().manual_seed(number)
        x = torch.randn(32, 20, generator=drawn)
        yield x, x[:, :4].argmax(1)


def rate(batch):
    """The factor on all learning rates: it falls to zero over the whole training, however often that is cut."""
    return 1 - batch / BATCHES


def uninterrupted():
    package = new_package()
    with Pipeline(package, "cpu", "sequential", threads=1) as pipe:
        pipe.run(batches(), rate)
    return package.state_dict()


def interrupted(file):
    with Pipeline(new_package(), "cpu*4", threads=1) as pipe:
        pipe.run(batches(end=CUT), rate)
        pipe.save(file)
    # From here on it may be another process, or another machine: all that it needs is in the file.
    package = new_package()
    with Pipeline.load(file, package, "cpu*2", threads=1) as pipe:
        print(f"goes on with batch {pipe.next_batch}, on {len(pipe.stages)} stages instead of 4")
        pipe.run(batches(first=pipe.next_batch), rate)
    return package.state_dict()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        resumed = interrupted(Path(folder) / "half.pipeal")
    whole = uninterrupted()
    print("resumed equals uninterrupted:", all(torch.equal(whole[name], resumed[name]) for name in whole))
