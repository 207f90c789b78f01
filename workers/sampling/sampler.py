"""Samples the next tokens of a whole batch in one call.

A row of logits belongs to one sequence. Three changes are applied, in this order, and only to rows
that need them: logit bias, penalties, and the masks of `token_masks`, which exclude tokens.

- Greedy rows: choose the largest logit.
- Other rows: apply temperature, top-k, top-p, min-p and typical-p, add noise, and choose the
  largest logit.
- Beams: apply the three changes to log probabilities instead of logits, as in `transformers`. The
  most likely tokens become candidates of the beam search.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.common.grammar.matcher import CompiledGrammar
from penstock.common.sampling_params import UINT64_MAX, SamplingParams
from penstock.kernels.sampling.logprobs import logprobs
from penstock.kernels.sampling.op import SamplingTensors, finite_rows, greedy, sample
from penstock.kernels.sampling.penalties import Penalties, add_logit_bias_, apply_penalties_
from penstock.kernels.sampling.token_mask import apply_host_masks_, apply_token_mask_
from penstock.kernels.triton_common.launch import runs_kernels
from penstock.workers.gpu.pinned import put
from penstock.workers.sampling.beam_search import Candidates
from penstock.workers.sampling.token_masks import History, StepMasks, TokenMasks
from penstock.workers.scheduling.forced_tokens import NO_FORCED, ForcedTokens
from penstock.workers.scheduling.sequence import BeamRows, Bools, Ints, Key

GREEDY_BELOW = 1e-5
"""Lower temperatures are treated as greedy, because logits / temperature could overflow float32."""

ROW = np.dtype(
    [
        ("temperature", np.float32),  # 0: greedy
        ("top_p", np.float32),
        ("top_k", np.int64),
        ("min_p", np.float32),
        ("typical_p", np.float32),
        ("presence", np.float32),
        ("frequency", np.float32),
        ("repetition", np.float32),
        ("seed", np.uint64),
        ("choice", np.int64),
        ("min_tokens", np.int64),
        ("logprobs", np.int64),  # number of most likely tokens to report; -1: no logprobs
        # number of most likely tokens to report for prompt tokens; -1: no logprobs
        ("prompt_logprobs", np.int64),
        ("penalized", np.bool_),
        ("biased", np.bool_),
        ("modified", np.bool_),  # True if the row is penalized or biased
        ("candidates", np.int64),  # number of candidates of a beam; 0: the row is not a beam
    ]
)


NO_BEAMS = np.empty(0, np.intp)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log probabilities of the model, before temperature, penalties and filters."""

    chosen: float  # log probability of the chosen token
    rank: int  # rank of the chosen token; 1 is the most likely token
    tokens: list[int]  # the most likely tokens, most likely first
    values: list[float]  # log probabilities of `tokens`


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log probabilities of a prompt's tokens from `position` on."""

    key: Key
    position: int
    entries: list[TokenLogprobs | None]  # one entry per token, never None


@dataclass(frozen=True, slots=True)
class Sampled:
    """Result of sampling S rows of logits, one token per row; R of the rows are beams."""

    # [S] tokens; 0 in invalid rows, and in beams until the beam search sets their tokens
    tokens: Ints
    finite: Bools  # [S] False for invalid rows: NaN, Inf, or every token excluded
    logprobs: list[TokenLogprobs | None]  # [S]; None for rows without requested logprobs
    prompts: list[PromptLogprobs] = field(default_factory=list)
    beams: npt.NDArray[np.intp] = field(default_factory=NO_BEAMS.copy)  # [R] row indices of beams
    candidates: Candidates | None = None  # candidates of the R beam rows
    beam_rows: BeamRows | None = None  # beam rows after the beam search; None: there are no beams
    finished_searches: list[Key] = field(default_factory=list)  # keys of searches that have ended
    # for some rows, tokens that must follow the sampled token
    forced: ForcedTokens = field(default_factory=dict)


