"""Measures time, CPU time and memory of one start of `penstock serve`, and looks for leftovers.

`python -m penstock.loadtests.micro.start [ARGUMENTS OF serve]` prints one JSON object. Leftovers
are temporary files, processes, open ports and shared memory that remain after the server has ended.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from penstock.loadtests.micro.server import free_ports

READY_WORDS = " is served after "
READY_WITHIN = 300.0  # seconds
STOPPED_WITHIN = 120.0
SECONDS_TO_SETTLE = 1.0
MB = 1e6
_SHARED = Path("/dev/shm")


def main(arguments: Sequence[str]) -> int:
    """Measure one start. Return 0 if the server started, exited with 0 and left nothing behind."""
    segments, load = shared_memory(), os.getloadavg()[0]
    ports = free_ports(2)
    with tempfile.TemporaryDirectory(prefix="start-") as folder:
        output = Path(folder, "output")
        # A short name, because the paths of sockets in this folder have a length limit.
        temp = Path(folder, "t")
        temp.mkdir()
        run = _run(arguments, ports, temp, output)
        run["left_behind"] |= {
            "shared_memory": left_in_shared_memory(segments),
            "temp_files": sorted(path.name for path in temp.iterdir()),
        }
        run["output"] = output.read_text().splitlines()
    run["load_average_before"] = round(load, 2)
    print(json.dumps(run, indent=2))
    clean = run["exit_code"] == 0 and not any(run["left_behind"].values())
    return 0 if clean and run["ready_seconds"] is not None else 1


def _run(
    arguments: Sequence[str], ports: Sequence[int], temp: Path, output: Path
) -> dict[str, Any]:
    """Start the server, measure its memory when it is ready, stop it, and return the results."""
    command = [sys.executable, "-m", "penstock.cli", "serve", *arguments]
    command += ["--http-port", str(ports[0]), "--grpc-port", str(ports[1]), "--admin-port", "0"]
    began = time.monotonic()
    with output.open("w") as file:
        serving = subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "TMPDIR": str(temp)},
        )
    ready = _wait_until_ready(serving, output, began)
    cpu_seconds = _cpu_seconds(serving.pid)
    time.sleep(SECONDS_TO_SETTLE)
    memory, processes = _memory(serving.pid), _tree(serving.pid)
    code, stopping = _stop(serving)
    return {
        "ready_seconds": ready,
        "cpu_seconds": cpu_seconds,
        "pss_mb": round(sum(memory.values()), 1),
        "pss_mb_by_process": {name: round(size, 1) for name, size in sorted(memory.items())},
        "num_processes": len(processes),
        "stop_seconds": stopping,
        "exit_code": code,
        "left_behind": {
            "processes": [process.pid for process in processes if _is_alive(process)],
            "ports": [port for port in ports if _is_open(port)],
        },
    }


def _wait_until_ready(
    serving: "subprocess.Popen[bytes]", output: Path, began: float
) -> float | None:
    """Wait until the server reports that it is ready. Return the seconds, or None on failure."""
    while time.monotonic() - began < READY_WITHIN and serving.poll() is None:
        if READY_WORDS in output.read_text():
            return round(time.monotonic() - began, 2)
        time.sleep(0.02)
    return None


def _stop(serving: "subprocess.Popen[bytes]") -> tuple[int | None, float]:
    """Stop the server with SIGINT, as Ctrl-C does. Return its exit code and the seconds it took."""
    began = time.monotonic()
    with suppress(ProcessLookupError):
        os.killpg(serving.pid, signal.SIGINT)
    with suppress(subprocess.TimeoutExpired):
        serving.wait(STOPPED_WITHIN)
    return serving.poll(), round(time.monotonic() - began, 2)


def _tree(root: int) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(root)
        return [process, *process.children(recursive=True)]
    return []


def _is_alive(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _cpu_seconds(root: int) -> float:
    """Return the CPU time of `root` and its descendants, including those that have ended."""
    seconds = 0.0
    for process in _tree(root):
        with suppress(psutil.NoSuchProcess):
            # User and system time, including that of ended children.
            seconds += sum(process.cpu_times()[:4])
    return round(seconds, 1)


def _memory(root: int) -> dict[str, float]:
    """Return the PSS in MB of `root` and all its descendants, summed by process name."""
    sizes: dict[str, float] = {}
    for process in _tree(root):
        with suppress(psutil.NoSuchProcess):
            name = _name(process)
            sizes[name] = sizes.get(name, 0.0) + process.memory_full_info().pss / MB
    return sizes


def _name(process: psutil.Process) -> str:
    line = process.cmdline()
    if line and line[0].startswith(("penstock:", "ray::")):
        return line[0]
    script = next((word for word in line if word.endswith(".py")), process.name())
    return "penstock serve" if "penstock.cli" in line else Path(script).name


def _is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def shared_memory() -> set[str]:
    """Return the names of all shared memory segments of this machine."""
    return {path.name for path in _SHARED.iterdir()} if _SHARED.is_dir() else set()


def left_in_shared_memory(before: set[str]) -> list[str]:
    """Return the segments that did not exist in `before` and that no process maps.

    A segment that is mapped belongs to another program.
    """
    found = shared_memory() - before
    used = set().union(*map(_mapped, psutil.process_iter()))
    return sorted(name for name in found - used if (_SHARED / name).exists())


def _mapped(process: psutil.Process) -> set[str]:
    with suppress(OSError, psutil.Error):
        maps = Path(f"/proc/{process.pid}/maps").read_text()
        return set(re.findall(rf"{_SHARED}/(\S+)", maps))
    return set()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
