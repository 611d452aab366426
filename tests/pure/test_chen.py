import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkmate_tf import solvers
from checkmate_tf.ir.graph import GraphBuilder
from checkmate_tf.ir.plan import plan_from_order
from checkmate_tf.ir.simulate import keep_all_timeline, simulate
from checkmate_tf.ir.verify import verify_plan
from checkmate_tf.solvers import chen
from tests import strategies


def residual_net():
    """stem -> (conv -> add, with a skip from stem) -> head -> loss, and a gradient of each but the stem.

    Forward ops: 0 stem, 1 conv, 2 add, 3 head, 4 loss. Without stem, add, or head the rest falls apart or not:
    stem is an end (no), conv lies on a cycle (no), add separates stem and conv from head (yes), head separates loss.
    """
    builder = GraphBuilder()
    stem = builder.op("stem", bytes=4, seconds=1.0)
    conv = builder.op("conv", [stem], bytes=4, seconds=1.0)
    add = builder.op("add", [stem, conv], bytes=4, seconds=1.0)
    head = builder.op("head", [add], bytes=2, seconds=1.0)
    loss = builder.op("loss", [head], bytes=1, seconds=1.0)
    d_head = builder.op("d_head", [head, loss], bytes=2, seconds=1.0, backward=True)
    d_add = builder.op("d_add", [add, d_head], bytes=4, seconds=1.0, backward=True)
    builder.op("d_conv", [stem, conv, d_add], bytes=4, seconds=1.0, backward=True)
    return builder.build()


def test_articulation_points_of_a_residual_net():
    assert chen.articulation_points(residual_net()) == (2, 3)


def test_articulation_points_of_a_chain_are_all_but_its_ends():
    assert chen.articulation_points(strategies.linear_net(4)) == (1, 2, 3)


def test_a_root_with_two_branches_is_an_articulation_point():
    builder = GraphBuilder()
    root = builder.op("root", bytes=1)
    builder.op("left", [root], bytes=1)
    builder.op("right", [root], bytes=1)
    assert chen.articulation_points(builder.build()) == (0,)


def test_components_are_searched_one_by_one():
    builder = GraphBuilder()
    for name in ("x", "y"):
        a = builder.op(f"{name}0", bytes=1)
        b = builder.op(f"{name}1", [a], bytes=1)
        builder.op(f"{name}2", [b], bytes=1)
    assert chen.articulation_points(builder.build()) == (1, 4)


@given(strategies.graphs())
def test_articulation_points_are_those_whose_removal_adds_components(graph):
    forward = set(chen.forward_ops(graph))

    def components(ops):
        left, count = set(ops), 0
        while left:
            count += 1
            stack = [left.pop()]
            while stack:
                op = stack.pop()
                near = {other for other in left if other in graph.predecessors[op] or op in graph.predecessors[other]}
                left -= near
                stack.extend(near)
        return count

    # An isolated op that is removed takes its component with it, so the count goes down.
    separating = {op for op in forward if components(forward - {op}) > components(forward)}
    assert set(chen.articulation_points(graph)) == separating


def test_square_root_takes_every_second_of_seven_candidates():
    assert chen.square_root_borders(tuple(range(10, 17))) == {11, 13, 15}


def test_square_root_of_few_or_no_candidates():
    assert chen.square_root_borders(()) == frozenset()
    assert chen.square_root_borders((4,)) == {4}


def test_greedy_closes_a_segment_when_its_bytes_are_reached():
    graph = residual_net()
    # Running sums for b = 6: stem 4, conv 8 -> border; add 4, head 6 -> border; loss 1.
    assert chen.greedy_borders(graph, chen.forward_ops(graph), 6) == {1, 3}
    # Only add and head may be borders: stem 4, conv 8, add 12 -> border; head 2, loss 3.
    assert chen.greedy_borders(graph, chen.articulation_points(graph), 6) == {2}
    assert chen.greedy_borders(graph, chen.forward_ops(graph), 0) == {0, 1, 2, 3, 4}


