"""Between the messages of protos/worker.proto and the engine's records: checked once, here."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple, cast

from penstock.protos import worker_pb2 as wire
from penstock.workers.engine import EngineLoad, Found, StepResult
from penstock.workers.sampler import TokenLogprobs
from penstock.workers.scheduling.sequence import (
    BeamParams,
    Finish,
    Key,
    NewSequence,
    SamplingParams,
    Sibling,
    StepOutput,
    usable_source,
)

PROTOCOL = 1  # of protos/worker.proto
MAX_MESSAGE_BYTES = 16 << 20
MAX_CHOICES = 256
MAX_LOGPROBS = 64
MAX_STOP_TOKENS = 1024
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_TOKENS = 128
MAX_SALT_BYTES = 256
MAX_COUNT = 1 << 30
MAX_FOUND_TOKENS = 1 << 14  # of a search: its answers are one message, with their logprobs
MAX_LENGTH_PENALTY = 10.0

EARLY_STOPPING = {
    wire.EARLY_STOPPING_FALSE: False,
    wire.EARLY_STOPPING_TRUE: True,
    wire.EARLY_STOPPING_NEVER: None,
}


class SequenceKey(NamedTuple):
    """A sequence's name in a worker: `session` numbers the router's streams."""

    session: int
    request: int
    attempt: int


def named(key: Key) -> SequenceKey:
    """A key of the scheduler, as what it is here."""
    return cast(SequenceKey, key)


class BadSubmit(ValueError):
    """A submission that no worker of this model could run: the text says why."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a submission's tokens are held against."""

    size: int
    eos_tokens: tuple[int, ...]

    def check(self, name: str, tokens: Iterable[int]) -> None:
        worst = max(tokens, default=0)
        if worst >= self.size:
            raise BadSubmit(f"{name} has token {worst}, but the vocabulary ends at {self.size - 1}")


def new_sequence(
    submit: wire.Submit, key: SequenceKey, vocabulary: Vocabulary, source_len: int
) -> NewSequence:
    """The sequence that a Submit asks for; BadSubmit."""
    prompt, answers = list(submit.prompt), _answers(submit)
    if not prompt:
        raise BadSubmit("the prompt is empty")
    vocabulary.check("the prompt", prompt)
    for answer in answers.values():
        vocabulary.check("the answer so far", answer)
    if len(submit.salt) > MAX_SALT_BYTES:
        raise BadSubmit(f"the salt is longer than {MAX_SALT_BYTES} bytes")
    params = _params(submit.params, vocabulary)
    longest = max(map(len, answers.values()))
    if longest >= params.max_tokens:
        raise BadSubmit(
            f"max_tokens is {params.max_tokens}, and the answer has {longest} tokens already"
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
        priority=submit.priority,
        salt=submit.salt,
        source_len=0 if scored else usable_source(source_len, len(prompt), lengths),
        prompt_known=known,
        choice=first.choice,
        siblings=tuple(others),
    )


def _answers(submit: wire.Submit) -> dict[int, list[int]]:
    """The answer so far of every choice that has not finished, or of every beam."""
    if submit.params.HasField("beams"):
        if submit.log:
            raise BadSubmit("there is a log, but a beam search begins at its prompt")
        return {beam: [] for beam in range(_width(submit.params))}
    num_choices = max(submit.params.n, 1)
    if num_choices > MAX_CHOICES:
        raise BadSubmit(f"n is {num_choices}, more than {MAX_CHOICES}")
    answers: dict[int, list[int]] = {choice: [] for choice in range(num_choices)}
    if len({entry.choice for entry in submit.log}) < len(submit.log):
        raise BadSubmit("the log has a choice twice")
    if any(entry.choice not in answers for entry in submit.log):
        raise BadSubmit("the log has choices that the request does not")
    for entry in submit.log:
        answers[entry.choice] = list(entry.tokens)
        if entry.finished:
            del answers[entry.choice]
    if not answers:
        raise BadSubmit("every choice has finished already")
    return answers


