"""/tokenize and /detokenize, in vLLM's format."""

from collections.abc import Iterator
from itertools import chain
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from penstock.router.api.generation.bodies import read_request, while_connected
from penstock.router.api.generation.parsed_body import ParsedBody
from penstock.router.api.generation.sending import FragmentResponse
from penstock.router.api.openai.json_fragments import array, ids, items_of
from penstock.router.api.openai.schema import TokenizeChatRequest, TokenizeTextRequest
from penstock.router.errors import invalid
from penstock.router.frontend import Frontend
from penstock.router.requests.json_text import joined_string

NAMES_PER_FRAGMENT = 2048


class TokenApi:
    """The handlers of /tokenize and /detokenize."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend

    async def tokenize(self, request: Request) -> Response:
        """Return the token ids that a text or a chat has as the prompt of a request."""
        parsed = await read_request("tokenize", request, self._frontend)
        self._frontend.check_model(parsed.body.model)
        tokens = await while_connected(request, self._tokens(parsed, request.state.tenant))
        return FragmentResponse(self._answer(tokens, bool(parsed.body.return_token_strs)))

    async def _tokens(self, parsed: ParsedBody[Any], tenant: str) -> list[int]:
        body, prompts = parsed.body, self._frontend.prompts
        if isinstance(body, TokenizeTextRequest):
            (text,) = parsed.prompts
            assert isinstance(text, str)
            return await prompts.encode(text, tenant, body.add_special_tokens is not False)
        assert isinstance(body, TokenizeChatRequest)
        if body.add_special_tokens:
            raise invalid(
                "add_special_tokens cannot be true for messages, because the chat template writes "
                "the special tokens: leave it out",
                "add_special_tokens",
            )
        options = body.template_options(self._frontend.helpers.template_variables)
        return await prompts.encode_chat(parsed.messages, tenant, options)

    def _answer(self, tokens: list[int], with_strings: bool) -> Iterator[str]:
        max_model_len = self._frontend.model.max_model_len
        yield f'{{"count":{len(tokens)},"max_model_len":{max_model_len},"tokens":'
        yield from ids(tokens)
        yield ',"token_strs":'
        if with_strings:
            yield from array(self._names(tokens))
        else:
            yield "null"
        yield "}"

    def _names(self, tokens: list[int]) -> Iterator[str]:
        name = self._frontend.tokenizer.tokenizer.id_to_token
        for start in range(0, len(tokens), NAMES_PER_FRAGMENT):
            yield items_of([name(token) for token in tokens[start : start + NAMES_PER_FRAGMENT]])

    async def detokenize(self, request: Request) -> Response:
        """Return the text of token ids, special tokens included."""
        parsed = await read_request("detokenize", request, self._frontend)
        self._frontend.check_model(parsed.body.model)
        (tokens,) = parsed.prompts
        assert not isinstance(tokens, str)
        # The text is decoded while it is sent: it can be a hundred times as long as the body.
        token_bytes = self._frontend.tokenizer.token_bytes
        texts = token_bytes.texts(tokens, skip_special_tokens=False)
        return FragmentResponse(chain(['{"prompt":'], joined_string(texts), ["}"]))