def test_a_segment_is_recomputed_when_the_backward_pass_reaches_it():
    graph = residual_net()
    # Kept: add and what follows it. d_conv (op 7) reads stem and conv, which are made again for it.
    assert chen.recomputing_order(graph, {2}) == (0, 1, 2, 3, 4, 5, 6, 0, 1, 7)


def test_recomputed_values_serve_the_whole_segment():
    # Layers 0 to 3, loss (4), gradients of layers 3 to 0 (5 to 8). Border: layer 2, so layers 0 and 1 are dropped.
    # gradient1 (op 7) reads layers 1 and 2: layers 0 and 1 run again; gradient0 reads layer 0 from that run.
    assert chen.recomputing_order(strategies.linear_net(4), {2}) == (0, 1, 2, 3, 4, 5, 6, 0, 1, 7, 8)


def test_without_borders_everything_is_kept():
    graph = residual_net()
    assert chen.recomputing_order(graph, set()) == graph.order


def test_an_op_that_must_run_once_is_kept_inside_a_segment():
    builder = GraphBuilder()
    a = builder.op("a", bytes=1)
    mask = builder.op("mask", [a], bytes=1, once="a stateful draw")
    b = builder.op("b", [mask], bytes=1)
    loss = builder.op("loss", [b], bytes=1)
    builder.op("gradient", [mask, b, loss], bytes=1, backward=True)
    assert chen.recomputing_order(builder.build(), {3}) == (0, 1, 2, 3, 2, 4)


def test_an_op_whose_input_has_been_overwritten_is_not_run_again():
    builder = GraphBuilder()
    variable = builder.op("read variable", bytes=1)
    a = builder.op("a", [variable], bytes=1)
    loss = builder.op("loss", [a], bytes=1)
    builder.op("assign", overwrites=[variable], once="a variable write", bytes=[], backward=True)
    builder.op("gradient", [a, loss], bytes=1, backward=True)
    assert chen.recomputing_order(builder.build(), {2}) == (0, 1, 2, 3, 4)


@pytest.mark.parametrize("name", ["chen_sqrt", "chen_greedy", "linearized_sqrt", "linearized_greedy"])
def test_a_graph_without_a_backward_part_keeps_everything(name):
    builder = GraphBuilder()
    value = builder.op("op0", bytes=1, seconds=1.0)
    for index in range(1, 9):
        value = builder.op(f"op{index}", [value], bytes=1, seconds=1.0)
    graph = builder.build()
    assert solvers.solve(graph, keep_all_timeline(graph).peak_bytes, solvers.get(name)).plan.order == graph.order


@pytest.mark.parametrize("name", ["chen_sqrt", "chen_greedy", "linearized_sqrt", "linearized_greedy"])
def test_a_long_chain_fits_in_a_few_times_the_square_root_of_its_memory(name):
    graph = strategies.linear_net(100)
    base_peak_bytes = keep_all_timeline(graph).peak_bytes
    assert base_peak_bytes >= 100
    solution = solvers.solve(graph, 30, solvers.get(name))
    assert solution.peak_bytes <= 30
    assert max(solution.timeline.runs) == 2  # at most one extra forward pass


def test_greedy_takes_the_cheapest_of_the_plans_that_fit():
    graph = strategies.linear_net(20)
    costs = [solvers.solve(graph, budget, solvers.get("linearized_greedy")).seconds for budget in (12, 16, 20, 25)]
    assert costs == sorted(costs, reverse=True) and costs[-1] == graph.seconds


@given(strategies.graphs(), st.sets(st.integers(0, 9)))
def test_any_borders_give_a_plan_that_runs_no_op_more_than_twice(graph, borders):
    plan = verify_plan(graph, plan_from_order(graph, chen.recomputing_order(graph, borders)))
    assert max(simulate(graph, plan).runs, default=0) <= 2
