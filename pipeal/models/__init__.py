"""Models in AL and in BP form, and their registry."""

from pipeal.models.convolution import BasicBlock, ConvBN, ResidualStage, VGGStage
from pipeal.models.features import Blocks, Features, TokenEmbedding
from pipeal.models.grouping import group_layers
from pipeal.models.lstm import LSTMBlock
from pipeal.models.registry import (
    TEXT_MODELS,
    VISION_MODELS,
    build_text,
    build_vision,
    canonical_text_model,
    canonical_vision_model,
)
from pipeal.models.text import LSTM, LSTMAL, TextDims, Transformer, TransformerAL
from pipeal.models.transformer import TransformerBlock
from pipeal.models.vision import VGG, VGGAL, Resnet, ResnetAL, VisionDims

__all__ = [
    "LSTM",
    "LSTMAL",
    "TEXT_MODELS",
    "VGG",
    "VGGAL",
    "VISION_MODELS",
    "BasicBlock",
    "Blocks",
    "ConvBN",
    "Features",
    "LSTMBlock",
    "ResidualStage",
    "Resnet",
    "ResnetAL",
    "TextDims",
    "TokenEmbedding",
    "Transformer",
    "TransformerAL",
    "TransformerBlock",
    "VGGStage",
    "VisionDims",
    "build_text",
    "build_vision",
    "canonical_text_model",
    "canonical_vision_model",
    "group_layers",
]
