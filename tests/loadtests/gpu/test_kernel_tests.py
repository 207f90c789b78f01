"""The section that runs tests: which count, and that none at all is a failure."""

from penstock.loadtests.gpu.kernel_tests import FOLDERS, ROOT, FileRun, figures_of, files_of_tests


def test_a_file_without_a_test_for_a_device_does_not_count() -> None:
    runs = [
        FileRun("a.py", 0, 1.0, "...\n3 passed in 1s\n"),
        FileRun("b.py", 5, 1.0, "no tests ran\n"),
        FileRun("c.py", 1, 1.0, "\n".join(map(str, range(99))) + "\n1 failed in 1s\n"),
        FileRun("d.py", -1, 9.0, "stopped after 9 s"),
    ]
    figures = figures_of(runs)
    assert list(figures["files"]) == ["a.py", "c.py", "d.py"]
    assert figures["files"]["a.py"]["said"] == "3 passed in 1s"
    assert [failure.split(":")[0] for failure in figures["failures"]] == ["c.py", "d.py"]
    assert "1 failed in 1s" in figures["failures"][0]
    assert "\n0\n" not in figures["failures"][0]  # only the end of it


def test_no_test_at_all_is_a_failure() -> None:
    skipped = figures_of([FileRun("a.py", 0, 1.0, "s\n1 skipped in 1s")])
    assert skipped["failures"] == ["no test of a kernel has passed"]
    assert figures_of([FileRun("b.py", 5, 1.0, "")])["failures"] == [
        "no test of a kernel has passed"
    ]


def test_there_are_files_to_run() -> None:
    names = {path.name for path in files_of_tests(ROOT, FOLDERS)}
    assert {"test_forms.py", "test_runner.py"} <= names
