"""Admission of a client's request: checks the request, and makes its routing request and output."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

from penstock.common.sampling_params import SamplingParams
from penstock.common.text.detokenizer import IncrementalDetokenizer
from penstock.common.text.tokenizer import ModelTokenizer
from penstock.protos.worker_codec import encoded_lists, packed_pieces
from penstock.router.config import RequestBounds, RouterConfig
from penstock.router.requests.best_of import BestOfRanker
from penstock.router.requests.cost_limits import (
    CallSizes,
    check_cost,
    check_sizes,
    default_max_tokens,
)
from penstock.router.requests.prompt_hasher import PromptHasher
from penstock.router.requests.request import (
    GenerationRequest,
    ModelLimits,
    ResumeState,
    check_cache_salt,
    check_priority,
    check_prompt,
    check_timeout,
    resolve_sampling,
    stop_options,
)
from penstock.router.requests.request_output import RequestOutput
from penstock.router.requests.response_stream import ResponseStream
from penstock.router.requests.resume import check_resume_state, resume
from penstock.router.requests.slices import Slices
from penstock.router.requests.structured_check import Helpers, StructuredOutputsChecker
from penstock.router.routing import events as ev


class RequestAdmission:
    """Checks requests and numbers the admitted ones.

    Args:
        config: limits and the default timeout.
        tokenizer: makes the detokenizers.
        on_stop_string: called with `ChoiceStopped` when a stop string ends a choice.
        hasher: hashes the prompts.
        helpers: helper processes that check the constraints on answers.
    """

    def __init__(
        self,
        config: RouterConfig,
        tokenizer: ModelTokenizer,
        on_stop_string: Callable[[ev.ChoiceStopped], None],
        hasher: PromptHasher,
        helpers: Helpers,
    ) -> None:
        self._checker = StructuredOutputsChecker(helpers)
        self._hasher = hasher
        self._config = config
        self._tokenizer = tokenizer
        self._on_stop_string = on_stop_string
        self._request_ids = itertools.count(1)
        self.num_pending = 0  # requests whose checks have begun but have not ended

    async def admit_call(
        self,
        requests: Sequence[GenerationRequest],
        stream: ResponseStream,
        model: ModelLimits,
        now: float,
    ) -> list[tuple[ev.Request, RequestOutput]]:
        """Check the requests of a call and add them to its stream.

        Returns:
            For each request, the dispatcher's record of the request, and the request's output.

        Raises:
            ServingError: INVALID, if a request is refused.
        """
        self.num_pending += len(requests)
        try:
            bounds = self._config.bounds
            check_sizes(CallSizes(prompts=len(requests)), bounds)
            slices = Slices()
            params: list[SamplingParams] = []
            shared: SamplingParams | None = None  # the last validated parameters
            for each in requests:
                is_valid, shared = each.sampling is shared, each.sampling
                await check_prompt(each.prompt, model, slices)
                params.append(_resolve(each, len(requests), model, bounds, is_valid))
                await slices.pause()
            check_cost(requests, params, bounds)
            await self._checker.check(requests)
            params = await _with_encoded_lists(requests, params, slices)
            return [
                await self._admit(generation, one, index, stream, model, now, slices)
                for index, (generation, one) in enumerate(zip(requests, params, strict=True))
            ]
        finally:
            self.num_pending -= len(requests)

    async def _admit(
        self,
        generation: GenerationRequest,
        params: SamplingParams,
        index: int,
        stream: ResponseStream,
        model: ModelLimits,
        now: float,
        slices: Slices,
    ) -> tuple[ev.Request, RequestOutput]:
        await check_resume_state(generation, params, model, slices)
        timeout, num_choices = self._timeout(generation), params.num_generated
        options = stop_options(params, generation.shown_tokens)
        texts: list[IncrementalDetokenizer] = []
        for _ in range(num_choices):
            texts.append(self._tokenizer.detokenizer(options))
            await slices.pause()
        past = await resume(generation, params, model, texts, slices)
        await slices.pause()
        number = next(self._request_ids)
        stream.add_request(number, params.seed or 0)
        ranking = None
        if params.is_ranked:
            ranking = BestOfRanker(num_choices, params.n, params.logprobs is not None)
        output = RequestOutput(
            stream,
            index,
            texts,
            frozenset(params.stop_token_ids),
            lambda choice, length: self._on_stop_string(ev.ChoiceStopped(number, choice, length)),
            ranking,
            past,
        )
        packed = await _packed(generation.prompt, slices)
        nothing = ResumeState()
        request = ev.Request(
            id=number,
            prompt=generation.prompt,
            params=params.for_worker(),
            num_choices=num_choices,
            num_beams=params.num_sequences if params.use_beam_search else 0,
            max_tokens=params.answer_limit(len(generation.prompt), model.max_model_len),
            tenant=generation.tenant,
            priority=generation.priority,
            salt=generation.salt,
            packed_prompt=packed,
            prompt_hashes=await self._hasher.hashes(generation, packed),
            deadline=now + timeout,
            log=[
                generation.resume_from.get(choice, nothing).tokens for choice in range(num_choices)
            ],
            ended=[end is not None for end in past],
            external_id=generation.request_id,
        )
        return request, output

    def _timeout(self, request: GenerationRequest) -> float:
        """Return the time limit of a request in seconds."""
        if request.timeout is None:
            return self._config.timeout
        check_timeout(request.timeout)
        return min(self._config.timeout, request.timeout)


async def _packed(prompt: Sequence[int], slices: Slices) -> bytes:
    """Return a prompt as bytes. Packing a million tokens at once would take 10 ms."""
    pieces: list[bytes] = []
    for piece in packed_pieces(prompt):
        pieces.append(piece)
        await slices.pause()
    return b"".join(pieces)


async def _with_encoded_lists(
    requests: Sequence[GenerationRequest], params: Sequence[SamplingParams], slices: Slices
) -> list[SamplingParams]:
    """Return the resolved parameters of each request with encoded lists.

    The requests of a call usually share their sampling parameters, so that the lists are encoded
    once. Encoding 128,000 allowed tokens takes 5 ms.
    """
    encoded: list[SamplingParams] = []
    shared: SamplingParams | None = None
    lists = b""
    for request, one in zip(requests, params, strict=True):
        if request.sampling is not shared:
            shared, pieces = request.sampling, []
            for piece in encoded_lists(shared):
                pieces.append(piece)
                await slices.pause()
            lists = b"".join(pieces)
        encoded.append(replace(one, encoded_lists=lists))
        await slices.pause()
    return encoded


def _resolve(
    request: GenerationRequest,
    num_requests: int,
    model: ModelLimits,
    bounds: RequestBounds,
    is_valid: bool,
) -> SamplingParams:
    """Check the sampling parameters of a request; fill in defaults.

    `is_valid` is True if the sampling parameters have already been validated.
    """
    check_priority(request.priority)
    check_cache_salt(request)
    default = default_max_tokens(request, num_requests, bounds)
    return resolve_sampling(request, model, bounds, default, is_valid)
