"""Log probabilities of tokens as JSON, in the form that chats and responses share."""

from typing import Any

from penstock.common.text.token_bytes import TokenBytes
from penstock.router.api.openai.json_fragments import dumps
from penstock.router.api.openai.response_context import (
    MIN_LOGPROB,
    Logprobs,
    alternatives,
    finite,
    name_of,
)


def logprobs_json(
    token_bytes: TokenBytes, token: int, entry: Logprobs | None, as_ids: bool = False
) -> str:
    """Return the log probability of a token, with its most probable alternatives, as JSON.

    With 20 alternatives, this takes about 25 µs.

    Args:
        token_bytes: the bytes of the model's tokens.
        token: the token.
        entry: the token's log probabilities, or None if they are unknown.
        as_ids: whether tokens are named by their ids instead of their texts.
    """

    def shown(token: int, value: float) -> dict[str, Any]:
        content = list(token_bytes.bytes_of(token))
        name = name_of(token_bytes, token, as_ids)
        return {"token": name, "bytes": content, "logprob": finite(value)}

    chosen = shown(token, entry.chosen if entry else MIN_LOGPROB)
    top = [shown(other, value) for other, value in alternatives(entry)]
    return dumps({**chosen, "top_logprobs": top})
