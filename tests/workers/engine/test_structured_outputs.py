"""Structured outputs in the engine: answers have the required form in every kind of run."""

import dataclasses
import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from penstock.common.sampling_params import SamplingParams
from penstock.common.structured_outputs import StructuredOutputs, choice, json_schema
from penstock.common.text.tokenizer import ModelTokenizer
from penstock.common.thinking_budget import ThinkingBudget
from penstock.workers.config import WorkerConfig
from penstock.workers.engine.engine import Engine
from penstock.workers.engine.results import StepResult
from penstock.workers.scheduling.sequence import FinishReason, Key, NewSequence, Sibling
from tests.support.engines import run_out, tokens_of
from tests.support.stepper_driver import StepperDriver

FOLDER = Path(__file__).parents[3] / "penstock" / "models" / "demo-small"
TOKENIZER = ModelTokenizer(FOLDER)
PROMPT = TOKENIZER.encode("The old man went to the sea and")

CLOSE = TOKENIZER.vocab_size - 1
"""Token that ends reasoning in these tests."""

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "tags", "age"],
    "additionalProperties": False,
}
FORM = json_schema(SCHEMA)
SAMPLED = SamplingParams(temperature=1.2, seed=1, max_tokens=80, structured_outputs=FORM)


def make_engine(**sizes: Any) -> Engine:
    given = {"kv_cache_mib": 4, "max_sequences": 8, "max_batched_tokens": 64, **sizes}
    return Engine(WorkerConfig("w", FOLDER, **given))


@pytest.fixture(scope="module")
def engine() -> Engine:
    return make_engine()


def constrained(
    engine: Engine, key: Key, params: SamplingParams, answer: list[int] | None = None, **rest: Any
) -> NewSequence:
    wanted = params.structured_outputs
    grammar = None if wanted is None else engine.grammars.compile(wanted)
    params = params.with_end_tokens(engine.spec.eos_tokens)
    log = [*PROMPT, *(answer or [])]
    return NewSequence(key, log, len(PROMPT), params, grammar=grammar, **rest)


def mixed() -> dict[Key, SamplingParams]:
    """Return constrained requests with various other parameters, and unconstrained requests."""
    return {
        "schema": SAMPLED,
        "greedy": replace(SAMPLED, temperature=0.0),
        "plain": SamplingParams(temperature=0.9, seed=3, max_tokens=40),
        "penalized": replace(SAMPLED, seed=4, repetition_penalty=1.3, presence_penalty=0.5),
        "logprobs": replace(SAMPLED, seed=5, logprobs=2),
        "words": replace(SAMPLED, seed=6, bad_words_token_ids=(tuple(TOKENIZER.encode("red")),)),
        "choice": replace(SAMPLED, seed=7, structured_outputs=choice(["yes", "no", "maybe"])),
        "regex": replace(SAMPLED, seed=8, structured_outputs=StructuredOutputs("regex", "[ab]{9}")),
        "thinking": SamplingParams(
            seed=9, max_tokens=40, thinking_budget=ThinkingBudget(11, CLOSE)
        ),
    }


def answers_of(engine: Engine, wanted: dict[Key, SamplingParams]) -> dict[Key, list[int]]:
    for key, params in wanted.items():
        engine.submit(constrained(engine, key, params))
    return run_out(engine)


@pytest.fixture(scope="module")
def expected(engine: Engine) -> dict[Key, list[int]]:
    return answers_of(engine, mixed())


def text_of(answer: list[int]) -> str:
    return TOKENIZER.token_bytes.decode(answer)


def test_answers_have_their_forms(engine: Engine, expected: dict[Key, list[int]]) -> None:
    ends = set(engine.spec.eos_tokens)
    for key in ("schema", "greedy", "penalized", "logprobs", "words"):
        assert expected[key][-1] in ends, key
        jsonschema.validate(json.loads(text_of(expected[key])), SCHEMA)
    assert text_of(expected["choice"]) in ("yes", "no", "maybe")
    assert set(text_of(expected["regex"])) <= {"a", "b"}
    assert len(text_of(expected["regex"])) == 9
    assert CLOSE not in expected["thinking"][:11]
    assert expected["thinking"][11] == CLOSE


