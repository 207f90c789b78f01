"""Surrogates, which escape sequences in JSON and in Python's syntax can write, but UTF-8 cannot."""


def without_surrogates(text: str) -> str:
    """Return a text with each pair of surrogates as its character, and others as U+FFFD."""
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
