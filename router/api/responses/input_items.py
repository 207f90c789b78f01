"""Pages of the input items of a response."""

from collections.abc import Mapping, Sequence
from itertools import chain

from penstock.router.api.openai.json_fragments import dumps
from penstock.router.api.responses.stored import StoredItems
from penstock.router.errors import invalid
from penstock.router.requests.slices import Slices

DEFAULT_LIMIT = 20
MAX_LIMIT = 100


async def list_page(stored: Sequence[StoredItems], query: Mapping[str, str]) -> Sequence[bytes]:
    """Return a page of stored items as a JSON object, in fragments.

    Args:
        stored: the items of a response's input.
        query: OpenAI's parameters `limit` (1 to 100), `order` (the newest item is first unless it
            is `asc`) and `after` (id of the item after which the page begins).

    Raises:
        ServingError: INVALID if a parameter is not valid, or if no item has the id.
    """
    limit = _limit(query.get("limit", str(DEFAULT_LIMIT)))
    slices = Slices()
    ids: list[bytes] = []
    items: list[bytes] = []
    for each in stored:
        ids += each.ids.split(b"\n") if each.ids else ()
        items += each.items.split(b"\n") if each.items else ()
        await slices.pause()
    if query.get("order") != "asc":
        ids.reverse()
        items.reverse()
    after, first = query.get("after"), 0
    if after is not None:
        name = after.encode()
        if name not in ids:
            raise invalid(f"after: no input item has the id {after[:80]!r}", "after")
        first = ids.index(name) + 1
    shown = ids[first : first + limit]
    ends = [shown[0].decode(), shown[-1].decode()] if shown else [None, None]
    tail = {"first_id": ends[0], "last_id": ends[1], "has_more": first + limit < len(ids)}
    found = list(chain.from_iterable((b",", item) for item in items[first : first + limit]))
    return [b'{"object":"list","data":[', *found[1:], b"],", dumps(tail)[1:].encode()]


def _limit(text: str) -> int:
    limit = int(text) if text.isascii() and text.isdecimal() and len(text) < 4 else 0
    if not 0 < limit <= MAX_LIMIT:
        raise invalid(f"limit must be from 1 to {MAX_LIMIT}", "limit")
    return limit
