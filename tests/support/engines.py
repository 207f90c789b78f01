"""Helpers for tests that call the engine directly."""

from penstock.common.sampling_params import SamplingParams
from penstock.workers.engine.engine import Engine
from penstock.workers.engine.results import StepResult
from penstock.workers.scheduling.sequence import Key, NewSequence


def greedy_sequence(
    key: Key, prompt: list[int], num_tokens: int, salt: bytes = b"", yield_after: int = 0
) -> NewSequence:
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens)
    return NewSequence(key, prompt, len(prompt), params, salt=salt, yield_after=yield_after)


def tokens_of(result: StepResult) -> list[tuple[Key, int]]:
    if result.output is None:
        return []
    return list(zip(result.output.keys, result.output.tokens.tolist(), strict=True))


def run_out(engine: Engine) -> dict[Key, list[int]]:
    """Run steps until no work is left; return the tokens of each sequence."""
    answers: dict[Key, list[int]] = {}
    while (result := engine.step()).output is not None:
        for key, token in tokens_of(result):
            answers.setdefault(key, []).append(token)
    return answers


def run_greedy(engine: Engine, prompt: list[int], num_tokens: int) -> list[int]:
    """Return one greedy answer; end-of-sequence tokens are ignored."""
    engine.submit(greedy_sequence("one", prompt, num_tokens))
    return run_out(engine)["one"]
