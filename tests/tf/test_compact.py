"""Variables moved together: same values, exact sizes, more free memory in one piece; or left where they are."""

import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from checkmate_tf.bridge import compact as compacting
from checkmate_tf.bridge import measure
from checkmate_tf.bridge.compact import compact
from checkmate_tf.bridge.extract import extract
from checkmate_tf.bridge.rehearse import Device
from checkmate_tf.bridge.trace import trace
from checkmate_tf.ir.plan import plan_from_order

pytestmark = pytest.mark.skipif(measure.measured_memory() is None, reason="the device keeps no allocator statistics")
MIB = 1 << 20


def _in_a_process_of_its_own(function):
    script = f"import sys; sys.path[:0] = {sys.path!r}; import test_compact; test_compact.{function}()"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=300, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


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


def test_variables_keep_their_values_and_leave_more_in_one_piece():
    _in_a_process_of_its_own("variables_are_moved")


def variables_are_moved():
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


def test_where_a_limit_leaves_no_room_nothing_moves(monkeypatch):
    traced, graph, variables = _scattered()
    places = [_address(variable) for variable in variables[:12]]
    monkeypatch.setattr(compacting.measure, "memory_limit", lambda: measure.measured_memory()[0] + MIB)
    monkeypatch.setattr(compacting, "_gain_bytes", lambda *arguments: 1 << 40)
    monkeypatch.setattr(compacting.Device, "stretches", lambda *arguments: ((0, MIB),))
    assert not compact(graph, [handle for _, handle in traced.captures])
    assert [_address(variable) for variable in variables[:12]] == places


def test_a_device_that_tells_nothing_is_left_alone(monkeypatch):
    traced, graph, _ = _scattered()
    monkeypatch.setattr(compacting.measure, "measured_memory", lambda: None)
    assert not compact(graph, [handle for _, handle in traced.captures])


def _address(variable):
    return compacting.address_of(tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype))
