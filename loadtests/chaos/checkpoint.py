"""Provides a checkpoint whose chat template uses `tools`, so that a server accepts tools."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.common.text.tokenizer import ModelTokenizer

NAMES = "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"
"""Text that is inserted before the model's own chat template; it renders the names of the tools."""


@contextmanager
def reading_tools(folder: Path) -> Iterator[Path]:
    """Yield a checkpoint whose chat template uses `tools`: `folder` itself, or a copy of it.

    The copy has another template, and links to all other files. A checkpoint that is not a folder
    or has no template is yielded unchanged.
    """
    source = ModelTokenizer(folder).chat_template if folder.is_dir() else None
    if source is None or "tools" in source.template:
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="penstock-chaos-") as name:
        copy = Path(name) / folder.name
        copy.mkdir()
        for path in folder.iterdir():
            (copy / path.name).symlink_to(path.resolve())
        template = copy / "chat_template.jinja"
        template.unlink(missing_ok=True)
        template.write_text(NAMES + source.template, encoding="utf-8")
        yield copy
