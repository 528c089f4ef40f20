"""The choice of a placement: a pure function of measured numbers, whose verdict turns with the scale."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmdp.placement import SLACK, Traffic, busiest, choose

MBIT = 1e6 / 8
# Pixels of 224 x 224, and their JPEG; blocks of four; cards of 50 Mbit/s: the experiment that the talk's lesson was
# reproduced with. Small: one rank wants 20 samples a second; large: four on two nodes want 80.
SMALL = Traffic(50 * MBIT, 4 * 11e3, 4 * 150_528, 20 / 4, ranks=1, rank_nodes=1, nodes=6)
LARGE = replace(SMALL, rows_per_second=80 / 4, ranks=4, rank_nodes=2)


def test_the_same_knob_has_the_opposite_verdict():
    """On the small cluster the simplest is enough; on the large one it is not, and near has room."""
    assert "together" == choose(SMALL).placement
    large = choose(LARGE)
    assert "near" == large.placement
    assert "simplest with room" in large.reason
    assert "4 ranks want 20 rows a second of 0.602 MB (44 kB as fetched)" in large.reason
    assert large.load["together"] > LARGE.link > large.load["near"]


def test_spread_where_the_cards_of_ranks_are_no_limit():
    """All rows through one card are too much, a share of them through each of twelve is not."""
    many = replace(LARGE, rank_nodes=4, nodes=12, rows_per_second=15, link=60 * MBIT)
    assert "spread" == choose(many).placement


def test_by_hand():
    """Ten rows a second of 100 bytes, 10 as fetched, two ranks on two of four nodes."""
    load = busiest(Traffic(1e6, 10, 100, 10, ranks=2, rank_nodes=2, nodes=4))
    assert {"together": 1000, "spread": 500 * 0.75 + 25, "near": 50} == load
    everywhere = busiest(Traffic(1e6, 10, 100, 10, ranks=4, rank_nodes=4, nodes=4))
    assert 1000 * 0.75 == everywhere["together"]


def test_one_node_says_so():
    """Nothing crosses a card but images, and no flag matters."""
    one = choose(replace(LARGE, rank_nodes=1, nodes=1))
    assert ("together", "there is one node, so where actors are can make no difference") == (one.placement, one.reason)


traffics = st.builds(
    lambda link, images, pixels, rate, nodes, rank_nodes, more: Traffic(
        link, images, images + pixels, rate, rank_nodes + more, min(rank_nodes, nodes), nodes
    ),
    st.floats(1, 1e12),
    st.floats(0, 1e7),
    st.floats(0, 1e8),
    st.floats(0, 1e4),
    st.integers(2, 64),
    st.integers(1, 64),
    st.integers(0, 64),
)


@given(traffics, st.floats(1, 100))
def test_more_rows_never_make_it_simpler(traffic, times):
    """With a higher rate the choice moves on from together to spread to near, until none has room."""
    order = ["together", "spread", "near"]
    load = busiest(traffic)
    more = replace(traffic, rows_per_second=traffic.rows_per_second * times)
    if any(one * SLACK <= traffic.link for one in busiest(more).values()):
        assert order.index(choose(more).placement) >= order.index(choose(traffic).placement)
    chosen = choose(traffic).placement
    fits = load[chosen] * SLACK <= traffic.link
    assert fits or load[chosen] == min(load.values())
    assert not any(load[simpler] * SLACK <= traffic.link for simpler in order[: order.index(chosen)] if fits)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"link": 0}, "link is 0: it must be above 0"),
        ({"link": math.nan}, "link is nan"),
        ({"row_bytes": math.nan}, "row_bytes is nan"),
        ({"rows_per_second": math.inf}, "rows_per_second is inf: it must be finite"),
        ({"image_bytes": -1}, "image_bytes is -1"),
        ({"rank_nodes": 5, "nodes": 12}, "4 ranks on 5 of 12 nodes"),
        ({"rank_nodes": 2, "nodes": 1}, "4 ranks on 2 of 1 nodes"),
    ],
)
def test_numbers_that_can_not_be(changes, message):
    """Refused with the number."""
    with pytest.raises(ValueError, match=message):
        replace(LARGE, **changes)


def test_a_link_without_limit():
    """Then the simplest has room."""
    assert "together" == choose(replace(LARGE, link=math.inf)).placement
