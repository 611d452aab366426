"""One test for each thing that `bridge/private.py` takes from TensorFlow's inside."""

import numpy as np
import pytest
import tensorflow as tf

from checkmate_tf.bridge import private


def _names(graph_def):
    return {node.name for node in graph_def.node}


def test_optimize_merges_equal_ops_and_keeps_what_is_asked_for():
    concrete = tf.function(lambda x: tf.exp(x) + tf.exp(x)).get_concrete_function(tf.TensorSpec([4]))
    graph = concrete.graph
    keep = [tensor.name for tensor in (*graph.inputs, *graph.outputs)]
    optimized = private.optimize(graph.as_graph_def(), keep)
    assert sum(node.op == "Exp" for node in optimized.node) == 1
    assert {tensor.op.name for tensor in graph.outputs} <= _names(optimized)


def test_optimize_leaves_sums_stateless():
    concrete = tf.function(lambda x: tf.add_n([tf.exp(x), tf.sin(x), tf.cos(x)])).get_concrete_function(tf.TensorSpec([4]))
    graph = concrete.graph
    optimized = private.optimize(graph.as_graph_def(), [tensor.name for tensor in (*graph.inputs, *graph.outputs)])
    assert "TemporaryVariable" not in {node.op for node in optimized.node}


def test_a_function_called_without_optimizers_runs_as_written():
    function = tf.compat.v1.wrap_function(lambda x: tf.exp(x) + tf.exp(x), [tf.TensorSpec([4])])
    with private.export_graphs() as graphs:
        tf.raw_ops.StatefulPartitionedCall(args=[tf.ones([4])], Tout=[tf.float32], f=function,
                                           config_proto=private.config_without_optimizers())
    executed = [node for graph in graphs for node in graph.post_optimization_graph.node]
    assert sum(node.op == "Exp" for node in executed) == 2


def test_export_graphs_leaves_collection_off():
    with private.export_graphs():
        pass
    function = tf.function(lambda x: x + 1)
    function(tf.ones([2]))
    with private.export_graphs() as graphs:
        pass
    assert not graphs


def test_handles_tell_bytes_dtype_and_shape_of_their_variable():
    variable = tf.Variable(np.zeros([3, 5], np.float64))
    assert private.handle_bytes(variable.handle) == 3 * 5 * 8
    assert private.handle_dtype(variable.handle) == tf.float64
    assert private.handle_shape(variable.handle) == [3, 5] and private.handle_shape(tf.zeros([2])) is None
    in_graph = []
    tf.function(lambda: in_graph.append(private.handle_shape(variable.handle)) or variable.value()).get_concrete_function()
    assert in_graph == [[3, 5]]
    assert private.handle_dtype(tf.zeros([2])) is None


@pytest.mark.skipif(not tf.config.list_physical_devices("GPU"), reason="the limit is asked of GPUs only, and there is none")
def test_a_gpu_tells_its_limit():
    assert private.device_memory_limit("GPU:0") > 0


def test_a_device_that_is_not_there_has_no_limit():
    assert private.device_memory_limit("GPU:99") is None


def test_kinds_of_ops_tell_whether_they_have_state():
    assert private.is_stateful("AssignVariableOp") and private.is_stateful("a_function_of_someone")
    assert not private.is_stateful("MatMul") and not private.is_stateful("StatelessWhile")


def test_optimize_takes_loops_apart_where_only_that_is_asked_for():
    graph = tf.function(lambda x: tf.while_loop(lambda n, _: n < 3, lambda n, y: (n + 1, tf.sin(y)), [0, x])[1] + tf.exp(x) + tf.exp(x)
                        ).get_concrete_function(tf.TensorSpec([4])).graph
    keep = [operation.name for operation in graph.get_operations() if operation.type != "While"]
    apart = private.optimize(graph.as_graph_def(), keep, ("function", "pruning", "dependency"))
    kinds = [node.op for node in apart.node]
    assert kinds.count("LoopCond") == 1 and kinds.count("Exp") == 2 and "While" not in kinds
