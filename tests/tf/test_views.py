"""Which ops own no bytes, against what the device's allocator says of running them."""

import numpy as np
import pytest
import tensorflow as tf

from checkmate_tf.bridge import measure
from checkmate_tf.bridge.audit import first_call
from checkmate_tf.bridge.emit import emit
from checkmate_tf.bridge.extract import extract
from checkmate_tf.bridge.trace import trace
from checkmate_tf.bridge.views import is_view
from checkmate_tf.ir.plan import plan_from_order

ROWS, LONG = [256, 1024], [1 << 18]
CASES = {
    "split of rows": (lambda x: tf.split(x, 4), ROWS, True),
    "split of rows counted from behind": (lambda x: tf.split(x, 4, axis=-2), ROWS, True),
    "split of columns": (lambda x: tf.split(x, 4, axis=1), ROWS, False),
    "split of odd rows": (lambda x: tf.split(x, 4), [256, 1023], False),
    "uneven split": (lambda x: tf.split(x, [100, 156]), ROWS, True),
    "uneven split of columns": (lambda x: tf.split(x, [100, 924], axis=1), ROWS, False),
    "uneven split of a vector, aligned": (lambda x: tf.raw_ops.SplitV(value=x, size_splits=[1 << 17, 1 << 17], axis=0, num_split=2),
                                          LONG, True),
    "unstacked rows": (lambda x: tf.unstack(x), [4, 1 << 16], True),
    "unstacked columns": (lambda x: tf.unstack(x, axis=1), [1 << 16, 4], False),
    "slice of rows": (lambda x: tf.slice(x, [16, 0], [64, -1]), ROWS, True),
    "slice of columns": (lambda x: tf.slice(x, [0, 16], [-1, 512]), ROWS, False),
    "slice of a vector": (lambda x: tf.slice(x, [1024], [1 << 17]), LONG, True),
    "slice of a vector, not aligned": (lambda x: tf.slice(x, [1001], [1 << 17]), LONG, False),
    "rows by index": (lambda x: x[16:-16], ROWS, True),
    "one of few rows": (lambda x: x[-2], [4, 1 << 16], True),
    "rows and another dimension": (lambda x: x[16:128, None, ..., :], ROWS, True),
    "every second row": (lambda x: x[::2], ROWS, False),
    "rows and some columns": (lambda x: x[16:240, :512], ROWS, False),
    "all but the last column": (lambda x: x[..., :-1], ROWS, False),
    "transposition": (tf.transpose, ROWS, False),
    "transposition of small dimensions": (lambda x: tf.transpose(x, [1, 0, 3, 2]), [1, 256, 1, 1024], True),
    "sum over nothing": (lambda x: tf.reduce_sum(x, 1), [256, 1, 1024], True),
    "mean over rows": (lambda x: tf.reduce_mean(x, 0), [2, 1 << 17], False),
    "stack of one": (lambda x: tf.stack([x]), ROWS, True),
    "stack of two": (lambda x: tf.stack([x, x]), ROWS, False),
}


def _last(function, shape) -> tf.Operation:
    graph = tf.Graph()
    with graph.as_default():
        function(tf.compat.v1.placeholder(tf.float32, shape))
    return [operation for operation in graph.get_operations() if operation.type not in ("Const", "Placeholder")][-1]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.skipif(measure.measured_memory() is None, reason="the device keeps no allocator statistics")
def test_a_view_takes_no_memory_and_everything_else_does(case):
    function, shape, expected = CASES[case]
    assert is_view(_last(function, shape)) == expected
    x = tf.random.stateless_uniform(shape, [1, 2])
    run = tf.function(function).get_concrete_function(tf.TensorSpec(shape))
    run(x)
    held = measure.measured_memory()[0]
    made = run(x)
    assert (measure.measured_memory()[0] - held < 1 << 18) == expected
    del made


def test_what_is_not_static_is_no_view():
    assert not is_view(_last(lambda x: tf.slice(x, [tf.cast(x[0, 0], tf.int32), 0], [1, -1]), ROWS))
    assert not is_view(_last(lambda x: tf.transpose(x, tf.cast(tf.argsort(x[0]), tf.int32)), [2, 2]))


def test_a_piece_of_a_value_holds_the_whole_and_is_taken_again_with_it():
    def step(x):
        first, second = tf.split(tf.exp(x), 2)
        return tf.reduce_sum(tf.tanh(first)), tf.reduce_sum(tf.matmul(second, second, transpose_b=True))
    traced = trace(step, tf.TensorSpec(ROWS))
    graph = extract(traced)
    assert "Split" not in {op.kind for op in graph.ops}
    exp = next(op for op in graph.ops if op.kind == "Exp")
    readers = [op.index for op in graph.ops if exp.outputs[0] in op.inputs]
    assert len(readers) == 2
    order = list(graph.order)
    order.insert(order.index(readers[1]), exp.index)
    x = tf.random.stateless_uniform(ROWS, [1, 2])
    outputs, runs = first_call(emit(traced, graph, plan_from_order(graph, order)), x)
    assert runs["Exp"] == 2
    for output, expected in zip(outputs, traced.pack(traced.function(x)), strict=True):
        np.testing.assert_allclose(output, expected, rtol=1e-5)
