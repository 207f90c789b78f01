"""Converts messages of protos/worker.proto to engine records and back; validates all input."""

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple, cast

from penstock.common.block_hash import MAX_SALT_BYTES
from penstock.common.sampling_params import (
    InvalidParameterError,
    SamplingLimits,
    SamplingParams,
)
from penstock.common.token_ids import check_token_ids
from penstock.protos import worker_pb2 as wire
from penstock.protos.worker_codec import TOKEN_BYTES, decode_sampling_params, unpack_tokens
from penstock.workers.engine.results import BeamResult, StepResult
from penstock.workers.engine.step_times import StepRecord
from penstock.workers.sampling.sampler import TokenLogprobs
from penstock.workers.scheduling.sequence import (
    FinishReason,
    Key,
    NewSequence,
    Sibling,
    StepOutput,
    usable_source,
)

MAX_MESSAGE_BYTES = 16 << 20
MAX_COUNT = 1 << 30

LIMITS = SamplingLimits(
    max_choices=256,
    max_beam_tokens=1 << 14,  # all answers of a beam search are sent in one message
    max_stop_tokens=1024,
    max_logit_bias=1 << 14,
    max_bad_words=512,
    max_bad_word_tokens=128,
    max_logprobs=64,
)
"""Limits of a submission to a worker; the limits of the router are lower."""


class SequenceKey(NamedTuple):
    """Key of a sequence within a worker; `session` is the number of the router's stream."""

    session: int
    request: int
    attempt: int


def sequence_key(key: Key) -> SequenceKey:
    """Cast a scheduler key to `SequenceKey`, the type of all keys in a worker."""
    return cast(SequenceKey, key)


class BadSubmit(ValueError):
    """A submission that no worker with this model could run; the message gives the reason."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The model's token ids, used to validate submissions."""

    size: int
    eos_tokens: tuple[int, ...]

    def check(self, name: str, tokens: Collection[int]) -> None:
        """Raise BadSubmit if a token is not in the vocabulary."""
        try:
            check_token_ids(name, tokens, self.size)
        except InvalidParameterError as error:
            raise BadSubmit(str(error)) from error


def new_sequence(
    submit: wire.Submit, key: SequenceKey, vocabulary: Vocabulary, source_len: int
) -> NewSequence:
    """Convert a Submit message whose source offers `source_len` KV positions. Raises BadSubmit."""
    prompt = _unpack("the prompt", submit.prompt)
    if not prompt:
        raise BadSubmit("the prompt is empty: expected at least one token")
    vocabulary.check("the prompt", prompt)
    params = _params(submit.params, vocabulary)
    answers = _answers(submit, params)
    for answer in answers.values():
        vocabulary.check("the answer so far", answer)
    if len(submit.salt) > MAX_SALT_BYTES:
        raise BadSubmit(
            f"the cache salt has {len(submit.salt)} bytes; at most {MAX_SALT_BYTES} are allowed"
        )
    longest = max(map(len, answers.values()))
    if params.max_tokens is not None and longest >= params.max_tokens:
        raise BadSubmit(
            f"the answer so far has {longest} tokens: expected fewer than max_tokens "
            f"({params.max_tokens})"
        )
    first, *others = [Sibling(choice, prompt + answer) for choice, answer in answers.items()]
    known = max(submit.prompt_known, 1)
    scored = params.prompt_logprobs is not None and known < len(prompt)
    lengths = [len(prompt) + len(answer) for answer in answers.values()]
    return NewSequence(
        key=key,
        tokens=first.tokens,
        num_prompt=len(prompt),
        params=params,
        yield_after=min(submit.yield_after, MAX_COUNT),
        salt=submit.salt,
        source_len=0 if scored else usable_source(source_len, len(prompt), lengths),
        prompt_known=known,
        choice=first.choice,
        siblings=tuple(others),
    )


def _unpack(name: str, packed: bytes) -> list[int]:
    try:
        return unpack_tokens(packed)
    except ValueError:
        raise BadSubmit(
            f"{name} has {len(packed)} bytes: expected a multiple of {TOKEN_BYTES}"
        ) from None


def _answers(submit: wire.Submit, params: SamplingParams) -> dict[int, list[int]]:
    """Return the answer so far of each unfinished choice; for a beam search, one [] per beam."""
    if params.use_beam_search:
        if submit.log:
            raise BadSubmit(
                f"a beam search cannot continue an answer, but the token log of the request has "
                f"{len(submit.log)} entries: expected none"
            )
        return {beam: [] for beam in range(params.num_sequences)}
    answers: dict[int, list[int]] = {choice: [] for choice in range(params.n)}
    if len({entry.choice for entry in submit.log}) < len(submit.log):
        raise BadSubmit("the token log has several entries for one choice: expected one")
    unknown = [entry.choice for entry in submit.log if entry.choice not in answers]
    if unknown:
        raise BadSubmit(
            f"the token log of the request has choice {unknown[0]}: expected 0 to {params.n - 1}"
        )
    for entry in submit.log:
        answers[entry.choice] = _unpack(f"the token log of choice {entry.choice}", entry.tokens)
        if entry.finished:
            del answers[entry.choice]
    if not answers:
        raise BadSubmit(
            f"every choice of the request ({params.n}) has finished: expected an unfinished one"
        )
    return answers


