"""Grouping inside a batch: modules applied to groups of samples of similar length, to compute less padding."""

from pipeal.data.grouping.annotated import Annotated, AnnotatedModule
from pipeal.data.grouping.collection import DataCollection, TensorData
from pipeal.data.grouping.grouped import EMBEDDED, FEATURES, TOKENS, Grouped
from pipeal.data.grouping.groupers import (
    Grouper,
    LengthThresholdGrouper,
    PredefinedConsecutiveGrouper,
    PredefinedGrouper,
    UniGrouper,
)
from pipeal.data.grouping.padders import CDimPadder, Padder, ValuePadder, ZeroPadder

__all__ = [
    "EMBEDDED",
    "FEATURES",
    "TOKENS",
    "Annotated",
    "AnnotatedModule",
    "CDimPadder",
    "DataCollection",
    "Grouped",
    "Grouper",
    "LengthThresholdGrouper",
    "Padder",
    "PredefinedConsecutiveGrouper",
    "PredefinedGrouper",
    "TensorData",
    "UniGrouper",
    "ValuePadder",
    "ZeroPadder",
]
