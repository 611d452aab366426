"""Graphs made coarse by labels: groups are convex, lifts are valid, and any solver plans on them."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkmate_tf import solvers
from checkmate_tf.ir.errors import UnsupportedError
from checkmate_tf.ir.graph import GraphBuilder
from checkmate_tf.ir.grouping import group_by_label
from checkmate_tf.ir.plan import plan_from_order
from checkmate_tf.ir.simulate import keep_all_timeline, simulate
from checkmate_tf.ir.verify import verify_plan
from checkmate_tf.layerwise import ByLayer, by_layer
from checkmate_tf.solvers import Limits, Status
from tests.strategies import graphs


@settings(deadline=None, max_examples=300)
@given(graph=graphs(1, 16), seed=st.integers(0, 1000), count=st.integers(1, 4))
def test_any_labels_give_groups_whose_lifted_order_is_valid_and_costs_the_same(graph, seed, count):
    choices = random.Random(seed)
    labels = [choices.choice([None, *map(str, range(count))]) for _ in graph.ops]
    small, lift = group_by_label(graph, labels)
    plan = verify_plan(graph, plan_from_order(graph, lift(small.order)))
    timeline, promised = simulate(graph, plan), keep_all_timeline(small)
    assert timeline.seconds == pytest.approx(promised.seconds) and timeline.peak_bytes <= promised.peak_bytes


def test_a_label_that_a_path_leaves_and_comes_back_to_is_two_groups():
    builder = GraphBuilder()
    a = builder.op("a", bytes=1)
    b = builder.op("b", [a], bytes=1)
    other = builder.op("other", [a], bytes=1)
    builder.op("c", [other, b], bytes=1)
    small, lift = group_by_label(builder.build(), ["layer", "layer", "other", "layer"])
    assert [lift([index]) for index in range(3)] == [(0, 1), (2,), (3,)]


def test_what_runs_once_stays_out_of_its_layer():
    builder = GraphBuilder()
    a = builder.op("a", bytes=1)
    b = builder.op("b", [a], bytes=1)
    builder.op("write", [b], once="writes a variable")
    builder.op("d", [b], bytes=1)
    small, _ = group_by_label(builder.build(), 4 * ["layer"])
    assert sorted((op.once is not None) for op in small.ops) == [False, True]


def test_a_solver_by_layer_answers_for_the_whole_graph_and_claims_no_bound():
    # Two ops a layer: 'in' is what a layer needs inside, 'out' what it hands on.
    builder, value, outs = GraphBuilder(), None, []
    for layer in range(5):
        inner = builder.op(f"m/layer{layer}_1/in", [] if value is None else [value], bytes=4, seconds=1.0)
        value = builder.op(f"m/layer{layer}_1/out", [inner], bytes=4, seconds=1.0)
        outs.append(value)
    for layer in reversed(range(5)):
        value = builder.op(f"gradient_tape/m/layer{layer}_1/back", [value, outs[layer]], bytes=4, seconds=1.0, backward=True)
    graph = builder.build()
    coarse = ByLayer(solvers.get("auto"), frozenset(f"layer{layer}" for layer in range(5)))
    solution = solvers.solve(graph, 20, coarse, Limits(seconds=2))
    assert solution.status is Status.FEASIBLE and solution.stats["groups"] == 10 and solution.solver == "auto by layer"
    assert solution.peak_bytes <= 20 < keep_all_timeline(graph).peak_bytes and solution.bound_seconds == graph.seconds
    assert coarse.label("gradient_tape/m/layer1_1/back", True) == "gradient_tape/m/layer1_1 backward"
    assert coarse.label("adam/update", True) is None


def test_only_what_has_layers_is_planned_by_layer():
    with pytest.raises(UnsupportedError, match="Received: int"):
        by_layer(7)
