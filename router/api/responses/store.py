"""The responses of each tenant that can be retrieved and continued, in the memory of one router."""

from collections import OrderedDict
from dataclasses import dataclass, field

from penstock.router.api.responses.stored import StoredResponse
from penstock.router.errors import Code, ServingError


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """Limits of the store. Above a limit, the least recently used responses are removed."""

    tenant_responses: int = 4096
    tenant_bytes: int = 64 << 20
    total_bytes: int = 256 << 20


@dataclass(slots=True)
class _Tenant:
    """The responses of one tenant, the least recently used first."""

    responses: OrderedDict[str, StoredResponse] = field(default_factory=OrderedDict)
    num_bytes: int = 0


class ResponseStore:
    """The stored responses of all tenants; a tenant can only see its own responses.

    If all tenants together exceed the limit, responses of the tenant with the most bytes are
    removed.
    """

    def __init__(self, limits: StoreLimits = StoreLimits()) -> None:
        self._limits = limits
        self._tenants: dict[str, _Tenant] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of all stored responses."""
        return sum(tenant.num_bytes for tenant in self._tenants.values())

    @property
    def max_bytes(self) -> int:
        """The largest size of one stored response, in bytes."""
        return min(self._limits.tenant_bytes, self._limits.total_bytes)

    def put(self, tenant: str, response: StoredResponse) -> None:
        """Store a response.

        Raises:
            ValueError: the response is larger than `max_bytes`.
        """
        limits, size = self._limits, response.num_bytes
        if size > self.max_bytes:
            raise ValueError(
                f"the response {response.id} has {size} bytes; at most {self.max_bytes} are allowed"
            )
        known = self._tenants.get(tenant)
        if known is not None and response.id in known.responses:
            self._remove(tenant, known.responses[response.id])
        own = self._tenants.setdefault(tenant, _Tenant())
        own.responses[response.id] = response
        own.num_bytes += size
        while own.num_bytes > limits.tenant_bytes or len(own.responses) > limits.tenant_responses:
            self._remove_oldest(tenant)
        while self.num_bytes > limits.total_bytes:
            largest = max(self._tenants, key=lambda name: self._tenants[name].num_bytes)
            self._remove_oldest(largest)

    def get(self, tenant: str, name: str, param: str | None = None) -> StoredResponse:
        """Return a response of a tenant, and mark the response as the most recently used one.

        Args:
            tenant: the tenant.
            name: id of the response.
            param: request field that contains the id, or None if the URL's path contains it.

        Raises:
            ServingError: NOT_FOUND if the tenant has no such response.
        """
        own = self._tenants.get(tenant)
        if own is None or name not in own.responses:
            raise not_found(name, param)
        own.responses.move_to_end(name)
        return own.responses[name]

    def delete(self, tenant: str, name: str) -> None:
        """Remove a response of a tenant.

        Raises:
            ServingError: NOT_FOUND if the tenant has no such response.
        """
        response = self.get(tenant, name)
        self._remove(tenant, response)

    def _remove_oldest(self, tenant: str) -> None:
        self._remove(tenant, next(iter(self._tenants[tenant].responses.values())))

    def _remove(self, tenant: str, response: StoredResponse) -> None:
        own = self._tenants[tenant]
        del own.responses[response.id]
        own.num_bytes -= response.num_bytes
        if not own.responses:
            del self._tenants[tenant]


def not_found(name: str, param: str | None = None) -> ServingError:
    """Return the error for an id that no response of the tenant has."""
    what = "previous response" if param else "response"
    reason = "previous_response_not_found" if param else None
    return ServingError(
        Code.NOT_FOUND,
        f"the {what} {name[:80]!r} does not exist: it was not stored, was removed, or is stored by "
        "another router",
        param,
        reason=reason,
    )
