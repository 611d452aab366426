"""Emission and audit: what runs is the plan, and what it computes is what the step computes."""

import dataclasses
import math

import numpy as np
import pytest
import tensorflow as tf

from checkmate_tf import solvers
from checkmate_tf.bridge import measure, private
from checkmate_tf.bridge.audit import executed_runs, first_call
from checkmate_tf.bridge.emit import Emitted, emit, is_plenty
from checkmate_tf.bridge.extract import extract
from checkmate_tf.bridge.measure import measured_memory, reset_peak
from checkmate_tf.bridge.trace import trace
from checkmate_tf.ir.errors import PlanError
from checkmate_tf.ir.graph import GraphBuilder
from checkmate_tf.ir.plan import plan_from_order
from checkmate_tf.ir.simulate import keep_all_timeline, simulate, structural_floor

MEGABYTE = 1 << 20


def _wide(x):
    """Two long branches from one cheap value: computing it again saves its bytes meanwhile."""
    cheap = tf.exp(x)
    other = tf.reduce_sum(tf.tanh(tf.sin(x)) * 2.0)
    return tf.reduce_sum(tf.reshape(cheap, [-1]) * other) + tf.reduce_sum(cheap)


def _traced(step, *specs):
    traced = trace(step, *specs)
    return traced, extract(traced)


def _with_recomputation(graph, kind, before_kind):
    """The given order, with every op of a kind run again right before the last op of another."""
    target = max(op.index for op in graph.ops if op.kind == before_kind)
    again = [op.index for op in graph.ops if op.kind == kind]
    return plan_from_order(graph, [*range(target), *again, *range(target, len(graph.ops))])


def test_keeping_everything_computes_what_the_step_computes():
    traced, graph = _traced(_wide, tf.TensorSpec([1000]))
    x = tf.random.stateless_uniform([1000], [1, 2])
    np.testing.assert_array_equal(emit(traced, graph, plan_from_order(graph, graph.order))(x), traced.pack(traced.function(x)))


def test_a_recomputed_value_runs_as_often_as_planned_and_changes_nothing():
    traced, graph = _traced(_wide, tf.TensorSpec([1000]))
    plan = _with_recomputation(graph, "Exp", "Mul")
    x = tf.random.stateless_uniform([1000], [1, 2])
    outputs, runs = first_call(emit(traced, graph, plan), x)
    timeline = simulate(graph, plan)
    assert runs == {op.name: timeline.runs[op.index] for op in graph.ops}
    assert runs[next(op.name for op in graph.ops if op.kind == "Exp")] == 2
    np.testing.assert_array_equal(outputs, traced.pack(traced.function(x)))


def _two_phases(x):
    """`a` is used at both ends; between them the peak is three other values of its size."""
    a = tf.exp(x)
    b = tf.sin(a)
    c = tf.matmul(tf.cos(b), tf.tan(b))
    return tf.reduce_sum(tf.matmul(c, a))


def test_recomputing_lowers_the_measured_peak_as_simulated():
    traced, graph = _traced(_two_phases, tf.TensorSpec([1024, 1024]))
    keep = plan_from_order(graph, graph.order)
    last = max(op.index for op in graph.ops if op.kind == "MatMul")
    exp = next(op.index for op in graph.ops if op.kind == "Exp")
    less = plan_from_order(graph, [*range(last), exp, *range(last, len(graph.ops))])
    x = tf.random.stateless_uniform([1024, 1024], [1, 2])
    peaks = {}
    for name, plan in (("keep", keep), ("less", less)):
        step = emit(traced, graph, plan)
        step(x)
        before = measured_memory()[0]
        reset_peak()
        step(x)
        peaks[name] = measured_memory()[1] - before
    saved = simulate(graph, keep).peak_bytes - simulate(graph, less).peak_bytes
    assert saved == 4 * MEGABYTE
    assert peaks["keep"] - peaks["less"] >= 0.9 * saved


def test_a_variable_is_written_once_however_often_its_value_is_computed():
    total = tf.Variable(0.0)

    def step(x):
        value = tf.exp(x)
        total.assign_add(tf.reduce_sum(value))
        return tf.reduce_sum(tf.sin(value)) + tf.reduce_sum(value)
    traced, graph = _traced(step, tf.TensorSpec([10]))
    plan = _with_recomputation(graph, "Exp", "Sin")
    emit(traced, graph, plan)(tf.zeros([10]))
    assert total.numpy() == 10


def test_the_process_wide_optimizer_options_are_as_before():
    before = tf.config.optimizer.get_experimental_options()
    traced, graph = _traced(_wide, tf.TensorSpec([100]))
    emit(traced, graph, plan_from_order(graph, graph.order))(tf.zeros([100]))
    assert tf.config.optimizer.get_experimental_options() == before


