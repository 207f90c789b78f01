"""Conversion of tokens' log probabilities to the JSON of the OpenAI API."""

import json
import math

import pytest

from penstock.common.text.token_bytes import TokenBytes
from penstock.protos import worker_pb2 as pb
from penstock.router.api.openai.token_logprobs import logprobs_json
from tests.support.tokenizers import byte_level

TOKENIZER = byte_level()
TOKEN_BYTES = TokenBytes(TOKENIZER)


@pytest.mark.parametrize("as_ids", [False, True])
def test_every_token_has_its_name_bytes_and_value(as_ids: bool) -> None:
    for token in range(TOKENIZER.get_vocab_size() - 3):
        top = [token, token + 1, token + 2]
        values = [-token / 7, -1e-7, -0.0]
        entry = pb.TokenLogprobs(chosen=values[0], tokens=top, values=values)
        found = json.loads(logprobs_json(TOKEN_BYTES, token, entry, as_ids))
        entries = [found, *found.pop("top_logprobs")]
        for one, name, value in zip(
            entries, [token, *top], [entry.chosen, *entry.values], strict=True
        ):
            text = f"token_id:{name}" if as_ids else TOKEN_BYTES.text_of(name)
            content = list(TOKEN_BYTES.bytes_of(name))
            assert one == {"token": text, "bytes": content, "logprob": value}


@pytest.mark.parametrize("value", [-math.inf, math.inf, math.nan, -1e5])
def test_value_that_json_cannot_represent_is_replaced(value: float) -> None:
    entry = pb.TokenLogprobs(chosen=value, tokens=[9], values=[value])
    found = json.loads(logprobs_json(TOKEN_BYTES, 9, entry))
    assert found["logprob"] == found["top_logprobs"][0]["logprob"] == -9999.0


def test_unknown_log_probability_has_no_alternatives() -> None:
    found = json.loads(logprobs_json(TOKEN_BYTES, 9, None))
    assert (found["logprob"], found["top_logprobs"]) == (-9999.0, [])
