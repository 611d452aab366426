"""Extraction: what is an op, what it makes, what may run again, and what must hold of the order."""

import keras
import pytest
import tensorflow as tf

from checkmate_tf.bridge.extract import extract
from checkmate_tf.bridge.trace import trace
from checkmate_tf.ir.errors import UnsupportedError


def _graph(step, *specs):
    return extract(trace(step, specs[0] if len(specs) == 1 else specs))


def _ops(graph, kind):
    return [op for op in graph.ops if op.kind == kind]


def test_views_take_no_bytes_and_are_looked_through():
    graph = _graph(lambda x: tf.exp(tf.expand_dims(tf.reshape(tf.sin(x), [4, 2]), 0)), tf.TensorSpec([8]))
    assert {op.kind for op in graph.ops} == {"Sin", "Exp"}
    sin, exp = _ops(graph, "Sin")[0], _ops(graph, "Exp")[0]
    assert exp.inputs == sin.outputs
    assert graph.values[sin.outputs[0]].bytes == 256      # 8 * 4, rounded up as the allocator does
    assert graph.results == exp.outputs


def test_resident_bytes_are_variables_batch_and_constants():
    weights = tf.Variable(tf.ones([5, 3]))
    table = tf.constant([[1.5, 2.5, 3.5]])
    graph = _graph(lambda x: (x @ weights) + table, tf.TensorSpec([2, 5]))
    assert graph.resident_bytes == 5 * 3 * 4 + 2 * 5 * 4 + 3 * 4


def test_a_read_takes_no_bytes_and_runs_once():
    weights = tf.Variable(tf.ones([5, 3]))
    read = _ops(_graph(lambda x: x @ weights, tf.TensorSpec([2, 5])), "ReadVariableOp")[0]
    assert "reads a variable" in read.once


def test_a_write_runs_once_and_after_every_use_of_the_old_value():
    weights = tf.Variable(tf.ones([5, 3]))

    def step(x):
        y = x @ weights
        weights.assign_sub(tf.ones([5, 3]) * tf.reduce_sum(y))
        return tf.reduce_sum(tf.exp(y))
    graph = _graph(step, tf.TensorSpec([2, 5]))
    write = _ops(graph, "AssignSubVariableOp")[0]
    product = _ops(graph, "MatMul")[0]
    assert write.once == "writes a variable"
    assert set(write.overwrites) == set(_ops(graph, "ReadVariableOp")[0].outputs) <= set(product.inputs)
    assert product.index < write.index


def test_an_old_value_that_must_be_used_after_the_write_is_not_overwritten():
    counter = tf.Variable(1.0)

    def step(x):
        old = counter.read_value()
        with tf.control_dependencies([counter.assign(old + 1)]):
            return x * old
    graph = _graph(step, tf.TensorSpec([2]))
    assert all(not op.overwrites for op in graph.ops)


@pytest.mark.parametrize("late", [lambda x, old: x * old, lambda x, old: tf.reshape(old, [1]) + x])
def test_a_write_comes_after_the_uses_of_the_old_value_that_were_traced_after_it(late):
    counter = tf.Variable(1.0)

    def step(x):
        old = counter.read_value()
        counter.assign(counter * 0.5)
        return late(x, old)
    graph = _graph(step, tf.TensorSpec([2]))
    write = next(op for op in graph.ops if op.once == "writes a variable")
    stale = {graph.ops[graph.values[value].producer].kind for value in write.overwrites}
    assert stale == {"ReadVariableOp"}
    for value in write.overwrites:
        assert all(reader < write.index for reader in graph.consumers[value])
    assert {"Mul", "AddV2"} & {graph.ops[reader].kind for value in write.overwrites for reader in graph.consumers[value]}


def test_a_read_after_a_write_stays_behind_it():
    counter = tf.Variable(1.0)

    def step(x):
        counter.assign_add(1.0)
        return x * counter
    graph = _graph(step, tf.TensorSpec([2]))
    write, read = _ops(graph, "AssignAddVariableOp")[0], _ops(graph, "ReadVariableOp")[0]
    assert write.index in read.after


