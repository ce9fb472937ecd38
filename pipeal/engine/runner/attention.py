"""Which kernels compute attention on GPUs: those that need no plan for each size of a batch.

On the newest GPUs PyTorch prefers cuDNN's. It makes a plan for each shape and thread, which takes about a second, and a
text model meets hundreds of shapes on each of its stages' threads. Flash attention and the memory-efficient kernel,
which takes masks as well, need none.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch

_LOCK = threading.Lock()
_BEFORE: list[bool] = []
"""For each that holds the process to it, what was set when the first one began."""


@contextmanager
def attention_without_plans(kinds: Collection[str]) -> Iterator[None]:
    """Within it, where there are GPUs, attention of the whole process is not cuDNN's, which the user may turn on again.

    Several may overlap in any order; the last one to end leaves what was before the first.

    Args:
        kinds: The kinds of devices, such as ``cuda``.
    """
    if "cuda" not in kinds:
        yield
        return
    with _LOCK:
        _BEFORE.append(_BEFORE[0] if _BEFORE else torch.backends.cuda.cudnn_sdp_enabled())
        if len(_BEFORE) == 1:
            torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        with _LOCK:
            before = _BEFORE.pop()
            if not _BEFORE:
                torch.backends.cuda.enable_cudnn_sdp(before)
