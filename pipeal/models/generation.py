"""A language model writes: character after character, each drawn from what the model expects next."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import torch
from torch import Tensor, nn

from pipeal.errors import ConfigError
from pipeal.packet import device_of


@torch.no_grad()
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
    """Continues a prompt.

    Args:
        model: ``(1, T)`` characters to logits ``(1, T, V)``, in evaluation mode: a module, on whatever device, such as
            :meth:`pipeal.ALPackage.to_bp` gives of every exit, or a function of characters on the CPU.
        prompt: ``(N,)`` characters, at least one.
        length: How many to write.
        block: The most that the model looks back on.
        temperature: Above 1, the unlikely becomes likelier; below, less so; 0 always takes the likeliest.
        top_k: Only so many of the likeliest are drawn from; None for all.
        seed: The same writes the same.

    Returns:
        ``(N + length,)``: the prompt and what was written, on the CPU.

    Raises:
        ConfigError: The prompt is empty, or a number out of range.
    """
    if not len(prompt):
        raise ConfigError("the prompt is empty; give at least one character to go on from")
    if not 0 <= temperature < inf:
        raise ConfigError(f"temperature is {temperature}; expected a number, at least 0")
    for name, count in (("length", length), ("top_k", top_k), ("block", block)):
        if count is not None and count < 1:
            raise ConfigError(f"{name} is {count}; expected a whole number, at least 1")
    device = device_of(model) if isinstance(model, nn.Module) else torch.device("cpu")
    draws = torch.Generator().manual_seed(seed)
    written = torch.cat((prompt.cpu(), prompt.new_zeros(length, device="cpu")))
    for place in range(len(prompt), len(written)):
        logits = model(written[None, max(0, place - block) : place].to(device))[0, -1].float().cpu()
        written[place] = _draw(logits, temperature, top_k, draws)
    return written


def _draw(logits: Tensor, temperature: float, top_k: int | None, draws: torch.Generator) -> Tensor:
    """One character, ``()``."""
    if temperature == 0:
        return logits.argmax()
    if top_k is not None and top_k < len(logits):
        # By rank, not by the value of the last: of equals, too, only so many stay.
        logits = torch.full_like(logits, -inf).scatter(0, kept := logits.topk(top_k).indices, logits[kept])
    # The greatest becomes 0 first: divided by a temperature near 0, others would overflow together with it.
    weights = torch.softmax((logits - logits.max()).double() / temperature, 0)
    return torch.multinomial(weights, 1, generator=draws)[0]
