"""Grouping inside a batch: modules applied to groups of samples of similar length, to compute less padding."""

from pipeal.data.grouping.annotated import *
from pipeal.data.grouping.collection import *
from pipeal.data.grouping.grouped import *
from pipeal.data.grouping.groupers import *
from pipeal.data.grouping.padders import *
