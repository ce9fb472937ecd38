"""What a line of stages would take if nothing but its steps, its links' delay and their rate took time."""

from __future__ import annotations

from collections.abc import Sequence

from pipeal.planning.pure.simulate import log_normal_factors

Step = tuple[float, float]
"""The seconds of a forward, and of the backward and update after it."""


def drawn(stages: int, batches: int, step: Step, cv: float, seed: int) -> list[list[Step]]:
    """The steps of each stage: ``step`` times log-normal factors of mean 1, one for F and B of a batch together.

    Args:
        stages: How many.
        batches: Of each.
        step: The mean.
        cv: The standard deviation of the factors; 0: all are 1.
        seed: Of the draw.
    """
    rows = log_normal_factors(stages, batches, cv, seed)
    return [[(factor * step[0], factor * step[1]) for factor in row] for row in rows]


def pipelined_s(steps: Sequence[Sequence[Step]], delay_s: float, carried_s: float = 0.0) -> float:
    """The makespan of a line in which nothing flows back and any number of packets may be on their way.

    Args:
        steps: Of each stage, by batch.
        delay_s: One way.
        carried_s: How long a packet keeps the link, and the next one waits.

    >>> steps = [[(1.0, 2.0)] * 10] * 4
    >>> pipelined_s(steps, 0.0)
    33.0
    >>> pipelined_s(steps, 100.0) == (4 - 1) * (1 + 100) + 10 * (1 + 2)
    True
    >>> pipelined_s(steps, 0.0, carried_s=5.0) == 1 + 10 * 5 + 2 * (1 + 5) + (1 + 2)
    True
    """
    come = [0.0] * len(steps[0])
    free = 0.0
    for of_stage in steps:
        free = left = 0.0
        for batch, (forward, rest) in enumerate(of_stage):
            handed_on = max(free, come[batch]) + forward
            free = handed_on + rest
            left = max(left, handed_on) + carried_s
            come[batch] = left + delay_s
    return free


def backprop_s(stages: int, parts: int, step: Step, delay_s: float, carried_s: float = 0.0) -> tuple[float, float]:
    """One update by GPipe and by 1F1B, of a batch in so many micro-batches.

    A stage that has nothing to wait for loses nothing; gradients and activations take the same links at once, one way
    each. 1F1B keeps ``stages - stage`` micro-batches at a stage, and so waits for gradients where links are long.

    >>> backprop_s(4, 8, (5.0, 10.0), 0.0)
    (165.0, 165.0)
    >>> backprop_s(4, 8, (5.0, 10.0), 100.0)[0] == 8 * 15 + 3 * 15 + 2 * 3 * 100
    True
    """
    orders = [
        [[("F", part) for part in range(parts)] + [("B", part) for part in range(parts)] for _ in range(stages)],
        [_one_forward_one_backward(stages - stage, parts) for stage in range(stages)],
    ]
    gpipe, one_f_one_b = (_backprop_s(order, parts, step, delay_s, carried_s) for order in orders)
    return gpipe, one_f_one_b


def _one_forward_one_backward(ahead: int, parts: int) -> list[tuple[str, int]]:
    ahead = min(ahead, parts)
    order = [("F", part) for part in range(ahead)]
    for part in range(parts):
        order.append(("B", part))
        if part + ahead < parts:
            order.append(("F", part + ahead))
    return order


def _backprop_s(orders: list[list[tuple[str, int]]], parts: int, step: Step, delay_s: float, carried_s: float) -> float:
    """Each stage does its tasks in its order; a packet waits for those before it on its link."""
    stages = len(orders)
    seconds = dict(zip("FB", step, strict=True))
    come = {("F", 0, part): 0.0 for part in range(parts)} | {("B", stages - 1, part): 0.0 for part in range(parts)}
    free, place = [0.0] * stages, [0] * stages
    links = {(action, stage): 0.0 for action in "FB" for stage in range(stages)}
    left = 2 * stages * parts
    while left:
        for stage, order in enumerate(orders):
            while place[stage] < len(order) and (order[place[stage]][0], stage, order[place[stage]][1]) in come:
                action, part = order[place[stage]]
                free[stage] = max(free[stage], come[action, stage, part]) + seconds[action]
                to = stage + 1 if action == "F" else stage - 1
                links[action, stage] = max(links[action, stage], free[stage]) + carried_s
                come[action, to, part] = links[action, stage] + delay_s
                place[stage] += 1
                left -= 1
    return max(free)
