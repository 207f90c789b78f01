"""Each command is encoded to its message, and each message decoded to its event."""

from dataclasses import replace
from math import inf, nan
from typing import Any

import pytest

from penstock.common.sampling_params import SamplingParams
from penstock.common.worker_load import WorkerLoad
from penstock.protos import worker_pb2 as pb
from penstock.protos.worker_codec import decode_sampling_params, pack_tokens, unpack_tokens
from penstock.router.routing import events as ev
from penstock.router.routing.prefix_cache.cache_events import (
    CacheChange,
    CacheEvents,
    CacheSnapshot,
    ResyncCache,
)
from penstock.router.routing.transfer_peers import ConnectPeers, TransferEndpoint
from penstock.router.worker_links import codec
from penstock.router.worker_links.message_checks import SIZES

PARAMS = SamplingParams(temperature=0.5, max_tokens=7, seed=3)
REQUEST = ev.Request(
    9, [1, 2, 3], PARAMS, num_choices=2, priority=-1, salt=b"tenant", external_id="order-66"
)
ENDPOINT = TransferEndpoint("d0", "d0-1", "10.0.0.1:7", "secret")
WELCOME = pb.Welcome(
    worker="d0",
    role="decode",
    block_size=16,
    num_blocks=64,
    max_model_len=512,
    max_sequences=4,
    vocab_size=100,
)


def test_submit_carries_every_field() -> None:
    source = ev.Source("p0", "p0-1", 1, 5, "layout")
    command = ev.Submit("d0", REQUEST, 2, ([4, 5], ()), (False, True), source, 1)
    submit = codec.encode_command(command).submit
    assert (submit.request, submit.attempt, submit.yield_after) == (9, 2, 1)
    assert unpack_tokens(submit.prompt) == [1, 2, 3]
    assert decode_sampling_params(submit.params) == PARAMS
    assert (submit.salt, submit.request_id) == (b"tenant", "order-66")
    logs = [(log.choice, unpack_tokens(log.tokens), log.finished) for log in submit.log]
    assert logs == [(0, [4, 5], False), (1, [], True)]
    assert submit.source == pb.Source(
        worker="p0", incarnation="p0-1", attempt=1, kv_len=5, layout="layout"
    )


def test_packed_prompt_is_sent_as_it_is() -> None:
    request = replace(REQUEST, packed_prompt=pack_tokens([7, 8]))
    command = ev.Submit("w", request, 1, ((), ()), (False, False), None, 0)
    assert unpack_tokens(codec.encode_command(command).submit.prompt) == [7, 8]


def test_first_submit_has_neither_log_nor_source() -> None:
    submit = codec.encode_command(
        ev.Submit("w", REQUEST, 1, ((), ()), (False, False), None, 0)
    ).submit
    assert not submit.log
    assert not submit.HasField("source")


def test_yield_send_and_drop_are_encoded() -> None:
    message = codec.encode_command(ev.Yield("w", 9, 2))
    assert message.WhichOneof("body") == "yield"
    assert getattr(message, "yield") == pb.Yield(request=9, attempt=2)
    send = codec.encode_command(ev.Send("p0", 9, 1, ENDPOINT, 2, 77, 16)).send
    assert send.to == pb.TransferEndpoint(
        worker="d0", incarnation="d0-1", address="10.0.0.1:7", secret="secret"
    )
    assert (send.request, send.attempt, send.to_attempt, send.epoch, send.have) == (9, 1, 2, 77, 16)
    assert not codec.encode_command(ev.Drop("w", 9, 2)).drop.HasField("choice")
    assert codec.encode_command(ev.Drop("w", 9, 2, 0)).drop.HasField("choice")


def test_peers_to_connect_to_are_encoded_and_endpoints_of_workers_decoded() -> None:
    message = codec.encode_command(ConnectPeers("p0", [ENDPOINT]))
    (sent,) = message.connect_peers.destinations
    assert codec.decode_welcome(WELCOME).transfer is None
    with_endpoint = pb.Welcome(transfer=sent)
    with_endpoint.MergeFrom(WELCOME)
    assert codec.decode_welcome(with_endpoint).transfer == ENDPOINT
    assert "secret=" not in repr(ENDPOINT)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        *(
            ({name: size}, f"the worker reports {name} = {size}: must be from 1 to 2147483647")
            for name in SIZES
            for size in (0, 2**31)
        ),
        ({"max_batched_tokens": 2**32 - 1}, "max_batched_tokens"),
        ({"enough_prompt_tokens": 2**31}, "enough_prompt_tokens > 2147483647"),
        ({"role": "root"}, "unknown role 'root'"),
        ({"layout": "x" * 5000}, "a text of more than 4096 characters"),
        ({"transfer": pb.TransferEndpoint(address="x" * 5000)}, "a text of more than 4096"),
        ({"eos_tokens": range(5000)}, "more than 4096 end tokens"),
        ({"step_bounds": [0.1, nan]}, "step_bounds that are negative, infinite or NaN"),
        ({"step_bounds": [0.2, 0.1]}, "step_bounds that are not in ascending order"),
        ({"step_token_bounds": range(5000)}, "5000 step_token_bounds: too many"),
        ({"load": pb.Load(step_seconds=inf)}, "a load with a negative or infinite number"),
    ],
)
def test_welcome_with_impossible_values_is_refused(fields: dict[str, Any], message: str) -> None:
    welcome = pb.Welcome()
    welcome.CopyFrom(WELCOME)
    for name in fields:
        welcome.ClearField(name)
    welcome.MergeFrom(pb.Welcome(**fields))
    with pytest.raises(ValueError, match=message):
        codec.decode_welcome(welcome)


