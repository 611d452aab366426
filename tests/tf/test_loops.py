"""What loops and branches hold inside is counted in bytes, and the turns of a loop in time."""

import keras
import pytest
import tensorflow as tf

from checkmate_tf import profiles
from checkmate_tf.bridge.extract import extract
from checkmate_tf.bridge.measure import missing
from checkmate_tf.bridge.price import price
from checkmate_tf.bridge.trace import trace

SPEC = tf.TensorSpec([64, 64])
VALUE_BYTES = 64 * 64 * 4


def _gradient(function, spec=SPEC):
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            total = tf.reduce_sum(function(x))
        return tape.gradient(total, x)
    return trace(step, spec)


def _loops(traced):
    return [op for op in extract(traced).ops if "While" in op.kind]


def _left_bytes(traced):
    """Bytes of the lists that the first loop leaves."""
    graph = extract(traced)
    return sum(graph.values[value].bytes for value in _loops(traced)[0].outputs if graph.values[value].dtype == "uint8")


def _repeated(turns, **arguments):
    return lambda x: tf.while_loop(lambda count, value: count < turns, lambda count, value: (count + 1, tf.sin(value)), [0, x],
                                   **arguments)[1]


def test_a_loop_leaves_one_value_a_turn_for_the_gradient_of_a_sine():
    assert _left_bytes(_gradient(_repeated(5, maximum_iterations=5))) == 5 * VALUE_BYTES


def test_a_value_that_is_put_into_two_lists_is_counted_once():
    """The gradient of v * sin(v) needs v twice, and sin(v)."""
    def body(count, value):
        return count + 1, value * tf.sin(value)
    traced = _gradient(lambda x: tf.while_loop(lambda count, value: count < 5, body, [0, x], maximum_iterations=5)[1])
    assert _left_bytes(traced) == 5 * 2 * VALUE_BYTES


def test_a_mapped_function_fills_lists_of_a_known_length():
    """64 turns, each with at most three rows of 64 numbers and three indices, each in 256 bytes, the least chunk."""
    assert 64 * 256 <= _left_bytes(_gradient(lambda x: tf.map_fn(lambda row: tf.sin(2.0 * row), x))) <= 6 * 64 * 256


def test_a_loop_whose_turns_nobody_tells_counts_as_one():
    assert _left_bytes(_gradient(_repeated(5))) == VALUE_BYTES


def test_what_one_turn_needs_is_scratch():
    """The product of [64, 64] and [64, 1024] is there in each turn, and its sine."""
    wide = tf.ones([64, 1024])

    def body(count, value):
        return count + 1, value + tf.reduce_sum(tf.sin(value @ wide), axis=-1, keepdims=True)
    traced = trace(lambda x: tf.while_loop(lambda count, value: count < 5, body, [0, x], maximum_iterations=5)[1], SPEC)
    assert 2 * 64 * 1024 * 4 <= _loops(traced)[0].scratch_bytes <= 3 * 64 * 1024 * 4


def test_the_branch_that_needs_more_is_the_scratch():
    wide = tf.ones([64, 1024])
    traced = trace(lambda x: tf.cond(tf.reduce_sum(x) > 0, lambda: tf.reduce_sum(tf.sin(x @ wide)), lambda: 0.0), SPEC)
    branches = [op for op in extract(traced).ops if "If" in op.kind]
    assert branches[0].scratch_bytes >= 2 * 64 * 1024 * 4


def test_ten_times_the_turns_take_ten_times_as_long():
    seconds = []
    for turns in (10, 100):
        traced = trace(_repeated(turns, maximum_iterations=turns), tf.TensorSpec([512, 512]))
        priced = price(traced, extract(traced), profiles.get("cpu"))
        seconds.append(next(op.seconds for op in priced.ops if "While" in op.kind))
    assert seconds[1] / seconds[0] == pytest.approx(10, rel=0.05)


def test_weights_that_a_loop_reads_are_not_counted_again():
    """24 turns of an LSTM of 128 units: the kernels, 128 x 512 numbers each, are put into lists, too, as they are."""
    inputs = keras.layers.Input((24, 128))
    model = keras.Model(inputs, keras.layers.LSTM(128)(inputs))
    traced = _gradient(lambda x: model(x, training=True), tf.TensorSpec([4, 24, 128]))
    kernels_bytes = 24 * 2 * 128 * 512 * 4
    assert 0 < _left_bytes(traced) < kernels_bytes / 4


def test_zeros_that_a_gradient_begins_with_are_counted_and_filled_in_place():
    """The gradient of what 24 turns read: 24 times [4, 128], first zeros, each of which goes when its turn has come."""
    inputs = keras.layers.Input((24, 128))
    model = keras.Model(inputs, keras.layers.LSTM(8)(inputs))
    traced = _gradient(lambda x: model(x, training=True), tf.TensorSpec([4, 24, 128]))
    graph = extract(traced)
    zeros = next(op for op in graph.ops if op.kind == "ZerosLike")
    value, = zeros.outputs
    assert graph.values[value].bytes == 24 * 4 * 128 * 4 and graph.values[value].pieces == 24
    assert zeros.once is not None
    loop, *readers = [graph.ops[reader] for reader in graph.consumers[value]]
    assert "While" in loop.kind and [reader.kind for reader in readers] == ["TensorListStack"]
    assert all(graph.values[output].bytes < graph.values[value].bytes for output in loop.outputs)


def test_what_a_loop_leaves_is_in_as_many_pieces_as_it_has_turns():
    graph = extract(_gradient(_repeated(5, maximum_iterations=5)))
    loop = next(op for op in graph.ops if "While" in op.kind)
    assert [graph.values[value].pieces for value in loop.outputs if graph.values[value].dtype == "uint8"] == [5]


def test_the_ops_of_a_turn_are_measured_where_they_are_worth_it():
    traced = trace(lambda x: tf.while_loop(lambda count, _: count < 5, lambda count, value: (count + 1, tf.sin(value @ x)), [0, x],
                                           maximum_iterations=5)[1], tf.TensorSpec([256, 256]))
    found = missing(traced, extract(traced), profiles.get("cpu")).values()
    assert {"MatMul", "Sin"} <= {operation.type for operation in found}
