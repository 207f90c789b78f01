"""Adapter for the proxy of LiteLLM, with one worker process and no database.

The proxy forwards to one OpenAI server.
"""

import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from host import running

_VARIABLES = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # prevents a download of the table of prices
    "LITELLM_LOG": "ERROR",
    "LITELLM_MODE": "PRODUCTION",
}


@contextlib.contextmanager
def router(options: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Run the proxy and yield its version."""
    model = {
        "model": "text-completion-openai/stub",
        "api_base": f"http://{options['stub']}/v1",
        "api_key": "none",
    }
    config = {
        "model_list": [{"model_name": "stub", "litellm_params": model}],
        "litellm_settings": {"telemetry": False, "request_timeout": 600},
    }
    host, port = options["address"].split(":")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(json.dumps(config))  # the JSON is also valid YAML
        command = [
            *(str(Path(sys.executable).parent / "litellm"), "--config", str(path)),
            *("--host", host, "--port", port, "--num_workers", "1", "--telemetry", "False"),
        ]
        variables = {**_VARIABLES, "LITELLM_MASTER_KEY": options["key"]}
        with running(command, f"http://{options['address']}/health/readiness", variables):
            yield {"litellm": version("litellm"), "worker processes": 1}
