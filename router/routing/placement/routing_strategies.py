"""The placement strategies by their names in `--routing`."""

from collections.abc import Callable, Mapping
from typing import Literal

from penstock.router.routing.placement.cost_policy import CostPolicy
from penstock.router.routing.placement.policy import Policy, RolePolicy
from penstock.router.routing.placement.ranking import Ranking
from penstock.router.routing.placement.rankings.consistent_hash import ConsistentHashRanking
from penstock.router.routing.placement.rankings.cost import CostRanking
from penstock.router.routing.placement.rankings.least_loaded import LeastLoadedRanking
from penstock.router.routing.placement.rankings.power_of_two import PowerOfTwoRanking
from penstock.router.routing.placement.rankings.round_robin import RoundRobinRanking

RANKINGS: Mapping[str, Callable[[], Ranking]] = {
    "cost": CostRanking,
    "round_robin": RoundRobinRanking,
    "least_loaded": LeastLoadedRanking,
    "power_of_two": PowerOfTwoRanking,
    "consistent_hash": ConsistentHashRanking,
}

Strategy = Literal["cost", "round_robin", "least_loaded", "power_of_two", "consistent_hash"]
DEFAULT_STRATEGY: Strategy = "cost"


def policy_of(strategy: str) -> Policy:
    """Return a new policy for a strategy, a key of `RANKINGS`.

    Raises:
        ValueError: the strategy is unknown.
    """
    ranking = RANKINGS.get(strategy)
    if ranking is None:
        raise ValueError(f"unknown routing {strategy!r}: expected one of {', '.join(RANKINGS)}")
    return CostPolicy() if strategy == "cost" else RolePolicy(ranking())
