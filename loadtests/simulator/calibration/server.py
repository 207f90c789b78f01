"""A running server, with its status, its step records and the loads that are sent to it."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import numpy as np

from penstock.loadtests.bench.client_grpc import GrpcClient
from penstock.loadtests.bench.client_http import HttpClient
from penstock.loadtests.bench.clients import ServerUnusable, Target
from penstock.loadtests.bench.load import Load
from penstock.loadtests.bench.metrics import Outcome
from penstock.loadtests.bench.workload import Planned, Prompts, ordinary_tokens
from penstock.loadtests.simulator.calibration.fit import Steps, with_engine_time
from penstock.loadtests.simulator.model.timing import Floats

_TIMEOUT_SECONDS = 30.0

Records = Mapping[str, Mapping[str, Sequence[float]]]
"""Reply of /steps: columns of each worker's latest steps."""


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Workers of a server, as the server's /status reports them."""

    pools: Mapping[str, int]  # number of ready workers by role
    max_sequences: int  # maximum sequences per worker
    max_batched_tokens: int  # maximum tokens of a step
    kv_blocks: int  # number of KV blocks per worker
    kv_bytes: float  # bytes per position in recent KV transfers; 0 without transfers
    transfer_bandwidth: float  # bytes per second of KV transfers; 0 without transfers
    transfer_seconds: float  # fixed seconds of each KV transfer
    block_size: int = 16  # tokens of a KV block
    ttft_slo_seconds: float = 0.0  # SLO of the time to first token; 0 means no SLO
    tpot_slo_seconds: float = 0.0  # SLO of the time per output token; 0 means no SLO
    enough_prompt_tokens: int = 0  # see `SchedulerConfig` of workers


def admin_address(address: str) -> str:
    """Return the default address of the operators' port, for a server's client address."""
    split = urlsplit(address)
    port = {9000: 8001}.get(split.port or 0, (split.port or 8000) + 1)
    return f"http://{split.hostname}:{port}"


def arrangement_of(status: Mapping[str, Any]) -> Arrangement:
    """Read the workers and the SLOs from the reply of /status.

    If the workers differ in a size, the result has the smallest one.

    Raises:
        ServerUnusable: no worker is ready, or the server is of another release.
    """
    try:
        return _arrangement_of(status)
    except KeyError as error:
        raise ServerUnusable(
            f"the server's /status has no {error}: use the same release for the server and for "
            "this command"
        ) from None


def _arrangement_of(status: Mapping[str, Any]) -> Arrangement:
    ready = [each for each in status["workers"] if each["numbers"] and each["state"] == "ready"]
    if not ready:
        raise ServerUnusable("the server has no worker that is ready: wait until one is ready")
    pools: dict[str, int] = {}
    for each in ready:
        pools[each["role"]] = pools.get(each["role"], 0) + 1
    cost = status["kv_transfer_cost"]
    numbers = [each["numbers"] for each in ready]
    block_size = min(each["block_size"] for each in numbers)
    kv_tokens = min(sum(each["blocks"].values()) * each["block_size"] for each in numbers)
    return Arrangement(
        pools,
        min(each["places"] for each in numbers),
        min(each["max_batched_tokens"] for each in numbers),
        kv_tokens // block_size,
        cost["bytes_per_token"],
        cost["bytes_per_second"],
        cost["fixed_seconds"],
        block_size,
        status["ttft_slo_seconds"],
        status["tpot_slo_seconds"],
        min(each["enough_prompt_tokens"] for each in numbers),
    )


