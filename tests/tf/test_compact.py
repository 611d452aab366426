"""Variables moved together: same values, exact sizes, more free memory in one piece; or left where they are."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import checkmate_tf
from budgets import in_a_process_of_its_own
from checkmate_tf import planning
from checkmate_tf.bridge import compact as compacting
from checkmate_tf.bridge import measure
from checkmate_tf.bridge import variables as moving
from checkmate_tf.bridge.compact import compact
from checkmate_tf.bridge.extract import extract
from checkmate_tf.bridge.rehearse import Device, OutOfMemory, address_of
from checkmate_tf.bridge.trace import trace
from checkmate_tf.ir.plan import plan_from_order
from networks import digits

pytestmark = pytest.mark.skipif(measure.measured_memory() is None, reason="the device keeps no allocator statistics")
MIB = 1 << 20


def _scattered():
    """Variables of 3 MiB, each in a chunk of five with something free behind, and a step that makes larger values than that."""
    variables, walls = [], []
    for number in range(12):
        hole = tf.zeros([5 * MIB // 4])
        walls.append(tf.zeros([(1 + number % 4) * MIB // 4]))
        del hole
        variables.append(tf.Variable(tf.fill([3 * MIB // 4], float(number))))
    variables += [tf.Variable(True), tf.Variable([True] * 300), tf.Variable(3.0), tf.Variable(tf.ones([5], tf.bfloat16))]
    del walls

    def step(x):
        made = [tf.tile(x, [factor]) + 1.0 for factor in (6, 9, 7, 13)]
        for variable in variables[:12]:
            made.append(made[-1][:1] * variable)
        for variable in variables[12:]:
            variable.assign(tf.identity(variable))
        return tf.add_n([tf.reduce_sum(value) for value in made])
    traced = trace(step, tf.TensorSpec([MIB // 4]))
    return traced, extract(traced), variables


@pytest.mark.parametrize("function", ["variables_go_through_the_largest_stretch", "variables_go_through_new_memory"])
def test_variables_keep_their_values_and_leave_more_in_one_piece(function):
    in_a_process_of_its_own(__name__, function)


def variables_go_through_the_largest_stretch():
    _assert_moved()


def variables_go_through_new_memory():
    real = compacting.Device.stretches
    # Nothing known to be free is as large as all the variables.
    compacting.Device.stretches = lambda *arguments: tuple((start, size) for start, size in real(*arguments) if size < 36 * MIB)
    _assert_moved()


def _assert_moved():
    traced, graph, variables = _scattered()
    handles = [handle for _, handle in traced.captures]
    keep = plan_from_order(graph, graph.order)
    before = [np.array(variable) for variable in variables]
    held_bytes = measure.measured_memory()[0]
    peak_bytes = held_bytes + Device(graph).peak_bytes(keep)
    assert compact(graph, handles)
    assert all(np.array_equal(variable, value) for variable, value in zip(variables, before))
    assert held_bytes > 12 * 4 * MIB
    assert measure.measured_memory()[0] == pytest.approx(12 * 3 * MIB, abs=MIB // 2)      # exact sizes
    assert measure.measured_memory()[0] + Device(graph).peak_bytes(keep) < peak_bytes - 8 * MIB


def test_variables_fill_the_smaller_stretches_and_leave_the_largest_whole(monkeypatch):
    """Sizes in place of variables. Each stretch gets the largest that still fit, or each variable the smallest stretch from which it
    would be cut; what is left of all goes to the largest."""
    monkeypatch.setattr(compacting, "_bytes_of", lambda size: size)
    sizes, stretches = [9, 9, 4, 4, 3, 2, 1], [(100, 4), (200, 8), (300, 10), (400, 40)]
    filled, best_fit = compacting._filled(sizes, stretches), compacting._best_fit(sizes, stretches)
    assert filled.chosen == [((100, 4), [4]), ((200, 8), [4, 3, 1]), ((300, 10), [9]), ((400, 40), [9, 2])]
    assert filled.rests == [(100, 0), (200, 0), (300, 1), (400, 29)]
    assert best_fit.chosen == [((100, 4), [4]), ((200, 8), [4, 2, 1]), ((300, 10), [3]), ((400, 40), [9, 9])]
    assert best_fit.rests == [(100, 0), (200, 1), (300, 7), (400, 22)]


def test_a_variable_that_a_chunk_is_not_cut_for_is_given_its_exact_size():
    in_a_process_of_its_own(__name__, "a_variable_in_a_chunk_of_nearly_twice_its_size")


def a_variable_in_a_chunk_of_nearly_twice_its_size():
    traced, graph, _ = _scattered()
    handle = max((handle for _, handle in traced.captures), key=compacting._bytes_of)
    room, fence = tf.zeros([5 * MIB // 4]), tf.zeros([MIB // 4])
    address = address_of(room)
    with moving.evacuated([handle]) as give:
        del room
        held_bytes = measure.measured_memory()[0]
        compacting._pack(Device(graph), compacting._filled([handle], [(address, 5 * MIB)]), give)
        assert measure.measured_memory()[0] - held_bytes == 3 * MIB
    del fence


@pytest.mark.parametrize("error", [OutOfMemory, KeyboardInterrupt])
def test_what_goes_wrong_half_way_costs_no_value(monkeypatch, error):
    traced, graph, variables = _scattered()
    before = [variable.numpy() for variable in variables]
    real, calls = moving.fill, []

    def fill(handle, value):
        calls.append(handle)
        if len(calls) == 3:
            raise error
        real(handle, value)
    monkeypatch.setattr(moving, "fill", fill)
    monkeypatch.setattr(compacting, "_gain_bytes", lambda *arguments: 1 << 40)
    handles = [handle for _, handle in traced.captures]
    if error is OutOfMemory:
        assert not compact(graph, handles)
    else:
        with pytest.raises(KeyboardInterrupt):
            compact(graph, handles)
    assert len(calls) > len(handles) / 2    # the others got theirs, too
    assert all(np.array_equal(variable.numpy(), value) for variable, value in zip(variables, before))


def test_a_value_that_is_put_back_leaves_the_variable_where_it_is():
    traced, graph, variables = _scattered()
    places, before = [_address(variable) for variable in variables[:12]], moving.snapshot(traced)
    for variable in variables[:12]:
        variable.assign_add(tf.ones_like(variable))
    moving.put_back(traced, before)
    assert [_address(variable) for variable in variables[:12]] == places
    assert [float(variable[0]) for variable in variables[:12]] == list(range(12))


def test_a_device_that_tells_nothing_is_left_alone(monkeypatch):
    traced, graph, _ = _scattered()
    monkeypatch.setattr(compacting.measure, "measured_memory", lambda: None)
    assert not compact(graph, [handle for _, handle in traced.captures])


def _address(variable):
    return address_of(tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype))


def test_variables_of_a_planned_step_stay_where_they_are_when_another_shape_comes(monkeypatch):
    moved = []
    monkeypatch.setattr(planning, "compact", lambda graph, captures, batch_bytes: moved.append(len(captures)))
    x, y = digits(24)
    model = checkmate_tf.compile(_sgd(x), "100GB", verbose=0)
    places = []
    for size in (8, 12):
        model.fit(x[:2 * size], y[:2 * size], batch_size=size, verbose=0)
        places.append([_address(weight.value) for weight in model.trainable_weights])
    assert len(moved) == 1 and moved[0] > 0 and places[0] == places[1]


def _sgd(x):
    model = keras.Sequential([keras.layers.Input(x.shape[1:]), keras.layers.Flatten(), keras.layers.Dense(10)])
    model.compile(keras.optimizers.SGD(momentum=0.9), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model
