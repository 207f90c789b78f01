"""Limits on the work and the memory of one call, which are checked before the work is done.

The cost of a call is the number of entries in its answer:

    prompts x n x (max_tokens + echoed prompt tokens) x (1 + logprobs)

`best_of` and the number of beams count as `n`. Prompt tokens that are returned with
`prompt_logprobs` count as echoed, with `prompt_logprobs` as their number of logprobs.

Each prompt is sent to a worker with the lists of its sampling parameters. A second bound therefore
limits the number of prompts x the number of entries in `TOKEN_LISTS`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.common.number_text import number_text
from penstock.common.sampling_params import SamplingParams
from penstock.router.config import RequestBounds
from penstock.router.errors import CONTEXT_LENGTH_EXCEEDED, invalid
from penstock.router.requests.request import GenerationRequest, ModelLimits, check_sampling

MAX_LIST_ENTRIES = 1 << 20
"""Maximum number of list entries that one call may send to workers.

Checking, sending and reading as many allowed tokens takes about 0.1 s of CPU time in all.
"""

TOKEN_LISTS = ("allowed_token_ids", "logit_bias", "stop_token_ids", "bad_words")
"""Request fields with lists that are sent with each prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSizes:
    """Numbers of entries in the lists of a parsed call."""

    prompts: int = 1
    messages: int = 0
    content_pieces: int = 0  # total content parts of all messages
    tool_calls: int = 0  # total tool calls of all messages
    tools: int = 0
    documents: int = 0
    logit_bias: int = 0
    stop: int = 0
    stop_token_ids: int = 0
    bad_words: int = 0
    resumed_choices: int = 0


def check_sizes(sizes: CallSizes, bounds: RequestBounds) -> None:
    """Refuse lists that are too long, before their entries are processed."""
    limits: Mapping[str, tuple[int, int, str]] = {
        "messages": (sizes.messages, bounds.max_messages, "messages"),
        "messages.content": (sizes.content_pieces, bounds.max_content_pieces, "content parts"),
        "messages.tool_calls": (sizes.tool_calls, bounds.max_tool_calls, "tool calls"),
        "tools": (sizes.tools, bounds.max_tools, "tools"),
        "documents": (sizes.documents, bounds.max_documents, "documents"),
        "logit_bias": (sizes.logit_bias, bounds.max_logit_bias, "entries"),
        "stop": (sizes.stop, bounds.max_stop_strings, "strings"),
        "stop_token_ids": (sizes.stop_token_ids, bounds.max_stop_tokens, "entries"),
        "bad_words": (sizes.bad_words, bounds.max_bad_words, "words"),
        "resume_from": (sizes.resumed_choices, bounds.max_choices, "choices"),
    }
    if not 0 < sizes.prompts <= bounds.max_prompts:
        raise invalid(f"send 1 to {bounds.max_prompts} prompts, not {sizes.prompts}", "prompt")
    for name, (count, most, unit) in limits.items():
        if count > most:
            field = name.partition(".")[0]
            raise invalid(f"{field} has {count} {unit}; at most {most} are allowed", field)


def check_num_tokens(name: str, count: int, most: int) -> None:
    """Refuse a list of more than `most` tokens before the list is read.

    `name` is the request field with the list.
    """
    if count > most:
        raise invalid(f"{name} has {count} tokens; at most {most} are allowed", name)


def check_num_detokenized(count: int, model: ModelLimits, bounds: RequestBounds) -> None:
    """Refuse a Detokenize call with too many tokens; the tokens of one context are allowed."""
    context = model.max_model_len
    most = min(bounds.max_detokenize_contexts * context, bounds.max_detokenize_tokens)
    check_num_tokens("tokens", count, max(most, context))


def check_text(num_chars: int, model: ModelLimits, longest_token: int, name: str) -> None:
    """Refuse a text that is certain to exceed the model's context, before it is encoded.

    Args:
        num_chars: characters of the text.
        model: limits of the model.
        longest_token: characters of the vocabulary's longest token.
        name: request field of the text.
    """
    most = model.max_model_len * longest_token
    if num_chars > most:
        raise invalid(
            f"this model's maximum context length is {model.max_model_len} tokens, and {name} has "
            f"{num_chars} characters; at most {most} can fit, because the longest token has "
            f"{longest_token} characters: shorten the text",
            name,
            CONTEXT_LENGTH_EXCEEDED,
        )


