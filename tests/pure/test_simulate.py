import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkmate_tf.ir.errors import PlanError
from checkmate_tf.ir.graph import GraphBuilder
from checkmate_tf.ir.plan import plan_from_order
from checkmate_tf.ir.simulate import held_at, keep_all_timeline, simulate, structural_floor
from checkmate_tf.solvers.chen import recomputing_order
from tests import oracle, strategies


def test_the_memory_of_each_step_by_hand():
    builder = GraphBuilder(resident_bytes=100)
    a = builder.op("a", bytes=1, seconds=1.0)
    b = builder.op("b", [a], bytes=[2, 4], seconds=2.0, scratch_bytes=8)
    builder.op("c", [a, b], bytes=16, seconds=4.0)
    graph = builder.build([a])
    timeline = simulate(graph, plan_from_order(graph, (0, 1, 2)))
    # compute a: 1; compute b: 1 + 2 + 4 + 8 scratch; free b:1; compute c: 1 + 2 + 16; free c; free b; a stays.
    assert timeline.live_bytes == (101, 115, 103, 119, 103, 101)
    assert (timeline.peak_bytes, timeline.peak_step) == (119, 3)
    assert timeline.seconds == 7.0
    assert timeline.runs == (1, 1, 1)


def test_recomputations_are_counted_and_paid():
    graph = strategies.linear_net(1)
    timeline = simulate(graph, plan_from_order(graph, (0, 1, 0, 2)))
    assert timeline.runs == (2, 1, 1)
    assert timeline.seconds == 4.0


def test_an_output_takes_over_the_memory_of_an_input_that_dies():
    builder = GraphBuilder()
    a = builder.op("a", bytes=4)
    b = builder.op("b", bytes=4)
    total = builder.op("total", [a, b], bytes=4, reuses=[a, b])
    builder.op("again", [a, total], bytes=1)
    graph = builder.build()
    # a: 4; b: 8; total takes over b, since a is read again: 8, and freeing b changes nothing; again: 9; all freed.
    assert simulate(graph, plan_from_order(graph, (0, 1, 2, 3))).live_bytes == (4, 8, 8, 8, 9, 8, 4, 0)
    # With a dropped and computed again both inputs die, and one of them is taken over.
    timeline = simulate(graph, plan_from_order(graph, (0, 1, 2, 0, 3)))
    assert timeline.live_bytes == (4, 8, 8, 8, 4, 8, 9, 8, 4, 0)
    assert structural_floor(graph) == (9, 3)


def test_what_is_held_at_a_step_largest_first():
    builder = GraphBuilder()
    a = builder.op("a", bytes=1)
    b = builder.op("b", [a], bytes=[2, 4])
    c = builder.op("c", [b], bytes=4, reuses=[b])
    builder.op("d", [a, c], bytes=16)
    graph = builder.build()
    plan = plan_from_order(graph, (0, 1, 2, 3))
    # compute a; compute b (its second output is not read); free that; compute c, which takes over b; free b; compute d; ...
    assert [held_at(graph, plan, step) for step in (0, 1, 2, 3, 5)] == [(0,), (2, 1, 0), (1, 0), (3, 0), (4, 3, 0)]


def test_a_graph_without_ops_holds_what_is_resident():
    graph = GraphBuilder(resident_bytes=7).build()
    timeline = keep_all_timeline(graph)
    assert (timeline.peak_bytes, timeline.peak_step, timeline.seconds) == (7, -1, 0.0)
    assert structural_floor(graph) == (7, -1)


def test_the_floor_is_the_hungriest_ops_own_need():
    builder = GraphBuilder(resident_bytes=10)
    a = builder.op("a", bytes=5)
    builder.op("b", [a], bytes=1, scratch_bytes=3)
    assert structural_floor(builder.build()) == (19, 1)


def test_a_plan_for_another_graph_is_refused():
    small, large = strategies.linear_net(1), strategies.linear_net(2)
    with pytest.raises(PlanError, match="another graph"):
        simulate(large, plan_from_order(small, small.order))


@given(strategies.graphs(), st.sets(st.integers(0, 9)))
def test_peaks_agree_with_the_naive_simulator(graph, borders):
    order = recomputing_order(graph, borders)
    timeline = simulate(graph, plan_from_order(graph, order))
    assert timeline.peak_bytes == oracle.peak_bytes(graph, order)
    assert timeline.seconds == oracle.seconds(graph, order)


@given(strategies.graphs())
def test_no_order_goes_below_the_floor(graph):
    assert structural_floor(graph)[0] <= keep_all_timeline(graph).peak_bytes
