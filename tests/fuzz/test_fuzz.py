"""The fuzz run finds injected bugs, covers the whole schema, and replays failing inputs."""

import logging
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import message_factory
from google.protobuf.message import Message
from hypothesis import HealthCheck, given, seed, settings
from pydantic import BaseModel

from penstock.protos import inference_pb2, worker_pb2
from penstock.router.api.generation.strict_model import StrictModel
from penstock.router.api.openai.schema import CompletionRequest
from penstock.router.frontend import Frontend
from penstock.router.requests.prompt_encoder import PromptEncoder
from tests.fuzz.inputs import GrpcInput, Input, RawInput, from_text, to_text
from tests.fuzz.run import Session, check, draw, run
from tests.fuzz.strategies import BODIES, USER, HttpRoute
from tests.fuzz.target import Target
from tests.fuzz.values import Values, messages_of, objects_of
from tests.support.served_router import until

pytestmark = pytest.mark.slow

NUM_DRAWN = 60
QUICK = settings(max_examples=NUM_DRAWN, database=None, suppress_health_check=list(HealthCheck))


def post(path: str, body: bytes, ending: str = "read", port: str = "http") -> RawInput:
    head = (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {USER}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        "connection: close\r\n\r\n"
    )
    return RawInput(port, (head.encode(), body), ending, f"POST {path}")  # type: ignore[arg-type]


def problem_of(input_: Input) -> str:
    """Send one input to a new target; return its problem."""
    session = Session()
    try:
        return check(session, input_, True)
    finally:
        session.close()


# ------------------------------------------------------------ the run itself


@pytest.mark.long
def test_small_run_has_no_problem_and_reaches_answers() -> None:
    result = run(300, 5)
    assert result.problem == ""
    assert (result.failing, result.num_inputs > 200) == (None, True)
    assert any(name.endswith(" 200") for name in result.reached)
    assert any(name.endswith(" OK") for name in result.reached)


@pytest.mark.long
def test_run_finds_a_handler_that_raises_for_one_field(monkeypatch: pytest.MonkeyPatch) -> None:
    original = CompletionRequest.check

    def broken(body: CompletionRequest) -> None:
        assert "echo" not in body.model_fields_set
        original(body)

    monkeypatch.setattr(CompletionRequest, "check", broken)
    result = run(3000, 1)
    assert "status 500" in result.problem or "AssertionError" in result.problem
    assert isinstance(result.failing, RawInput)
    assert problem_of(from_text(to_text(result.failing))) != ""
    monkeypatch.undo()
    assert problem_of(result.failing) == ""


@pytest.mark.long
def test_run_finds_a_request_that_is_not_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.fuzz.target.STALL_SECONDS", 2.0)
    monkeypatch.setattr(Frontend, "_cancel", lambda frontend, requests: None)
    # Draw only completions: few other routes start a request that could be cancelled.
    monkeypatch.setattr(Target, "routes", [HttpRoute("http", "POST", "/v1/completions")])
    result = run(3000, 1)
    assert "requests are left" in result.problem
    assert result.failing is not None
    assert result.failing.ending in ("close", "cancel")


@pytest.mark.long
def test_memory_that_is_not_given_back_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.fuzz.run.MAX_GROWTH", 32 << 20)
    monkeypatch.setattr("tests.fuzz.run.PART", 20)
    kept: list[bytes] = []
    original = CompletionRequest.check

    def keep(body: CompletionRequest) -> None:
        kept.append(b"x" * (4 << 20))
        original(body)

    monkeypatch.setattr(CompletionRequest, "check", keep)
    result = run(400, 2)
    assert len(kept) > 10
    assert "memory are not given back" in result.problem


# ------------------------------------------------------------ problems that are noticed


STREAM = post("/v1/completions", b'{"prompt": "hi", "stream": true}')
TOKENIZE = "/penstock.v1.Inference/Tokenize"
CALL = GrpcInput(
    TOKENIZE,
    (inference_pb2.TokenizeRequest(text="hi").SerializeToString(),),
    (("authorization", f"Bearer {USER}"),),
    "read",
)


def test_valid_inputs_have_no_problem() -> None:
    assert problem_of(STREAM) == ""
    assert problem_of(CALL) == ""


def test_error_of_a_grpc_method_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*arguments: object) -> list[int]:
        raise KeyError("hi")

    monkeypatch.setattr(PromptEncoder, "encode", broken)
    assert "status INTERNAL" in problem_of(CALL)


