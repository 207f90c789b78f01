"""Load-test client for the gRPC API, `penstock.v1.Inference`."""

from collections.abc import AsyncGenerator

import grpc

from penstock.loadtests.bench.clients import (
    Chunk,
    Prompt,
    RequestFailed,
    Served,
    ServerUnusable,
    Target,
)
from penstock.protos import inference_pb2, inference_pb2_grpc

_TIMEOUT_SECONDS = 10.0


class GrpcClient:
    """Implementation of `Client` over gRPC."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._metadata = [("authorization", f"Bearer {target.api_key}")] if target.api_key else None
        self._channel = grpc.aio.insecure_channel(
            target.address, options=[("grpc.max_receive_message_length", 64 << 20)]
        )
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)  # type: ignore[no-untyped-call]

    async def describe(self) -> Served:
        request = inference_pb2.GetModelRequest(name=self._target.model)
        try:
            model = await self._stub.GetModel(
                request, timeout=_TIMEOUT_SECONDS, metadata=self._metadata
            )
        except grpc.RpcError as error:
            raise ServerUnusable(f"grpc://{self._target.address}: {_error_text(error)}") from None
        return Served(model.name, model.vocab_size or None, model.max_model_len or None)

    async def stream(self, prompt: Prompt, output_len: int) -> AsyncGenerator[Chunk]:
        call = self._stub.Generate(
            self._request(prompt, output_len),
            timeout=self._target.timeout,
            metadata=self._metadata,
        )
        position, finished = 0, False
        try:
            async for reply in call:
                if reply.tokens and reply.position != position:
                    raise RequestFailed(
                        f"expected the token at position {position}, received the token at "
                        f"position {reply.position}"
                    )
                position += len(reply.tokens)
                finished = bool(reply.finish_reason)
                yield _chunk(reply)
        except grpc.RpcError as error:
            raise RequestFailed(_error_text(error)) from None
        finally:
            call.cancel()
        if not finished:
            raise RequestFailed("the server ended the stream before the answer was complete")

    async def close(self) -> None:
        await self._channel.close()

    def _request(self, prompt: Prompt, output_len: int) -> inference_pb2.GenerateRequest:
        text, tokens = (prompt, None) if isinstance(prompt, str) else (None, prompt)
        return inference_pb2.GenerateRequest(
            model=self._target.model,
            text=text,
            tokens=None if tokens is None else inference_pb2.Tokens(ids=tokens),
            sampling=inference_pb2.Sampling(
                temperature=self._target.temperature, max_tokens=output_len, ignore_eos=True
            ),
        )


def _chunk(reply: inference_pb2.GenerateReply) -> Chunk:
    if not reply.HasField("usage"):
        return Chunk(len(reply.tokens))
    usage = reply.usage
    return Chunk(len(reply.tokens), usage.prompt_tokens, usage.completion_tokens)


def _error_text(error: grpc.RpcError) -> str:
    return f"{error.code().name}: {error.details()}"
