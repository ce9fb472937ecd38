"""Inside Lightning: layers that train themselves in a module with manual optimization; the Trainer keeps the loop.

python examples/lightning_module.py        the weights are those of a Pipeline, bit for bit
"""

import logging
import sys
import warnings

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pipeal import ALPackage, Pipeline

try:
    import lightning as L
except ImportError:
    sys.exit("skipped: lightning is not installed (pip install lightning)")


def new_package():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
    return ALPackage.from_bp(net, torch.randn(8, 20), outputs=4, split=3)


class Local(L.LightningModule):
    """Every layer steps its own optimizers; Lightning has the loop, the data and the log."""

    def __init__(self, package):
        super().__init__()
        self.package = package
        self.automatic_optimization = False

    def training_step(self, batch, _):
        x, y = batch
        for number, layer in enumerate(self.package):
            x, y = layer(x, y)
            layer.backward()
            layer.update()
            self.log(f"loss_{number}", sum(layer.loss()), prog_bar=True)

    def validation_step(self, batch, _):
        x, y = batch
        self.log("accuracy", (self.package.infer(x).argmax(1) == y).float().mean())

    def configure_optimizers(self):
        return []


def data(seed, samples=3200):
    x = torch.randn(samples, 20, generator=torch.Generator().manual_seed(seed))
    return DataLoader(TensorDataset(x, x[:, :4].argmax(1)), batch_size=32)


if __name__ == "__main__":
    warnings.filterwarnings("ignore", module="lightning")  # advice on workers, and on a fit that logs to no folder
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)  # as the stages have it: more threads round otherwise
    module = Local(new_package())
    trainer = L.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, data(1), data(2))
    print(f"Lightning: accuracy {trainer.callback_metrics['accuracy']:.3f}")

    package = new_package()
    with Pipeline(package, "cpu*3", threads=1) as pipe:
        for _ in range(2):
            pipe.run(data(1))
    ours, theirs = package.state_dict(), module.package.state_dict()
    print("the weights of Pipeline.run:", all(torch.equal(ours[name], theirs[name]) for name in ours))