def test_logged_traceback_is_noticed_although_the_answer_is_good(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = Frontend.check_model

    def noisy(frontend: Frontend, name: str | None) -> None:
        try:
            raise KeyError("hi")
        except KeyError:
            logging.getLogger("penstock").info("something failed", exc_info=True)
        original(frontend, name)

    logging.getLogger("penstock").setLevel(logging.INFO)
    monkeypatch.setattr(Frontend, "check_model", noisy)
    try:
        assert "KeyError" in problem_of(CALL)
    finally:
        logging.getLogger("penstock").setLevel(logging.NOTSET)


def test_long_callback_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Frontend.check_model

    def slow(frontend: Frontend, name: str | None) -> None:
        sum(range(10_000_000))
        original(frontend, name)

    monkeypatch.setattr(Frontend, "check_model", slow)
    assert "held the event loop" in problem_of(CALL)


def test_change_of_another_stream_is_noticed() -> None:
    session = Session()
    try:
        assert check(session, CALL, True) == ""
        session.target.expected += b"more"
        assert "another stream has changed" in check(session, CALL, True)
    finally:
        session.close()


def test_answer_on_a_connection_left_open_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.fuzz.target.DOCUMENTED", set())
    session = Session()
    try:
        frontend, left = session.target.served.router.frontend, session.target.left
        frontend.is_draining = True
        left_open = post("/v1/completions", b'{"prompt": "hi"}', "leave")
        assert session.runner.run(session.target.check(left_open)) == ""
        session.runner.run(until(lambda: left[0].received))
        frontend.is_draining = False
        assert "status 503" in session.runner.run(session.target.settle())
        assert session.target.late[0][0] == left_open
    finally:
        session.close()


# ------------------------------------------------------------ the schema


def drawn_from(values: Values, number: int = 1) -> list[Any]:
    """Return `NUM_DRAWN` values of a strategy, which depend on the seed `number`.

    They also depend on the imported modules, because Hypothesis draws constants from their code.
    """
    seen: list[Any] = []

    def keep(value: Any) -> None:
        seen.append(value)

    seed(number)(QUICK(given(values)(keep)))()
    return seen


def names_drawn(
    values: Values, wanted: set[str], names_of: Callable[[Any], Iterable[str]]
) -> set[str]:
    """Draw values until all `wanted` names have occurred; return the names that occurred."""
    seen: set[str] = set()
    # Many draws are needed, because Hypothesis seldom draws some of the 50 fields of a body.
    for number in range(100):
        for value in drawn_from(values, number):
            seen.update(names_of(value))
        if seen >= wanted:
            break
    return seen


def set_fields(message: Message) -> list[str]:
    return [field.name for field, _ in message.ListFields()]


def leaves(model: type[BaseModel]) -> Sequence[type[BaseModel]]:
    below = [leaf for each in model.__subclasses__() for leaf in leaves(each)]
    return below or [model]


def test_every_route_with_a_body_has_its_models_and_every_field_is_drawn() -> None:
    session = Session()
    try:
        posts = {route.path for route in session.target.routes if route.method == "POST"}
        assert posts == set(BODIES)
    finally:
        session.close()
    for models in BODIES.values():
        for model in models:
            fields = set(model.model_fields)
            assert names_drawn(objects_of(model), fields, list) == fields


def test_models_of_all_bodies_are_used() -> None:
    used = {model for models in BODIES.values() for model in models}
    bodies = {leaf for leaf in leaves(StrictModel) if leaf.__name__.endswith("Request")}
    assert bodies <= used


def test_every_field_of_every_grpc_request_is_drawn() -> None:
    service = inference_pb2.DESCRIPTOR.services_by_name["Inference"]
    nested: dict[str, Any] = {}
    for method in service.methods:
        _collect(method.input_type, nested)
    assert len(nested) >= 8
    for descriptor in nested.values():
        fields = {field.name for field in descriptor.fields}
        assert names_drawn(messages_of(descriptor), fields, set_fields) == fields


def _collect(descriptor: Any, found: dict[str, Any]) -> None:
    if descriptor.full_name in found or descriptor.GetOptions().map_entry:
        return
    found[descriptor.full_name] = descriptor
    for field in descriptor.fields:
        if field.message_type is not None:
            _collect(field.message_type, found)


def test_new_message_types_need_no_change_here() -> None:
    """The strategies also draw all fields of a message of another protocol (the worker's)."""
    descriptor = worker_pb2.DESCRIPTOR.message_types_by_name["Submit"]
    kind = message_factory.GetMessageClass(descriptor)
    params = descriptor.fields_by_name["params"].message_type
    assert params is not None
    inner = {field.name for field in params.fields}
    messages = messages_of(descriptor)
    assert names_drawn(messages, inner, lambda each: set_fields(each.params)) == inner
    assert all(
        len(kind.FromString(each.SerializeToString()).ListFields()) >= 0
        for each in drawn_from(messages)
    )


# ------------------------------------------------------------ replay


def drawn(seed: int) -> list[Input]:
    """Return inputs drawn with a seed."""
    routes = [HttpRoute("http", "POST", "/v1/completions"), HttpRoute("admin", "GET", "/status")]
    seen: list[Input] = []
    draw(routes, 100, seed, seen.append)
    return seen


def test_inputs_survive_the_command_line() -> None:
    for each in drawn(1):
        assert from_text(to_text(each)) == each


def test_same_seed_draws_the_same_inputs() -> None:
    assert len(drawn(1)) > 50
    assert drawn(1) == drawn(1) != drawn(2)


def test_replay_command_sends_the_input() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz", "--replay", to_text(CALL)],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.stdout.splitlines()[-1] == "no problem", done.stderr
    assert done.returncode == 0
