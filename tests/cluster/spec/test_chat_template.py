"""`chat_template` of a model: a file, read once, or the template itself."""

from pathlib import Path

import pytest

from penstock.cluster.configs import ClusterSecrets, router_config
from penstock.cluster.spec.chat_template import with_chat_template
from penstock.cluster.spec.records import SpecError
from penstock.cluster.spec.spec import ClusterSpec, parse


def spec_of(template: str) -> ClusterSpec:
    return parse({"models": {"m": {"chat_template": template, "dtype": "float32"}}})


@pytest.mark.parametrize("text", ["{{ messages }}", "line\nline", "plain"])
def test_text_of_a_file_reaches_the_routers(tmp_path: Path, text: str) -> None:
    path = tmp_path / "chat.jinja"
    path.write_text(text, encoding="utf-8")
    spec = with_chat_template(spec_of(str(path)))
    config = router_config(spec, tmp_path, ClusterSecrets.new())
    assert (config.chat_template, spec.model.dtype) == (text, "float32")


@pytest.mark.parametrize("text", ["{{ messages }}", "line\nline"])
def test_template_may_be_given_as_text(text: str) -> None:
    assert with_chat_template(spec_of(text)) == spec_of(text)


def test_without_a_template_nothing_changes() -> None:
    assert with_chat_template(parse({})) == parse({})


@pytest.mark.parametrize(
    ("content", "reason"),
    [(None, "cannot be read: No such file"), (b"\xff", "it is not UTF-8"), (b" \n", "is empty")],
)
def test_unusable_file_is_refused_by_name(
    tmp_path: Path, content: bytes | None, reason: str
) -> None:
    path = tmp_path / "chat.jinja"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SpecError, match=rf"^models\.m\.chat_template: the file .*{reason}"):
        with_chat_template(spec_of(str(path)))
