"""Repair: the same runs, valid, and less memory when placed."""

import time

from hypothesis import given, settings
from hypothesis import strategies as st

from checkmate_tf.ir.graph import GraphBuilder
from checkmate_tf.ir.placement import place
from checkmate_tf.ir.plan import plan_from_order
from checkmate_tf.ir.repair import repaired
from checkmate_tf.ir.simulate import simulate
from checkmate_tf.ir.verify import verify_plan
from checkmate_tf.solvers.chen import recomputing_order
from tests import strategies

MIB = 1 << 20


def test_a_run_moves_where_it_takes_less():
    builder = GraphBuilder()
    a = builder.op("a", bytes=2 * MIB)
    b = builder.op("b", bytes=2 * MIB)
    small = builder.op("small", [a], bytes=256)
    builder.op("both", [small, b], bytes=256)
    graph = builder.build()
    # b before a's reader: both large values at once. b after it: one at a time, and the small one.
    plan, placed = repaired(graph, (0, 1, 2, 3), lambda plan: (plan, place(graph, plan).peak_bytes), 3 * MIB, 5.0)
    assert placed <= 3 * MIB and simulate(graph, plan).peak_bytes <= 3 * MIB
    assert sorted(plan.order) == [0, 1, 2, 3]


def test_what_fits_already_is_left_alone():
    graph = strategies.linear_net(3)
    started = time.monotonic()
    plan, placed = repaired(graph, graph.order, lambda plan: (plan, 5), 5, 60.0)
    assert (plan.order, placed) == (graph.order, 5) and time.monotonic() - started < 30


def test_what_gains_too_little_to_get_there_is_given_up():
    graph = strategies.linear_net(3)
    started = time.monotonic()
    plan, placed = repaired(graph, graph.order, lambda plan: (plan, 9), 5, 20.0)
    assert (sorted(plan.order), placed) == (sorted(graph.order), 9) and time.monotonic() - started < 15


@settings(deadline=None, max_examples=40)
@given(graph=strategies.graphs(1, 10), borders=st.sets(st.integers(0, 9)), seed=st.integers(0, 99))
def test_the_runs_stay_the_same_and_the_plan_valid(graph, borders, seed):
    order = recomputing_order(graph, borders)
    live = lambda plan: simulate(graph, plan).peak_bytes
    plan, placed = repaired(graph, order, lambda plan: (plan, live(plan)), 0, 0.02, seed)
    assert sorted(plan.order) == sorted(order)
    verify_plan(graph, plan)
    assert placed == live(plan) <= live(plan_from_order(graph, order))
