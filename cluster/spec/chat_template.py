"""Reads the file with the chat template that replaces the model's own chat template."""

from dataclasses import replace
from pathlib import Path

from penstock.cluster.spec.records import SpecError
from penstock.cluster.spec.spec import ClusterSpec


def with_chat_template(spec: ClusterSpec) -> ClusterSpec:
    """Return the specification with the text of the chat template in place of its file name.

    The file is read here, because routers may run on nodes that do not have the file. As in vLLM, a
    value with a brace or a line break is the template itself instead of a file name.

    Raises:
        SpecError: the file cannot be read, or is empty.
    """
    given, where = spec.model.chat_template, f"models.{spec.model_name}.chat_template"
    if given is None or any(sign in given for sign in "{}\n"):
        return spec
    try:
        text = Path(given).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise SpecError(f"{where}: the file {given} cannot be read: {reason}") from None
    if not text.strip():
        raise SpecError(f"{where}: the file {given} is empty: expected a Jinja template")
    return replace(spec, models={spec.model_name: replace(spec.model, chat_template=text)})
