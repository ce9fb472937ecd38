"""Models in AL and in BP form, and their registry."""

from pipeal.models.features import Blocks, Features, MeanPool, TokenEmbedding
from pipeal.models.lstm import LSTMBlock
from pipeal.models.registry import TEXT_MODELS, build_text, canonical_text_model
from pipeal.models.text import LSTM, LSTMAL, TextDims, Transformer, TransformerAL
from pipeal.models.transformer import TransformerBlock

__all__ = [
    "LSTM",
    "LSTMAL",
    "TEXT_MODELS",
    "Blocks",
    "Features",
    "LSTMBlock",
    "MeanPool",
    "TextDims",
    "TokenEmbedding",
    "Transformer",
    "TransformerAL",
    "TransformerBlock",
    "build_text",
    "canonical_text_model",
]
