"""AOT compilation: each rule reports a broken kernel and accepts the corrected kernel."""

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton")

from penstock.kernels.attention import triton as attention_kernels
from penstock.kernels.attention import triton_launch
from penstock.kernels.norm.op import rms_norm
from penstock.kernels.triton_common.launch import INTERPRETED, DeviceInfo, record_launches
from tests.aot.case import SM_80, SM_89, SM_90, SM_100, meta
from tests.aot.compiling import compiled
from tests.aot.jobs import Report, cases_of, forgotten, jobs_of, reports, run
from tests.aot.pipelining import Loop
from tests.aot.rules import complaints
from tests.support import broken_kernels
from tests.support.mutants import NOTHING, Change, mutant_of, replaced

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(INTERPRETED, reason="interpreted kernels are not compiled"),
]

JOBS = {
    (cases_of(job.module)[job.case].name, job.chip.name): job
    for job in jobs_of([broken_kernels.__name__])
}


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "triton"))


def single_report(case: str, chip: str) -> Report:
    (report,) = reports(JOBS[case, chip])
    return report


@pytest.mark.parametrize(
    ("case", "chip", "complaint"),
    [
        ("spills", "sm_90", "spills: "),
        ("no tensor cores", "sm_90", "does not use tensor cores"),
        ("narrow reads", "sm_90", "reads only 0% of its bytes with 16-byte loads"),
        ("narrow reads", "gfx942", "reads only 0% of its bytes with 16-byte loads"),
        ("does not compile", "sm_90", "does not compile: "),
    ],
)
def test_a_kernel_that_breaks_a_rule_is_reported(case: str, chip: str, complaint: str) -> None:
    (found,) = single_report(case, chip).complaints
    assert found.startswith(complaint)


@pytest.mark.parametrize(
    ("case", "chip"),
    [
        ("hoards no more", "sm_90"),
        ("tensor cores", "sm_90"),
        ("tensor cores", "gfx942"),
        ("wide reads", "sm_90"),
        ("wide reads", "gfx942"),
    ],
)
def test_the_corrected_kernel_passes(case: str, chip: str) -> None:
    report = single_report(case, chip)
    assert report.complaints == []
    assert report.artefact is not None
    assert report.artefact["registers"] > 0


def test_too_much_shared_memory_is_reported() -> None:
    job = JOBS["tensor cores", "sm_90"]
    case, chip = cases_of(job.module)[job.case], job.chip
    with record_launches(chip) as launches:
        case.call()
    artefact = compiled(launches[0], chip)
    small = replace(chip, shared_bytes=artefact.shared_bytes - 1)
    assert complaints(artefact, "_multiplier", case, chip) == []
    (found,) = complaints(artefact, "_multiplier", case, small)
    assert found.startswith(f"shared memory: {artefact.shared_bytes} bytes")


LOADS_ITS_BLOCK: Change = (
    "block = next_block.to",
    "block = tl.load(table + columns // S, mask=columns < high, other=0).to",
)
"""A change of the kernel's source: the address of a tile depends on a load of the same
iteration."""

DECODE = 1  # index of the decode launch (split KV) among the launches of the case


@pytest.mark.parametrize("chip", [SM_80, SM_89, SM_90, SM_100], ids=lambda chip: chip.name)
def test_attention_that_loads_its_own_block_numbers_is_not_pipelined(
    chip: DeviceInfo, tmp_path: Path
) -> None:
    """Compile the decode kernel in three variants: unchanged, `LOADS_ITS_BLOCK`, too few stages."""
    case = cases_of("tests.aot.cases.attention")[0]

    def found(change: Change, **options: int) -> list[str]:
        mutant = mutant_of(attention_kernels, change, tmp_path)
        with replaced(triton_launch, mutant, "attend_kernel"), record_launches(chip) as launches:
            case.call()
        decode = launches[DECODE]
        decode = replace(decode, options={**decode.options, **options})
        return complaints(compiled(decode, chip), "attend_kernel", case, chip)

    assert found(NOTHING) == []
    for kept in (found(LOADS_ITS_BLOCK), found(NOTHING, num_stages=2)):
        assert [text.partition(":")[0] for text in kept] == ["copies not pipelined"]


def test_too_few_resident_warps_are_reported() -> None:
    job = JOBS["tensor cores", "sm_90"]
    case, chip = cases_of(job.module)[job.case], job.chip
    with record_launches(chip) as launches:
        case.call()
    artefact = compiled(launches[0], chip)
    four_warps = replace(artefact, num_warps=4, registers=128, shared_bytes=120 << 10, loops=[])
    (found,) = complaints(replace(four_warps, loops=[Loop(2, 2, 2)]), "_multiplier", case, chip)
    assert found.startswith("4 warps on a multiprocessor of sm_90, at least 8 expected")
    assert complaints(replace(four_warps, loops=[Loop(2, 3, 4)]), "_multiplier", case, chip) == []
    two_programs = replace(four_warps, shared_bytes=100 << 10, loops=[Loop(2, 2, 2)])
    assert complaints(two_programs, "_multiplier", case, chip) == []
    many_registers = replace(two_programs, registers=255, num_warps=8)
    assert complaints(many_registers, "_multiplier", case, chip) == []


def test_a_kernel_named_by_a_case_and_not_launched_is_reported() -> None:
    first, second = reports(JOBS["absent", "sm_90"])
    assert (first.kernel, first.complaints) == ("_multiplier", ["is not launched by its case"])
    assert (second.kernel, second.complaints) == ("_copier", [])


def test_kernels_without_a_case_are_listed() -> None:
    assert forgotten("tests.aot.cases.norm", ["penstock.kernels.norm.triton"]) == []
    assert forgotten("tests.aot.cases.rope", ["penstock.kernels.norm.triton"]) == ["_norm_kernel"]
    # Leave out the case "dies", which would end this process.
    cases = [case for case in broken_kernels.aot_cases() if case.name != "dies"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(broken_kernels, "aot_cases", lambda: iter(cases))
        assert forgotten(broken_kernels.__name__, [broken_kernels.__name__]) == ["_outsider"]


def test_recorded_launches_do_not_run() -> None:
    with record_launches(SM_90) as launches:
        rms_norm(meta(3, 64), meta(64), 1e-5)
    assert [launch.arguments[0].shape for launch in launches] == [(3, 1, 64)]


@pytest.mark.process
def test_a_crash_of_the_compiler_fails_only_its_job() -> None:
    jobs = [JOBS["dies", "sm_90"], JOBS["wide reads", "sm_90"], JOBS["dies", "sm_90"]]
    assert [report.complaints for report in run(jobs)] == [
        ["the compiler crashed"],
        [],
        ["the compiler crashed"],
    ]


def test_measures_are_cached_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    fresh = single_report("wide reads", "sm_90")
    assert list(tmp_path.glob("*.json"))
    monkeypatch.setattr("tests.aot.compiling._cuda", None)
    assert single_report("wide reads", "sm_90") == fresh
