"""A Hypothesis strategy for settings of MoE routing."""

from hypothesis import strategies as st

from penstock.kernels.moe.routing import Routing


@st.composite
def routings(draw: st.DrawFn) -> tuple[Routing, int]:
    """Generate routing settings, and a number of experts for which the settings are valid."""
    num_groups, size = draw(st.integers(1, 6)), draw(st.integers(2, 5))
    top_groups = draw(st.integers(1, num_groups))
    routing = Routing(
        top_k=draw(st.integers(1, top_groups * size)),
        normalise=draw(st.booleans()),
        sigmoid=draw(st.booleans()),
        num_groups=num_groups,
        top_groups=top_groups,
        group_best=draw(st.integers(1, 2)),
        scale=draw(st.sampled_from([1.0, 2.5])),
    )
    return routing, num_groups * size
