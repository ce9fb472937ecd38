"""Options of methods: keyword arguments of their ``make_layers``, with the same defaults.

A method that has some adds a class here, and a field to :class:`MethodsConfig` with its own name.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MethodsConfig:
    """Options by method."""