@pytest.mark.parametrize("name", ["step_seconds", "prompt_seconds", "expert_imbalance"])
@pytest.mark.parametrize("value", [-1.0, inf, -inf, nan])
def test_step_with_an_impossible_load_is_refused(name: str, value: float) -> None:
    load = pb.Load(**{name: value})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a load with a negative or infinite number, or a NaN"):
        codec.decode_event("w", pb.ToRouter(step=pb.Step(load=load)))


@pytest.mark.parametrize("field", ["logprobs", "prompts"])
def test_logprobs_without_tokens_are_refused(field: str) -> None:
    entries = [pb.TokenLogprobs(tokens=[1, 2], values=[-1.0])]
    found = entries if field == "logprobs" else [pb.PromptLogprobs(entries=entries)]
    with pytest.raises(ValueError, match="different numbers of tokens and logprobs"):
        codec.decode_event("w", pb.ToRouter(step=pb.Step(**{field: found})))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["step_counts", "step_token_counts"])
def test_histogram_with_too_many_buckets_is_refused(name: str) -> None:
    load = pb.Load(**{name: [1] * 5000})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a histogram of more than 4096 buckets"):
        codec.decode_event("w", pb.ToRouter(step=pb.Step(load=load)))


def test_step_with_all_fields_is_decoded() -> None:
    step = pb.Step(
        request=[9, 9],
        attempt=[2, 2],
        choice=[0, 1],
        position=[4, 0],
        token=[11, 12],
        finish=[pb.FINISH_NONE, pb.FINISH_STOP],
        load=pb.Load(
            queued=1, queued_tokens=2, running=3, free_blocks=4, step_micros=1500, steps=9
        ),
    )
    entry = step.logprobs.add(row=1, chosen=-0.5, tokens=[12], values=[-0.5])
    step.ended.add(request=8, attempt=1, reason="not finite")
    event = codec.decode_event("w", pb.ToRouter(step=step))
    assert isinstance(event, ev.Stepped)
    assert event.tokens == ev.TokenColumns(
        [9, 9], [2, 2], [0, 1], [4, 0], [11, 12], [ev.Finish.NONE, ev.Finish.STOP], {1: entry}
    )
    assert event.ended == [(8, 1, "not finite")]
    assert event.load == WorkerLoad(
        queued=1, queued_tokens=2, running=3, free_blocks=4, last_step_seconds=0.0015, num_steps=9
    )


def test_large_step_is_split_into_steps_with_the_same_content() -> None:
    count = 10
    step = pb.Step(load=pb.Load(running=3))
    for row in range(count):
        for column in (step.request, step.attempt, step.choice, step.position, step.token):
            column.append(row)
        step.finish.append(pb.FINISH_NONE)
        if row % 3:
            step.logprobs.add(row=row, chosen=-row)
    step.ended.add(request=8, attempt=1, reason="not finite")
    step.cached.add(request=4, attempt=2, tokens=32)
    step.preempted.append(5)
    step.prompts.append(SCORED)
    whole = codec.decode_event("w", pb.ToRouter(step=step))
    assert isinstance(whole, ev.Stepped)
    for size in (1, 3, 4, 9, 10, 11):
        found = list(codec.slices_of(whole, size))
        assert [len(each.tokens) for each in found[:-1]] == [size] * (len(found) - 1)
        rows = [row for each in found for row in each.tokens.rows()]
        assert rows == list(whole.tokens.rows())
        logprobs = [each.tokens.logprobs.get(row) for each in found for row in range(size)]
        assert logprobs[:count] == [whole.tokens.logprobs.get(row) for row in range(count)]
        first, last = found[0], found[-1]
        assert (first.prompts, first.cached) == (whole.prompts, whole.cached)
        assert (first.preempted, whole.preempted) == ([5], [5])
        assert (last.load, last.ended) == (whole.load, whole.ended)
        assert all(each.load is None and not each.ended for each in found[:-1])
        assert not any(each.prompts or each.cached or each.preempted for each in found[1:])


