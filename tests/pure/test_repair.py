"""Repair: the same runs, valid, and less memory when placed."""

import dataclasses
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkmate_tf.ir.errors import PlanError
from checkmate_tf.ir.graph import GraphBuilder
from checkmate_tf.ir.placement import UNLIMITED_BYTES, Layout, Placer
from checkmate_tf.ir.plan import plan_from_order
from checkmate_tf.ir.repair import repaired, rules_for
from checkmate_tf.ir.simulate import simulate
from checkmate_tf.ir.verify import verify_plan
from checkmate_tf.solvers.chen import recomputing_order
from tests import strategies

MIB = 1 << 20
ANYWHERE = [(Layout(), UNLIMITED_BYTES)]


def _repaired(graph, order, limit_bytes, seconds, seed=0, layouts=ANYWHERE, device_bytes=UNLIMITED_BYTES):
    return repaired(Placer(graph), rules_for(graph), order, layouts, limit_bytes, device_bytes, seconds, seed)


def test_a_run_moves_where_it_takes_less():
    builder = GraphBuilder()
    a = builder.op("a", bytes=2 * MIB)
    b = builder.op("b", bytes=2 * MIB)
    small = builder.op("small", [a], bytes=256)
    builder.op("both", [small, b], bytes=256)
    graph = builder.build()
    # b before a's reader: both large values at once. b after it: one at a time, and the small one.
    plan, placed = _repaired(graph, (0, 1, 2, 3), 3 * MIB, 5.0)
    assert placed <= 3 * MIB and simulate(graph, plan).peak_bytes <= 3 * MIB
    assert sorted(plan.order) == [0, 1, 2, 3]


def test_what_fits_already_is_left_alone():
    graph = strategies.linear_net(3)
    started = time.monotonic()
    plan, _ = _repaired(graph, graph.order, UNLIMITED_BYTES, 60.0)
    assert plan.order == graph.order and time.monotonic() - started < 30


def test_what_gains_too_little_to_get_there_is_given_up():
    graph = strategies.linear_net(3)
    started = time.monotonic()
    plan, placed = _repaired(graph, graph.order, 5, 20.0)
    assert sorted(plan.order) == sorted(graph.order) and time.monotonic() - started < 15
    assert placed == Placer(graph).place(plan).peak_bytes


def test_an_order_that_uses_what_nothing_made_is_none():
    graph = strategies.linear_net(3)
    with pytest.raises(PlanError, match="before, or without"):
        _repaired(graph, graph.order[1:], 5, 1.0)


def test_fillers_are_part_of_a_try():
    builder = GraphBuilder()
    kept = builder.op("kept", bytes=3 * MIB)
    late = builder.op("late", [kept], bytes=3 * MIB)
    builder.op("end", [kept, late], bytes=256)
    graph = builder.build()
    # Whichever chunk of 5 MiB is given to a value of 3 is handed out whole, but for a filler of 2.
    layouts = [(Layout(stretches=((0, 5 * MIB), (1 << 40, 5 * MIB), (2 << 40, 256))), 1 << 40)]
    plan, placed = _repaired(graph, graph.order, 8 * MIB + 4096, 5.0, layouts=layouts)
    assert placed == 8 * MIB + 256 and [size for _, size in plan.fillers] == [2 * MIB]
    assert Placer(graph).place(plan, *layouts[0]).peak_bytes == placed


def _on_paper(graph, plan, layouts, device_bytes):
    """The measure of `repaired`, by `place`."""
    placements = [Placer(graph).place(plan, layout, limit) for layout, limit in layouts]
    return max(max(placement.peak_bytes, device_bytes + placement.lacking_bytes + placement.homeless_bytes // 1000)
               if placement.lacking_bytes else placement.peak_bytes for placement in placements)


@settings(deadline=None, max_examples=60)
@given(graph=strategies.graphs(1, 10), borders=st.sets(st.integers(0, 9)), seed=st.integers(0, 99), large=st.sampled_from((1, 100_000)),
       free=st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=6), min_size=1, max_size=2), is_limited=st.booleans())
def test_the_runs_stay_the_same_and_the_plan_valid(graph, borders, seed, large, free, is_limited):
    graph = dataclasses.replace(graph, values=tuple(dataclasses.replace(value, bytes=value.bytes * large) for value in graph.values))
    layouts = [Layout(stretches=tuple((number << 40, 256 * size * large) for number, size in enumerate(sizes))) for sizes in free]
    layouts = [(layout, sum(size for _, size in layout.stretches) if is_limited else UNLIMITED_BYTES) for layout in layouts]
    order = recomputing_order(graph, borders)
    plan, placed = _repaired(graph, order, 0, 0.02, seed, layouts, 1000 * large)
    assert sorted(plan.order) == sorted(order)
    verify_plan(graph, plan)
    # Frees as everywhere.
    assert dataclasses.replace(plan, fillers=()) == plan_from_order(graph, plan.order)
    assert placed == _on_paper(graph, plan, layouts, 1000 * large) <= _on_paper(graph, plan_from_order(graph, order), layouts, 1000 * large)