def test_rows_do_not_change_each_other(engine: Engine, expected: dict[Key, list[int]]) -> None:
    alone: dict[Key, list[int]] = {}
    for key, params in mixed().items():
        alone |= answers_of(engine, {key: params})
    assert alone == expected


@pytest.mark.parametrize("on_device", [False, True], ids=["a thread computes", "a device computes"])
def test_steps_with_overlap_give_the_same_answers(
    expected: dict[Key, list[int]], on_device: bool
) -> None:
    engine = make_engine()
    engine.plans_ahead = True
    engine.executor.on_device = on_device
    driver = StepperDriver(engine)
    for key, params in mixed().items():
        new = constrained(engine, key, params)
        driver.advance(lambda engine, new=new: engine.submit(new))  # type: ignore[misc]
    while driver.num_ended < len(expected):
        driver.advance()
    driver.stepper.stop()
    assert driver.answers == expected
    assert not driver.failed


def test_answer_continues_from_any_point_of_its_log(
    engine: Engine, expected: dict[Key, list[int]]
) -> None:
    for key in ("schema", "words", "thinking"):
        whole = expected[key]
        for cut in range(1, len(whole)):
            engine.submit(constrained(engine, cut, mixed()[key], whole[:cut]))
        found = run_out(engine)
        assert found == {cut: whole[cut:] for cut in range(1, len(whole))}


@pytest.mark.parametrize("max_forced", [0, 1, 3])
def test_answers_do_not_depend_on_how_many_forced_tokens_a_step_takes(
    expected: dict[Key, list[int]], max_forced: int
) -> None:
    engine = make_engine()
    engine.executor.sampler.masks.max_forced = max_forced
    assert answers_of(engine, mixed()) == expected


def num_steps(engine: Engine, params: SamplingParams) -> tuple[int, StepResult]:
    """Return the number of steps of an answer, and the result of the step with most tokens."""
    engine.submit(constrained(engine, "one", params))
    results = []
    while (result := engine.step()).output is not None:
        results.append(result)
    return len(results), max(results, key=lambda each: len(tokens_of(each)))


CHOICE = replace(SAMPLED, structured_outputs=choice(["The lighthouse keeper sleeps at noon."]))


def test_forced_tokens_are_taken_in_one_step_with_the_end_of_the_answer(engine: Engine) -> None:
    steps, result = num_steps(engine, CHOICE)
    tokens = [token for _, token in tokens_of(result)]
    assert steps == 1
    assert text_of(tokens[:-1]) == json.loads(CHOICE.structured_outputs.text)[0]  # type: ignore[union-attr]
    assert tokens[-1] in engine.spec.eos_tokens
    assert result.output is not None
    assert result.output.indices.tolist() == list(range(len(tokens)))
    assert result.logprobs == [None] * len(tokens)


@pytest.mark.parametrize(
    "more",
    [
        {"logprobs": 0},
        {"bad_words_token_ids": ((5, 6),)},
        {"allowed_token_ids": tuple(range(TOKENIZER.vocab_size))},
    ],
)
def test_forced_tokens_are_sampled_one_at_a_time_if_each_needs_its_own_step(
    engine: Engine, more: dict[str, Any]
) -> None:
    steps, result = num_steps(engine, replace(CHOICE, **more))
    assert steps > 5
    assert len(tokens_of(result)) == 1


def test_forced_tokens_end_at_max_tokens(engine: Engine) -> None:
    _, result = num_steps(engine, replace(CHOICE, max_tokens=3))
    assert result.output is not None
    assert result.output.finishes.tolist() == [0, 0, FinishReason.LENGTH]


