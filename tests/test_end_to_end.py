"""End-to-end tests of the bundled model with third-party clients: answers equal `transformers`'."""

import os
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import torch
from google.protobuf import descriptor_pool, message_factory
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)
from openai import OpenAI
from transformers import AutoModelForCausalLM, AutoTokenizer

from penstock.cli.checkpoint import SHIPPED
from penstock.cli.status import fetch
from penstock.loadtests.micro.server import free_ports
from tests.support.serving import TIMEOUT_SECONDS, Serving, serving

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

BLOCK = 16
TEXT = "Tell me a story about a fox who looks for a lamp in the forest and finds a friend. "
QUESTIONS = ["What is 12 + 7?", "Sort these numbers: 8, 3, 5", "Hello!", "Repeat exactly: lamp"]


@pytest.fixture(scope="module")
def served() -> Iterator[Serving]:
    # Unix socket paths in pytest's tmp_path would be too long.
    with (
        tempfile.TemporaryDirectory(prefix="pk-") as name,
        serving(["--kv-cache-mib", "64"], free_ports(2), Path(name)) as running,
    ):
        running.wait_for_output("is served after")
        yield running


@pytest.fixture
def apart(served: Serving) -> Iterator[Serving]:
    """Let the router compute prompts apart, although the workers share cores."""
    give_role(served, "prefill")
    yield served
    give_role(served, "mixed")


def give_role(running: Serving, role: str) -> None:
    """Assign a role to the prefill worker, as an operator."""
    url = f"http://127.0.0.1:{running.admin}/role"
    reply = httpx.post(url, json={"worker": "prefill-0", "role": role}, timeout=TIMEOUT_SECONDS)
    assert reply.status_code == 200, reply.text


def num_transfers(running: Serving) -> int:
    found: int = fetch(f"127.0.0.1:{running.admin}", None)["kv_transfers"]
    return found


@pytest.fixture(scope="module")
def client(served: Serving) -> Iterator[OpenAI]:
    url = f"http://127.0.0.1:{served.http}/v1"
    with OpenAI(base_url=url, api_key="none", timeout=TIMEOUT_SECONDS, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def reference() -> "Reference":
    return Reference(SHIPPED)


class Reference:
    """Greedy reference answers of `transformers` in float32."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def tokens(self, prompt: list[int], num_new: int) -> list[int]:
        options = {"do_sample": False, "min_new_tokens": num_new, "max_new_tokens": num_new}
        found = self.model.generate(torch.tensor([prompt]), **options)
        return [int(token) for token in found[0, len(prompt) :]]

    def answer(self, messages: list[dict[str, str]], num_new: int) -> str:
        prompt = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        ids = torch.tensor([prompt["input_ids"]])
        found = self.model.generate(ids, do_sample=False, max_new_tokens=num_new)
        text: str = self.tokenizer.decode(found[0, ids.shape[1] :], skip_special_tokens=True)
        return text


def complete(client: OpenAI, prompt: list[int], num_new: int) -> list[int]:
    """Return the tokens of a greedy answer of `num_new` tokens."""
    extra = {"return_token_ids": True, "min_tokens": num_new}
    reply: Any = client.completions.create(
        model="demo", prompt=prompt, max_tokens=num_new, temperature=0, extra_body=extra
    )
    return list(reply.choices[0].token_ids)


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 150])
def test_disaggregated_answers_equal_transformers(
    apart: Serving, client: OpenAI, reference: Reference, length: int
) -> None:
    prompt, before = (reference.tokenizer.encode(TEXT * 20))[:length], num_transfers(apart)
    assert complete(client, prompt, 20) == reference.tokens(prompt, 20)
    assert num_transfers(apart) == before + 1


def test_concurrent_answers_equal_transformers(client: OpenAI, reference: Reference) -> None:
    prompts = [reference.tokenizer.encode(TEXT * 3)[start : start + 40] for start in range(12)]
    with ThreadPoolExecutor(len(prompts)) as executor:
        found = list(executor.map(lambda prompt: complete(client, prompt, 30), prompts))
    assert found == [reference.tokens(prompt, 30) for prompt in prompts]


@pytest.mark.skipif(
    sys.platform != "linux" or len(os.sched_getaffinity(0)) < 2, reason="workers share no cores"
)
def test_prompts_of_workers_that_share_cores_are_not_transferred(
    served: Serving, client: OpenAI
) -> None:
    before = num_transfers(served)
    with ThreadPoolExecutor(8) as executor:
        prompts = [[100 + number] * 40 for number in range(8)]
        assert all(executor.map(lambda prompt: complete(client, prompt, 30), prompts))
    assert num_transfers(served) == before


def test_openai_client_streams_a_conversation(client: OpenAI, reference: Reference) -> None:
    messages: list[dict[str, str]] = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        request_messages: Any = messages
        chunks = client.chat.completions.create(
            model="demo", messages=request_messages, temperature=0, max_tokens=60, stream=True
        )
        answer = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert answer == reference.answer(messages, 60)
        assert answer
        messages.append({"role": "assistant", "content": answer})


def test_client_made_by_grpc_reflection_holds_a_conversation(
    served: Serving, reference: Reference
) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{served.grpc}") as channel:
        pool = descriptor_pool.DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
        method = pool.FindServiceByName("penstock.v1.Inference").FindMethodByName("Generate")
        request_type = message_factory.GetMessageClass(method.input_type)
        reply_type = message_factory.GetMessageClass(method.output_type)
        call = channel.unary_stream(
            "/penstock.v1.Inference/Generate",
            request_serializer=request_type.SerializeToString,
            response_deserializer=reply_type.FromString,
        )
        messages: list[dict[str, str]] = []
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            sampling = {"temperature": 0, "max_tokens": 60}
            replies = list(call(request_type(chat={"messages": messages}, sampling=sampling)))
            answer = "".join(each.text for each in replies)
            assert answer == reference.answer(messages, 60)
            positions = [each.position + i for each in replies for i in range(len(each.tokens))]
            assert positions == list(range(replies[-1].usage.completion_tokens))
            messages.append({"role": "assistant", "content": answer})


def test_equal_seeds_give_equal_answers(client: OpenAI) -> None:
    def draw(seed: int) -> str:
        reply = client.completions.create(
            model="demo", prompt=TEXT, max_tokens=40, temperature=1.5, seed=seed
        )
        return reply.choices[0].text

    with ThreadPoolExecutor(6) as executor:
        texts = list(executor.map(draw, [1, 2, 1, 2, 1, 2]))
    assert texts[::2] == texts[:1] * 3
    assert texts[1::2] == texts[1:2] * 3
    assert texts[0] != texts[1]


def test_next_request_runs_after_disconnected_clients(client: OpenAI) -> None:
    for _ in range(5):
        chunks = client.completions.create(
            model="demo",
            prompt=TEXT,
            max_tokens=1500,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        next(iter(chunks))
        chunks.close()
    assert complete(client, [5, 6, 7], 4)
