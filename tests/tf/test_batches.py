"""The largest batch: sizes as functions of the batch, the search, and that the answer trains within the budget."""

import dataclasses
import gc

import keras
import numpy as np
import pytest
import tensorflow as tf

import checkmate_tf
from checkmate_tf import batches, planning
from checkmate_tf.bridge import measure
from checkmate_tf.ir.errors import BudgetError, InfeasibleBudgetError, UnsupportedError
from checkmate_tf.ir.graph import GraphBuilder
from checkmate_tf.lines import Lines
from checkmate_tf.solvers import Limits, get
from networks import conv_net, digits, layers

QUICK = {"profile": "cpu", "time_limit": 1, "solver": "greedy", "verbose": 0}


def small_net(**arguments) -> keras.Model:
    return conv_net(optimizer="sgd", **arguments)


def prepare(model, batch_size: int):
    specs = (tf.TensorSpec([batch_size, 16, 16, 3]), tf.TensorSpec([batch_size], tf.int64))
    planning.build(model, specs)
    return planning.prepare(model, specs, "cpu", lambda text: None, batch_is_there=False)


def held() -> int:
    """What the process holds already; what Keras traced once stays in memory, its variables with it."""
    gc.collect()
    return measure.measured_memory()[0]


def pooled_net() -> keras.Model:
    """Its pooling leaves a workspace that is no whole number of granules."""
    model = keras.Sequential([layers.Input((16, 16, 3)), layers.Conv2D(5, 3, padding="same"), layers.MaxPooling2D(3),
                              layers.Flatten(), layers.Dense(10)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


@pytest.mark.slow
@pytest.mark.parametrize("make", [lambda: small_net(dropout=0.2), pooled_net], ids=["dropout", "pooling"])
def test_a_step_between_two_traced_ones_is_the_step_that_would_be_traced(make):
    model = make()
    lines = Lines.through((8, 16), (prepare(model, 8), prepare(model, 16)))
    for batch_size in (3, 8, 37):
        drawn, traced = lines.at(batch_size), prepare(model, batch_size)
        by_name = {traced.graph.ops[value.producer].name + str(value.port): value for value in traced.graph.values}
        for value in drawn.graph.values:
            other = by_name[drawn.graph.ops[value.producer].name + str(value.port)]
            assert (value.bytes, value.shape) == (other.bytes, other.shape)
        assert drawn.residents.batch == traced.residents.batch and drawn.traced.resident_sizes == traced.traced.resident_sizes
        assert drawn.graph.seconds == pytest.approx(traced.graph.seconds, rel=0.05)


def test_steps_of_other_ops_are_not_on_lines():
    first, second = prepare(small_net(), 8), prepare(small_net(dropout=0.2), 16)
    assert Lines.through((8, 16), (first, second)) is None


@pytest.mark.slow
def test_the_batch_fits_with_its_plan_and_the_next_does_not():
    model = small_net()
    budget = 12_000_000 + held()
    found = checkmate_tf.max_batch_size(model, budget, *digits(16), **QUICK)
    assert found.keep_all_batch_size < found.batch_size <= found.limit_batch_size
    assert found.solution.placed_peak_bytes <= found.budget_bytes == budget
    assert [item.fits for item in found.tries if item.batch_size == found.batch_size + 1][-1:] in ([False], [])
    assert prepare(model, found.batch_size).graph.key == found.solution.plan.graph_key
    # The plan is one of the step that training traces, with room for the data that `fit` holds.
    x, y = digits(found.batch_size)
    checkmate_tf.compile(model, dataclasses.replace(found.solution, budget_bytes=budget + 12_000_000), verbose=0)
    model.fit(x, y, batch_size=found.batch_size, verbose=0)
    assert model.checkmate.solution.plan == found.solution.plan
    assert sum(model.checkmate.solution.timeline.runs) > len(model.checkmate.solution.timeline.runs)


@pytest.mark.slow
def test_what_costs_more_than_allowed_does_not_fit():
    found = checkmate_tf.max_batch_size(small_net(), 12_000_000 + held(), *digits(16), max_overhead=0.02, **QUICK)
    assert found.keep_all_batch_size <= found.batch_size and found.solution.overhead <= 0.02
    assert any(not item.fits and item.overhead is not None and item.overhead > 0.02 for item in found.tries)


@pytest.mark.slow
def test_a_fraction_is_of_the_peak_for_the_batch_given():
    model, batch = small_net(), digits(64)
    needs = checkmate_tf.estimate(model, *batch, profile="cpu", verbose=0)
    fraction = (1 + held() / needs.keep_all_peak_bytes) / 2
    found = checkmate_tf.max_batch_size(model, fraction, *batch, solver="keep_all", profile="cpu", time_limit=1, verbose=0)
    assert abs(found.budget_bytes - fraction * needs.keep_all_peak_bytes) < 0.05 * needs.keep_all_peak_bytes
    # A plan's order may have been repaired, so that a little more fits than in the order of tracing.
    assert found.keep_all_batch_size - 1 <= found.batch_size <= 1.25 * found.keep_all_batch_size < 64


def test_where_not_even_one_example_fits_the_error_says_what_is_held():
    with pytest.raises(InfeasibleBudgetError, match="floor") as caught:
        checkmate_tf.max_batch_size(small_net(), "10KB", *digits(4), **QUICK)
    assert "weights" in caught.value.breakdown


@pytest.mark.parametrize("arguments, error, text", [
    ({"budget": -5}, BudgetError, "positive"), ({"max_overhead": -0.1}, BudgetError, "max_overhead=-0.1"),
    ({"max_overhead": "twice"}, BudgetError, "max_overhead='twice'"), ({"max_overhead": True}, BudgetError, "max_overhead=True")])
def test_bad_arguments_are_refused(arguments, error, text):
    with pytest.raises(error, match=text):
        checkmate_tf.max_batch_size(small_net(), arguments.pop("budget", "12MB"), *digits(4), **QUICK, **arguments)


def test_parts_of_a_batch_must_share_its_size():
    with pytest.raises(UnsupportedError, match="same first dimension.*Received: shapes"):
        checkmate_tf.max_batch_size(small_net(), "12MB", np.zeros((4, 16, 16, 3), np.float32), np.zeros(3, np.int64), **QUICK)


def chain(batch_size: int):
    """Three forward ops and three backward ones of a second each; what f0 and b0 make is 10 bytes an item, the rest 4."""
    builder = GraphBuilder()
    kept = builder.op("f0", bytes=10 * batch_size, seconds=1.0)
    value = builder.op("f1", [kept], bytes=4 * batch_size, seconds=1.0)
    value = builder.op("f2", [value], bytes=4 * batch_size, seconds=1.0)
    value = builder.op("b2", [value], bytes=14 * batch_size, seconds=1.0, backward=True)
    value = builder.op("b1", [value], bytes=4 * batch_size, seconds=1.0, backward=True)
    builder.op("b0", [value, kept], bytes=4 * batch_size, seconds=1.0, backward=True)
    return builder.build()


@pytest.mark.parametrize("max_overhead, batch_size", [(0.0, 7), (0.1, 7), (0.2, 11), ("forward", 11), (None, 11)])
def test_the_largest_batch_of_a_family_by_hand(max_overhead, batch_size):
    # Every op by itself needs at most 18 bytes an item (b1 and b2, b0): 200 / 18 = 11. With f0 kept b2 holds 28: 200 / 28 = 7. Running
    # f0 again is one second of six, and a forward pass three.
    found = batches.largest_batch(batches.Bare(chain, get("auto"), Limits(seconds=1)), 200, max_overhead)
    assert (found.batch_size, found.keep_all_batch_size, found.limit_batch_size) == (batch_size, 7, 11)
    assert found.is_proven == (batch_size == 11) and found.solution.peak_bytes <= 200
    assert "largest batch" in str(found) and f"<td style=\"text-align:right\">{batch_size}</td>" in found._repr_html_()


def test_an_order_is_not_carried_to_a_step_of_other_ops():
    def graph(batch_size):
        ops = tuple(dataclasses.replace(op, name=f"{op.name} of {batch_size}") for op in chain(batch_size).ops)
        return dataclasses.replace(chain(batch_size), ops=ops)

    found = batches.largest_batch(batches.Bare(graph, get("keep_all"), Limits(seconds=1)), 200)
    assert found.batch_size == 7 and all(item.fits == (item.batch_size <= 7) for item in found.tries)
    assert found.solution.plan.graph_key == graph(7).key
