"""The GPU budget limits the growth of pools."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.cluster.autoscaling.gpu_budget import GrowthRequest, grant


def test_gpus_go_to_the_pool_with_the_largest_shortage() -> None:
    requests = [GrowthRequest(1, 2, gpus=1), GrowthRequest(1, 4, gpus=1)]
    assert grant(requests, 3) == [1, 2]
    assert grant(requests, 4) == [2, 2]
    assert grant(requests, 5) == [2, 3]
    assert grant(requests, 100) == [2, 4]


def test_pool_that_needs_fewer_gpus_grows_where_another_does_not_fit() -> None:
    assert grant([GrowthRequest(0, 9, gpus=8), GrowthRequest(1, 3, gpus=1)], 5) == [0, 3]


def test_workers_that_do_not_serve_still_hold_their_gpus() -> None:
    assert grant([GrowthRequest(1, 3, gpus=2, not_serving=1)], 6) == [2]


def test_pools_above_the_budget_keep_their_workers() -> None:
    assert grant([GrowthRequest(4, 5, gpus=2), GrowthRequest(3, 1, gpus=2)], 2) == [4, 1]


requests_of_pools = st.lists(
    st.builds(
        GrowthRequest,
        st.integers(0, 5),
        st.integers(0, 9),
        st.integers(0, 4),
        st.integers(0, 2),
    ),
    max_size=3,
)


@given(requests_of_pools, st.integers(0, 40))
def test_growth_stays_within_the_budget_and_uses_what_fits(
    requests: list[GrowthRequest], budget: int
) -> None:
    granted = grant(requests, budget)
    held = 0
    for each, num in zip(requests, granted, strict=True):
        assert min(each.count, each.desired) <= num <= each.desired
        held += each.gpus * (num + each.not_serving)
    if any(num > each.count for each, num in zip(requests, granted, strict=True) if each.gpus):
        assert held <= budget
    for each, num in zip(requests, granted, strict=True):
        assert num == each.desired or held + each.gpus > budget
