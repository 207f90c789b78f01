"""Pages of the input items of a response."""

import itertools
import json
import random
from typing import Any

import pytest

from penstock.router.api.responses.input_items import list_page
from penstock.router.api.responses.stored import StoredItems
from penstock.router.errors import ServingError


def listed(names: list[str]) -> StoredItems:
    ids = "\n".join(names).encode()
    items = "\n".join(json.dumps({"id": name}) for name in names).encode()
    return StoredItems(ids, [items], b"", 0)


async def page(lists: list[StoredItems], **query: str) -> Any:
    return json.loads(b"".join(await list_page(lists, query)))


@pytest.mark.parametrize("order", ["asc", "desc"])
async def test_pages_have_every_item_once_and_in_order(order: str) -> None:
    drawn = random.Random(5)
    for _ in range(30):
        count = itertools.count()
        sizes = [drawn.randrange(5) for _ in range(drawn.randrange(6))]
        lists = [listed([f"m{next(count)}" for _ in range(size)]) for size in sizes]
        expected = [f"m{index}" for index in range(sum(sizes))][:: 1 if order == "asc" else -1]
        found: list[str] = []
        query = {"limit": str(drawn.randrange(1, 7)), "order": order}
        has_more = True
        while has_more:
            one = await page(lists, **query)
            names = [item["id"] for item in one["data"]]
            ends = (names[0], names[-1]) if names else (None, None)
            assert (one["first_id"], one["last_id"]) == ends
            found += names
            has_more = one["has_more"]
            assert has_more == (len(found) < len(expected))
            query["after"] = one["last_id"]
        assert found == expected


async def test_only_the_lists_of_a_page_are_split() -> None:
    # Reading `lines` of this record would raise ValueError.
    unread = StoredItems(b"a\nb", [b"one line"], b"", 0)
    lists = [unread, listed(["c"]), listed(["d", "e"])]
    assert [item["id"] for item in (await page(lists, limit="2"))["data"]] == ["e", "d"]
    assert [item["id"] for item in (await page(lists, limit="1", after="e"))["data"]] == ["d"]


@pytest.mark.parametrize("name", ["", "x", "a\nb", "A"])
async def test_unknown_id_is_refused(name: str) -> None:
    with pytest.raises(ServingError, match="no input item has the id") as refusal:
        await page([listed(["a", "b"])], after=name)
    assert refusal.value.param == "after"
