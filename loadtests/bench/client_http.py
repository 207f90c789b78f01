"""Load-test client for the OpenAI HTTP API of any server."""

import json
import os
from collections.abc import AsyncGenerator
from typing import Any

import aiohttp

from penstock.loadtests.bench.clients import (
    Chunk,
    Prompt,
    RequestFailed,
    Served,
    ServerUnusable,
    Target,
)

_TIMEOUT_SECONDS = 10.0

# The chat API accepts only text. Each of these short words is at most a few tokens long.
_TEXT = (
    "the of and to in is you that it he was for on are as with his they at be"
    " this have from or one had by word but not what all were we when your can said there use"
    " an each which she do how their if will up other about out many then them these so"
)
WORDS = tuple(_TEXT.split())

# Fields with text in the events of a chat. The field of the reasoning depends on the server.
_TEXT_FIELDS = ("content", "reasoning_content", "reasoning")


class HttpClient:
    """Implementation of `Client` over HTTP: completions or chat completions."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._base = target.address.rstrip("/").removesuffix("/v1")
        self._path = "/v1/chat/completions" if target.api == "chat" else "/v1/completions"
        self._model = target.model
        self._session: aiohttp.ClientSession | None = None

    async def describe(self) -> Served:
        limit = aiohttp.ClientTimeout(total=_TIMEOUT_SECONDS)
        try:
            async with self._open().get(f"{self._base}/v1/models", timeout=limit) as response:
                if response.status != 200:
                    raise ServerUnusable(f"{self._base}: {await _refusal(response)}")
                models = (await response.json())["data"]
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ServerUnusable(f"{self._base}: {_error_text(error)}") from None
        except (KeyError, TypeError, json.JSONDecodeError):
            raise ServerUnusable(
                f"{self._base}/v1/models: expected a list of models in OpenAI's form"
            ) from None
        return self._choose(models)

    def _choose(self, models: list[dict[str, Any]]) -> Served:
        """Return the requested model, or the server's first model if none was requested."""
        names = [str(model.get("id")) for model in models]
        if not names or (self._target.model and self._target.model not in names):
            wanted = f"no model {self._target.model!r}" if self._target.model else "no model"
            raise ServerUnusable(
                f"{self._base} serves {wanted}; its models are: {', '.join(names) or 'none'}"
            )
        model = models[names.index(self._target.model) if self._target.model else 0]
        self._model = str(model["id"])
        return Served(self._model, model.get("vocab_size"), model.get("max_model_len"))

    async def stream(self, prompt: Prompt, output_len: int) -> AsyncGenerator[Chunk]:
        body = self._body(prompt, output_len)
        try:
            async with self._open().post(self._base + self._path, json=body) as response:
                if response.status != 200:
                    raise RequestFailed(await _refusal(response))
                done = has_tokens = False
                async for line in response.content:
                    data = line[5:].strip() if line.startswith(b"data:") else b""
                    done = done or data == b"[DONE]"
                    if data and not done:
                        chunk = self._chunk(data, has_tokens)
                        has_tokens = has_tokens or chunk.num_tokens != 0
                        yield chunk
        except aiohttp.ConnectionTimeoutError:
            raise RequestFailed(
                f"cannot connect: no connection after {_TIMEOUT_SECONDS:g} s"
            ) from None
        except TimeoutError:
            raise RequestFailed(
                f"the answer was not complete after {self._target.timeout:g} s (--timeout)"
            ) from None
        except (aiohttp.ClientError, OSError) as error:
            raise RequestFailed(_error_text(error)) from None
        if not done:
            raise RequestFailed("the server ended the stream before the answer was complete")

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    def _open(self) -> aiohttp.ClientSession:
        # The session is created on first use, because aiohttp needs a running event loop.
        if self._session is None:
            key = self._target.api_key
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(
                    total=self._target.timeout, sock_connect=_TIMEOUT_SECONDS
                ),
                headers={"Authorization": f"Bearer {key}"} if key else None,
            )
        return self._session

    def _body(self, prompt: Prompt, output_len: int) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model,
            "temperature": self._target.temperature,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._target.api == "chat":
            text = prompt if isinstance(prompt, str) else " ".join(WORDS[id_] for id_ in prompt)
            messages = [{"role": "user", "content": text}]
            return body | {"messages": messages, "max_completion_tokens": output_len}
        return body | {"prompt": prompt, "max_tokens": output_len}

    def _chunk(self, data: bytes, has_tokens: bool) -> Chunk:
        """Parse an event. `has_tokens`: whether an earlier event of the answer had a token."""
        try:
            event = json.loads(data)
            if "error" in event:
                raise RequestFailed(_message(event["error"]))
            usage = event.get("usage") or {}
            brings = any(self._brings_tokens(choice, has_tokens) for choice in event["choices"])
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError):
            raise RequestFailed(f"invalid event in the response: {data[:80]!r}") from None
        return Chunk(
            None if brings else 0, usage.get("prompt_tokens"), usage.get("completion_tokens")
        )

    def _brings_tokens(self, choice: dict[str, Any], has_tokens: bool) -> bool:
        """Return whether a streamed event contains a token.

        An event with a token may have an empty text: the token may be special, or may end in the
        middle of a UTF-8 character. Some servers send no text at all with such a token. If no event
        had a token before the end of the answer, the event with the finish reason counts.
        """
        if self._target.api == "completions":
            return True
        delta = choice["delta"]
        texts = [delta[name] for name in _TEXT_FIELDS if delta.get(name) is not None]
        if any(texts) or delta.get("tool_calls"):
            return True
        # The first event of a chat answer contains only the role and no token.
        if texts and delta.get("role") is None:
            return True
        return not has_tokens and choice.get("finish_reason") is not None


async def _refusal(response: aiohttp.ClientResponse) -> str:
    text = await response.text(errors="replace")
    try:
        reason = _message(json.loads(text)["error"])
    except (KeyError, TypeError, json.JSONDecodeError):
        reason = text.strip()[:200] or response.reason or ""
    return f"HTTP {response.status}: {reason}"


def _message(error: object) -> str:
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)


def _error_text(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientConnectorError):
        return (
            "cannot connect"
            if error.errno is None
            else f"cannot connect: {os.strerror(error.errno)}"
        )
    return str(error) or type(error).__name__
