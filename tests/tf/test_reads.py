"""Variables that a loop only reads are read before it, once, and at the right time."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from checkmate_tf.bridge.extract import extract
from checkmate_tf.bridge.trace import trace
from checkmate_tf.ir.errors import PlanError
from checkmate_tf.ir.plan import plan_from_order
from checkmate_tf.ir.verify import verify_plan

SPEC = tf.TensorSpec([8])
X = tf.linspace(0.5, 1.5, 8)


def _repeated(value, turn, turns=3):
    return tf.while_loop(lambda count, _: count < turns, lambda count, value: (count + 1, turn(value)), [0, value],
                         maximum_iterations=turns)[1]


def _traced(step):
    traced = trace(step, SPEC)
    return traced, extract(traced)


def _loops(graph):
    return [op for op in graph.ops if "While" in op.kind]


@pytest.mark.parametrize("layer", ["LSTM", "GRU", "SimpleRNN"])
def test_the_loops_of_recurrent_layers_may_run_again(layer):
    inputs = keras.layers.Input((6, 4))
    model = keras.Model(inputs, getattr(keras.layers, layer)(8)(inputs))

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x, training=True))
        return tape.gradient(loss, model.trainable_weights)
    traced = trace(step, tf.TensorSpec([2, 6, 4]))
    assert [op.once for op in _loops(extract(traced))] == [None, None]
    x = tf.random.stateless_uniform([2, 6, 4], [1, 2])
    for received, expected in zip(traced.pack(traced.function(x)), tf.function(step)(x)):
        np.testing.assert_allclose(received, expected, rtol=1e-5, atol=1e-6)


def test_a_loop_reads_what_was_written_before_it_and_not_what_comes_after():
    weight = tf.Variable(0.0)

    def step(x):
        weight.assign(2.0)
        total = _repeated(x, lambda value: value * weight)
        weight.assign(5.0)
        return total
    traced, graph = _traced(step)
    np.testing.assert_allclose(traced.pack(traced.function(X)), 8 * X)
    assert weight.numpy() == 5.0
    loop, = _loops(graph)
    assert loop.once is None
    with pytest.raises(PlanError):
        verify_plan(graph, plan_from_order(graph, [*graph.order, loop.index]))


def test_a_loop_that_writes_a_variable_runs_once():
    count = tf.Variable(0.0)
    traced, graph = _traced(lambda x: _repeated(x, lambda value: value + count.assign_add(1.0)))
    np.testing.assert_allclose(traced.pack(traced.function(X)), X + 6)
    assert _loops(graph)[0].once is not None and count.numpy() == 3


def test_a_loop_in_a_loop_reads_its_variable_itself():
    weight = tf.Variable(2.0)
    traced, graph = _traced(lambda x: _repeated(x, lambda value: _repeated(value, lambda inner: inner * weight, turns=2)))
    np.testing.assert_allclose(traced.pack(traced.function(X)), 64 * X)
    assert _loops(graph)[0].once is not None


def test_sums_in_the_turns_of_a_loop_are_chains():
    """With three numbers or more, what AddN adds first depends on what else is in memory."""
    traced, _ = _traced(lambda x: _repeated(x, lambda value: tf.add_n([value, tf.sin(value), tf.cos(value)])))
    kinds = [node.op for function in traced.graph_def.library.function for node in function.node_def]
    assert "AddN" not in kinds and "Sin" in kinds
    expected = X
    for _ in range(3):
        expected = expected + tf.sin(expected) + tf.cos(expected)
    np.testing.assert_allclose(traced.pack(traced.function(X)), expected, rtol=1e-5)


def test_a_table_in_a_loop_stays_where_it_is():
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer([0, 1, 2], [1.0, 2.0, 4.0]), 0.0)
    traced, _ = _traced(lambda x: tf.while_loop(lambda count, _: count < 3, lambda count, value: (
        count + 1, value * table.lookup(count)), [0, x])[1])
    np.testing.assert_allclose(traced.pack(traced.function(X)), 8 * X)
