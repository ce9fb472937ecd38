"""Associated Learning: layers, packages, and backpropagation in the same shape."""

from pipeal.al.bp import BP
from pipeal.al.classcodes import encode_each_class
from pipeal.al.dropout import Dropout
from pipeal.al.encoder import Encoder
from pipeal.al.layers import AE, AL, ENC, LabelAE, LearningRates
from pipeal.al.optimizers import OptimizerFactory, adam
from pipeal.al.package import ALPackage, set_device
from pipeal.al.touched import TouchedAdam, touch_rows

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
    "encode_each_class",
    "set_device",
    "touch_rows",
]