def _width(given: wire.SamplingParams) -> int:
    width, wanted = given.beams.width, max(given.n, 1)
    if not 2 <= width <= MAX_CHOICES:
        raise BadSubmit(f"a beam search of width {width}: from 2 to {MAX_CHOICES} can be")
    if wanted > width:
        raise BadSubmit(f"n is {wanted}, and {width} beams give no more than {width} answers")
    if wanted * given.max_tokens > MAX_FOUND_TOKENS:
        raise BadSubmit(
            f"n is {wanted} and max_tokens {given.max_tokens}, but the answers of a beam search "
            f"have at most {MAX_FOUND_TOKENS} tokens together"
        )
    return width


def _beams(given: wire.SamplingParams) -> BeamParams | None:
    if not given.HasField("beams"):
        return None
    search = given.beams
    if search.early_stopping not in EARLY_STOPPING:
        raise BadSubmit(f"early_stopping is {search.early_stopping}, which means nothing here")
    stopping = EARLY_STOPPING[search.early_stopping]
    return BeamParams(search.width, max(given.n, 1), search.length_penalty, stopping)


def _params(given: wire.SamplingParams, vocabulary: Vocabulary) -> SamplingParams:
    _check_ranges(given)
    _check_counts(given)
    vocabulary.check("stop_tokens", given.stop_tokens)
    vocabulary.check("logit_bias", given.logit_bias)
    vocabulary.check("allowed_tokens", given.allowed_tokens)
    for word in given.bad_words:
        vocabulary.check("bad_words", word.tokens)
    ends = () if given.ignore_eos else vocabulary.eos_tokens
    return SamplingParams(
        temperature=given.temperature,
        top_p=given.top_p,
        top_k=min(given.top_k, vocabulary.size),
        min_p=given.min_p,
        presence_penalty=given.presence_penalty,
        frequency_penalty=given.frequency_penalty,
        repetition_penalty=given.repetition_penalty,
        seed=given.seed,
        max_tokens=min(given.max_tokens, MAX_COUNT),
        min_tokens=min(given.min_tokens, MAX_COUNT),
        stop_tokens=tuple(dict.fromkeys((*given.stop_tokens, *ends))),
        logprobs=given.logprobs if given.HasField("logprobs") else None,
        logit_bias=dict(given.logit_bias),
        typical_p=given.typical_p or 1.0,
        bad_words=tuple(tuple(word.tokens) for word in given.bad_words),
        allowed_tokens=tuple(given.allowed_tokens),
        prompt_logprobs=given.prompt_logprobs if given.HasField("prompt_logprobs") else None,
        beams=_beams(given),
    )


def _check_ranges(given: wire.SamplingParams) -> None:
    largest = math.nextafter(math.inf, 0)
    ranges = {
        "temperature": (given.temperature, 0.0, largest),
        "top_p": (given.top_p, math.ulp(0.0), 1.0),
        "min_p": (given.min_p, 0.0, 1.0),
        "typical_p": (given.typical_p, 0.0, 1.0),
        "presence_penalty": (given.presence_penalty, -largest, largest),
        "frequency_penalty": (given.frequency_penalty, -largest, largest),
        "repetition_penalty": (given.repetition_penalty, math.ulp(0.0), largest),
        "length_penalty": (given.beams.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY),
    }
    for name, (value, least, most) in ranges.items():
        if not least <= value <= most:  # so that NaN is refused too
            raise BadSubmit(f"{name} is {value:g}, which is out of its range")
    for token, bias in given.logit_bias.items():
        if not math.isfinite(bias):
            raise BadSubmit(f"logit_bias of token {token} is {bias:g}")


def _check_counts(given: wire.SamplingParams) -> None:
    if given.max_tokens < 1:
        raise BadSubmit("max_tokens is 0")
    for name, count in (("logprobs", given.logprobs), ("prompt_logprobs", given.prompt_logprobs)):
        if count > MAX_LOGPROBS:
            raise BadSubmit(f"{name} is {count}, more than {MAX_LOGPROBS}")
    if len(given.stop_tokens) > MAX_STOP_TOKENS:
        raise BadSubmit(f"there are more than {MAX_STOP_TOKENS} stop_tokens")
    if len(given.bad_words) > MAX_BAD_WORDS:
        raise BadSubmit(f"there are more than {MAX_BAD_WORDS} bad_words")
    if any(not 0 < len(word.tokens) <= MAX_BAD_WORD_TOKENS for word in given.bad_words):
        raise BadSubmit(f"a word of bad_words must have 1 to {MAX_BAD_WORD_TOKENS} tokens")


