"""Fits the time model to measured steps, by weighted least squares with nonnegative parameters.

A step takes `launch + sequence x sequences + max(compute, memory)`. If it is known for each step
whether compute or memory is larger, the time is linear in the parameters. The fit therefore
alternates: it fits the parameters, and then determines for each step which of the two is larger.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.loadtests.simulator.model.timing import Floats, Timing

Bools: TypeAlias = npt.NDArray[np.bool_]

PARAMETERS = ("launch", "sequence", "token", "pair", "weights", "kv_token")
MOST_ROUNDS = 12
"""Maximum number of alternations between the two parts of the fit (see the module docstring)."""
FIRST_SIDES = (0, 1, 4, 16, 64, 256, 10**9)
"""Starting points of the fit.

A fit starts with the assumption that compute is larger than memory for steps of more tokens than
this number. The fit is repeated from each starting point.
"""
HUBER_DEVIATIONS = 2.0
"""Residuals beyond this many standard deviations count less (Huber's loss)."""
MOST_MEDIANS = 5.0
"""A step counts as at most this many times the median of its group."""
MOST_TIMES = 20.0
MIN_STEPS = 20
SOLE_OTHERS, SHARED_OTHERS = 0.1, 0.9
"""Limits of the mean number of other computing workers during a step: below the first, the step
counts as alone; above the second, as shared."""
LEAST_SHARING = 0.05
"""Smallest slowdown that shows shared cores. A smaller slowdown counts as noise."""
LONGEST_GAP = 0.02
"""A longer gap between two steps, in seconds, means that the engine was idle or interrupted."""


class BadCalibration(ValueError):
    """Raised if the measurements cannot be used. The message gives the reason."""


@dataclass(frozen=True, slots=True)
class Steps:
    """Measured steps as columns [n]. `seconds` includes the engine's time between two steps.

    `others` is the mean number of other workers that computed during the step; it defaults to 0.
    """

    seconds: Floats
    tokens: Floats
    sequences: Floats
    positions: Floats
    pairs: Floats
    others: Floats = field(default_factory=lambda: np.zeros(0))

    def __post_init__(self) -> None:
        if not len(self.others):
            object.__setattr__(self, "others", np.zeros(len(self.seconds)))

    def __len__(self) -> int:
        return len(self.seconds)

    def select(self, chosen: Bools) -> "Steps":
        return Steps(*(column[chosen] for column in self._columns()))

    def _columns(self) -> tuple[Floats, ...]:
        return (
            self.seconds,
            self.tokens,
            self.sequences,
            self.positions,
            self.pairs,
            self.others,
        )

    @classmethod
    def joined(cls, several: Sequence["Steps"]) -> "Steps":
        columns = zip(*(steps._columns() for steps in several), strict=True)
        return cls(*(np.concatenate(column) for column in columns))


@dataclass(frozen=True, slots=True)
class StepFit:
    """A fitted time model with its residuals."""

    timing: Timing
    num_steps: int
    # Mean relative error of the predicted times of steps.
    mean_error: float
    # Median relative error of the predicted times of steps.
    median_error: float
    total_ratio: float  # sum of the predicted times divided by that of the measured times


def with_engine_time(ended: Floats, steps: Steps) -> Steps:
    """Add the engine's own time between two steps to the duration of each step.

    The time is `fixed + per_sequence x sequences`. It is fitted to the gaps before decode steps,
    because a decode step immediately follows the step before it. Gaps of LONGEST_GAP or more are
    pauses of the machine, and are ignored.

    Args:
        ended: end time of each step of one worker, ascending.
        steps: the same steps; `seconds` does not include the engine's time.
    """
    gaps = np.diff(ended) - steps.seconds[1:]
    decodes = (steps.tokens == steps.sequences)[1:] & (gaps < LONGEST_GAP)
    if decodes.sum() < MIN_STEPS:
        return steps
    design = np.stack((np.ones(int(decodes.sum())), steps.sequences[1:][decodes]), axis=1)
    fixed, per_sequence = _robust(design, np.maximum(gaps[decodes], 0.0), np.ones(len(design)))
    return replace(steps, seconds=steps.seconds + fixed + per_sequence * steps.sequences)


def fit_steps(steps: Steps, base: Timing) -> StepFit:
    """Fit the parameters of steps. The other parameters are those of `base`.

    Raises BadCalibration if there are too few steps.
    """
    if len(steps) < MIN_STEPS:
        raise BadCalibration(
            f"only {len(steps)} steps were measured, but at least {MIN_STEPS} are needed"
        )
    base = replace(base, sharing=sharing_of(steps))
    steps = without_sharing(steps, base.sharing)
    cells, counts = grouped(steps)
    weights = np.sqrt(counts) / cells.seconds
    best: tuple[float, Floats] | None = None
    for most in FIRST_SIDES:
        computing = cells.tokens > most
        for _ in range(MOST_ROUNDS):
            found = _robust(_design(cells, computing), cells.seconds, weights)
            loss = float((np.abs(_predicted(cells, found) - cells.seconds) * weights).mean())
            if best is None or loss < best[0]:
                best = loss, found
            before, computing = computing, _sides(cells, found)
            if (before == computing).all():
                break
    assert best is not None
    return _result(steps, best[1] * slowdown(steps, best[1]), base)


def sharing_of(steps: Steps) -> float:
    """Return the relative slowdown of a step for each other worker that computes, at least 0.

    Steps with and without other workers are compared within groups of equal steps (see `grouped`),
    so the result does not depend on the rest of the model. The result is 0 if no group has steps of
    both kinds, or if the slowdown is below LEAST_SHARING.
    """
    group, seconds = _groups(steps)
    counts = np.bincount(group)
    slowdowns, weights = list[float](), list[float]()
    for one in range(len(counts)):
        own, others = seconds[group == one], steps.others[group == one]
        sole, beside = others < SOLE_OTHERS, others > SHARED_OTHERS
        if sole.any() and beside.any():
            ratio = float(own[beside].mean() / own[sole].mean())
            slowdowns.append((ratio - 1) / float(others[beside].mean()))
            weights.append(float(min(sole.sum(), beside.sum())))
    sharing = float(np.average(slowdowns, weights=weights)) if slowdowns else 0.0
    return sharing if sharing >= LEAST_SHARING else 0.0


def without_sharing(steps: Steps, sharing: float) -> Steps:
    """Return the steps as if no other worker had computed at the same time."""
    factor = 1 + sharing * steps.others
    return replace(steps, seconds=steps.seconds / factor, others=np.zeros(len(steps)))


def jitter_of(steps: Steps, predicted: Floats) -> float:
    """Return the standard deviation of log(measured / predicted) within groups of equal steps.

    Deviations between groups are errors of the model and do not count. A step counts as at most
    MOST_MEDIANS times the median of its group; see `grouped`.

    Args:
        steps: the measured steps.
        predicted: [n] their durations by the fitted model.
    """
    group, capped = _groups(steps)
    logs = np.log(capped / predicted)
    counts = np.bincount(group)
    means = np.bincount(group, weights=logs) / counts
    freedom = len(steps) - len(counts)
    return float(np.sqrt(((logs - means[group]) ** 2).sum() / freedom)) if freedom else 0.0


def slowdown(steps: Steps, values: Floats) -> float:
    """Return the ratio of the measured to the predicted total time.

    A busy machine interrupts a process in proportion to its computing time. The robust fit almost
    ignores these pauses, so this factor adds them. A step counts as at most MOST_TIMES times
    its prediction.
    """
    predicted = _predicted(steps, values)
    return float(np.minimum(steps.seconds, MOST_TIMES * predicted).sum() / predicted.sum())


def grouped(steps: Steps) -> tuple[Steps, Floats]:
    """Return the means of groups of equal steps, and the number of steps in each group.

    Means are used because a queue, and the time of a whole answer, depend on the mean of the steps.
    Steps of a group have the same tokens and sequences, and positions within a factor of 1.4. To
    limit the effect of pauses of the machine, a step counts as at most MOST_MEDIANS times the
    median of its group.
    """
    group, seconds = _groups(steps)
    capped = replace(steps, seconds=seconds)
    counts = np.bincount(group).astype(np.float64)
    columns = (np.bincount(group, weights=column) / counts for column in capped._columns())
    return Steps(*columns), counts


def _groups(steps: Steps) -> tuple[npt.NDArray[np.intp], Floats]:
    """Return, for each step [n], the number of its group and its seconds after capping."""
    keys = np.stack((steps.tokens, steps.sequences, np.rint(2 * np.log2(steps.positions + 1))))
    _, group = np.unique(keys, axis=1, return_inverse=True)
    group = group.reshape(-1)
    num_groups = int(group.max()) + 1
    medians = np.array([np.median(steps.seconds[group == one]) for one in range(num_groups)])
    return group, np.minimum(steps.seconds, MOST_MEDIANS * medians[group])


def predicted_seconds(steps: Steps, timing: Timing) -> Floats:
    """Return the duration [n] of each step according to a time model."""
    return _predicted(steps, np.array([getattr(timing, name) for name in PARAMETERS]))


def fit_line(x: Floats, seconds: Floats) -> tuple[float, float]:
    """Return (fixed, per_unit), both at least 0, of a robust fit of `fixed + per_unit x x`."""
    design = np.stack((np.ones(len(x)), x), axis=1)
    fixed, slope = _robust(design, seconds, np.ones(len(x)))
    return float(fixed), float(slope)


def _result(steps: Steps, values: Floats, base: Timing) -> StepFit:
    fitted = dict(zip(PARAMETERS, map(float, values), strict=True))
    predicted = _predicted(steps, values)
    errors = np.abs(predicted / steps.seconds - 1)
    ratio = float(predicted.sum() / steps.seconds.sum())
    return StepFit(
        replace(base, **fitted, jitter=jitter_of(steps, predicted)),
        len(steps),
        float(errors.mean()),
        float(np.median(errors)),
        ratio,
    )


def _design(steps: Steps, computing: Bools) -> Floats:
    memory = ~computing
    columns = (
        np.ones(len(steps)),
        steps.sequences,
        steps.tokens * computing,
        steps.pairs * computing,
        memory.astype(np.float64),
        steps.positions * memory,
    )
    return np.stack(columns, axis=1)


def _sides(steps: Steps, values: Floats) -> Bools:
    """Return, for each step [n], whether compute takes at least as long as memory."""
    _, _, token, pair, weights, kv_token = values
    sides: Bools = token * steps.tokens + pair * steps.pairs >= weights + kv_token * steps.positions
    return sides


def _predicted(steps: Steps, values: Floats) -> Floats:
    launch, sequence, token, pair, weights, kv_token = values
    compute = token * steps.tokens + pair * steps.pairs
    seconds: Floats = (
        launch
        + sequence * steps.sequences
        + np.maximum(compute, weights + kv_token * steps.positions)
    )
    return seconds


def _robust(design: Floats, target: Floats, weights: Floats) -> Floats:
    """Return the nonnegative solution of `design x values = target` with Huber's loss.

    Args:
        design: [n, k] coefficients.
        target: [n] measured values.
        weights: [n] factors of the residuals before the loss is applied.
    """
    trust = np.ones(len(target))
    values = np.zeros(design.shape[1])
    for _ in range(8):
        values = _nonnegative(design, target, weights * np.sqrt(trust))
        residuals = np.abs((design @ values - target) * weights)
        deviation = 1.4826 * float(np.median(residuals))
        if deviation <= 1e-12:
            break
        trust = np.minimum(1.0, HUBER_DEVIATIONS * deviation / np.maximum(residuals, 1e-300))
    return values


def _nonnegative(design: Floats, target: Floats, weights: Floats) -> Floats:
    """Return the exact nonnegative least squares solution.

    All subsets of columns are tried.
    """
    scaled, aim = design * weights[:, None], target * weights
    sizes = np.sqrt((scaled**2).sum(axis=0))
    usable = np.flatnonzero(sizes > 0)
    normal = scaled[:, usable] / sizes[usable]
    gram, right = normal.T @ normal, normal.T @ aim
    best, best_loss = np.zeros(len(usable)), 0.0
    for count in range(1, len(usable) + 1):
        for chosen in map(list, combinations(range(len(usable)), count)):
            found = np.linalg.lstsq(gram[np.ix_(chosen, chosen)], right[chosen], rcond=None)[0]
            # Squared error without the term |aim|^2, which is the same for all subsets.
            loss = float(-(right[chosen] @ found))
            if (found >= 0).all() and loss < best_loss - 1e-15:
                best, best_loss = np.zeros(len(usable)), loss
                best[chosen] = found
    values = np.zeros(design.shape[1])
    values[usable] = best / sizes[usable]
    return values
