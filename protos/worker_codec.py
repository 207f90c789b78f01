"""Records of `penstock.common` to and from the messages of worker.proto, written by hand.

Both ends of the router-worker stream use this module: routers encode what workers decode, and the
other way round. Decoding checks nothing: the receiver validates what it gets.
"""

from typing import Any

from penstock.common.sampling_params import SamplingParams
from penstock.protos import worker_pb2 as pb

EARLY_STOPPING: dict[bool | str, pb.EarlyStopping] = {
    False: pb.EARLY_STOPPING_FALSE,
    True: pb.EARLY_STOPPING_TRUE,
    "never": pb.EARLY_STOPPING_NEVER,
}
_EARLY_STOPPING_VALUES = {number: value for value, number in EARLY_STOPPING.items()}


def encode_sampling_params(params: SamplingParams) -> pb.SamplingParams:
    """Return the message of resolved parameters; see `SamplingParams.for_worker`."""
    beams = None
    if params.use_beam_search:
        beams = pb.BeamSearch(
            width=params.num_sequences,
            length_penalty=params.length_penalty,
            early_stopping=EARLY_STOPPING[params.early_stopping],
        )
    return pb.SamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        seed=params.seed or 0,
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        stop_tokens=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        logprobs=params.logprobs,
        n=params.n,
        logit_bias=params.logit_bias,
        typical_p=params.typical_p,
        bad_words=[pb.BadWord(tokens=word) for word in params.bad_words_token_ids],
        allowed_tokens=params.allowed_token_ids,
        prompt_logprobs=params.prompt_logprobs,
        beams=beams,
    )


def decode_sampling_params(message: pb.SamplingParams) -> SamplingParams:
    """Return the parameters of a message, whatever it holds.

    An absent `n` is 1, and an absent `typical_p` keeps all tokens. Floats are float32 values, as
    they were sent. An unknown `early_stopping` becomes a string that validation refuses.
    """
    search: dict[str, Any] = {"seed": message.seed}
    if message.HasField("beams"):
        beams = message.beams
        search = {
            "use_beam_search": True,
            "best_of": beams.width,
            "length_penalty": beams.length_penalty,
            "early_stopping": _EARLY_STOPPING_VALUES.get(
                beams.early_stopping, str(beams.early_stopping)
            ),
        }
    return SamplingParams(
        n=message.n or 1,
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k,
        min_p=message.min_p,
        typical_p=message.typical_p or 1.0,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        repetition_penalty=message.repetition_penalty,
        logit_bias=dict(message.logit_bias),
        bad_words_token_ids=tuple(tuple(word.tokens) for word in message.bad_words),
        allowed_token_ids=tuple(message.allowed_tokens) or None,
        max_tokens=message.max_tokens,
        min_tokens=message.min_tokens,
        stop_token_ids=tuple(message.stop_tokens),
        ignore_eos=message.ignore_eos,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        **search,
    )