class Sampler:
    """Samples tokens, and holds the sampling parameters of every row of the sequence table.

    The token sampled for a row depends only on the row's logits, parameters and previous tokens.

    Attributes:
        masks: the tokens that each row may sample.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._params = np.zeros(num_rows, ROW)
        self.masks = TokenMasks(num_rows, vocab_size)
        # Token ids and values of the logit bias of each row, on the device.
        # An entry is invalid if "biased" is False: it may belong to an earlier sequence.
        self._biases = [(torch.empty(0, dtype=torch.int64), torch.empty(0))] * num_rows
        self._vocab_size = vocab_size
        self._device = device

    def admit(
        self,
        row: int,
        params: SamplingParams,
        choice: int,
        grammar: CompiledGrammar | None = None,
    ) -> None:
        """Set the parameters of a row of the sequence table for a new sequence.

        Token ids in `params`, except stop tokens, must be within the vocabulary. `grammar` is the
        compiled form of `params.structured_outputs`.
        """
        self.masks.admit(row, params, grammar)
        penalties = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty)
        bias = params.logit_bias
        if bias:
            self._biases[row] = (
                self._put(np.array(list(bias), np.int64)),
                self._put(np.array(list(bias.values()), np.float32)),
            )
        changes = (penalties != (0, 0, 1), bool(bias))
        self._params[row] = (
            0 if params.temperature < GREEDY_BELOW else params.temperature,
            params.top_p,
            min(max(params.top_k, 0), self._vocab_size),
            params.min_p,
            params.typical_p,
            *penalties,
            (params.seed or 0) & UINT64_MAX,
            choice,
            params.min_tokens,
            -1 if params.logprobs is None else params.logprobs,
            params.prompt_logprobs or 0,
            *changes,
            any(changes),
            # Take enough candidates for every beam, even if all stop tokens are among them.
            params.num_sequences + len(params.stop_token_ids) if params.use_beam_search else 0,
        )

    @torch.inference_mode()
    def sample(self, logits: Tensor, rows: Ints, indices: Ints, history: History) -> Sampled:
        """Sample one token per row of logits.

        Args:
            logits: [S, V] float32. Rows may be modified in place, except the rows of beams. If any
                row needs log probabilities, no row is modified.
            rows: [S] sequence-table row of each row of logits.
            indices: [S] answer index, from 0, of the token to sample in each row.
            history: prompts and answers so far of all rows of the sequence table.
        """
        if not len(rows):
            return Sampled(np.empty(0, np.int32), np.empty(0, np.bool_), [])
        params = self._params[rows]
        is_beam = params["candidates"] > 0
        beams, others = np.flatnonzero(is_beam), np.flatnonzero(~is_beam)
        masks = self.masks.take(rows, indices, history)
        shaped, finite = logits, None
        is_modified = params["modified"].any()
        if masks is not None or len(beams) or is_modified:
            shaped = self._writable(logits, beams, params)
            if len(beams) or is_modified or self._device.type != "cpu":
                finite = finite_rows(logits).cpu().numpy()
            if is_modified:
                self._modify_(shaped, rows, params, history)
        if masks is not None:
            unmasked_finite = _apply_masks_(shaped, masks)
            finite = unmasked_finite if finite is None else finite
            # the masks of these rows allow only one token
            params["temperature"][masks.at[masks.is_single]] = 0.0
        tokens, finite = self._sample_rows(shaped, finite, params, indices, others)
        entries = self._logprobs(logits, np.where(is_beam, -1, params["logprobs"]), tokens)
        forced = NO_FORCED if masks is None else masks.forced
        if not len(beams):
            return Sampled(tokens, finite, entries, forced=forced)
        candidates = self._candidates(_rows(shaped, beams), params["candidates"][beams])
        return Sampled(tokens, finite, entries, beams=beams, candidates=candidates, forced=forced)

    def num_logprobs(self, rows: Ints) -> npt.NDArray[np.int64]:
        """Return [S]: for each row, the number of most likely tokens to report; -1: no logprobs."""
        return self._params["logprobs"][rows]

    def num_prompt_logprobs(self, rows: Ints) -> npt.NDArray[np.int64]:
        """Return [S]: for each row, the number of most likely tokens to report per prompt token."""
        return self._params["prompt_logprobs"][rows]

    def can_sample_on_device(self, rows: Ints) -> bool:
        """Return whether these rows can be sampled without the host: see `sample_on_device`."""
        params = self._params[rows]
        host = params["modified"] | (params["logprobs"] >= 0) | (params["candidates"] > 0)
        return not host.any()

    @torch.inference_mode()
    def sample_on_device(
        self, logits: Tensor, rows: Ints, indices: Ints, history: History
    ) -> tuple[Tensor, Tensor, ForcedTokens]:
        """Sample tokens without waiting for the device; requires `can_sample_on_device`.

        The arguments are those of `sample`. Masked rows of the logits are modified in place. If no
        mask reads the log, `history` may lack the tokens of the previous step.

        Returns:
            On the device: the tokens [S] int32, and [S] bool, True for valid rows. Also, for some
            rows, the forced tokens that must follow the row's token.
        """
        params, masks = self._params[rows], self.masks.take(rows, indices, history)
        if masks is not None:
            # the masks of these rows allow only one token
            params["temperature"][masks.at[masks.is_single]] = 0.0
        tensors = self._sampling_tensors(params, indices)
        if masks is None:
            tokens, finite = sample(logits, tensors)
            return tokens.to(torch.int32), finite, NO_FORCED
        finite = finite_rows(logits)
        _apply_masks_(logits, masks)
        tokens, left = sample(logits, tensors, bans=True)
        return tokens.to(torch.int32), finite & left, masks.forced

    @torch.inference_mode()
    def score(
        self, logits: Tensor, wanted: npt.NDArray[np.int64], tokens: Ints
    ) -> list[TokenLogprobs | None]:
        """Return the log probabilities of `tokens` [P] under `logits` [P, V].

        wanted: [P] number of most likely tokens to return as well; -1: return None for the row.
        """
        return self._logprobs(logits, wanted, tokens)

    def _writable(
        self, logits: Tensor, beams: npt.NDArray[np.intp], params: npt.NDArray[np.void]
    ) -> Tensor:
        """Return scores that may be modified: `logits`, or a copy if `logits` are still needed.

        If `beams` is not empty, the result is a copy, with log-softmax applied to the rows `beams`.
        """
        if len(beams) == len(logits):
            return logits.log_softmax(-1)
        if not len(beams):
            return logits.clone() if (params["logprobs"] >= 0).any() else logits
        scores = logits.clone()
        scores[self._put(beams)] = _rows(logits, beams).log_softmax(-1)
        return scores

    def _candidates(self, scores: Tensor, counts: npt.NDArray[np.int64]) -> Candidates:
        """Return the `counts[r]` most likely tokens of row r of scores [R, V], padded with -inf."""
        counts = counts.clip(max=self._vocab_size)
        shape = len(counts), int(counts.max())
        tokens, logprobs = np.zeros(shape, np.int32), np.full(shape, -np.inf, np.float32)
        # With ties, the choice of `topk` depends on k.
        # One call per k makes the result of a row independent of the other rows.
        for count in np.unique(counts).tolist():
            at = np.flatnonzero(counts == count)
            found = _rows(scores, at).topk(count)
            tokens[at, :count] = found.indices.cpu().numpy()
            logprobs[at, :count] = found.values.cpu().numpy()
        return Candidates(tokens, logprobs)

    def _modify_(
        self,
        logits: Tensor,
        rows: Ints,
        params: npt.NDArray[np.void],
        history: History,
    ) -> None:
        """Apply biases and penalties to the rows that have them, in place."""
        biased = np.flatnonzero(params["biased"])
        if len(biased):
            tokens, values = zip(*(self._biases[row] for row in rows[biased]), strict=True)
            owners = self._put(np.repeat(biased, [len(each) for each in tokens]))
            add_logit_bias_(logits, owners, torch.cat(tokens), torch.cat(values))
        penalized = np.flatnonzero(params["penalized"])
        if len(penalized):
            _penalize_(logits, rows[penalized], params[penalized], penalized, history)

    def _sample_rows(
        self,
        logits: Tensor,
        finite: Bools | None,
        params: npt.NDArray[np.void],
        indices: Ints,
        at: npt.NDArray[np.intp],
    ) -> tuple[Ints, Bools]:
        """Sample tokens for the rows `at`; return tokens [S] and validity [S] of all rows.

        finite: [S] validity of the logits before they were modified; None: they were not modified.
        """
        tokens, bans = np.zeros(len(logits), np.int32), finite is not None
        if finite is None:
            finite = np.ones(len(logits), np.bool_)
        if len(at):
            picked = _rows(logits, at)
            if not runs_kernels(self._device) and not params["temperature"][at].any():
                drawn, good = greedy(picked, bans)
            else:
                drawn, good = sample(picked, self._sampling_tensors(params[at], indices[at]), bans)
            finite[at] &= good.cpu().numpy()
            tokens[at] = drawn.cpu().numpy()
        tokens[~finite] = 0
        return tokens, finite

    def _sampling_tensors(self, params: npt.NDArray[np.void], indices: Ints) -> SamplingTensors:
        floats = np.stack([params[name] for name in ("temperature", "top_p", "min_p", "typical_p")])
        seeds = params["seed"].view(np.int64)
        numbers = np.stack([params["top_k"], seeds, indices.astype(np.int64), params["choice"]])
        return SamplingTensors(*self._put(floats), *self._put(numbers))

    def _logprobs(
        self, logits: Tensor, wanted: npt.NDArray[np.int64], tokens: Ints
    ) -> list[TokenLogprobs | None]:
        """Return log probabilities of `tokens` under `logits`; see `score` for the arguments."""
        found: list[TokenLogprobs | None] = [None] * len(tokens)
        requested = np.flatnonzero(wanted >= 0)
        if not len(requested):
            return found
        # With ties, the choice of `topk` depends on k. One call per k makes rows independent.
        for count in np.unique(wanted[requested]).tolist():
            at = np.flatnonzero(wanted == count)
            drawn = self._put(tokens[at].astype(np.int64))
            best = logprobs(_rows(logits, at), drawn, count)
            lists = (best.chosen, best.ranks, best.tokens, best.values)
            columns = zip(at, *(column.tolist() for column in lists), strict=True)
            for index, value, rank, names, values in columns:
                found[index] = TokenLogprobs(value, rank, names, values)
        return found

    def _put(self, array: npt.NDArray[np.generic]) -> Tensor:
        return put(array.copy(), self._device)


def _apply_masks_(logits: Tensor, masks: StepMasks) -> Bools | None:
    """Exclude tokens from the masked rows of logits [S, V], in place.

    On a CPU, return [S]: True for rows that had no NaN or Inf before the change. On other devices,
    return None.
    """
    if logits.device.type == "cpu":
        return apply_host_masks_(logits, masks.at, masks.words)
    at, words = put(masks.at, logits.device), put(masks.words, logits.device)
    apply_token_mask_(logits, at, words)
    return None


def _penalize_(
    shaped: Tensor,
    rows: Ints,
    params: npt.NDArray[np.void],
    at: npt.NDArray[np.intp],
    history: History,
) -> None:
    """Apply the penalties of P sequences to the rows `at` of the logits, in place."""

    def on_device(array: npt.NDArray[np.generic]) -> Tensor:
        return put(array.copy(), shaped.device)

    num_tokens = history.num_tokens[rows]
    tokens = on_device(history.tokens[rows, : num_tokens.max()].astype(np.int64))
    starts = on_device(history.num_prompt[rows].astype(np.int64))
    ends = on_device(num_tokens.astype(np.int64))
    names = ("repetition", "presence", "frequency")
    penalties = Penalties(*(on_device(params[name]) for name in names))
    picked = _rows(shaped, at)
    apply_penalties_(picked, tokens, starts, ends, penalties)
    if picked is not shaped:
        shaped[on_device(at)] = picked


def _rows(tensor: Tensor, at: npt.NDArray[np.intp]) -> Tensor:
    """Return the rows `at` of a tensor; if these are all rows, return the tensor itself."""
    if len(at) == len(tensor):
        return tensor
    return tensor[put(at, tensor.device)]
