import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkmate_tf.ir.errors import PlanError
from checkmate_tf.ir.graph import GraphBuilder
from checkmate_tf.ir.plan import plan_from_order
from checkmate_tf.ir.simulate import keep_all_timeline, simulate
from checkmate_tf.ir.verify import verify_plan
from checkmate_tf.solvers import matrices
from checkmate_tf.solvers.chen import recomputing_order
from tests import strategies


def as_bits(rows):
    return np.array([[int(bit) for bit in row] for row in rows], dtype=bool)


# Two layers, loss, two gradients (ops 0 to 4); layer 0 is dropped after layer 1 and made again for its gradient.
#   gradient1 (op 3) reads layer1, loss; gradient0 (op 4) reads layer0, layer1, gradient1
NET = strategies.linear_net(2)
ORDER = (0, 1, 2, 3, 0, 4)
R = as_bits(["10000", "01000", "00100", "00010", "10001"])
S = as_bits(["00000", "10000", "01000", "01100", "01010"])


def test_r_is_read_row_by_row():
    assert matrices.order_from_runs(R) == ORDER


def test_an_order_is_cut_into_stages():
    np.testing.assert_array_equal(matrices.runs_from_order(NET, ORDER), R)


def test_s_is_what_later_stages_read():
    np.testing.assert_array_equal(matrices.kept_from_runs(NET, R), S)


def test_the_cheapest_r_for_an_s():
    np.testing.assert_array_equal(matrices.cheapest_runs(NET, S), R)


def test_free_follows_equation_5():
    pairs = matrices.free_pairs(NET)
    assert pairs == ((0, 1), (0, 4), (1, 2), (1, 3), (1, 4), (2, 3), (3, 4))
    released = matrices.frees(NET, R, S)
    # Layer 0 goes after layer 1 and again after its gradient, loss after gradient1, the rest at the end.
    assert {(int(stage), pairs[column]) for stage, column in zip(*np.nonzero(released))} == {
        (1, (0, 1)), (3, (2, 3)), (4, (0, 4)), (4, (1, 4)), (4, (3, 4))}


def test_u_is_worked_out_by_hand():
    # Stage 0 makes layer0 (1 byte). Stage 1 holds layer0 and makes layer1 (2). Stage 2: layer1, loss (2).
    # Stage 3: layer1, loss, gradient1 (3). Stage 4: layer1, gradient1, layer0 again (3), gradient0 (4).
    assert matrices.memory(NET, R, S).max(axis=1).tolist() == [1, 2, 2, 3, 4]


def test_a_multi_output_op_releases_the_output_that_a_rerun_does_not_need():
    builder = GraphBuilder()
    builder.op("pair", bytes=[1, 100])
    builder.op("first", [0, 1], bytes=1)
    builder.op("wide", bytes=50)
    builder.op("second", [0, 3], bytes=1)
    builder.op("last", [3, 4], bytes=50)
    graph = builder.build()
    order = (0, 1, 2, 0, 3, 4)
    runs = matrices.runs_from_order(graph, order)
    held = matrices.memory(graph, runs, matrices.kept_from_runs(graph, runs))
    # Stage 3 keeps wide, reruns pair, and lets the large output go before it runs second.
    assert held[3, 0] == 50 + 1 + 100
    assert held[3, 3] == 50 + 1 + 1


@pytest.mark.parametrize("order", [(1, 0, 2, 3, 4), (0, 1, 2, 3, 4, 4), (0, 1, 2, 1, 0, 3, 4),
                                   (0, 1, 2, 0, 0, 3, 4), (0, 1, 2, 3), (0, 1, 2, 3, 4, 0)])
def test_orders_that_are_no_stage_plans_have_no_matrices(order):
    with pytest.raises(PlanError, match="stage plan"):
        matrices.runs_from_order(NET, order)


def test_last_stages_follow_once_and_overwrites():
    builder = GraphBuilder()
    a = builder.op("read variable", bytes=1)
    b = builder.op("use", [a], bytes=1)
    builder.op("draw", bytes=1, once="a stateful draw")
    builder.op("write", [a, b], overwrites=[a], bytes=[])
    builder.op("after", [b], bytes=1)
    assert matrices.last_stages(builder.build()).tolist() == [4, 3, 2, 3, 4]


def test_an_empty_graph_has_empty_matrices():
    graph = GraphBuilder().build()
    runs = matrices.runs_from_order(graph, ())
    assert runs.shape == (0, 0) and matrices.order_from_runs(runs) == ()
    assert matrices.memory(graph, runs, matrices.kept_from_runs(graph, runs)).shape == (0, 0)


@given(strategies.graphs(min_ops=1), st.sets(st.integers(0, 9)))
def test_u_is_what_the_simulator_finds(graph, borders):
    order = recomputing_order(graph, borders)
    runs = matrices.runs_from_order(graph, order)
    kept = matrices.kept_from_runs(graph, runs)
    assert matrices.order_from_runs(runs) == order
    peak_bytes = simulate(graph, plan_from_order(graph, order)).peak_bytes
    assert matrices.memory(graph, runs, kept).max() == peak_bytes


@given(strategies.graphs(min_ops=1), st.sets(st.integers(0, 9)))
def test_s_then_r_then_s_runs_nothing_that_was_not_run(graph, borders):
    runs = matrices.runs_from_order(graph, recomputing_order(graph, borders))
    again = matrices.cheapest_runs(graph, matrices.kept_from_runs(graph, runs))
    assert not (again & ~runs).any()
    verify_plan(graph, plan_from_order(graph, matrices.order_from_runs(again)))


@given(strategies.graphs(min_ops=1))
def test_keeping_everything_runs_everything_once(graph):
    runs = matrices.runs_from_order(graph, graph.order)
    kept = matrices.kept_from_runs(graph, runs)
    np.testing.assert_array_equal(matrices.cheapest_runs(graph, kept), runs)
    assert runs.sum() == len(graph.ops)
    assert matrices.memory(graph, runs, kept).max() == keep_all_timeline(graph).peak_bytes