def test_a_view_with_a_computed_shape_is_copied_with_its_reader():
    def step(x):
        value = tf.exp(x)
        shape = tf.stack([tf.constant(2), tf.cast(tf.reduce_sum(tf.zeros([2])), tf.int32) + 5])
        return tf.reduce_sum(tf.ensure_shape(tf.reshape(value, shape), [2, 5])) + tf.reduce_sum(tf.sin(value))
    traced, graph = _traced(step, tf.TensorSpec([10]))
    plan = _with_recomputation(graph, "Exp", "Sum")
    x = tf.random.stateless_uniform([10], [1, 2])
    np.testing.assert_array_equal(emit(traced, graph, plan)(x), traced.pack(traced.function(x)))


def test_a_plan_of_another_graph_is_refused():
    traced, graph = _traced(_wide, tf.TensorSpec([100]))
    other = extract(trace(_wide, tf.TensorSpec([200])))
    with pytest.raises(PlanError, match="another graph"):
        emit(traced, graph, plan_from_order(other, other.order))


def test_the_audit_notices_a_computation_that_is_not_there():
    traced, graph = _traced(_wide, tf.TensorSpec([100]))
    step = emit(traced, graph, plan_from_order(graph, graph.order))
    with private.export_graphs() as graphs:
        step(tf.zeros([100]))
    claimed = Emitted(step.function, {**step.waits, "Exp/recompute_9": ()}, step.pack, b"")
    with pytest.raises(PlanError, match="recompute_9"):
        executed_runs(claimed, graphs)


def test_the_audit_notices_a_lost_order():
    traced, graph = _traced(_wide, tf.TensorSpec([100]))
    step = emit(traced, graph, plan_from_order(graph, graph.order))
    with private.export_graphs() as graphs:
        step(tf.zeros([100]))
    first, *_, last = step.waits
    claimed = Emitted(step.function, {**step.waits, first: (last,)}, step.pack, b"")
    with pytest.raises(PlanError, match="order"):
        executed_runs(claimed, graphs)


def _branches(x):
    return tf.add_n([tf.exp(x + float(number)) for number in range(3)])


@pytest.mark.parametrize("spare_bytes", [0, 1e3, 1e9])
def test_computations_run_at_once_where_memory_is_plenty(spare_bytes):
    x = tf.random.stateless_uniform([100, 100], [1, 2])
    traced, graph = _traced(_branches, tf.TensorSpec([100, 100]))
    step = emit(traced, graph, plan_from_order(graph, graph.order), spare_bytes)
    outputs, runs = first_call(step, x)
    np.testing.assert_array_equal(outputs, traced.pack(traced.function(x)))
    assert sum(runs.values()) == len(graph.ops)
    exps = [set(waits) for name, waits in step.waits.items() if name.startswith("Exp")]
    if spare_bytes == 1e9:
        assert all(not any(other.startswith("Exp") for other in waits) for waits in exps)
    else:
        assert all(len(waits) == 1 for waits in exps[1:])         # for the one before


@pytest.mark.parametrize("is_limited", [False, True])
def test_where_there_is_no_more_memory_at_all_more_must_be_left_over(monkeypatch, is_limited):
    builder = GraphBuilder(resident_bytes=1000)
    builder.op("a", bytes=100, seconds=1.0)
    graph = builder.build()
    monkeypatch.setattr(measure, "is_limited", lambda: is_limited)
    timeline = keep_all_timeline(graph)
    assert [is_plenty(graph, timeline, spare_bytes) for spare_bytes in (29, 30, 99, 100)] == (
        [False, False, False, True] if is_limited else [False, True, True, True])


def _beside(waits):
    """For each computation, those before it that may still run when it begins."""
    done, beside = {}, {}
    for name, waited_for in waits.items():
        done[name] = set(waited_for).union(*(done[other] for other in waited_for))
        beside[name] = [other for other in beside if other not in done[name]]
    return beside


def test_what_runs_at_once_fits_with_nothing_freed_meanwhile():
    traced, graph = _traced(_branches, tf.TensorSpec([100, 100]))
    plan = plan_from_order(graph, graph.order)
    timeline = simulate(graph, plan)
    sizes = {op.name: sum(graph.values[value].bytes for value in op.outputs) for op in graph.ops}
    most = []
    for spare_bytes in (0, 50_000, 100_000, 200_000):
        beside = _beside(emit(traced, graph, plan, spare_bytes).waits)
        assert all(sizes[name] + sum(sizes[other] for other in others) <= timeline.peak_bytes + spare_bytes / 3
                   for name, others in beside.items() if others)
        most.append(max(len(others) for others in beside.values()))
    assert most[0] == 0 < most[-1] and most == sorted(most)


def test_only_so_many_computations_run_at_once_however_much_memory_there_is():
    traced, graph = _traced(lambda x: tf.add_n([tf.exp(x + float(number)) for number in range(80)]), tf.TensorSpec([100, 100]))
    beside = _beside(emit(traced, graph, plan_from_order(graph, graph.order), 1e12).waits)
    assert max(len(others) for others in beside.values()) == 63


