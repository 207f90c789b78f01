"""Sample one token per row: temperature, filters, Gumbel noise, argmax.

The sampled token has the largest sum of logit and Gumbel noise (see `philox`). Therefore a row's
token depends only on the row's logits, seed, choice and index.

On a CPU, the filters are those of `logit_filters`. On a GPU (`sampling/triton`), nothing is sorted,
the host does not wait, and the noise is bitwise identical to `philox`. A row with NaN or Inf is
flagged and does not affect other rows.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.kernels.checks import check
from penstock.kernels.sampling.logit_filters import (
    FilterParams,
    apply_top_k_top_p_min_p_,
    apply_typical_p_,
)
from penstock.kernels.sampling.philox import gumbel_noise
from penstock.kernels.sampling.row_scan import scan_rows
from penstock.kernels.sampling.triton import sample_triton
from penstock.kernels.triton_common.launch import use_triton


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """Sampling parameters of R rows: each field is [R], on the device of the logits."""

    temperature: Tensor  # float32; 0 means greedy: all other parameters are then ignored
    top_p: Tensor  # float32; 1 disables the filter, see `FilterParams`
    min_p: Tensor  # float32; 0 disables the filter, see `FilterParams`
    typical_p: Tensor  # float32, applied to the tokens that the other filters keep; 1 disables it
    top_k: Tensor  # int64; 0 disables the filter, see `FilterParams`
    seeds: Tensor  # int64 with the bits of a uint64
    indices: Tensor  # int64: index of the sampled token in its answer, from 0
    choices: Tensor  # int64: number of the choice within its request, from 0


def sample(logits: Tensor, params: SamplingTensors, bans: bool = False) -> tuple[Tensor, Tensor]:
    """Sample one token per row. On a GPU, the host does not wait for the result.

    Args:
        logits: [R, V] float32; they are not modified.
        params: sampling parameters of the R rows.
        bans: True if -inf marks a banned token. If False, a row that contains -inf is invalid.

    Returns:
        The tokens [R] int64, and a mask [R] bool of the valid rows. A row is invalid if it contains
        NaN or Inf, or if every token is excluded; its token is then 0.
    """
    if not use_triton(logits):
        return _sample_on_cpu(logits, params, bans)
    _check(logits, params)
    filters = FilterParams(params.top_k, params.top_p, params.min_p)
    draws = (params.seeds, params.indices, params.choices)
    return sample_triton(logits, params.temperature, filters, params.typical_p, *draws, bans)


def _check(logits: Tensor, params: SamplingTensors) -> None:
    check("logits", logits, ("R", "V"), (torch.float32,))
    for name in ("seeds", "indices", "choices", "top_k"):
        check(name, getattr(params, name), (len(logits),), (torch.int64,), like=logits)
    for name in ("temperature", "top_p", "min_p", "typical_p"):
        check(name, getattr(params, name), (len(logits),), (torch.float32,), like=logits)


def greedy(logits: Tensor, bans: bool = False) -> tuple[Tensor, Tensor]:
    """Return the token with the largest logit of each row, and the mask of valid rows, on a CPU.

    For a batch whose rows are all greedy, this equals `sample` and takes less time.
    """
    scan = scan_rows(logits)
    finite = torch.from_numpy(scan.largest_is_finite if bans else scan.finite)
    return torch.from_numpy(scan.tokens).masked_fill_(~finite, 0), finite


def _sample_on_cpu(logits: Tensor, params: SamplingTensors, bans: bool) -> tuple[Tensor, Tensor]:
    tokens, finite = greedy(logits, bans)
    drawn = np.flatnonzero((params.temperature > 0).numpy())
    if len(drawn):
        noisy = _add_noise(_rows(logits, drawn), params, drawn)
        rows = torch.from_numpy(drawn)
        tokens[rows] = torch.from_numpy(scan_rows(noisy).tokens)
        # A low temperature may have made all scores of a row -inf, even those of allowed tokens.
        finite[rows] &= logits[rows, tokens[rows]].isfinite()
    return tokens.masked_fill_(~finite, 0), finite


def _add_noise(logits: Tensor, params: SamplingTensors, at: npt.NDArray[np.intp]) -> Tensor:
    """Return `logits` divided by temperature, after the filters, and with noise added.

    `logits` are the rows with the numbers `at` of the batch; `params` are those of the whole batch.
    """
    rows = torch.from_numpy(at)
    heat, top_p, min_p, typical_p, top_k = (
        each[rows]
        for each in (
            params.temperature,
            params.top_p,
            params.min_p,
            params.typical_p,
            params.top_k,
        )
    )
    scores = logits / heat[:, None]
    cut = torch.nonzero((top_k > 0) | (top_p < 1) | (min_p > 0))[:, 0]
    if len(cut):
        cuts = FilterParams(top_k[cut], top_p[cut], min_p[cut])
        _update_rows_(scores, cut, lambda picked: apply_top_k_top_p_min_p_(picked, cuts))
    typical = torch.nonzero(typical_p < 1)[:, 0]
    if len(typical):
        _update_rows_(scores, typical, lambda picked: apply_typical_p_(picked, typical_p[typical]))
    noise = gumbel_noise(
        params.seeds[rows].numpy().view(np.uint64),
        params.indices[rows].numpy(),
        params.choices[rows].numpy(),
        scores.shape[1],
    )
    return scores.add_(noise)


def _rows(tensor: Tensor, at: npt.NDArray[np.intp]) -> Tensor:
    """Return the rows with the numbers `at`; if these are all rows, return the tensor itself."""
    return tensor if len(at) == len(tensor) else tensor[torch.from_numpy(at)]


def _update_rows_(tensor: Tensor, at: Tensor, change_: Callable[[Tensor], None]) -> None:
    """Apply `change_` to rows `at` of a tensor, in place."""
    picked = _rows(tensor, at.numpy())
    change_(picked)
    if picked is not tensor:
        tensor[at] = picked


def finite_rows(logits: Tensor) -> Tensor:
    """Return a mask [R]: True for rows of `logits` [R, V] without NaN and Inf."""
    if logits.device.type == "cpu":
        return torch.from_numpy(scan_rows(logits).finite)
    return logits.sum(-1).isfinite()  # the sum of a row with NaN or Inf is not finite
