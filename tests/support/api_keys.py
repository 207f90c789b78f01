"""API keys for tests."""

from pathlib import Path

from penstock.common.api_key import ApiKey

OPERATOR = "sesame-of-an-operator"
METRICS = "sesame-of-a-scraper"
EVERY_ROLE = (ApiKey("ops", OPERATOR, "operator"), ApiKey("scraper", METRICS, "metrics"))
"""A key of an operator, and one that only reads metrics and status."""


def user_keys(*keys: str) -> tuple[ApiKey, ...]:
    """Return keys of users, named like those of a key file: key-1, key-2, ..."""
    return tuple(ApiKey(f"key-{number}", key) for number, key in enumerate(keys, 1))


def key_file(folder: Path, *lines: str, mode: int = 0o600) -> Path:
    """Write a file with these lines and return its path."""
    path = folder / f"keys-{len(list(folder.glob('keys-*')))}"
    path.write_text("".join(f"{line}\n" for line in lines))
    path.chmod(mode)
    return path
