"""API keys: who may call, the same for every protocol."""

import hashlib
import hmac
from collections.abc import Sequence

from penstock.router.errors import Code, ServingError


class ApiKeys:
    """The keys that may call; with none, everyone may.

    Comparison takes the same time whichever key an offered one is nearly.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [_digest(key) for key in keys]
        self._operator_digests = {_digest(key) for key in keys if key.startswith(OPERATOR_PREFIX)}

    def tenant_names(self) -> dict[str, str]:
        """What each tenant is called where others may read it: by its key's place in the list.

        A tenant itself says enough of a weak key to guess it.
        """
        if not self._digests:
            return {"": "anonymous"}
        return {_tenant(digest): f"key-{n}" for n, digest in enumerate(self._digests, 1)}

    def tenant(self, header: str | None) -> str:
        """The tenant of an Authorization header: a name from which the key cannot be told.

        Raises UNAUTHENTICATED for a header that carries none of the keys.
        """
        if not self._digests:
            return ""
        scheme, _, key = (header or "").partition(" ")
        offered = _digest(key.strip())
        found = [hmac.compare_digest(offered, digest) for digest in self._digests]
        if scheme.lower() != "bearer" or not any(found):
            raise ServingError(
                Code.UNAUTHENTICATED, "no valid API key: send 'Authorization: Bearer <key>'"
            )
        return _tenant(offered)

    def check_operator(self, header: str | None, is_loopback: bool) -> None:
        """Refuse (FORBIDDEN) whoever may call, but not change the cluster. Without keys everybody
        on the machine may, and nobody from elsewhere."""
        _, _, key = (header or "").partition(" ")
        is_operator = _digest(key.strip()) in self._operator_digests
        if not (is_operator if self._digests else is_loopback):
            raise ServingError(
                Code.FORBIDDEN,
                f"this is for operators: call with a key of the server that begins with "
                f"'{OPERATOR_PREFIX}', or, where it has no keys, on its own machine",
            )


OPERATOR_PREFIX = "admin-"
"""Keys that begin so are operators': they may change the cluster too."""


def _tenant(digest: bytes) -> str:
    return digest.hex()[:16]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()
