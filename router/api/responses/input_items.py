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
        query: OpenAI's parameters `limit` (1 to 100), `order` (`desc`, the default, or `asc` for
            the oldest item first) and `after` (id of the item after which the page begins).

    Raises:
        ServingError: INVALID if a parameter is not valid, or if no item has the id.
    """
    limit = _limit(query.get("limit", str(DEFAULT_LIMIT)))
    step = 1 if query.get("order") == "asc" else -1
    lists = stored[::step]
    index, skipped, after = 0, 0, query.get("after")
    if after is not None:
        index, skipped = await _position_after(lists, after, step)
    slices = Slices()
    found: list[tuple[str, list[bytes]]] = []
    for own in lists[index:]:  # only the lists with items of the page are split
        found += own.lines()[::step][skipped:]
        skipped = 0
        if len(found) > limit:
            break
        await slices.pause()
    page = found[:limit]
    ends = [page[0][0], page[-1][0]] if page else [None, None]
    tail = {"first_id": ends[0], "last_id": ends[1], "has_more": len(found) > limit}
    shown = list(chain.from_iterable((b",", *item) for _, item in page))
    return [b'{"object":"list","data":[', *shown[1:], b"],", dumps(tail)[1:].encode()]


async def _position_after(lists: Sequence[StoredItems], name: str, step: int) -> tuple[int, int]:
    """Return the index of the list that has an item, and the number of items to skip in this list.

    Args:
        lists: the lists, in the order of the page.
        name: id of the item.
        step: 1, or -1 if the last item of a list is listed first.

    Raises:
        ServingError: INVALID if no item has this id.
    """
    slices = Slices()
    for index, own in enumerate(lists):
        found = own.index_of(name)
        if found is not None:
            return index, found + 1 if step > 0 else own.num_items - found
        await slices.pause()
    raise invalid(f"'after': no input item has the id {name[:80]!r}", "after")


def _limit(text: str) -> int:
    limit = int(text) if text.isascii() and text.isdecimal() and len(text) < 4 else 0
    if not 0 < limit <= MAX_LIMIT:
        raise invalid(f"'limit' is {text[:40]!r}: expected 1 to {MAX_LIMIT}", "limit")
    return limit
