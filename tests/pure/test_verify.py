"""One test for each numbered invariant of verify.py."""

import dataclasses
import math

import pytest

from checkmate_tf.ir.errors import GraphError, PlanError
from checkmate_tf.ir.graph import GraphBuilder
from checkmate_tf.ir.plan import Compute, Free, Plan, plan_from_order
from checkmate_tf.ir.verify import verify_graph, verify_plan


def base():
    """a -> b -> c, with c after a."""
    builder = GraphBuilder()
    a = builder.op("a", bytes=1, seconds=1.0)
    b = builder.op("b", [a], bytes=1, seconds=1.0)
    builder.op("c", [b], bytes=1, seconds=1.0, after=[0])
    return builder.build()


def with_op(graph, at, **fields):
    ops = list(graph.ops)
    ops[at] = dataclasses.replace(ops[at], **fields)
    return dataclasses.replace(graph, ops=tuple(ops))


def with_value(graph, at, **fields):
    values = list(graph.values)
    values[at] = dataclasses.replace(values[at], **fields)
    return dataclasses.replace(graph, values=tuple(values))


def refuses_graph(graph, invariant):
    with pytest.raises(GraphError, match=f"^{invariant}:"):
        verify_graph(graph)


def refuses_plan(graph, steps, invariant):
    with pytest.raises(PlanError, match=f"^{invariant}:"):
        verify_plan(graph, Plan(tuple(steps), graph.key))


def test_sound_graphs_come_back_as_they_are():
    graph = base()
    assert verify_graph(graph) is graph


@pytest.mark.parametrize("broken", [
    with_op(base(), 1, index=2), with_value(base(), 1, index=0), with_value(base(), 1, producer=7),
    with_value(base(), 1, port=1), with_value(base(), 1, producer=0), with_op(base(), 0, outputs=(0, 1)),
    with_op(base(), 0, outputs=(0, 17))])
def test_g1_indices_count_up_and_producers_list_their_values(broken):
    refuses_graph(broken, "G1")


@pytest.mark.parametrize("broken", [
    with_op(base(), 0, inputs=(2,)), with_op(base(), 1, inputs=(1,)), with_op(base(), 1, inputs=(9,)),
    with_op(base(), 0, after=(2,)), with_op(base(), 1, after=(1,)), with_op(base(), 1, overwrites=(2,))])
def test_g2_what_an_op_names_comes_from_earlier_ops(broken):
    refuses_graph(broken, "G2")


@pytest.mark.parametrize("broken", [
    with_value(base(), 0, bytes=-1), with_value(base(), 0, bytes=1.0), with_value(base(), 0, bytes=True),
    with_op(base(), 0, scratch_bytes=-1), with_op(base(), 0, seconds=-1.0), with_op(base(), 0, seconds=math.nan),
    with_op(base(), 0, seconds=math.inf), dataclasses.replace(base(), resident_bytes=-1)])
def test_g3_numbers_are_sound(broken):
    refuses_graph(broken, "G3")


@pytest.mark.parametrize("broken", [with_op(base(), 1, inputs=(0, 0)), dataclasses.replace(base(), results=(3,))])
def test_g4_inputs_stand_once_and_results_name_values(broken):
    refuses_graph(broken, "G4")


def test_g5_readers_of_an_overwritten_value_come_first():
    builder = GraphBuilder()
    a = builder.op("read variable", bytes=1)
    builder.op("write", overwrites=[a], bytes=[])
    builder.op("late", [a], bytes=1)
    refuses_graph(builder.build(), "G5")


def test_g5_the_writer_itself_may_read_what_it_overwrites():
    builder = GraphBuilder()
    a = builder.op("read variable", bytes=1)
    builder.op("write", [a], overwrites=[a], bytes=[])
    verify_graph(builder.build())

@pytest.mark.parametrize("broken", [with_op(base(), 1, reuses=(1,)), with_op(base(), 2, reuses=(0,)),
                                    with_value(with_op(base(), 1, reuses=(0,)), 0, bytes=2)])
def test_g6_what_is_reused_is_an_input_as_large_as_one_output(broken):
    refuses_graph(broken, "G6")


def test_p1_a_plan_belongs_to_one_graph():
    graph = base()
    with pytest.raises(PlanError, match="^P1:"):
        verify_plan(graph, Plan((), "another"))


@pytest.mark.parametrize("steps", [
    [Compute(1)], [Compute(3)], [Compute(0), Free(0), Compute(1)], [Compute(0), Compute(0)]])
def test_p2_reads_are_live_and_makes_are_not(steps):
    refuses_plan(base(), steps, "P2")


@pytest.mark.parametrize("steps", [[Free(0)], [Compute(0), Free(0), Free(0)], [Compute(0), Free(5)]])
def test_p3_only_live_values_are_freed(steps):
    refuses_plan(base(), steps, "P3")


def test_p4_every_op_runs():
    refuses_plan(base(), [Compute(0), Compute(1), Free(0), Free(1)], "P4")


def test_p4_what_must_run_once_runs_once():
    graph = with_op(base(), 0, once="a stateful draw")
    order = (0, 1, 0, 2)
    steps = plan_from_order(graph, order).steps
    with pytest.raises(PlanError, match="^P4:.*a stateful draw"):
        verify_plan(graph, Plan(steps, graph.key))


def test_p5_control_edges_order_first_runs():
    builder = GraphBuilder()
    builder.op("first", bytes=[])
    builder.op("second", bytes=[], after=[0])
    refuses_plan(builder.build(), [Compute(1), Compute(0)], "P5")


def test_p5_later_runs_carry_no_control_edges():
    builder = GraphBuilder()
    builder.op("first", bytes=[])
    builder.op("second", bytes=[], after=[0])
    graph = builder.build()
    verify_plan(graph, Plan((Compute(0), Compute(1), Compute(1)), graph.key))


def test_p6_an_overwritten_value_is_of_no_use():
    builder = GraphBuilder()
    a = builder.op("read variable", bytes=1)
    builder.op("use", [a], bytes=[])
    builder.op("write", overwrites=[a], bytes=[])
    graph = builder.build()
    verify_plan(graph, plan_from_order(graph, (0, 1, 2)))
    for order in [(0, 1, 2, 1), (0, 2, 1), (0, 1, 2, 0, 1)]:
        refuses_plan(graph, plan_from_order(graph, order).steps, "P6")


def test_p7_the_results_and_nothing_else_are_live_at_the_end():
    graph = base()
    steps = plan_from_order(graph, graph.order).steps
    refuses_plan(graph, steps[:-1], "P7")
    refuses_plan(dataclasses.replace(graph, results=(2,)), steps, "P7")
