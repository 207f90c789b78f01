"""What an engine computes before it serves, so that no request pays for what is made once."""

from collections.abc import Iterator

from penstock.workers.scheduling.limits import Limits
from penstock.workers.scheduling.sequence import NewSequence, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=2)

EVERY_WISH = SamplingParams(
    temperature=1.0,
    top_k=2,
    top_p=0.9,
    min_p=0.1,
    typical_p=0.9,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    repetition_penalty=1.1,
    logit_bias={0: 0.0},
    logprobs=1,
    max_tokens=2,
)

LEAST_PROMPT = 64  # tokens


def warm_up_sequences(limits: Limits, compiles: bool) -> Iterator[NewSequence]:
    """To be computed one after another: the largest prompt of one step, and a decode.

    compiles: kernels are compiled when they are first launched, and which ones a mixture of experts
    launches follows the number of tokens: so prompts of half as many tokens and so on, and one that
    is drawn with every wish, come too.
    """
    most = max(1, min(limits.max_batched_tokens, limits.max_model_len - 2))
    yield _prompt(most, GREEDY)
    if not compiles:
        return
    length = most // 2
    while length >= LEAST_PROMPT:
        yield _prompt(length, GREEDY)
        length //= 2
    yield _prompt(1, EVERY_WISH)


def _prompt(length: int, params: SamplingParams) -> NewSequence:
    """That finds none of its blocks cached."""
    key = f"warm-up of {length}"
    return NewSequence(key, [0] * length, length, params, salt=key.encode())
