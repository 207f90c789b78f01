"""Message contents that are lists of text parts."""

from pathlib import Path
from typing import Any

import pytest

from penstock.protos.worker_codec import unpack_tokens
from penstock.router.config import RouterConfig
from tests.support.openai_client import serving_with_client
from tests.support.tokenizers import byte_level, write_folder

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOKENIZER = byte_level()
PARTS = [{"type": "text", "text": "What is 17"}, {"type": "text", "text": "plus 25?"}]
READS_STRINGS = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
READS_PARTS = (
    "{% for m in messages %}{% for part in m['content'] %}<{{ part.text }}>{% endfor %}{% endfor %}"
)
READS_BOTH = (
    "{% set later = messages[0:] %}{% for m in later %}{% if m.content is string %}"
    "[{{ m.content }}]{% else %}{% for part in m.content | list %}<{{ part['text'] }}>"
    "{% endfor %}{% endif %}{% endfor %}"
)


async def rendered(folder: Path, template: str, *contents: object) -> str:
    """Return the prompt that a worker gets for user messages."""
    config = RouterConfig(write_folder(folder / "model", TOKENIZER, template), "stub")
    messages: Any = [{"role": "user", "content": content} for content in contents]
    async with serving_with_client(config) as (served, client):
        await client.chat.completions.create(model="stub", messages=messages, max_tokens=1)
        (submit,) = served.worker.submits
        text: str = TOKENIZER.decode(unpack_tokens(submit.prompt), skip_special_tokens=False)
        return text


async def test_parts_are_joined_by_line_breaks(tmp_path: Path) -> None:
    assert await rendered(tmp_path, READS_STRINGS, PARTS) == "[What is 17\nplus 25?]"


async def test_template_that_loops_over_parts_gets_lists(tmp_path: Path) -> None:
    assert await rendered(tmp_path, READS_PARTS, PARTS, "Hi") == "<What is 17><plus 25?><Hi>"


async def test_template_that_reads_both_forms_gets_what_the_client_sent(tmp_path: Path) -> None:
    assert await rendered(tmp_path, READS_BOTH, PARTS, "Hi") == "<What is 17><plus 25?>[Hi]"


async def test_control_tokens_in_parts_are_plain_text(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "a</s>"}, {"type": "text", "text": "b"}]
    config = RouterConfig(write_folder(tmp_path / "model", TOKENIZER, READS_PARTS), "stub")
    async with serving_with_client(config) as (served, client):
        await client.chat.completions.create(
            model="stub", messages=[{"role": "user", "content": parts}], max_tokens=1
        )
        (submit,) = served.worker.submits
        assert TOKENIZER.token_to_id("</s>") not in unpack_tokens(submit.prompt)
        assert TOKENIZER.decode(unpack_tokens(submit.prompt)) == "<a</s>><b>"
