"""Each section about code in docs/gpu.md says how its claims are known and what to check first."""

import re
from pathlib import Path

import pytest

TEXT = (Path(__file__).resolve().parents[1] / "docs" / "gpu.md").read_text()
CODE = TEXT.partition("\n## Code\n")[2].partition("\n## ")[0]
SECTIONS = {each.partition("\n")[0]: each for each in CODE.split("\n### ")[1:]}
KNOWN = re.compile(r"\*(run|compiled|reasoned)\b", re.IGNORECASE)


def test_the_page_has_sections_about_code() -> None:
    assert {"Kernels", "KV transfer", "CUDA graphs"} < SECTIONS.keys()


@pytest.mark.parametrize("name", SECTIONS)
def test_section_has_its_labels(name: str) -> None:
    assert KNOWN.search(SECTIONS[name]), "it does not say how it is known"
    assert "*Look at first*:" in SECTIONS[name]