def test_what_touches_small_values_waits_for_nothing_but_what_it_must_follow():
    state = tf.Variable([2.0, 3.0])

    def step(x):
        large = tf.exp(x)
        scaled = state * 2.0
        state.assign(scaled - 1.0)
        return tf.reduce_sum(large), scaled
    traced, graph = _traced(step, tf.TensorSpec([200, 200]))
    emitted = emit(traced, graph, plan_from_order(graph, graph.order))
    kinds = {op.name: op.kind for op in graph.ops}
    write = next(name for name in emitted.waits if kinds[name] == "ResourceStridedSliceAssign")
    product = next(name for name in emitted.waits if kinds[name] == "Mul")
    assert product in emitted.waits[write] and not any(kinds[name] == "Exp" for name in emitted.waits[product])
    outputs, _ = first_call(emitted, tf.zeros([200, 200]))
    assert outputs[0].numpy() == 40_000 and outputs[1].numpy().tolist() == [4, 6] and state.numpy().tolist() == [3, 5]


@pytest.mark.skipif(measured_memory() is None, reason="the device keeps no allocator statistics")
def test_what_is_made_of_constants_alone_is_made_when_it_is_needed_and_does_not_stay():
    def step(x):
        return tf.reduce_sum(tf.tile(tf.constant([1.0, 2.0]), [MEGABYTE]) * x)
    traced, graph = _traced(step, tf.TensorSpec([]))
    assert [op.inputs for op in graph.ops if op.kind == "Tile"] == [()]
    run = emit(traced, graph, plan_from_order(graph, graph.order))
    held = measured_memory()[0]
    assert run(tf.constant(1.0)).numpy() == 3 * MEGABYTE
    assert measured_memory()[0] - held < MEGABYTE


@pytest.mark.parametrize("spare", [0, 0.5, 1, 2])
def test_a_convolution_is_not_merged_into_what_reads_it(spare):
    """oneDNN's pass would, where both wait for the same, and end the process over it."""
    filters, bias = tf.Variable(tf.ones([3, 3, 2, 2])), tf.Variable(tf.ones([2]))

    def step(x):
        for number in range(9):             # large, so that there is room for only so many of them beside the small convolution
            x = tf.sin(x) if number % 2 else tf.tanh(x)
        with tf.GradientTape() as tape:
            result = tf.nn.bias_add(tf.nn.conv2d(x, filters, 2, "VALID"), bias)
            loss = tf.reduce_sum(result * result)
        return tape.gradient(loss, [filters, bias])
    traced, graph = _traced(step, tf.TensorSpec([2, 128, 128, 2]))
    assert {"Conv2D", "BiasAdd"} <= {op.kind for op in graph.ops}
    plan = plan_from_order(graph, graph.order)
    run = emit(traced, graph, plan, spare * simulate(graph, plan).peak_bytes)
    _, runs = first_call(run, tf.ones([2, 128, 128, 2]))
    assert set(runs.values()) == {1} and len(runs) == len(graph.ops)


def test_or_tools_solves_in_a_process_where_tensorflow_lives():
    """Both in one process: OR-Tools refuses every model or crashes."""
    graph = _one_second_an_op(extract(trace(_two_phases, tf.TensorSpec([64, 64]))))
    floor_bytes, _ = structural_floor(graph)
    solution = solvers.solve(graph, floor_bytes, solvers.get("ilp"), solvers.Limits(seconds=20))
    assert solution.plan is not None and sum(solution.timeline.runs) > len(graph.ops)


def _one_second_an_op(graph):
    """Enough to tell a recomputation from none."""
    return dataclasses.replace(graph, ops=tuple(dataclasses.replace(op, seconds=1.0) for op in graph.ops))


def test_a_filler_is_held_while_its_computation_runs():
    traced, graph = _traced(lambda x: tf.reduce_sum(tf.tanh(tf.tile(x, [4]))), tf.TensorSpec([MEGABYTE // 4]))
    bare = plan_from_order(graph, graph.order)
    number = next(number for number, op in enumerate(bare.order) if graph.ops[op].kind == "Tile")
    plan = dataclasses.replace(bare, fillers=((number, 16 * MEGABYTE),))
    x = tf.ones([MEGABYTE // 4])
    peaks = []
    for each, spare_bytes in ((bare, 0), (plan, 0), (plan, math.inf)):
        run = emit(traced, graph, each, spare_bytes)
        outputs, runs = first_call(run, x)
        assert float(outputs) == pytest.approx(math.tanh(1) * MEGABYTE, rel=1e-5) and set(runs.values()) == {1}
        held_bytes = measured_memory()[0]
        reset_peak()
        run(x)
        peaks.append(measured_memory()[1] - held_bytes)
    # Where memory is plenty, nothing is said of where values come to lie.
    assert [round((peak - peaks[0]) / MEGABYTE) for peak in peaks] == [0, 16, 0]
