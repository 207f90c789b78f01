"""Compile the kernels of AOT cases in worker processes, and report rule violations.

A job compiles the kernels of one case for one chip. If the compiler crashes, only that job fails.
"""

import dataclasses
import importlib
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from queue import Queue
from typing import Any

from triton.runtime.jit import JITFunction

from penstock.kernels.triton_common.launch import DeviceInfo, Launch, record_launches
from tests.aot.case import AotCase, kernel_name
from tests.aot.compiling import compiled
from tests.aot.rules import complaints

NUM_PROCESSES = 2


@dataclass(frozen=True, slots=True)
class Job:
    """One AOT case, to be compiled for one chip."""

    module: str  # import name of a module with `aot_cases`
    case: int  # index in `aot_cases`
    chip: DeviceInfo


@dataclass(frozen=True, slots=True)
class Report:
    """The result of one kernel of a case on one chip."""

    module: str
    case: str
    chip: str
    kernel: str
    artefact: dict[str, Any] | None  # fields of `Artefact`; None: compilation failed
    complaints: list[str]


def jobs_of(modules: Sequence[str]) -> list[Job]:
    return [
        Job(module, number, chip)
        for module in modules
        for number, case in enumerate(cases_of(module))
        for chip in case.targets
    ]


def cases_of(module: str) -> list[AotCase]:
    return list(importlib.import_module(module).aot_cases())


def run(jobs: Sequence[Job]) -> list[Report]:
    """Run the jobs in parallel; return their reports in the order of the jobs."""
    processes: Queue[_CompilerProcess] = Queue()
    for _ in range(NUM_PROCESSES):
        processes.put(_CompilerProcess())

    def one(job: Job) -> list[Report]:
        process = processes.get()
        try:
            return process.run(job)
        finally:
            processes.put(process)

    with ThreadPoolExecutor(NUM_PROCESSES) as threads:
        found = [report for job_reports in threads.map(one, jobs) for report in job_reports]
    while not processes.empty():
        processes.get().close()
    return found


class _CompilerProcess:
    """A compiler process, replaced if it crashes."""

    def __init__(self) -> None:
        self._pool = self._fresh()

    def run(self, job: Job) -> list[Report]:
        try:
            return self._pool.submit(reports, job).result()
        except BrokenProcessPool:
            self._pool = self._fresh()
            case = cases_of(job.module)[job.case]
            return [_report(job, case, "?", ["the compiler crashed"])]

    def close(self) -> None:
        self._pool.shutdown()

    def _fresh(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(1, mp_context=get_context("spawn"))


def reports(job: Job) -> list[Report]:
    """Compile a job in this process."""
    case = cases_of(job.module)[job.case]
    launches = _launches(case, job.chip)
    absent = {*case.products, *case.streams} - {kernel_name(each.kernel) for each in launches}
    missing = [_report(job, case, name, ["is not launched by its case"]) for name in sorted(absent)]
    return missing + [_compiled(job, case, each) for each in launches]


def _compiled(job: Job, case: AotCase, launch: Launch) -> Report:
    name = kernel_name(launch.kernel)
    try:
        artefact = compiled(launch, job.chip)
    except Exception as error:
        return _report(job, case, name, [f"does not compile: {_innermost(error)}"])
    found = complaints(artefact, name, case, job.chip)
    numbers = {**dataclasses.asdict(artefact), "wide_share": artefact.wide_share}
    return _report(job, case, name, found, numbers)


def _innermost(error: BaseException) -> str:
    """Format the innermost cause, because Triton's outer errors quote the whole source."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"


def _report(
    job: Job,
    case: AotCase,
    kernel: str,
    complaints: list[str],
    artefact: dict[str, Any] | None = None,
) -> Report:
    return Report(job.module, case.name, job.chip.name, kernel, artefact, complaints)


def _launches(case: AotCase, chip: DeviceInfo) -> list[Launch]:
    with record_launches(chip) as launches:
        case.call()
    return launches


def forgotten(cases: str, modules: Sequence[str]) -> list[str]:
    """Return the kernels of `modules` that no case of the module `cases` launches."""
    launched = {
        id(launch.kernel)
        for case in cases_of(cases)
        for chip in case.targets
        for launch in _launches(case, chip)
    }
    kernels = [each for module in modules for each in _kernels_of(module)]
    return sorted(kernel_name(each) for each in kernels if id(each) not in launched)


def _kernels_of(module: str) -> list[JITFunction]:
    """Return the kernels that a module defines, without functions that only kernels call."""
    functions = [
        each
        for each in vars(importlib.import_module(module)).values()
        if isinstance(each, JITFunction) and each.fn.__module__ == module
    ]
    return [each for each in functions if "program_id" in each.src]
