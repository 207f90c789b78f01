"""GGUF files as MODEL: answers are those of the safetensors checkpoint with the same weights."""

import json
import shutil
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from penstock.cli.checkpoint import SHIPPED
from penstock.loadtests.micro.server import free_ports
from penstock.workers.config import WorkerConfig
from penstock.workers.engine.engine import Engine
from tests.support.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.support.engines import run_greedy
from tests.support.gguf_files import write_gguf
from tests.support.serving import TIMEOUT_SECONDS, serving

QUESTIONS = ["What is 12 + 7?", "Sort these numbers: 8, 3, 5", "Hello!", "Repeat exactly: lamp"]


def round_weights(folder: Path) -> Path:
    """Round the matrices of a checkpoint to float16; return the folder."""
    found = load_file(folder / "model.safetensors")
    rounded = {
        name: each.half().float() if each.dim() > 1 else each for name, each in found.items()
    }
    save_file(rounded, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("family", ["llama3", "qwen2", "qwen3", "gemma3", "phi3-short"])
def test_greedy_answers_are_those_of_the_safetensors_checkpoint(
    family: str, tmp_path: Path
) -> None:
    make_checkpoint(tmp_path / "m", family)
    round_weights(tmp_path / "m")
    # GGUF has no entry for the scale of attention scores, so set the default scale.
    if family.startswith("gemma"):
        path = tmp_path / "m" / "config.json"
        config = json.loads(path.read_text())
        path.write_text(json.dumps(config | {"query_pre_attn_scalar": config["head_dim"]}))
    file = write_gguf(tmp_path / "m", tmp_path / "m.gguf")
    options: dict[str, Any] = {"kv_cache_mib": 1, "threads": 1, "dtype": "float32"}
    engines = [Engine(WorkerConfig("test", model, **options)) for model in (tmp_path / "m", file)]
    random = torch.Generator().manual_seed(5)
    for _ in range(3):
        prompt = torch.randint(4, VOCAB_SIZE, (30,), generator=random).tolist()
        expected, found = (run_greedy(engine, prompt, 32) for engine in engines)
        assert found == expected


def post(port: int, path: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/{path}",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as reply:
        return json.load(reply)


@pytest.mark.cluster
@pytest.mark.timeout(1800)
def test_served_file_answers_as_transformers_does_with_the_same_weights(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    shutil.copytree(SHIPPED, folder)
    round_weights(folder)
    path = write_gguf(folder, tmp_path / "answers.gguf")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    # Unix socket paths in pytest's tmp_path would be too long.
    with (
        tempfile.TemporaryDirectory(prefix="pk-") as name,
        serving([str(path), "--kv-cache-mib", "64"], free_ports(2), Path(name)) as running,
    ):
        running.wait_for_output("answers is served after")
        assert "chat/completions" in running.output_text
        for question in QUESTIONS:
            messages = [{"role": "user", "content": question}]
            body = {"model": "answers", "messages": messages, "temperature": 0, "max_tokens": 60}
            reply = post(running.http, "chat/completions", body)
            prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
            ids = torch.tensor([prompt["input_ids"]])
            found = model.generate(ids, do_sample=False, max_new_tokens=60)[0, ids.shape[1] :]
            answer = reply["choices"][0]["message"]["content"]
            assert answer == tokenizer.decode(found, skip_special_tokens=True)
            assert answer
