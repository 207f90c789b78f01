"""A constrained answer whose worker ends midway continues unchanged on another worker."""

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.router.config import RouterConfig
from penstock.workers.config import WorkerConfig
from penstock.workers.service.grpc_service import serve_worker
from tests.support.openai_client import connect
from tests.support.served_router import serving, until

pytestmark = pytest.mark.asyncio(loop_scope="function")

FOLDER = Path(__file__).parents[2] / "penstock" / "models" / "demo-small"
SCHEMA = {
    "type": "array",
    "items": {"type": "string", "minLength": 3, "maxLength": 9},
    "minItems": 12,
    "maxItems": 20,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "words", "schema": SCHEMA}}


async def test_answer_continues_exactly_on_another_worker() -> None:
    configs = [
        WorkerConfig(name, FOLDER, kv_cache_mib=8, deterministic=True) for name in ("w0", "w1")
    ]
    workers = {config.name: await serve_worker(config) for config in configs}
    async with serving(RouterConfig(FOLDER, "demo")) as served, connect(served) as client:
        frontend = served.router.frontend
        await frontend.set_workers({name: each.address for name, each in workers.items()})
        await until(lambda: frontend.num_workers == 2)

        async def pieces() -> Any:
            return await client.completions.create(
                model="demo",
                prompt="Once",
                seed=4,
                max_tokens=300,
                stream=True,
                extra_body={"response_format": FORMAT},
            )

        whole = "".join([chunk.choices[0].text async for chunk in await pieces()])
        text = ""
        stopped = ""
        async for chunk in await pieces():
            text += chunk.choices[0].text
            if not stopped:
                busy = {each.worker: each.num_requests for each in frontend.workers()}
                stopped = max(busy, key=lambda name: busy[name])
                await workers[stopped].stop()
        assert len(json.loads(whole)) >= 12
        assert text == whole
        assert frontend.num_workers == 1
    for name, worker in workers.items():
        if name != stopped:
            await worker.stop()
