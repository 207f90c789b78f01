"""Makes a tokenizer for text that continues another text."""

import json
from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer

NO_PREFIX: Mapping[str, Mapping[str, Any]] = {
    "Metaspace": {"prepend_scheme": "never"},
    "ByteLevel": {"add_prefix_space": False},
}
"""Fields that keep a normalizer or pre-tokenizer from adding a space before a text, by type."""


def continuing(tokenizer: Tokenizer) -> Tokenizer:
    """Return a tokenizer for text that continues another text.

    The tokenizer adds no space at the start, and reads no control tokens in the text.
    """
    spec = json.loads(tokenizer.to_str())
    for part in ("normalizer", "pre_tokenizer"):
        spec[part] = _without_prefix(spec[part])
    for token in spec["added_tokens"]:
        # With the flags `lstrip` and `rstrip`, a token would include the spaces around it. With
        # `single_word`, it would not be found inside words.
        token.update(lstrip=False, rstrip=False, single_word=False)
    found = Tokenizer.from_str(json.dumps(spec))
    found.encode_special_tokens = True
    return found


def _without_prefix(step: Any) -> Any:
    """Return a normalizer or pre-tokenizer without the space that it adds before a text.

    `step` is an object of `tokenizer.json`. Return None if it would then have no effect.
    """
    if step is None or step["type"] == "Prepend":
        return None
    if step["type"] == "Sequence":
        (key,) = step.keys() - {"type"}
        kept = [each for each in map(_without_prefix, step[key]) if each is not None]
        return {**step, key: kept}
    return {**step, **NO_PREFIX.get(step["type"], {})}
