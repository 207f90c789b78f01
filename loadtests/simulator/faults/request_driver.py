"""Sends the requests of a fault schedule to routers.

It also cancels requests, and resumes those of dead routers at other routers.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from math import isinf

from penstock.loadtests.simulator.faults.client import HashModelClient
from penstock.loadtests.simulator.faults.schedules import MAX_MODEL_LEN, RequestPlan
from penstock.loadtests.simulator.world.clock import Clock
from penstock.loadtests.simulator.world.router import Router
from penstock.router.routing.events import Request


class RequestDriver:
    """Drives one client for each planned request.

    Args:
        routers: current routers by number; the list changes when a router is restarted.
        note: called with one line of text per event.
    """

    def __init__(
        self, clock: Clock, routers: Sequence[Router], note: Callable[[str], None]
    ) -> None:
        self.clients: list[HashModelClient] = []
        self._clock = clock
        self._routers = routers
        self._note = note
        # Number of requests sent to each router, which is also the latest request id.
        self._num_sent: Counter[Router] = Counter()

    def running(self) -> list[int]:
        """Return the numbers of the clients whose requests have not ended."""
        return [client.number for client in self.clients if not client.over]

    def plan(self, plan: RequestPlan) -> None:
        """Schedule the request, and the time at which its client disconnects."""
        client = HashModelClient(plan, MAX_MODEL_LEN)
        self.clients.append(client)
        self._clock.at(plan.at, lambda: self._submit(client, self._routers[plan.router]))
        self._plan_leave(client, plan.at + plan.leaves_after)

    def on_moved(self, router: str, request: int) -> None:
        """Schedule the client's planned disconnect, counted from the start of a KV transfer."""
        for client in self.clients:
            at = client.at
            if at is not None and (at[0].name, at[1]) == (router, request):
                self._plan_leave(client, client.plan.leaves_moving)

    def on_router_killed(self, router: Router) -> None:
        """Resume the requests of a dead router at a live router."""
        for client in self.clients:
            if client.at is not None and client.at[0] is router and not client.over:
                self._retry_elsewhere(client)

    def _submit(self, client: HashModelClient, router: Router) -> None:
        """Submit the client's request to `router`, with the tokens that the client already has."""
        plan = client.plan
        if client.over:
            return
        if not router.process.alive:
            self._retry_elsewhere(client)
            return
        self._num_sent[router] += 1
        request = Request(
            id=self._num_sent[router],
            prompt=plan.prompt,
            params=plan.params,
            max_tokens=min(plan.max_tokens, MAX_MODEL_LEN - len(plan.prompt)),
            tenant=plan.tenant,
            priority=plan.priority,
            salt=plan.salt,
            deadline=self._clock.now + plan.deadline,
            num_choices=plan.num_choices,
            log=tuple(map(tuple, client.answers)) if client.num_tokens else (),
        )
        client.at = (router, request.id)
        self._note(f"client {plan.number} asks {router.name} as {request.id}")
        router.process.take(lambda: router.submit(request, client))

    def _plan_leave(self, client: HashModelClient, seconds: float) -> None:
        if not isinf(seconds):
            self._clock.after(seconds, lambda: self._leave(client))

    def _leave(self, client: HashModelClient) -> None:
        if client.over or client.at is None:
            client.leave()
            return
        router, number = client.at
        client.leave()
        self._note(f"client {client.number} leaves")
        router.process.take(lambda: router.cancel(number))

    def _retry_elsewhere(self, client: HashModelClient) -> None:
        """Resubmit the request of a dead router, or disconnect a client that does not resume."""
        live = [router for router in self._routers if router.process.alive]
        client.at = None
        if not client.plan.resumes:
            client.leave()
        elif live:
            self._clock.after(0.1, lambda: self._submit(client, live[0]))
        else:
            self._clock.after(0.5, lambda: self._retry_elsewhere(client))
