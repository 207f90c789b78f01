"""Calls of Llama 3.1 to 3.3: the answer is `{"name": ..., "parameters": {...}}`.

Several calls are separated by semicolons. `<|python_tag|>` may precede the first call.
"""

from penstock.router.parsers.tools.json_reader import JsonReader

TAG = "<|python_tag|>"


class LlamaJsonParser(JsonReader):
    """Parses one answer; an answer that does not begin with a call is content up to a tag."""

    markers = (TAG,)

    def _start(self) -> bool:
        rest = self._text.lstrip()
        if not rest or (TAG.startswith(rest) and rest != TAG and not self._is_ended):
            return False
        self._state = self._read_object if rest[0] == "{" else self._read_content
        return True

    def _read_content(self) -> bool:
        text, marker = self._until(TAG)
        self._add_content(text)
        if marker:
            self._state = self._read_object
        return marker is not None

    def _read_object(self) -> bool:
        rest = self._text.lstrip()
        if not rest:
            return False
        opened = self._text[: len(self._text) - len(rest)]
        if rest[0] == "{":
            self._text = rest
            return self._begin_json(opened, self._read_next, self._read_content, True)
        self._state = self._read_content
        return True

    def _read_next(self) -> bool:
        if not self._skip(" \t\r\n;,"):
            return False
        self._state = self._read_object if self._text[0] == "{" else self._read_content
        return True
