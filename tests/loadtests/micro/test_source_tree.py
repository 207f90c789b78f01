from pathlib import Path

import pytest

from penstock.loadtests.micro.source_tree import REGRESSION_CHECK, ProgramFailed, SourceTree

ROOT = Path(__file__).resolve().parents[3]


def test_this_tree_has_the_current_names() -> None:
    tree = SourceTree.at(ROOT)
    assert tree.module(REGRESSION_CHECK) == "penstock.loadtests.micro.regression_check"


@pytest.fixture
def tree(tmp_path: Path) -> SourceTree:
    """A source tree with its own package `penstock`, which hides the installed package."""
    package = tmp_path / "penstock"
    package.mkdir()
    (package / "__init__.py").write_text("NAME = 'other'\n")
    (package / "program.py").write_text(
        "import sys, penstock\n"
        'print(f\'{{"name": "{penstock.NAME}", "got": {input()}}}\', flush=True)\n'
        "sys.stdin.read()\n"
    )
    return SourceTree(tmp_path)


@pytest.mark.process
async def test_programs_import_from_their_tree(tree: SourceTree, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import json, penstock\nprint('log')\nprint(json.dumps(penstock.NAME))\n")
    assert await tree.run(str(script)) == "other"
    script.write_text("import sys\nsys.exit(sys.argv[1])\n")
    with pytest.raises(ProgramFailed, match=r"(?s)script\.py reason in .* failed:\nreason"):
        await tree.run(str(script), "reason")


@pytest.mark.process
async def test_running_program_reads_its_configuration(tree: SourceTree) -> None:
    async with tree.running("penstock.program", config={"a": 1}) as (pid, line):
        assert line == {"name": "other", "got": {"a": 1}}
        assert Path(f"/proc/{pid}").exists()
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.process
async def test_program_that_does_not_start_is_reported(tree: SourceTree) -> None:
    with pytest.raises(ProgramFailed, match="did not start"):
        async with tree.running("penstock.no_such_module"):
            pytest.fail("it must not start")
