"""Models in AL and in BP form, and their registry."""

from pipeal.core.names import LANGUAGE, TEXT, VISION
from pipeal.methods.al.place_codes import UNLABELLED, TokenCrossEntropy
from pipeal.models.causal import CausalAttention, CausalBlock, CharacterEmbedding
from pipeal.models.charlm import CharDims, CharLM, CharLMAL
from pipeal.models.features import TokenEmbedding
from pipeal.models.generation import generate, generate_each
from pipeal.models.grouping import group_each, group_layers
from pipeal.models.registry import build_language, build_text, build_vision, model_layers
from pipeal.models.text import LSTM, LSTMAL, TextDims, Transformer, TransformerAL
from pipeal.models.vision import VGG, VGGAL, Resnet, ResnetAL, VisionDims

TEXT_MODELS = tuple(TEXT.models)
"""The names of models for classified texts."""

VISION_MODELS = tuple(VISION.models)
"""Those of models for images."""

LANGUAGE_MODELS = tuple(LANGUAGE.models)
"""Those of language models."""

__all__ = [
    "LANGUAGE_MODELS",
    "LSTM",
    "LSTMAL",
    "TEXT_MODELS",
    "UNLABELLED",
    "VGG",
    "VGGAL",
    "VISION_MODELS",
    "CausalAttention",
    "CausalBlock",
    "CharDims",
    "CharLM",
    "CharLMAL",
    "CharacterEmbedding",
    "Resnet",
    "ResnetAL",
    "TextDims",
    "TokenCrossEntropy",
    "TokenEmbedding",
    "Transformer",
    "TransformerAL",
    "VisionDims",
    "build_language",
    "build_text",
    "build_vision",
    "generate",
    "generate_each",
    "group_each",
    "group_layers",
    "model_layers",
]