SCORED = pb.PromptLogprobs(
    request=4, attempt=2, position=7, entries=[pb.TokenLogprobs(chosen=-1.5, rank=2)]
)
NO_TOKENS = ev.TokenColumns([], [], [], [], [], [])
MESSAGES = [
    (pb.ToRouter(step=pb.Step()), ev.Stepped("w", NO_TOKENS, None, [], [], [], [])),
    (
        pb.ToRouter(step=pb.Step(prompts=[SCORED])),
        ev.Stepped(
            "w", NO_TOKENS, None, [], [ev.ScoredPrompt(4, 2, 7, [SCORED.entries[0]])], [], []
        ),
    ),
    (
        pb.ToRouter(step=pb.Step(cached=[pb.CachedPrompt(request=4, attempt=2, tokens=32)])),
        ev.Stepped("w", NO_TOKENS, None, [], [], [(4, 2, 32)], []),
    ),
    (
        pb.ToRouter(step=pb.Step(preempted=[4, 5, 4])),
        ev.Stepped("w", NO_TOKENS, None, [], [], [], [4, 5, 4]),
    ),
    (
        pb.ToRouter(yielded=pb.Yielded(request=9, attempt=1, kv_len=5)),
        ev.Yielded("w", 9, 1, 5),
    ),
    (
        pb.ToRouter(
            ready=pb.Ready(
                request=9,
                attempt=2,
                epoch=7,
                have=16,
                at=pb.TransferEndpoint(
                    worker="d0", incarnation="d0-1", address="10.0.0.1:7", secret="secret"
                ),
            )
        ),
        ev.Ready("w", 9, 2, 7, 16, ENDPOINT),
    ),
    (
        pb.ToRouter(received=pb.Received(request=9, attempt=2, epoch=7, bytes=1)),
        ev.Received("w", 9, 2, 7, 1),
    ),
    (
        pb.ToRouter(failed=pb.Failed(request=9, attempt=2, epoch=7, reason="late")),
        ev.Failed("w", 9, 2, 7, "late"),
    ),
    (
        pb.ToRouter(rejected=pb.Rejected(request=9, attempt=2, reason="full", never=True)),
        ev.Rejected("w", 9, 2, "full", True),
    ),
    (pb.ToRouter(draining=pb.Draining()), ev.Draining("w")),
    (
        pb.ToRouter(
            cache_snapshot=pb.CacheSnapshot(
                incarnation="i", next=9, chunk=1, last=True, blocks=[1, 2**64 - 1]
            )
        ),
        CacheSnapshot("w", "i", 9, 1, True, [1, 2**64 - 1]),
    ),
    (pb.ToRouter(heartbeat=pb.Heartbeat()), ev.Heartbeat("w")),
]


@pytest.mark.parametrize(("message", "event"), MESSAGES)
def test_message_is_decoded_to_its_event(message: pb.ToRouter, event: ev.Event) -> None:
    assert codec.decode_event("w", message) == event


def test_cache_events_of_a_step_are_decoded_in_order() -> None:
    changes = [
        pb.CacheChange(evicted=[7, 8]),
        pb.CacheChange(stored=[1, 2, 5], parents=[3, 0], lengths=[2, 1]),
    ]
    message = pb.CacheEvents(incarnation="i", first=4, changes=changes)
    expected = [CacheChange([7, 8], [], [], []), CacheChange([], [1, 2, 5], [3, 0], [2, 1])]
    assert codec.decode_cache_events("w", message) == CacheEvents("w", "i", 4, expected)


def test_request_for_a_snapshot_is_encoded() -> None:
    assert codec.encode_command(ResyncCache("w", "why")).HasField("resync_cache")


@pytest.mark.parametrize(
    "columns",
    [
        {"request": [9], "attempt": [1], "choice": [0], "position": [0], "token": [5, 6]},
        {"request": [9], "attempt": [1], "choice": [0], "position": [0], "token": [5]}
        | {"finish": [9]},
    ],
)
def test_columns_of_unequal_length_and_unknown_finishes_are_refused(
    columns: dict[str, list[int]],
) -> None:
    step = pb.Step(**columns)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"differ in length|unknown finish"):
        codec.decode_event("w", pb.ToRouter(step=step))


def test_every_message_of_the_protocol_is_known() -> None:
    (bodies,) = pb.ToRouter.DESCRIPTOR.oneofs
    assert {field.name for field in bodies.fields} - {"welcome"} == set(codec.DECODERS)
    (bodies,) = pb.ToWorker.DESCRIPTOR.oneofs
    # Hello and heartbeat are sent without an encoder.
    assert len(bodies.fields) - 2 == len(codec.ENCODERS)