# ------------------------------------------------------------ the price of a call


def request_cost(request: GenerationRequest, max_tokens: int) -> int:
    """Return the cost of one request whose answers have up to `max_tokens` tokens each."""
    sampling = request.sampling
    answer = max(sampling.num_sequences, 1) * max_tokens * (1 + max(sampling.logprobs or 0, 0))
    echoed = request.prompt_copies * len(request.prompt)
    return answer + echoed * (1 + max(sampling.prompt_logprobs or 0, 0))


def default_max_tokens(
    request: GenerationRequest, num_requests: int, bounds: RequestBounds
) -> int | None:
    """Return the request's default of `max_tokens`, reduced if the call would cost too much."""
    left = bounds.max_request_cost // num_requests - request_cost(request, 0)
    affordable = max(left // request_cost(_without_prompt(request.sampling), 1), 1)
    given = request.default_max_tokens
    return affordable if given is None else min(given, affordable)


def check_least_cost(
    sampling: SamplingParams, num_prompts: int, model: ModelLimits, bounds: RequestBounds
) -> None:
    """Refuse a call that is invalid, or too expensive even without its prompts.

    The check is made before the prompts and the bad words are encoded. `sampling` may therefore
    lack the bad words.
    """
    check_sampling(sampling, model, bounds)
    _check_list_entries(sampling, num_prompts)
    least = request_cost(_without_prompt(sampling), max(sampling.max_tokens or 1, 1))
    _check(num_prompts * least, sampling, num_prompts, bounds)


def check_cost(
    requests: Sequence[GenerationRequest], params: Sequence[SamplingParams], bounds: RequestBounds
) -> None:
    """Refuse a call that is too expensive. `params` are the resolved parameters of each request.

    The sampling parameters of all requests of a call have the same lists.
    """
    _check_list_entries(requests[0].sampling, len(requests))
    pairs = zip(requests, params, strict=True)
    total = sum(request_cost(request, one.max_tokens or 0) for request, one in pairs)
    _check(total, requests[0].sampling, len(requests), bounds)


def _without_prompt(sampling: SamplingParams) -> GenerationRequest:
    return GenerationRequest((), sampling)


def _check(cost: int, sampling: SamplingParams, num_prompts: int, bounds: RequestBounds) -> None:
    if cost <= bounds.max_request_cost:
        return
    name = _costly_field(sampling, num_prompts)
    action = "send fewer prompts" if name == "prompt" else f"reduce {name}"
    raise invalid(
        f"the call costs {number_text(cost)}; at most {bounds.max_request_cost} is allowed (the "
        "cost counts the tokens of all answers, echoed prompt tokens and log probabilities): "
        f"{action}",
        name,
    )


def _check_list_entries(sampling: SamplingParams, num_prompts: int) -> None:
    """Refuse several prompts with lists that have too many entries in all."""
    sizes = (
        len(sampling.allowed_token_ids or ()),
        len(sampling.logit_bias),
        len(sampling.stop_token_ids),
        sum(map(len, sampling.bad_words_token_ids)),
    )
    total = num_prompts * sum(sizes)
    if num_prompts == 1 or total <= MAX_LIST_ENTRIES:
        return
    name = TOKEN_LISTS[sizes.index(max(sizes))]
    raise invalid(
        f"the lists of the call have {total} entries; at most {MAX_LIST_ENTRIES} are allowed (the "
        f"entries of {', '.join(TOKEN_LISTS[:-1])} and {TOKEN_LISTS[-1]} count once for each of "
        f"the {num_prompts} prompts): send fewer prompts or shorten {name}",
        name,
    )


def _costly_field(sampling: SamplingParams, num_prompts: int) -> str:
    """Return the first request field that multiplies the cost; a refusal names this field."""
    if sampling.num_sequences > 1:
        return "n" if sampling.best_of is None else "best_of"
    if sampling.logprobs:
        return "logprobs"
    if sampling.prompt_logprobs:
        return "prompt_logprobs"
    return "prompt" if num_prompts > 1 else "max_tokens"
