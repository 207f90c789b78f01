"""Any HTTP body gets an answer, or an error in OpenAI's format."""

import asyncio
import json

import httpx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.router.config import RouterConfig
from tests.support.openai_errors import check_form
from tests.support.served_router import serving
from tests.support.stub_worker import StubWorker

HI = [{"role": "user", "content": "hi"}]
KEYS = [
    *("model", "prompt", "messages", "stream", "stream_options", "n", "max_tokens", "temperature"),
    *("top_p", "top_k", "min_p", "presence_penalty", "repetition_penalty", "logit_bias", "seed"),
    *("stop", "logprobs", "top_logprobs", "min_tokens", "ignore_eos", "stop_token_ids", "tools"),
    *("typical_p", "bad_words", "allowed_token_ids"),
    *("return_token_ids", "include_stop_str_in_output", "skip_special_tokens", "best_of"),
]
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(10**30), 10**30)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["stub", "user", "text", "hi"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "7"]), inner, max_size=3
        )
    ),
    max_leaves=6,
)
VALID = st.sampled_from(
    [{}, {"prompt": "hi"}, {"prompt": [5, 6]}, {"messages": HI}, {"prompt": ["a", "b"]}]
)
BODIES = st.one_of(
    st.tuples(VALID, st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=4)).map(
        lambda pair: json.dumps({**pair[0], **pair[1], "max_tokens": 2}).encode()
    ),
    st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=6).map(
        lambda body: json.dumps(body).encode()
    ),
    VALUES.map(lambda body: json.dumps(body).encode()),
    st.binary(max_size=40),
)


def test_any_body_gets_an_answer_or_a_well_formed_error(config: RouterConfig) -> None:
    async def post(client: httpx.AsyncClient, path: str, body: bytes) -> httpx.Response:
        return await client.post(path, content=body, headers={"content-type": "application/json"})

    with asyncio.Runner() as runner:
        server = serving(config, StubWorker())
        served = runner.run(server.__aenter__())
        client = httpx.AsyncClient(base_url=served.url, timeout=30)

        @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
        @given(st.sampled_from(["/v1/completions", "/v1/chat/completions"]), BODIES)
        def check_body(path: str, body: bytes) -> None:
            response = runner.run(post(client, path, body))
            if response.status_code != 200:
                assert response.status_code in (400, 404)
                check_form(response)

        try:
            check_body()
        finally:
            runner.run(client.aclose())
            runner.run(server.__aexit__(None, None, None))
