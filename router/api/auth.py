"""Authentication by API key, for all protocols."""

import hashlib
import hmac
from collections.abc import Sequence

from penstock.router.errors import Code, ServingError


class ApiKeys:
    """The configured API keys; if there are none, all calls are allowed.

    Keys are compared in constant time.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [_digest(key) for key in keys]
        self._operator_digests = {_digest(key) for key in keys if key.startswith(OPERATOR_PREFIX)}

    def tenant_names(self) -> dict[str, str]:
        """Return the metric name of each tenant: `key-N` for the N-th key.

        Tenant ids are hashes of keys. Metrics do not contain them, because a weak key could be
        guessed from its hash.
        """
        if not self._digests:
            return {"": "anonymous"}
        return {_tenant(digest): f"key-{n}" for n, digest in enumerate(self._digests, 1)}

    def tenant(self, header: str | None) -> str:
        """Return the tenant of an Authorization header: a hash of its API key.

        Raises:
            ServingError: UNAUTHENTICATED if the header has no valid key.
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
        """Raise FORBIDDEN unless the caller may change the cluster.

        If keys are configured, the call needs an operator's key; otherwise the server must be bound
        to loopback.
        """
        _, _, key = (header or "").partition(" ")
        is_operator = _digest(key.strip()) in self._operator_digests
        if not (is_operator if self._digests else is_loopback):
            raise ServingError(
                Code.FORBIDDEN,
                f"this is for operators: use an API key that begins with '{OPERATOR_PREFIX}'; if "
                f"the server has no keys, bind it to loopback",
            )


OPERATOR_PREFIX = "admin-"
"""Prefix of the API keys with which operators may change the cluster."""


def _tenant(digest: bytes) -> str:
    return digest.hex()[:16]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()
