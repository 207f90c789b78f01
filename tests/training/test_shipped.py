"""The bundled models load in `transformers` and reach the scores on their model cards."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from training import checkpoint, evaluate
from training.chat import BEGIN, END, PAD
from training.evaluate import Answer
from training.tasks import Conversation
from training.train import MODELS

NAMES = ("demo", "demo-small")
MEGABYTES = 20
# By chance, a sample of SAMPLE examples may score up to SLACK below the claimed score.
SAMPLE, SLACK = 40, 0.08


@pytest.fixture(scope="module")
def answer() -> Answer:
    """Return a function that answers with the bundled demo model."""
    return evaluate.transformers_answer(MODELS / "demo")


def ask(answer: Answer, *turns: str) -> list[str]:
    """Send the user turns of one conversation; return the answers."""
    messages: list[dict[str, str]] = []
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        [text] = answer([Conversation(messages)])
        messages.append({"role": "assistant", "content": text})
    return [message["content"] for message in messages[1::2]]


def test_the_weights_are_small_enough_to_ship() -> None:
    size = sum((MODELS / name / "model.safetensors").stat().st_size for name in NAMES)
    assert size <= MEGABYTES * 1_000_000


@pytest.mark.parametrize("name", NAMES)
def test_config_and_tokenizer_have_the_same_special_token_ids(name: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODELS / name)
    model = AutoModelForCausalLM.from_pretrained(MODELS / name)
    for config in (model.config, model.generation_config):
        assert config.bos_token_id == tokenizer.convert_tokens_to_ids(BEGIN)
        assert config.eos_token_id == tokenizer.convert_tokens_to_ids(END)
        assert config.pad_token_id == tokenizer.convert_tokens_to_ids(PAD)
    assert tokenizer.eos_token == END
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.max_position_embeddings >= 2048
    assert model.dtype == torch.float32


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_the_trained_module_and_transformers_agree(name: str) -> None:
    tokens = torch.randint(6, 2048, (1, 64), generator=torch.Generator().manual_seed(0))
    model = checkpoint.load(MODELS / name)
    mask = torch.ones(1, 1, 64, 64, dtype=torch.bool).tril()
    actual = model.logits(model(tokens, mask))
    expected = AutoModelForCausalLM.from_pretrained(MODELS / name)(tokens).logits
    assert torch.equal(actual.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("name", NAMES)
def test_the_card_repeats_the_scores(name: str) -> None:
    card = (MODELS / name / "README.md").read_text()
    for score in evaluate.read_scores(MODELS / name):
        measured = f"{score.fraction:.1%} ({score.right}/{score.total})"
        assert f"{measured} | {'yes' if score.is_claimed else 'no'} |" in card


def claimed() -> list[str]:
    """Return the question families that the demo's model card claims."""
    return [score.family for score in evaluate.read_scores(MODELS / "demo") if score.is_claimed]


@pytest.mark.slow
@pytest.mark.parametrize("family", claimed())
def test_the_demo_reaches_the_scores_that_its_card_claims(answer: Answer, family: str) -> None:
    [score] = evaluate.measure(answer, SAMPLE, seed=1, families=[family])
    assert score.fraction >= evaluate.CLAIM_BOUND - SLACK


def test_a_conversation_of_several_questions(answer: Answer) -> None:
    answers = ask(
        answer, "My name is Ada.", "Which day comes two days after Monday?", "What is my name?"
    )
    assert answers == [
        "Nice to meet you, Ada!",
        "Two days after Monday comes Wednesday.",
        "Your name is Ada.",
    ]


def test_the_demo_introduces_itself(answer: Answer) -> None:
    assert "Penstock's demo model" in ask(answer, "Who are you?")[0]
