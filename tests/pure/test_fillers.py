"""Fillers: what is taken first so that a value is handed no more than its size."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import strategies
from checkmate_tf import solvers
from checkmate_tf.ir.errors import PlanError
from checkmate_tf.ir.graph import GraphBuilder
from checkmate_tf.ir.placement import Layout, Placer, place
from checkmate_tf.ir.plan import plan_from_order
from checkmate_tf.ir.simulate import simulate
from checkmate_tf.ir.verify import verify_plan
from checkmate_tf.solvers import Solution

MIB = 1 << 20


def _two_and_a_third():
    """Values of 4, 4 and 2 MiB, all held until the end."""
    builder = GraphBuilder()
    values = [builder.op(name, bytes=size * MIB) for name, size in zip("abc", (4, 4, 2))]
    builder.op("end", values, bytes=0)
    graph = builder.build()
    return graph, plan_from_order(graph, graph.order)


def test_a_value_finds_a_chunk_of_its_size():
    """10 MiB are free. The first value is cut from them; the second would be handed all 6 that are left, and the third find no room."""
    graph, plan = _two_and_a_third()
    layout = Layout(stretches=((0, 10 * MIB),))
    with_fillers = Placer(graph).filled(plan, layout)
    assert with_fillers.fillers == ((1, 2 * MIB),) and with_fillers.steps == plan.steps
    bare, better = place(graph, plan, layout, 10 * MIB), place(graph, with_fillers, layout, 10 * MIB)
    assert (bare.peak_bytes, bare.lacking_bytes) == (12 * MIB, 2 * MIB)
    assert (better.peak_bytes, better.lacking_bytes) == (10 * MIB, 0)
    assert simulate(graph, with_fillers).peak_bytes == simulate(graph, plan).peak_bytes


@pytest.mark.parametrize("layout", [
    Layout(stretches=((0, 10 * MIB), (1 << 30, 2 * MIB))),          # which would serve the filler
    Layout(stretches=((0, 12 * MIB),)),                             # of 8 that are left the second is cut
    Layout(stretches=((0, 8 * MIB),)),
    Layout(stretches=((0, 4 * MIB + 256),)),
    Layout(stretches=((0, 10 * MIB),), small_bytes=3 * MIB)], ids=["another", "cut", "exact", "too little", "elsewhere"])
def test_where_it_would_not_help_there_is_none(layout):
    graph, plan = _two_and_a_third()
    assert Placer(graph).filled(plan, layout).fillers == ()


def test_small_requests_of_the_same_computation_come_before():
    builder = GraphBuilder()
    first = builder.op("first", bytes=4 * MIB)
    builder.op("pair", bytes=[1024, 4 * MIB])
    builder.op("end", [first, *builder.outputs_of("pair")], bytes=0)
    graph = builder.build()
    # What is small comes to lie before the filler on paper, and behind it in the plan.
    assert Placer(graph).filled(plan_from_order(graph, graph.order), Layout(stretches=((0, 10 * MIB),))).fillers == ((1, 2 * MIB - 1024),)


@settings(deadline=None, max_examples=60)
@given(graph=strategies.graphs(1, 10), sizes=st.lists(st.integers(1, 1 << 16), min_size=1, max_size=4))
def test_any_plan_stays_what_it_is(graph, sizes):
    plan = plan_from_order(graph, graph.order)
    layout = Layout(stretches=tuple((number << 30, 256 * size) for number, size in enumerate(sizes)))
    with_fillers = verify_plan(graph, Placer(graph).filled(plan, layout, least_bytes=256))
    assert with_fillers.steps == plan.steps
    assert place(graph, with_fillers, layout).peak_bytes >= simulate(graph, plan).peak_bytes


@pytest.mark.parametrize("fillers", [((9, 256),), ((-1, 256),), ((1, 256), (0, 256)), ((0, 256), (0, 256)), ((0, 0),), ((0, 2.5),)])
def test_fillers_that_belong_to_no_computation_are_refused(fillers):
    graph, plan = _two_and_a_third()
    with pytest.raises(PlanError, match="P8"):
        verify_plan(graph, dataclasses.replace(plan, fillers=fillers))


def test_they_are_saved_with_the_plan(tmp_path):
    graph, plan = _two_and_a_third()
    solution = solvers.solve(graph, 1 << 40, solvers.get("keep_all"))
    solution = dataclasses.replace(solution, plan=dataclasses.replace(solution.plan, fillers=((1, 2 * MIB),)))
    solution.save(tmp_path / "plan.json")
    assert Solution.load(tmp_path / "plan.json").plan == solution.plan != plan
