"""Priorities of the requests that reach a router's dispatcher."""

import pytest

from penstock.router.routing.events import Event, RequestArrived
from tests.support.served_router import Served


def spy_priorities(served: Served, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that collects the priority of each request that the dispatcher gets."""
    frontend, priorities = served.router.frontend, list[int]()
    post = frontend.post

    def spy(event: Event) -> None:
        if isinstance(event, RequestArrived):
            priorities.append(event.request.priority)
        post(event)

    monkeypatch.setattr(frontend, "post", spy)
    return priorities
