import pytest

from penstock.router.api.responses.store import ResponseStore, StoreLimits
from penstock.router.api.responses.stored import ENTRY_BYTES, StoredItems, StoredResponse
from penstock.router.errors import Code, ServingError

NO_ITEMS = StoredItems(b"", (), b"", 0)


def response(name: str, num_bytes: int = 0) -> StoredResponse:
    """Return a response that the store counts as `ENTRY_BYTES + num_bytes` bytes."""
    return StoredResponse(name, [b"x" * num_bytes], (), NO_ITEMS)


def names(store: ResponseStore, tenant: str, of: str) -> str:
    """Return those characters of the string `of` that are ids of stored responses."""
    return "".join(name for name in of if _is_stored(store, tenant, name))


def _is_stored(store: ResponseStore, tenant: str, name: str) -> bool:
    own = store._tenants.get(tenant)
    return own is not None and name in own.responses


def test_size_counts_every_text() -> None:
    items = StoredItems(b"12", (b"3", b"45"), b"6789", 4)
    stored = StoredResponse("x", [b"ab", b"c"], (items,), items)
    assert stored.num_bytes == ENTRY_BYTES + 3 + 9 + 9


def test_least_recently_used_response_is_removed_first() -> None:
    store = ResponseStore(StoreLimits(tenant_responses=3))
    for name in "abc":
        store.put("t", response(name))
    store.get("t", "a")
    store.put("t", response("d"))
    assert names(store, "t", "abcd") == "acd"


def test_bytes_of_a_tenant_are_bounded() -> None:
    store = ResponseStore(StoreLimits(tenant_bytes=3 * (ENTRY_BYTES + 100)))
    for name in "abcd":
        store.put("t", response(name, 100))
    assert names(store, "t", "abcd") == "bcd"
    store.put("t", response("e", 2 * ENTRY_BYTES))
    assert names(store, "t", "bcde") == "e"
    assert store.num_bytes <= 3 * (ENTRY_BYTES + 100)


def test_response_above_the_limit_is_not_stored_and_removes_none() -> None:
    store = ResponseStore(StoreLimits(tenant_bytes=2 * ENTRY_BYTES))
    assert store.max_bytes == 2 * ENTRY_BYTES
    store.put("t", response("a"))
    with pytest.raises(ValueError, match="response b has 6144 bytes; at most 4096"):
        store.put("t", response("b", 2 * ENTRY_BYTES))
    assert names(store, "t", "ab") == "a"


def test_bytes_of_all_tenants_are_bounded_and_the_largest_one_loses_responses() -> None:
    store = ResponseStore(StoreLimits(total_bytes=4 * ENTRY_BYTES))
    store.put("small", response("s"))
    for name in "abcd":
        store.put("large", response(name))
    assert names(store, "small", "s") == "s"
    assert names(store, "large", "abcd") == "bcd"
    assert store.num_bytes == 4 * ENTRY_BYTES


def test_responses_of_a_tenant_are_hidden_from_others() -> None:
    store = ResponseStore()
    store.put("a", response("x"))
    for call in (store.get, store.delete):
        with pytest.raises(ServingError) as error:
            call("b", "x")
        assert error.value.code is Code.NOT_FOUND
    assert store.get("a", "x").id == "x"


def test_deleted_responses_free_their_bytes() -> None:
    store = ResponseStore()
    store.put("a", response("x", 100))
    store.delete("a", "x")
    assert store.num_bytes == 0
    assert not store._tenants


def test_response_that_is_stored_again_replaces_the_first() -> None:
    store = ResponseStore()
    for _ in range(2):
        store.put("t", response("a"))
    assert store.num_bytes == response("a").num_bytes
    store.delete("t", "a")
    assert store.num_bytes == 0
