"""Associated Learning: layers, packages, and backpropagation in the same shape."""

from pipeal.methods.al.layers import AE, AL, ENC, LabelAE, make_layers
from pipeal.methods.al.package import ALPackage, set_device
from pipeal.methods.bp import BP
from pipeal.methods.cutting.encoder import Encoder
from pipeal.methods.dropout import Dropout
from pipeal.methods.optimizers import LearningRates, OptimizerFactory, adam
from pipeal.methods.touched import TouchedAdam, touch_rows

__all__ = [
    "AE",
    "AL",
    "BP",
    "ENC",
    "ALPackage",
    "Dropout",
    "Encoder",
    "LabelAE",
    "LearningRates",
    "OptimizerFactory",
    "TouchedAdam",
    "adam",
    "make_layers",
    "set_device",
    "touch_rows",
]
