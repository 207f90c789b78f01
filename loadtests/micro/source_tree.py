"""Runs programs of another source tree of Penstock.

The tree may be an older commit.
"""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REGRESSION_CHECK = ("penstock.loadtests.micro.regression_check", "penstock.loadtests.guard")
STANDALONE_ROUTER = ("penstock.loadtests.micro.standalone_router", "penstock.loadtests.lone_router")
STUB_WORKERS = ("penstock.loadtests.micro.stub_workers", "penstock.loadtests.stubs")
"""Names of the same module: the current name, then the names in older commits."""

_LINE_BYTES = 1 << 20


class ProgramFailed(RuntimeError):
    """Raised if a program of a source tree failed. The message gives the program and the reason."""


@dataclass(frozen=True, slots=True)
class SourceTree:
    """A checkout of Penstock."""

    root: Path

    @classmethod
    def at(cls, root: Path) -> "SourceTree":
        """Return the tree at `root`. Raises ValueError if `root` is not a checkout."""
        if not root.is_dir():
            raise ValueError(f"{root} is not a folder")
        tree = cls(root.resolve())
        for names in (("penstock.cli",), REGRESSION_CHECK, STANDALONE_ROUTER, STUB_WORKERS):
            tree.module(names)
        return tree

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables for a process that should import Penstock from this tree."""
        return {**os.environ, "PYTHONPATH": str(self.root)}

    @property
    def has_admin_port(self) -> bool:
        """True if `penstock serve` of this tree has `--admin-port`.

        Otherwise, the HTTP port serves the metrics.
        """
        return "admin_port" in (self.root / "penstock/cluster/configs.py").read_text("utf-8")

    def module(self, names: tuple[str, ...]) -> str:
        """Return the first of `names` that is in this tree. Raises ValueError if there is none."""
        for name in names:
            path = self.root.joinpath(*name.split("."))
            if path.with_suffix(".py").is_file() or (path / "__init__.py").is_file():
                return name
        raise ValueError(
            f"{self.root} is not a checkout of Penstock: expected one of the modules "
            f"{', '.join(names)}"
        )

    async def run(self, *arguments: str) -> Any:
        """Run Python with `arguments` and return the last line of its output, parsed as JSON.

        Raises ProgramFailed if the process fails.
        """
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", *arguments),
            cwd=self.root,
            env=self.variables,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            output, errors = await process.communicate()
        finally:
            await _kill(process)
        if process.returncode:
            reason = errors.decode(errors="replace").strip()[-1000:]
            raise ProgramFailed(f"{' '.join(arguments)} in {self.root} failed:\n{reason}")
        return json.loads(output.splitlines()[-1])

    @asynccontextmanager
    async def running(
        self, module: str, *arguments: str, config: Any = None
    ) -> AsyncIterator[tuple[int, Any]]:
        """Run a module that prints one line of JSON when it is ready. It is killed on exit.

        Args:
            config: written to stdin as one line of JSON.

        Yields:
            The process id and the parsed line.
        """
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", module, *arguments),
            cwd=self.root,
            env=self.variables,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_LINE_BYTES,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            if config is not None:
                process.stdin.write(json.dumps(config).encode() + b"\n")
            line = await process.stdout.readline()
            if not line:
                raise ProgramFailed(f"{module} in {self.root} did not start: see its output above")
            yield process.pid, json.loads(line)
        finally:
            await _kill(process)


async def _kill(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
        await process.wait()
