"""Log probabilities of tokens in the format of the Responses API."""

from typing import Any

from penstock.common.text.token_bytes import TokenBytes
from penstock.router.api.openai.json_fragments import dumps
from penstock.router.api.openai.response_context import (
    MIN_LOGPROB,
    Logprobs,
    alternatives,
    finite,
)


def logprobs_json(token_bytes: TokenBytes, token: int, entry: Logprobs | None) -> str:
    """Return the log probability of a token, with its most probable alternatives, as JSON."""

    def shown(token: int, value: float) -> dict[str, Any]:
        content = list(token_bytes.bytes_of(token))
        return {"token": token_bytes.text_of(token), "bytes": content, "logprob": finite(value)}

    chosen = shown(token, entry.chosen if entry else MIN_LOGPROB)
    top = [shown(other, value) for other, value in alternatives(entry)]
    return dumps({**chosen, "top_logprobs": top})