def test_stateful_draws_run_once_and_stateless_ones_may_run_again():
    graph = _graph(lambda x: (x + tf.random.uniform([3]), x + tf.random.stateless_uniform([3], [1, 2])), tf.TensorSpec([3]))
    assert {op.kind: op.once for op in graph.ops}["RandomUniform"] == "draws from a random state"
    assert all(op.once is None for op in graph.ops if op.kind.startswith("Stateless"))


def test_keras_dropout_draws_from_a_seed_that_is_read_once():
    layer = keras.layers.Dropout(0.5, seed=1)
    graph = _graph(lambda x: layer(tf.exp(x), training=True), tf.TensorSpec([64]))
    reasons = {op.kind: op.once for op in graph.ops if op.once}
    assert reasons == {"ReadVariableOp": "reads a variable", "AssignAddVariableOp": "writes a variable"}


@pytest.mark.parametrize("effect, reason", [
    (lambda x: tf.print("x"), "has an effect outside of the graph"),
    (lambda x: tf.debugging.assert_less(tf.reduce_sum(x), 1e9), "is control flow with state inside"),
])
def test_effects_run_once(effect, reason):
    def step(x):
        effect(x)
        return x + 1
    assert reason in {op.once for op in _graph(step, tf.TensorSpec([2])).ops}


def test_a_loop_without_state_may_run_again_and_one_with_state_may_not():
    total = tf.Variable(0.0)

    def pure(x):
        return tf.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, tf.tanh(y)), (0, x))[1]

    def counting(x):
        return tf.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y + total.assign_add(1.0)), (0, x))[1]
    assert {op.once for op in _ops(_graph(pure, tf.TensorSpec([4])), "StatelessWhile")} == {None}
    assert {op.once for op in _ops(_graph(counting, tf.TensorSpec([])), "While")} == {"is control flow with state inside"}


def test_an_unknown_shape_is_an_error_naming_op_and_dimension():
    with pytest.raises(UnsupportedError, match=r"Where.*dimension 0 of \(None, 1\)"):
        _graph(lambda x: tf.reduce_sum(tf.where(x > 0)), tf.TensorSpec([4]))


def test_a_loop_that_may_end_early_is_one_op():
    graph = _graph(lambda x: tf.while_loop(lambda y: tf.reduce_sum(y) < 100, lambda y: (y * 2,), (x,))[0], tf.TensorSpec([4]))
    assert [op.kind for op in graph.ops] == ["StatelessWhile"]


def test_an_update_comes_right_behind_its_gradient():
    """The gradient of the last layer is applied before that of the first is computed."""
    first, last = tf.Variable(tf.ones([64, 64])), tf.Variable(tf.ones([64, 64]))

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.tanh(tf.tanh(x @ first) @ last))
        for variable, gradient in zip((first, last), tape.gradient(loss, [first, last])):
            variable.assign_sub(gradient)
        return loss
    graph = _graph(step, tf.TensorSpec([64, 64]))
    writes = _ops(graph, "AssignSubVariableOp")
    products = _ops(graph, "MatMul")
    assert min(op.index for op in writes) < max(op.index for op in products)


def test_ops_of_the_gradient_are_marked():
    weights = tf.Variable(tf.ones([3]))

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.exp(x * weights))
        return tape.gradient(loss, weights)
    graph = _graph(step, tf.TensorSpec([3]))
    assert not _ops(graph, "Exp")[0].backward
    assert graph.ops[graph.values[graph.results[0]].producer].backward


def test_what_a_gradient_of_the_users_own_computes_is_marked_too():
    @tf.custom_gradient
    def gated(x):
        def gradient(upstream):
            return upstream * tf.sigmoid(x)
        return tf.exp(x), gradient
    weights = tf.Variable(tf.ones([3]))

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(gated(x * weights) ** 3)
        return loss, tape.gradient(loss, weights)
    graph = _graph(step, tf.TensorSpec([3]))
    assert [_ops(graph, kind)[0].backward for kind in ("Exp", "Sigmoid")] == [False, True]


def test_a_second_forward_pass_is_not_marked():
    weights = tf.Variable(tf.ones([3]))

    def step(x):
        results = []
        for function in (tf.exp, tf.tanh):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(function(x * weights))
            results += [loss, tape.gradient(loss, weights)]
        return results
    graph = _graph(step, tf.TensorSpec([3]))
    assert not any(_ops(graph, kind)[0].backward for kind in ("Exp", "Tanh"))