# ------------------------------------------------------------------ to the router


def load_message(load: EngineLoad, bytes_received: int, bytes_sent: int) -> wire.Load:
    pool = load.pool
    return wire.Load(
        queued=pool.queued,
        queued_tokens=pool.queued_tokens,
        running=pool.running,
        free_blocks=pool.free_blocks,
        cached_blocks=pool.cached_blocks,
        leased_blocks=pool.leased_blocks,
        step_micros=min(int(load.step_seconds * 1e6), (1 << 32) - 1),
        steps=load.num_steps,
        prompt_tokens_computed=pool.prompt_tokens_computed,
        prompt_tokens_cached=pool.prompt_tokens_cached,
        bytes_received=bytes_received,
        bytes_sent=bytes_sent,
        preemptions=pool.preemptions,
        reserved_blocks=pool.reserved_blocks,
        used_blocks=pool.used_blocks,
        unwritten_slots=pool.unwritten_slots,
        step_counts=load.step_counts,
        step_seconds=load.all_steps_seconds,
        prompt_seconds=load.prompt_seconds,
        expert_imbalance=load.expert_imbalance,
    )


def step_messages(
    result: StepResult, wanted: Callable[[SequenceKey], bool]
) -> dict[int, wire.Step]:
    """A Step for each session that has something in it; loads are for the caller to set."""
    steps: dict[int, wire.Step] = defaultdict(wire.Step)
    output = result.output
    if output is not None:
        rows: dict[int, list[int]] = defaultdict(list)
        for row, key in enumerate(map(named, output.keys)):
            if wanted(key):
                rows[key.session].append(row)
        for session, taken in rows.items():
            _add_tokens(steps[session], taken, output, result.logprobs)
    for prompt in result.prompts:
        key = named(prompt.key)
        if wanted(key):
            added = steps[key.session].prompts.add(
                request=key.request, attempt=key.attempt, position=prompt.position
            )
            for entry in filter(None, prompt.entries):
                added.entries.add(**asdict(entry))
    for key in filter(wanted, map(named, result.failed)):
        reason = (
            "no next token: the model's output was not finite for this request, or its bad words "
            "and allowed tokens left nothing to draw"
        )
        steps[key.session].ended.add(request=key.request, attempt=key.attempt, reason=reason)
    return steps


def found_message(found: Found) -> wire.Step:
    """The answers of a search, as so many choices."""
    key, step = named(found.key), wire.Step()
    for choice, answer in enumerate(found.answers):
        nodes = answer.last.path()
        first = len(step.token)
        step.token.extend([node.token for node in nodes])
        step.position.extend(range(len(nodes)))
        step.choice.extend([choice] * len(nodes))
        by_stop = answer.finish is Finish.STOP
        step.finish.extend([wire.FINISH_NONE] * (len(nodes) - 1))
        step.finish.append(wire.FINISH_STOP if by_stop else wire.FINISH_LENGTH)
        for row, node in enumerate(nodes, start=first):
            if isinstance(node.logprobs, TokenLogprobs):
                step.logprobs.add(row=row, **asdict(node.logprobs))
    step.request.extend([key.request] * len(step.token))
    step.attempt.extend([key.attempt] * len(step.token))
    return step


def _add_tokens(
    step: wire.Step,
    rows: list[int],
    output: StepOutput,
    logprobs: Sequence[TokenLogprobs | None],
) -> None:
    """Those rows of the output, a column at a time: this runs while the engine waits for Python."""
    keys = [named(output.keys[row]) for row in rows]
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


def merge_steps(earlier: wire.Step, later: wire.Step) -> None:
    """Append `later` to `earlier`; the load is the later one."""
    first = len(earlier.token)
    for logprobs in later.logprobs:
        logprobs.row += first
    earlier.MergeFrom(later)
    earlier.load.CopyFrom(later.load)  # a merge would keep what has become 0
