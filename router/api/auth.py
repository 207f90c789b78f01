"""Authentication by API key, for all protocols."""

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.common.api_key import ApiKey, Role
from penstock.router.errors import Code, ServingError

CLIENTS: frozenset[Role] = frozenset({"user", "operator"})
READERS: frozenset[Role] = frozenset({"metrics", "operator"})
OPERATORS: frozenset[Role] = frozenset({"operator"})

ANONYMOUS = "anonymous"
"""Name by which all callers of a server without API keys are known."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a call: name and role of the API key, and a hash of the key as tenant id."""

    name: str
    tenant: str
    role: Role = "user"


class ApiKeys:
    """The configured API keys; if there are none, all calls are allowed.

    Keys are compared in constant time.
    """

    def __init__(self, keys: Sequence[ApiKey]) -> None:
        self._keys = [(_digest(each.key), each) for each in keys]

    def tenant_names(self) -> dict[str, str]:
        """Return the name of each tenant in metrics, by tenant id: the name of the API key.

        Tenant ids are hashes of keys. Metrics do not contain them, because a weak key could be
        guessed from its hash.
        """
        if not self._keys:
            return {"": ANONYMOUS}
        return {_tenant(digest): each.name for digest, each in self._keys}

    def authenticate(
        self, header: str | None, roles: frozenset[Role] = CLIENTS, is_loopback: bool = True
    ) -> Caller:
        """Return the sender of a call with this Authorization header.

        Args:
            roles: roles of the keys that may make the call. Without configured keys,
                calls that only operators may make are allowed only if `is_loopback`.
            is_loopback: whether the server is bound to a loopback address.

        Raises:
            ServingError: UNAUTHENTICATED if the header has no valid key; FORBIDDEN if the key has
                another role.
        """
        if not self._keys:
            if roles == OPERATORS and not is_loopback:
                raise ServingError(
                    Code.FORBIDDEN,
                    "only operators may make this call, and the server has no API keys: configure "
                    "a key with the role 'operator', or bind the server to loopback",
                )
            return Caller(ANONYMOUS, "")
        scheme, _, key = (header or "").partition(" ")
        offered = _digest(key.strip())
        found = [each for digest, each in self._keys if hmac.compare_digest(offered, digest)]
        if scheme.lower() != "bearer" or not found:
            raise ServingError(
                Code.UNAUTHENTICATED,
                "the request has no valid API key: send 'Authorization: Bearer <key>'",
            )
        if found[0].role not in roles:
            raise ServingError(
                Code.FORBIDDEN,
                f"the API key {found[0].name!r} has the role {found[0].role!r}, but this call "
                f"needs the role {' or '.join(map(repr, sorted(roles)))}",
            )
        return Caller(found[0].name, _tenant(offered), found[0].role)


def _tenant(digest: bytes) -> str:
    return digest.hex()[:16]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()