class MeasuredServer:
    """A running server, with its addresses for clients and for operators.

    Args:
        target: address and key for clients.
        admin: address of the operators' port.
    """

    def __init__(self, target: Target, admin: str) -> None:
        self._client = HttpClient(target) if target.address.startswith("http") else _grpc(target)
        headers = {"authorization": f"Bearer {target.api_key}"} if target.api_key else None
        self._admin, self._headers = admin.rstrip("/"), headers
        # Random, so that the server has no prompt of an earlier command in its prefix cache.
        self._seed = secrets.randbits(32)
        self._num_loads = 0
        self._vocabulary = range(0)
        self.max_model_len = 0

    async def connect(self) -> None:
        """Query the server for its vocabulary size and context length. Raises ServerUnusable."""
        served = await self._client.describe()
        if served.vocab_size is None or served.max_model_len is None:
            missing = "vocabulary size" if served.vocab_size is None else "context length"
            raise ServerUnusable(f"the server does not report its {missing}")
        self._vocabulary = ordinary_tokens(served.vocab_size)
        self.max_model_len = served.max_model_len

    async def close(self) -> None:
        await self._client.close()

    async def play(self, plan: Sequence[Planned]) -> list[Outcome]:
        """Send a load with new prompts and return the outcomes by request number.

        Raises ServerUnusable if a request fails, because the figures would be incomplete.
        """
        self._num_loads += 1
        prompts = Prompts(self._vocabulary, self._seed + self._num_loads)
        load = Load(self._client, prompts, plan)
        await load.run()
        failed = [outcome.error for outcome in load.outcomes if outcome.error]
        if failed or len(load.outcomes) < len(plan):
            raise ServerUnusable(
                f"{len(failed)} of {len(plan)} requests failed and "
                f"{len(plan) - len(load.outcomes)} were not completed; first error: "
                f"{failed[0] if failed else 'none'}"
            )
        return sorted(load.outcomes, key=lambda outcome: outcome.number)

    async def arrangement(self) -> Arrangement:
        return arrangement_of(await self._get("/status"))

    async def records(self) -> Records:
        return dict(await self._get("/steps"))

    async def _get(self, path: str) -> dict[str, Any]:
        limit = aiohttp.ClientTimeout(total=_TIMEOUT_SECONDS)
        try:
            async with (
                aiohttp.ClientSession(timeout=limit, headers=self._headers) as session,
                session.get(self._admin + path) as response,
            ):
                if response.status != 200:
                    raise ServerUnusable(
                        f"{self._admin}{path}: HTTP status {response.status}; give the operators' "
                        "address with --admin, and a key with --api-key-file if the server "
                        "requires one"
                    )
                return dict(await response.json())
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise ServerUnusable(
                f"{self._admin}{path}: {str(error) or type(error).__name__}; give the operators' "
                "address with --admin"
            ) from None


def _grpc(target: Target) -> GrpcClient:
    return GrpcClient(target)


def steps_of(records: Records, after: Mapping[str, float]) -> Steps:
    """Return all workers' steps with numbers above `after`. Their durations include engine time."""
    every: list[Steps] = []
    arrays: dict[str, dict[str, Floats]] = {
        worker: {name: np.asarray(column, np.float64) for name, column in columns.items()}
        for worker, columns in records.items()
    }
    for worker, columns in arrays.items():
        others = sum(
            (
                busy_fraction(columns["ended"], columns["seconds"], each["ended"], each["seconds"])
                for name, each in arrays.items()
                if name != worker
            ),
            np.zeros(len(columns["ended"])),
        )
        measured = Steps(
            columns["seconds"],
            columns["tokens"],
            columns["sequences"],
            columns["positions"],
            columns["pairs"],
            others,
        )
        steps = with_engine_time(columns["ended"], measured)
        every.append(steps.select(columns["number"] > after.get(worker, 0)))
    return Steps.joined(every)


def busy_fraction(ended: Floats, seconds: Floats, others: Floats, durations: Floats) -> Floats:
    """Return the fraction [n] of each step in which another worker computed.

    The times of both workers must be from the same clock. Workers that share cores have the same
    clock.

    Args:
        ended: [n] ends of the steps of one worker.
        seconds: [n] durations of these steps.
        others: [m] ends of the steps of another worker, ascending.
        durations: [m] durations of these steps.
    """
    if not len(others):
        return np.zeros(len(ended))
    starts = np.maximum(others - durations, np.concatenate(((-np.inf,), others[:-1])))
    times = np.stack((starts, others), axis=1).reshape(-1)
    # Sum of the busy seconds up to the end of each step.
    total = np.concatenate(((0.0,), (others - starts).cumsum()))
    busy = np.stack((total[:-1], total[1:]), axis=1).reshape(-1)
    within = np.interp(ended, times, busy) - np.interp(ended - seconds, times, busy)
    fraction: Floats = within / np.maximum(seconds, 1e-9)
    return np.clip(fraction, 0.0, 1.0)


def last_numbers(records: Records) -> dict[str, float]:
    """Return the number of the last step of each worker that has steps."""
    return {worker: max(columns["number"], default=0) for worker, columns in records.items()}
