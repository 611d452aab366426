"""Tracing: once, on concrete shapes, through Grappler once; sums as chains; shapes as constants."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from checkmate_tf.bridge.rehearse import address_of
from checkmate_tf.bridge.trace import batch_specs, flatten_batch, import_function, tensor_name, trace
from checkmate_tf.bridge.writes import settle
from checkmate_tf.ir.errors import UnsupportedError


def _kinds(traced):
    return [node.op for node in traced.graph_def.node]


def test_a_step_is_traced_once():
    calls = []

    def step(data):
        calls.append(1)
        return data * 2
    trace(step, tf.TensorSpec([4]))
    assert len(calls) == 1


def test_an_unknown_dimension_is_refused_by_name():
    with pytest.raises(UnsupportedError, match="fully known.*None"):
        trace(lambda data: data * 2, tf.TensorSpec([None, 3]))


def test_a_sum_of_many_becomes_a_chain():
    traced = trace(lambda x: tf.add_n([tf.exp(x), tf.sin(x), tf.cos(x), tf.tan(x)]), tf.TensorSpec([8]))
    assert "AddN" not in _kinds(traced)
    assert _kinds(traced).count("AddV2") == 3
    x = tf.random.stateless_uniform([8], [1, 2])
    np.testing.assert_allclose(traced.pack(traced.function(x)), tf.exp(x) + tf.sin(x) + tf.cos(x) + tf.tan(x), rtol=1e-6)


def test_a_gradient_does_not_wait_for_a_value_of_which_it_needs_the_shape():
    weights = tf.Variable(tf.ones([3, 3, 2, 4]))

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.nn.conv2d(tf.exp(x), weights, 1, "SAME") ** 2)
        weights.assign_sub(tape.gradient(loss, weights))
        return loss
    traced = trace(step, tf.TensorSpec([1, 8, 8, 2]))
    assert not {"Shape", "ShapeN"} & set(_kinds(traced))


def test_no_activation_is_read_for_its_shape_alone():
    # Grappler leaves the `ShapeN` behind activations that convolutions make, and behind poolings.
    images = keras.layers.Input((16, 16, 3))
    value = images
    for _ in range(2):
        value = keras.layers.Conv2D(4, 3, padding="same", activation="relu")(value)
        value = keras.layers.Conv2D(4, 3, padding="same", activation="relu")(value)
        value = keras.layers.MaxPooling2D()(value)
    model = keras.Model(images, keras.layers.Dense(2)(keras.layers.Flatten()(value)))
    model.compile("sgd", "mse")
    batch = (tf.ones([4, 16, 16, 3]), tf.ones([4, 2]))
    model.train_on_batch(*batch)
    traced = trace(model.train_step, batch_specs(batch))
    assert "Conv2DBackpropInput" in _kinds(traced) and "ShapeN" not in _kinds(traced)


def test_the_nodes_come_in_a_topological_order():
    traced = trace(lambda x: {"a": tf.exp(x) * tf.sin(x), "b": tf.reduce_sum(x)}, tf.TensorSpec([8]))
    seen = {name for name, _ in traced.arguments}
    for node in traced.graph_def.node:
        assert {tensor_name(name.lstrip("^"))[0] for name in node.input} <= seen
        seen.add(node.name)


def test_results_come_back_in_the_structure_of_the_step():
    traced = trace(lambda x: {"b": (x + 1, None), "a": [x * 2]}, tf.TensorSpec([2]))
    result = traced.pack(traced.function(tf.constant([1.0, 2.0])))
    assert set(result) == {"a", "b"} and result["b"][1] is None
    np.testing.assert_array_equal(result["b"][0], [2, 3])
    np.testing.assert_array_equal(result["a"][0], [2, 4])


def test_a_result_that_is_an_argument_is_returned():
    traced = trace(lambda x: (x, x + 1), tf.TensorSpec([2]))
    np.testing.assert_array_equal(traced.pack(traced.function(tf.constant([1.0, 2.0])))[0], [1, 2])


def test_bytes_of_batch_and_captures_are_counted():
    weights = tf.Variable(tf.ones([10, 10]))
    traced = trace(lambda data: data[0] @ weights + data[1], (tf.TensorSpec([4, 10]), tf.TensorSpec([4, 10])))
    assert traced.argument_bytes == 2 * 4 * 10 * 4
    assert traced.capture_bytes == 10 * 10 * 4


def test_a_batch_is_flattened_without_what_is_missing():
    specs = batch_specs((np.zeros([2, 3], np.float32), None, {"w": tf.zeros([2])}))
    assert specs[1] is None and specs[0].shape == [2, 3]
    assert [tuple(tensor.shape) for tensor in flatten_batch((np.zeros([2, 3]), None, {"w": tf.zeros([2])}))] == [(2, 3), (2,)]


def test_a_function_without_results_still_runs():
    variable = tf.Variable(0.0)

    def step(x):
        variable.assign_add(tf.reduce_sum(x))
    traced = trace(step, tf.TensorSpec([2]))
    function = import_function(traced.graph_def, traced.arguments, traced.captures, (), traced.controls)
    function(tf.constant([1.0, 2.0]))
    assert variable.numpy() == 3


def test_variables_are_assigned_to_where_they_are():
    dtypes = [tf.float32, tf.int32, tf.int64, tf.bool, tf.bfloat16]
    variables = [tf.Variable(tf.zeros(shape, dtype)) for dtype in dtypes for shape in ([], [3], [2, 3, 400])]

    def step(x):
        for variable in variables:
            variable.assign(tf.cast(tf.fill(variable.shape, x), variable.dtype))
    traced = trace(step, tf.TensorSpec([]))
    assert "AssignVariableOp" not in _kinds(traced)
    settle(handle for _, handle in traced.captures)
    before = [_place(variable) for variable in variables]
    for _ in range(2):
        traced.function(tf.constant(1.0))
        assert all(np.all(tf.cast(variable, tf.float32) == 1) for variable in variables)
        assert [_place(variable) for variable in variables] == before       # nor is one copied when it is read


def _place(variable):
    return address_of(tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)) if variable.dtype != tf.bool else None


def test_a_variable_is_given_memory_of_its_own_and_keeps_its_value():
    value = tf.random.stateless_normal([300, 2], [1, 2])
    variable = tf.Variable(tf.zeros([300, 2]))
    variable.assign(value)
    assert _place(variable) == address_of(value)        # they share it
    settle([variable.handle])
    settled = _place(variable)
    assert settled != address_of(value) and np.array_equal(variable, value)
    variable.assign_add(tf.ones([300, 2]))
    assert _place(variable) == settled


@pytest.mark.parametrize("amount", ["as large", "one number"])
@pytest.mark.parametrize("change", ["assign_add", "assign_sub", "assign of a sum", "assign of a difference"])
def test_sums_are_made_in_the_variable_where_what_is_added_is_as_large(change, amount):
    variable = tf.Variable(tf.random.stateless_normal([7, 5], [1, 2]))
    expected = variable.numpy()

    def step(x):
        x = tf.sin(x)
        {"assign_add": lambda: variable.assign_add(tf.broadcast_to(x, [7, 5])),
         "assign_sub": lambda: variable.assign_sub(tf.broadcast_to(x, [7, 5])),
         "assign of a sum": lambda: variable.assign(x + variable),
         "assign of a difference": lambda: variable.assign(variable - x)}[change]()
    x = tf.random.stateless_normal([7, 5] if amount == "as large" else [], [3, 4])
    traced = trace(step, tf.TensorSpec(x.shape))
    is_direct = amount == "as large" or change.startswith("assign_")
    assert ("ResourceStridedSliceAssign" in _kinds(traced)) != is_direct and "AssignVariableOp" not in _kinds(traced)
    assert ("Sub" in _kinds(traced) or "AddV2" in _kinds(traced)) != is_direct
    for _ in range(3):
        traced.function(x)
        sign = -1 if change in ("assign_sub", "assign of a difference") else 1
        expected = expected + np.float32(sign) * np.sin(x.numpy())
    assert np.allclose(variable.numpy(), expected, rtol=1e-5)


def test_a_difference_that_another_write_comes_into_is_not_made_in_the_variable():
    variable = tf.Variable(tf.fill([3], 8.0))

    def step(x):
        before = variable.read_value()
        variable.assign(variable / 2.0)
        return variable.assign(before - x).read_value()
    traced = trace(step, tf.TensorSpec([3]))
    assert not {"AssignSubVariableOp", "AssignVariableOp"} & set(_kinds(traced))
    assert traced.function(tf.ones([3]))[0].numpy().tolist() == [7, 7, 7]


def test_a_decay_and_an_update_are_both_made_in_the_variable():
    variable = tf.Variable(tf.fill([3], 8.0))

    def step(x):
        variable.assign_sub(variable * 0.25)
        variable.assign_sub(x * variable)
    traced = trace(step, tf.TensorSpec([3]))
    assert _kinds(traced).count("AssignSubVariableOp") == 2
    traced.function(tf.constant([0.0, 0.5, 1.0]))
    assert variable.numpy().tolist() == [6, 3, 0]


def test_a_sum_that_is_returned_or_read_elsewhere_is_made_for_all():
    variable = tf.Variable(tf.fill([3], 8.0))

    def step(x):
        total = variable + x
        variable.assign(total)
        return total
    traced = trace(step, tf.TensorSpec([3]))
    assert traced.function(tf.ones([3]))[0].numpy().tolist() == [9, 9, 9] and variable.numpy().tolist() == [9, 9, 9]


def test_what_is_captured_or_given_and_not_read_is_no_trouble():
    variance = tf.constant([4.0, 9.0])  # Grappler folds its root, and then nobody reads it

    def step(batch):
        return batch[0] * tf.sqrt(variance)
    traced = trace(step, (tf.TensorSpec([2]), tf.TensorSpec([5])))
    assert traced.function(tf.ones([2]), tf.ones([5]))[0].numpy().tolist() == [2, 3]


def test_grappler_knows_the_shapes_of_arguments_and_variables():
    """So that it does what it does in plain Keras: away with a product by one, shapes as constants."""
    weight = tf.Variable(tf.ones([3, 3]))
    traced = trace(lambda x: tf.reshape(1.0 * (x @ weight), tf.shape(x)), tf.TensorSpec([2, 3]))
    assert not {"Mul", "Shape"} & set(_kinds(traced))
