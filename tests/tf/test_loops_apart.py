"""Loops and branches run taken apart as in plain Keras, in their place in the plan, as often as planned."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from checkmate_tf import planning, solvers
from checkmate_tf.bridge import private, variables
from checkmate_tf.bridge.audit import executed_runs, first_call
from checkmate_tf.bridge.emit import Emitted, emit
from checkmate_tf.bridge.extract import extract
from checkmate_tf.bridge.measure import measured_memory, reset_peak
from checkmate_tf.bridge.shapes import LEAST_TURNS, MOST_TURNS
from checkmate_tf.bridge.trace import trace
from checkmate_tf.ir.errors import PlanError
from checkmate_tf.ir.plan import plan_from_order
from checkmate_tf.ir.simulate import simulate

layers = keras.layers


def _nodes(run):
    """What TensorFlow executes in the first call of a function."""
    with private.export_graphs() as graphs:
        run()
    return [node for graph in graphs for node in graph.post_optimization_graph.node]


def _count(nodes, kind):
    return sum(node.op == kind for node in nodes)


def _model(layer=layers.GRU, steps=8, width=16):
    keras.utils.set_random_seed(5)
    inputs = layers.Input((steps, 8))
    value = layer(width)(layer(width, return_sequences=True)(inputs))
    model = keras.Model(inputs, layers.Dense(3, activation="softmax")(value))
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "sparse_categorical_crossentropy")
    return model


def _prepared(model, batch_size=16):
    steps = model.input_shape[1]
    batch = tf.random.stateless_uniform([batch_size, steps, 8], [1, 2]), tf.range(batch_size) % 3
    planning.build(model, batch)
    return planning.prepare(model, batch, "cpu", lambda text: None, batch_is_there=True), batch


def _with_first_loop_again(graph):
    """The given order, with the first loop run again right before the loop of its gradient."""
    loops = [op.index for op in graph.ops if "While" in op.kind]
    return plan_from_order(graph, [*range(loops[-1]), loops[0], *range(loops[-1], len(graph.ops))])


def test_the_loops_of_a_step_run_as_in_plain_keras():
    model = _model()
    prepared, batch = _prepared(model)
    model.make_train_function()
    plain = _nodes(lambda: model.train_function(iter([batch])))
    graph = prepared.graph
    ours = _nodes(lambda: emit(prepared.traced, graph, plan_from_order(graph, graph.order))(batch))
    assert _count(plain, "LoopCond") == _count(ours, "LoopCond") == 4
    assert not any("While" in node.op for node in ours)
    # A turn has no more nodes that do nothing than in plain Keras, but for some of each loop's.
    assert _count(ours, "Identity") < _count(plain, "Identity") + _count(ours, "Enter")


def test_a_loop_that_runs_again_is_counted_and_changes_no_bits():
    prepared, batch = _prepared(_model())
    graph, traced = prepared.graph, prepared.traced
    again = _with_first_loop_again(graph)
    start, ends = variables.snapshot(traced), []
    for plan in (plan_from_order(graph, graph.order), again, again):
        step = emit(traced, graph, plan)
        variables.put_back(traced, start)
        _, runs = first_call(step, batch)
        timeline = simulate(graph, plan)
        assert runs == {op.name: timeline.runs[op.index] for op in graph.ops}
        for _ in range(3):
            step(batch)
        ends.append(variables.snapshot(traced))
    kept, *planned = ends
    assert any(not np.array_equal(kept[name], start[name]) for name in start)
    for name, value in kept.items():
        for other in planned:
            np.testing.assert_array_equal(other[name], value, err_msg=name)


def test_the_audit_notices_a_loop_that_is_missing_or_out_of_order():
    prepared, batch = _prepared(_model())
    graph = prepared.graph
    step = emit(prepared.traced, graph, plan_from_order(graph, graph.order))
    with private.export_graphs() as graphs:
        step(batch)
    kinds = {op.name: op.kind for op in graph.ops}
    first = next(name for name in step.waits if "While" in kinds[name])
    follower = next(name for name, waits in step.waits.items() if first in waits)
    with pytest.raises(PlanError, match="order"):
        executed_runs(Emitted(step.function, {**step.waits, first: (follower,)}, step.pack, b""), graphs)
    with pytest.raises(PlanError, match="recompute_1"):
        executed_runs(Emitted(step.function, {**step.waits, f"{first}/recompute_1": ()}, step.pack, b""), graphs)


def test_branches_are_taken_apart_and_keep_their_place():
    total = tf.Variable(1.0)

    def step(x):
        value = tf.exp(x)
        value = tf.cond(tf.reduce_sum(value) > 0, lambda: tf.sin(value) * total, lambda: tf.cos(value))
        tf.cond(tf.reduce_sum(value) > 0, lambda: total.assign_add(1.0), lambda: total.assign_add(5.0))
        return tf.reduce_sum(tf.tanh(value)) * total
    traced = trace(step, tf.TensorSpec([4]))
    graph = extract(traced)
    emitted = emit(traced, graph, plan_from_order(graph, graph.order))
    outputs, runs = first_call(emitted, tf.ones([4]))
    assert set(runs.values()) == {1} and total.numpy() == 2
    np.testing.assert_allclose(outputs, 4 * 2 * np.tanh(np.sin(np.e)), rtol=1e-5)
    assert not any(node.op in ("If", "StatelessIf") for node in _nodes(lambda: emit(traced, graph, plan_from_order(
        graph, graph.order))(tf.ones([4]))))


def test_a_loop_that_gives_the_result_runs():
    traced = trace(lambda x: tf.while_loop(lambda n, _: n < 3, lambda n, value: (n + 1, value * 2.0), [0, x])[1], tf.TensorSpec([4]))
    graph = extract(traced)
    outputs, runs = first_call(emit(traced, graph, plan_from_order(graph, graph.order)), tf.ones([4]))
    np.testing.assert_array_equal(outputs, 8 * np.ones(4))
    assert set(runs.values()) == {1}


@pytest.mark.parametrize("spare_bytes, turns", [(0, LEAST_TURNS), (1 << 40, MOST_TURNS)])
def test_turns_run_ahead_where_there_is_room(spare_bytes, turns):
    prepared, batch = _prepared(_model(layers.LSTM, steps=32, width=64), batch_size=64)
    plan = plan_from_order(prepared.graph, prepared.graph.order)
    at_peak = prepared.graph.ops[plan.steps[simulate(prepared.graph, plan).peak_step].op]
    assert "While" in at_peak.kind
    nodes = _nodes(lambda: emit(prepared.traced, prepared.graph, plan, spare_bytes)(batch))
    assert {node.attr["parallel_iterations"].i for node in nodes
            if node.op == "Enter" and node.attr["frame_name"].s.decode().endswith(at_peak.name)} == {turns}


def test_running_a_loop_again_lowers_the_measured_peak_as_simulated():
    prepared, batch = _prepared(_model(layers.LSTM, steps=32, width=64), batch_size=64)
    graph, peaks, simulated = prepared.graph, [], []
    for plan in (plan_from_order(graph, graph.order), _with_first_loop_again(graph)):
        step = emit(prepared.traced, graph, plan, spare_bytes=0)
        step(batch)
        held_bytes = measured_memory()[0]
        measured = []
        for _ in range(3):
            reset_peak()
            step(batch)
            measured.append(measured_memory()[1] - held_bytes)
        peaks.append(min(measured))
        simulated.append(simulate(graph, plan).peak_bytes - graph.resident_bytes)
    assert simulated[1] < 0.75 * simulated[0]
    assert peaks == pytest.approx(simulated, rel=0.15)


def test_a_budget_that_takes_running_a_loop_again_is_kept():
    """60 % of the way from what is resident to keeping everything."""
    prepared, _ = _prepared(_model(layers.LSTM, steps=32, width=64), batch_size=64)
    resident = prepared.residents.total
    budget = int(resident + 0.6 * (prepared.base.peak_bytes - resident))
    solution = solvers.solve(prepared.graph, budget, solvers.get("greedy"), solvers.Limits(seconds=10))
    again = [op.kind for op, runs in zip(prepared.graph.ops, solution.timeline.runs) if runs > 1]
    assert "StatelessWhile" in again and solution.peak_bytes <= budget
