"""The admission of calls with several prompts."""

import asyncio

import pytest

from penstock.common.sampling_params import SamplingParams
from penstock.protos.worker_codec import unpack_tokens
from penstock.router.requests.request import GenerationRequest
from penstock.router.requests.response_stream import ResponseStream
from tests.support.served_router import Served

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_lists_of_a_call_are_validated_and_encoded_once(
    shared_served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    validated: list[SamplingParams] = []
    original = SamplingParams.validate

    def validate(self: SamplingParams, *limits: object) -> None:
        validated.append(self)
        original(self, *limits)  # type: ignore[arg-type]

    monkeypatch.setattr(SamplingParams, "validate", validate)
    frontend = shared_served.router.frontend
    sampling = SamplingParams(allowed_token_ids=(6, 7, 8), logit_bias={6: 1.0}, max_tokens=1)
    other = SamplingParams(allowed_token_ids=(9,), max_tokens=1)
    requests = [GenerationRequest([5], each) for each in (sampling, sampling, other)]
    stream = ResponseStream(100, lambda requests: None)
    now = asyncio.get_running_loop().time()
    admitted = await frontend._admission.admit_call(requests, stream, frontend.model, now)
    assert validated == [sampling, other]
    first, second, third = [request.params.encoded_lists for request, _ in admitted]
    assert first
    assert first is second
    assert third != first
    assert len({request.params.seed for request, _ in admitted}) == 3


async def test_admitted_prompt_is_packed_for_workers(shared_served: Served) -> None:
    frontend = shared_served.router.frontend
    prompt = [5 + index % 100 for index in range(700)]
    stream, sampling = ResponseStream(100, lambda requests: None), SamplingParams(max_tokens=1)
    now = asyncio.get_running_loop().time()
    ((request, _),) = await frontend._admission.admit_call(
        [GenerationRequest(prompt, sampling)], stream, frontend.model, now
    )
    assert unpack_tokens(request.packed_prompt) == prompt
