"""Which samples form a batch.

::

    pipeal.config.text.KINDS        a line per kind of batching: its name, and the options under data.batching it heeds
    pipeal.data.batching.<kind>     its sampler, and ``make_sampler``, which takes those options by name
    samplers, passes                what samplers share: plans of whole epochs, and passes over anything, each resumable
    bounds, cuts, packing, …        the algorithms: the best lengths to pad to, the best cuts, filling up to a limit
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from pipeal.data.batching.samplers import EpochBatchSampler, Known

__all__ = ["Known", "make_sampler"]


def make_sampler(kind: str, known: Known, **options: Any) -> EpochBatchSampler:
    """The sampler of a kind of batching.

    Args:
        kind: ``fixed``, ``bucket`` and so on: the name of its module, with dashes.
        known: What it batches.
        options: Those that the kind heeds, all of them.

    Raises:
        ConfigError: An option that does not fit the others.
        DataError: A sample that is over the budget, or all of them where such are dropped.
    """
    # By name: a kind is one module, and one line in the configuration.
    module = import_module(f"{__name__}.{kind.replace('-', '_')}")
    sampler: EpochBatchSampler = module.make_sampler(known, **options)
    return sampler