def _params(message: wire.SamplingParams, vocabulary: Vocabulary) -> SamplingParams:
    """Decode and validate sampling parameters. Raises BadSubmit if they are invalid."""
    params = decode_sampling_params(message)
    try:
        params.validate(LIMITS, vocabulary.size)
    except InvalidParameterError as error:
        raise BadSubmit(str(error)) from error
    return params.with_end_tokens(vocabulary.eos_tokens)


# ------------------------------------------------------------------ to the router


def step_messages(
    result: StepResult, is_held: Callable[[SequenceKey], bool]
) -> dict[int, wire.Step]:
    """Build one Step per session, without load; skip sequences for which `is_held` is False."""
    steps: dict[int, wire.Step] = defaultdict(wire.Step)
    output = result.output
    if output is not None:
        rows: dict[int, list[int]] = defaultdict(list)
        for row, key in enumerate(map(sequence_key, output.keys)):
            if is_held(key):
                rows[key.session].append(row)
        for session, taken in rows.items():
            _add_tokens(steps[session], taken, output, result.logprobs)
    _add_prompts(steps, result, is_held)
    for key in filter(is_held, map(sequence_key, result.preempted)):
        steps[key.session].preempted.append(key.request)
    for key in filter(is_held, map(sequence_key, result.failed)):
        reason = (
            "no next token: the model's output was not finite for this request, or its bad words, "
            "allowed tokens and structured_outputs left nothing to draw"
        )
        steps[key.session].ended.add(request=key.request, attempt=key.attempt, reason=reason)
    return steps


def beam_result_message(result: BeamResult) -> wire.Step:
    """Build the Step with all answers of a beam search, each as one choice."""
    key, step = sequence_key(result.key), wire.Step()
    for choice, answer in enumerate(result.answers):
        nodes = answer.last.path()
        first = len(step.token)
        step.token.extend([node.token for node in nodes])
        step.position.extend(range(len(nodes)))
        step.choice.extend([choice] * len(nodes))
        by_stop = answer.finish is FinishReason.STOP
        step.finish.extend([wire.FINISH_NONE] * (len(nodes) - 1))
        step.finish.append(wire.FINISH_STOP if by_stop else wire.FINISH_LENGTH)
        for row, node in enumerate(nodes, start=first):
            if isinstance(node.logprobs, TokenLogprobs):
                step.logprobs.add(row=row, **asdict(node.logprobs))
    step.request.extend([key.request] * len(step.token))
    step.attempt.extend([key.attempt] * len(step.token))
    return step


def _add_prompts(
    steps: dict[int, wire.Step], result: StepResult, is_held: Callable[[SequenceKey], bool]
) -> None:
    """Add prompt logprobs and the numbers of cached prompt tokens to `steps` (by session)."""
    for prompt in result.prompts:
        key = sequence_key(prompt.key)
        if is_held(key):
            added = steps[key.session].prompts.add(
                request=key.request, attempt=key.attempt, position=prompt.position
            )
            for entry in filter(None, prompt.entries):
                added.entries.add(**asdict(entry))
    for name, num_cached in result.num_cached.items():
        key = sequence_key(name)
        if is_held(key):
            steps[key.session].cached.add(
                request=key.request, attempt=key.attempt, tokens=num_cached
            )


def _add_tokens(
    step: wire.Step,
    rows: list[int],
    output: StepOutput,
    logprobs: Sequence[TokenLogprobs | None],
) -> None:
    """Add `rows` of the output to `step`, one column at a time.

    Whole columns are fast to add, so the event loop does not hold the GIL for long.
    """
    keys = [sequence_key(output.keys[row]) for row in rows]
    step.request.extend([key.request for key in keys])
    step.attempt.extend([key.attempt for key in keys])
    step.choice.extend(output.choices[rows].tolist())
    step.position.extend(output.indices[rows].tolist())
    step.token.extend(output.tokens[rows].tolist())
    step.finish.extend(output.finishes[rows].tolist())
    for column, row in enumerate(rows):
        entry = logprobs[row]
        if entry is not None:
            step.logprobs.add(row=column, **asdict(entry))


def step_records_message(records: Sequence[StepRecord]) -> wire.StepRecords:
    """Encode step records as a message."""
    return wire.StepRecords(
        number=[record.number for record in records],
        ended=[record.ended for record in records],
        seconds=[record.seconds for record in records],
        tokens=[record.work.tokens for record in records],
        sequences=[record.work.sequences for record in records],
        positions=[record.work.positions for record in records],
        pairs=[record.work.pairs for record in records],
    )


def merge_steps(earlier: wire.Step, later: wire.Step) -> None:
    """Append `later` to `earlier`; the merged Step has the newest load."""
    first = len(earlier.token)
    for logprobs in later.logprobs:
        logprobs.row += first
    first_change = earlier.cache.first if earlier.HasField("cache") else later.cache.first
    earlier.MergeFrom(later)
    if later.HasField("load"):
        earlier.load.CopyFrom(later.load)  # `MergeFrom` would skip fields that became 0
    if earlier.HasField("cache"):
        earlier.cache.first = first_change
