"""A language model writes: character after character, each drawn from what the model expects next.

::

    block = 6        R O M E . .  ──► answers at each place, of which the one at E tells what follows: O
                     R O M E O .
                     R O M E O :
    what is left     O M E O : \\n  ◄── a full block goes along with the text

The model always sees a whole block, filled up on the right: one shape, and so one graph where the model is compiled. No
place looks at what comes after it (a causal model), so what stands there says nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import inf

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeal.core.errors import ConfigError, DataError, check_counts
from pipeal.core.modules import device_of

_FILLING = 0
"""The character that a block is filled up with; any would do."""


def generate(
    model: Callable[[Tensor], Tensor],
    prompt: Tensor,
    *,
    length: int,
    block: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
) -> Tensor:
    """Continues a prompt; the arguments are those of :func:`generate_each`.

    Returns:
        ``(N + length,)``: the prompt and what was written, on the CPU.

    Raises:
        ConfigError: The prompt is empty, or a number out of range.
        DataError: The model's answers are not finite.
    """
    written = generate_each(model, prompt, length=length, block=block, temperature=temperature, top_k=top_k, seed=seed)
    return torch.cat((prompt.cpu(), prompt.new_tensor([*written], device="cpu")))


def generate_each(
    model: Callable[[Tensor], Tensor],
    prompt: Tensor,
    *,
    length: int,
    block: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
) -> Iterator[int]:
    """Continues a prompt, and yields each character before the next one is computed.

    For each, the model computes the whole block again: there is no cache of earlier places.

    Args:
        model: ``(1, block)`` characters to logits ``(1, block, V)``, causal and in evaluation mode: a module, on
            whatever device, such as :meth:`pipeal.ALPackage.to_bp` gives of every exit, or a function of characters on
            the CPU, such as :meth:`pipeal.Pipeline.predict`.
        prompt: ``(N,)`` characters, at least one.
        length: How many to write.
        block: The most that the model looks back on.
        temperature: Above 1, the unlikely becomes likelier; below, less so; 0 always takes the likeliest.
        top_k: Only so many of the likeliest are drawn from; None for all.
        seed: The same writes the same.

    Raises:
        ConfigError: The prompt is empty, or a number out of range; at once, before the first is asked for.
        DataError: The model's answers are not finite.
    """
    if not len(prompt):
        raise ConfigError("the prompt is empty; give at least one character to go on from")
    if not 0 <= temperature < inf:
        raise ConfigError(f"temperature is {temperature}; expected a number, at least 0")
    check_counts(length=length, top_k=top_k, block=block)
    draws = torch.Generator().manual_seed(seed)
    return _written(model, prompt.cpu(), length, block, lambda logits: _draw(logits, temperature, top_k, draws))


def _written(
    model: Callable[[Tensor], Tensor], prompt: Tensor, length: int, block: int, draw: Callable[[Tensor], Tensor]
) -> Iterator[int]:
    device = device_of(model) if isinstance(model, nn.Module) else torch.device("cpu")
    text = prompt[-block:]
    for _ in range(length):
        whole = F.pad(text, (0, block - len(text)), value=_FILLING).unsqueeze(0)
        with torch.no_grad():  # not around a yield: what the caller does meanwhile is its own affair
            logits = model(whole.to(device))[0, len(text) - 1].float().cpu()
        number = draw(logits)
        yield int(number)
        text = torch.cat((text, number[None]))[-block:]


def _draw(logits: Tensor, temperature: float, top_k: int | None, draws: torch.Generator) -> Tensor:
    """One character, ``()``."""
    if not logits.max().isfinite():  # some may be masked
        raise DataError(
            "the model's answers are not finite: it has diverged; take an earlier checkpoint, or train again"
        )
    if temperature == 0:
        return logits.argmax()
    if top_k is not None and top_k < len(logits):
        # By rank, not by the value of the last: of equals, too, only so many stay.
        logits = torch.full_like(logits, -inf).scatter(0, kept := logits.topk(top_k).indices, logits[kept])
    # The greatest becomes 0 first: divided by a temperature near 0, others would overflow together with it.
    weights = torch.softmax((logits - logits.max()).double() / temperature, 0)
    return torch.multinomial(weights, 1, generator=draws)[0]
