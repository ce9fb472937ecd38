"""You keep the loop: layers by hand, or batches into a pipeline one by one. Both end with the weights of ``run``.

python examples/own_loop.py        three loops, one result, bit for bit
"""

import torch
from torch import nn

from pipeal import ALPackage, Pipeline


def new_package():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
    return ALPackage.from_bp(net, torch.randn(8, 20), outputs=4, split=3)


def batches(count=100):
    drawn = torch.Generator().manual_seed(1)
    for _ in range(count):
        x = torch.randn(32, 20, generator=drawn)
        yield x, x[:, :4].argmax(1)


def rate(step):
    return min(1.0, (step + 1) / 20)  # a warm-up


def by_hand():
    """Plain PyTorch: every layer is a module with optimizers of its own; what it hands on is detached.

    Here is the place for what is yours: a log, a gradient clipped between backward and update, a test now and then.
    Dropout would draw from the default generator here, and in a pipeline from keys of seed, layer and batch.
    """
    package = new_package()
    for step, (x, y) in enumerate(batches()):
        for number, layer in enumerate(package):
            layer.scale_lr(rate(step))
            x, y = layer(x, y)
            layer.backward()
            layer.update()
            if step % 50 == 49:
                print(f"step {step + 1}, layer {number}:", " ".join(f"{loss:.3f}" for loss in layer.loss()))
    return package.state_dict()


def by_submission():
    """The loop is yours, and stages still overlap: ``submit`` comes back when the first stage has room."""
    package = new_package()
    with Pipeline(package, "cpu*3", threads=1) as pipe:
        for step, (x, y) in enumerate(batches()):
            pipe.submit(x, y, rate(step))
            if step % 50 == 49:
                report = pipe.drain()  # waits for all that was submitted: now weights may be read
                print(f"step {step + 1}: {report.samples} samples, last layer", report.losses[-1][-1].tolist())
    return package.state_dict()


def by_run():
    package = new_package()
    with Pipeline(package, "cpu*3", threads=1) as pipe:
        pipe.run(batches(), rate)
    return package.state_dict()


if __name__ == "__main__":
    torch.set_num_threads(1)  # as the stages have it: more threads round otherwise
    hand, submitted, run = by_hand(), by_submission(), by_run()
    for name, found in (("layers by hand", hand), ("batches submitted", submitted)):
        print(f"{name}, the weights of Pipeline.run:", all(torch.equal(run[key], found[key]) for key in run))
