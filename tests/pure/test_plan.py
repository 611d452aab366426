import pytest
from hypothesis import given

from checkmate_tf.ir.errors import PlanError
from checkmate_tf.ir.graph import GraphBuilder
from checkmate_tf.ir.plan import Compute, Free, plan_from_order, pretty
from checkmate_tf.ir.verify import verify_plan
from tests import strategies


def diamond():
    """a feeds b and c, both feed d."""
    builder = GraphBuilder()
    a = builder.op("a", bytes=1)
    b = builder.op("b", [a], bytes=1)
    c = builder.op("c", [a], bytes=1)
    builder.op("d", [b, c], bytes=1)
    return builder.build()


def test_values_are_freed_right_after_their_last_use():
    graph = diamond()
    assert pretty(graph, plan_from_order(graph, (0, 1, 2, 3))) == """\
compute a
compute b
compute c
free a
compute d
free d
free b
free c"""


def test_a_recomputed_value_is_freed_before_it_is_made_again():
    graph = diamond()
    assert pretty(graph, plan_from_order(graph, (0, 1, 0, 2, 3))) == """\
compute a
compute b
free a
recompute a
compute c
free a
compute d
free d
free b
free c"""


def test_an_unused_run_is_freed_at_once():
    graph = diamond()
    plan = plan_from_order(graph, (0, 0, 1, 2, 3))
    assert plan.steps[:3] == (Compute(0), Free(0), Compute(0))


def test_results_are_never_freed_at_the_end():
    builder = GraphBuilder()
    a, b = builder.op("a", bytes=[1, 1]), 1
    graph = builder.build([b])
    assert plan_from_order(graph, (0,)).steps == (Compute(0), Free(a))


def test_outputs_beyond_the_first_print_with_their_port():
    builder = GraphBuilder()
    builder.op("pair", bytes=[1, 1])
    graph = builder.build()
    assert pretty(graph, plan_from_order(graph, (0,))) == "compute pair\nfree pair\nfree pair:1"


def test_a_plan_gives_back_its_order():
    assert plan_from_order(diamond(), (0, 1, 0, 2, 3)).order == (0, 1, 0, 2, 3)


@pytest.mark.parametrize("order", [(1, 0, 2, 3), (0, 1, 3, 2), (1, 2, 3)])
def test_an_order_that_uses_what_is_not_there_is_refused(order):
    with pytest.raises(PlanError, match="before, or without"):
        plan_from_order(diamond(), order)


@pytest.mark.parametrize("order", [(0, 4), (-1,)])
def test_an_order_of_unknown_ops_is_refused(order):
    with pytest.raises(PlanError, match="Received: (4|-1)"):
        plan_from_order(diamond(), order)


@given(strategies.graphs())
def test_the_given_order_is_always_a_plan(graph):
    verify_plan(graph, plan_from_order(graph, graph.order))