def test_user_stop_token_within_forced_tokens_ends_the_answer(engine: Engine) -> None:
    _, whole = num_steps(engine, CHOICE)
    third = tokens_of(whole)[2][1]
    _, result = num_steps(engine, replace(CHOICE, stop_token_ids=(third,)))
    assert result.output is not None
    assert third not in result.output.tokens[:-1]
    engine.submit(constrained(engine, "two", replace(CHOICE, stop_token_ids=(third,))))
    assert run_out(engine)["two"] == [token for _, token in tokens_of(whole)][:3]


def test_preempted_answers_are_the_same(expected: dict[Key, list[int]]) -> None:
    engine = make_engine()
    engine.reset_scheduler(dataclasses.replace(engine.limits, num_blocks=9))
    assert answers_of(engine, mixed()) == expected
    assert engine.load().preemptions > 0


def test_choices_of_a_request_have_the_form_and_continue_from_their_logs(engine: Engine) -> None:
    params = replace(SAMPLED, n=3)
    siblings = tuple(Sibling(number, PROMPT) for number in (1, 2))
    engine.submit(constrained(engine, "n", params, siblings=siblings))
    whole: dict[int, list[int]] = {0: [], 1: [], 2: []}
    while (output := engine.step().output) is not None:
        for number, token in zip(output.choices.tolist(), output.tokens.tolist(), strict=True):
            whole[number].append(token)
    assert len({tuple(answer) for answer in whole.values()}) > 1
    for answer in whole.values():
        jsonschema.validate(json.loads(text_of(answer)), SCHEMA)
    later = (Sibling(1, PROMPT + whole[1][:2]), Sibling(2, PROMPT + whole[2][:5]))
    engine.submit(constrained(engine, "later", params, whole[0][:3], siblings=later))
    rest: dict[int, list[int]] = {0: [], 1: [], 2: []}
    while (output := engine.step().output) is not None:
        for number, token in zip(output.choices.tolist(), output.tokens.tolist(), strict=True):
            rest[number].append(token)
    assert rest == {0: whole[0][3:], 1: whole[1][2:], 2: whole[2][5:]}


def test_complete_answer_ends_before_min_tokens_and_others_are_held_back(engine: Engine) -> None:
    short = replace(SAMPLED, min_tokens=60, structured_outputs=choice(["yes", "no"]))
    digits = StructuredOutputs("regex", "[0-9]+")
    held = replace(SAMPLED, min_tokens=30, max_tokens=60, structured_outputs=digits)
    found = answers_of(engine, {"short": short, "held": held})
    assert text_of(found["short"]) in ("yes", "no")
    assert len(found["held"]) >= 30
    assert text_of(found["held"]).isdigit()


def test_row_without_a_token_left_fails_alone(engine: Engine) -> None:
    nothing = replace(SAMPLED, structured_outputs=choice(["yes"]), allowed_token_ids=(7,))
    plain = mixed()["plain"]
    engine.submit(constrained(engine, "plain", plain))
    engine.submit(constrained(engine, "nothing", nothing))
    failed: list[Key] = []
    answer: list[int] = []
    while (result := engine.step()).output is not None:
        failed += result.failed
        answer += [
            token
            for key, token in zip(result.output.keys, result.output.tokens.tolist(), strict=True)
            if key == "plain"
        ]
    assert failed == ["nothing"]
    assert answer == answers_of(engine, {"plain": plain})["plain"]


def test_masks_are_filled_on_another_thread(engine: Engine, monkeypatch: Any) -> None:
    masks = engine.executor.sampler.masks
    threads, fill = set(), masks._fill

    def recorded(*arguments: Any) -> Any:
        threads.add(threading.current_thread().name.split("_")[0])
        return fill(*arguments)

    monkeypatch.setattr(masks, "_fill", recorded)
    answers_of(engine, {"schema": SAMPLED})
    assert threads == {"masks"}
