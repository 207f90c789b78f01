"""Divides a limited number of GPUs among the pools of a cluster. This module does no I/O."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GrowthRequest:
    """Input of `grant` for one pool: its present and its desired number of workers."""

    count: int  # number of workers that serve or have been requested
    desired: int
    gpus: int  # GPUs of one worker
    # Number of draining and reassigned workers. They hold GPUs, but do not count in `count`.
    not_serving: int = 0


def grant(requests: Sequence[GrowthRequest], budget: int) -> list[int]:
    """Return the number of workers that each pool may have under the GPU budget.

    The number is at most the desired number of the pool. The budget limits only the growth of
    pools, and never takes workers from a pool. New workers are granted one at a time. Each goes to
    the pool whose ratio of desired to granted workers is largest.

    Args:
        budget: number of GPUs that all pools may use together.
    """
    granted = [min(each.desired, each.count) for each in requests]
    held = sum(
        each.gpus * (num + each.not_serving) for each, num in zip(requests, granted, strict=True)
    )
    left = max(budget - held, 0)
    while True:
        short = [
            at
            for at, each in enumerate(requests)
            if granted[at] < each.desired and each.gpus <= left
        ]
        if not short:
            return granted
        worst = max(short, key=lambda at: requests[at].desired / max(granted[at], 0.5))
        granted[worst] += 1
        left -= requests[worst].gpus
