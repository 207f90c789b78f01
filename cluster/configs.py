"""Builds the configurations of a cluster's routers and workers from the cluster's specification."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from penstock.cluster.placement.placement_plan import WorkerPlacement
from penstock.cluster.spec.spec import ClusterSpec, PoolSpec
from penstock.common.api_key import ApiKey
from penstock.common.block_hash import new_hash_key
from penstock.router.config import ConnectionBounds, RequestBounds, RouterConfig
from penstock.workers.config import WorkerConfig


@dataclass(frozen=True, slots=True)
class ClusterSecrets:
    """Secrets that all routers and workers of a cluster share.

    The supervisor creates them once. A restarted process gets the same secrets, so that its block
    hashes still match those of the other processes.
    """

    # Workers accept only connections from routers that send this token.
    token: str = field(repr=False)
    # Secret key of the root hash, from which each sequence's chain of block hashes starts.
    hash_key: bytes = field(repr=False)

    @classmethod
    def new(cls) -> Self:
        """Return new random secrets."""
        return cls(secrets.token_urlsafe(32), new_hash_key())


def router_config(
    spec: ClusterSpec,
    model: Path,
    shared: ClusterSecrets,
    index: int = 0,
    api_keys: Sequence[ApiKey] = (),
) -> RouterConfig:
    """Return the configuration of router number `index`."""
    http_port, grpc_port, admin_port = spec.ports(index)
    return RouterConfig(
        model=model,
        served_name=spec.model_name,
        aliases=spec.model.aliases,
        name=f"router-{index}",
        host=spec.router.host,
        http_port=http_port,
        grpc_port=grpc_port,
        admin_host=spec.router.admin_host,
        admin_port=admin_port,
        api_keys=tuple(api_keys),
        allowed_origins=spec.router.allowed_origins,
        worker_token=shared.token,
        hash_key=shared.hash_key,
        max_model_len=spec.model.max_model_len,
        no_special_in_completions=spec.router.no_special_in_completions,
        generation_config=spec.model.generation_config,
        chat_template=spec.model.chat_template,
        tool_call_parser=spec.model.tool_call_parser,
        reasoning_parser=spec.model.reasoning_parser,
        max_queued_requests=spec.router.max_queued,
        routing=spec.router.routing,
        max_wait_seconds=spec.router.max_wait_seconds,
        ttft_slo_seconds=spec.engine.ttft_slo_seconds,
        tpot_slo_seconds=spec.engine.tpot_slo_seconds,
        vllm_metrics=spec.router.vllm_metrics,
        waits_for_both=bool(spec.pools.prefill.least and spec.pools.decode.least),
        wakes_workers=spec.pools.may_be_empty,
        worker_timeout_seconds=spec.router.worker_timeout_seconds,
        step_timeout_seconds=spec.engine.step_timeout_seconds,
        bounds=RequestBounds(max_request_cost=spec.router.max_request_cost),
        connections=ConnectionBounds(
            max_connections_per_address=spec.router.max_connections_per_address
        ),
    )


def worker_config(
    spec: ClusterSpec, model: Path, shared: ClusterSecrets, placement: WorkerPlacement
) -> WorkerConfig:
    """Return the configuration of the worker that runs at `placement`.

    All sizes are those of the worker's own pool, even after an operator has changed the worker's
    role. The field `host` is set later, on the node where the worker runs.
    """
    pool: PoolSpec = getattr(spec.pools, placement.role)
    return WorkerConfig(
        name=placement.name,
        model=model,
        role=placement.role,
        token=shared.token,
        hash_key=shared.hash_key,
        block_size=pool.block_size,
        kv_cache_mib=pool.kv_cache_mib,
        max_sequences=pool.max_sequences,
        max_batched_tokens=pool.max_batched_tokens,
        tpot_slo_seconds=spec.engine.tpot_slo_seconds,
        max_model_len=spec.model.max_model_len,
        threads=placement.threads,
        max_threads=placement.max_threads,
        dtype=spec.model.dtype,
        quantization=spec.model.quantization,
        kv_cache_dtype=spec.model.kv_cache_dtype,
        attention_backend=spec.model.attention_backend,
        deterministic=spec.model.deterministic,
        canary_seconds=spec.engine.canary_seconds,
        step_timeout_seconds=spec.engine.step_timeout_seconds,
        crash_dump_dir=(
            None if spec.engine.crash_dump_dir is None else Path(spec.engine.crash_dump_dir)
        ),
        device="cuda" if placement.gpus else "cpu",
        compile_in_background=True,
        tp=placement.tp,
        pp=placement.pp,
        ep=placement.ep,
    )
