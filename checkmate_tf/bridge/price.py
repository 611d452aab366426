"""From a Graph without prices to the same Graph with seconds and scratch bytes, by a Profile.

`op_key` names the work that a node does; equal keys are measured once. `flops` counts the arithmetic of the ops
in which arithmetic can be what takes the time: contractions. All other ops are taken to be bound by their
traffic.
"""

import collections
import dataclasses
import hashlib
import json
import math
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from checkmate_tf.bridge.extract import Roots, inside_of
from checkmate_tf.bridge.loops import Inside
from checkmate_tf.bridge.trace import SOURCES, Traced
from checkmate_tf.bridge.views import is_view
from checkmate_tf.ir.graph import Graph, Op
from checkmate_tf.ir.verify import verify_graph
from checkmate_tf.profiles import OpCost, OpKey, Profile

_CONVOLUTIONS = {"Conv2D": (1, "out"), "Conv3D": (1, "out"), "DepthwiseConv2dNative": (1, "out"), "_FusedConv2D": (1, "out"),
                 "Conv2DBackpropInput": (1, "in"), "Conv3DBackpropInputV2": (1, "in"),
                 "DepthwiseConv2dNativeBackpropInput": (1, "in"), "Conv2DBackpropFilter": (None, "in"),
                 "Conv3DBackpropFilterV2": (None, "in"), "DepthwiseConv2dNativeBackpropFilter": (None, "in")}
_STATIC_ELEMENTS = 64


def price(traced: Traced, graph: Graph, profile: Profile) -> Graph:
    """The same graph (same key) with the seconds, scratch bytes, reuses and requests that the profile gives for each op.

    A pooling alone holds its workspace as scratch; where the workspace is an output, it is not counted twice. A loop that was
    not measured has the scratch of one turn and the work of all.
    """
    ops = []
    roots, inside = Roots(traced), inside_of(traced)
    value_of = {(graph.ops[value.producer].name, value.port): value.index for value in graph.values}
    for op in graph.ops:
        operation = traced.function.graph.get_operation_by_name(op.name)
        cost = _cost(traced, inside, profile, operation)
        left_bytes = sum(graph.values[value].bytes for value in op.outputs[len(operation.outputs):])
        # What is read in pieces is held to its end, and nobody writes into it.
        read = [() if any(roots.is_cut(*root) for root in found) else tuple(value_of[root] for root in found)
                for found in (roots.of(tensor.name) for tensor in operation.inputs)]
        ops.append(dataclasses.replace(op, seconds=cost.seconds, scratch_bytes=max(op.scratch_bytes, cost.scratch_bytes - left_bytes),
                                       reuses=_reused_values(graph, op, read, cost.reuses), requests=cost.requests))
    return verify_graph(dataclasses.replace(graph, ops=tuple(ops)))


def _cost(traced: Traced, inside: Inside, profile: Profile, operation: tf.Operation) -> OpCost:
    """Of a loop that was not measured, every turn of it; of two branches, the dearer."""
    cost = profile.cost(op_key(traced, operation), flops(operation), moved_bytes(operation))
    bodies = inside.bodies(operation)
    if cost.measured or not bodies:
        return cost
    seconds = [sum(_cost(traced, inside, profile, part).seconds for part in computing(body)) for body in bodies]
    return dataclasses.replace(cost, seconds=inside.turns(operation) * max(seconds))


def computing(body: tf.Graph) -> list[tf.Operation]:
    """The ops of a function that do any work."""
    return [operation for operation in body.get_operations() if operation.type not in SOURCES and not is_view(operation)]


def _reused_values(graph: Graph, op: Op, read: Sequence[tuple[int, ...]], positions: Sequence[int]) -> tuple[int, ...]:
    """The values at these positions, of those that the op reads once: two readings hold a value for each other.

    read: for each input the values under it
    """
    counts = collections.Counter(value for values in read for value in values)
    values = [read[position][0] for position in positions if len(read[position]) == 1]
    sizes = collections.Counter(graph.values[value].bytes for value in op.outputs)
    found = [value for value in values if counts[value] == 1 and sizes[graph.values[value].bytes] == 1]
    most_bytes = max((graph.values[value].bytes for value in found), default=0)
    return tuple(value for value in found if graph.values[value].bytes == most_bytes)


def op_key(traced: Traced, operation: tf.Operation) -> OpKey:
    """The op's kind, attributes, input shapes and dtypes, and the values of small integer inputs known beforehand."""
    attributes = {name: _attribute(traced, operation.node_def.attr[name]) for name in sorted(operation.node_def.attr)
                  if not name.startswith("_")}
    inputs = []
    for tensor in operation.inputs:
        value = static_value(tensor)
        inputs.append(value.tolist() if value is not None else f"{tensor.dtype.name}{tensor.shape}")
    return f"{operation.type} {json.dumps(attributes, sort_keys=True)} {json.dumps(inputs)}"


def static_value(tensor: tf.Tensor) -> np.ndarray | None:
    """The value of a small integer or boolean input (a shape, an axis) where it is known before running, else None."""
    if not (tensor.dtype.is_integer or tensor.dtype.is_bool) or (tensor.shape.num_elements() or 0) > _STATIC_ELEMENTS:
        return None
    return tf.get_static_value(tensor)


def moved_bytes(operation: tf.Operation) -> int:
    """Inputs read and outputs written; a read of a variable moves nothing."""
    if operation.type == "ReadVariableOp":
        return 0
    return sum(tensor_bytes(tensor) for tensor in (*operation.inputs, *operation.outputs))


def tensor_bytes(tensor: tf.Tensor) -> int:
    """Its bytes; 0 where they are not known or not its own."""
    if tensor.dtype in (tf.resource, tf.variant, tf.string) or not tensor.shape.is_fully_defined():
        return 0
    return tensor.shape.num_elements() * tensor.dtype.size


def flops(operation: tf.Operation) -> float:
    """Floating-point operations of a contraction, two for each multiply-add; 0 for every other kind."""
    shapes = [tensor.shape for tensor in (*operation.inputs, *operation.outputs)]
    if not all(shape.is_fully_defined() for shape in shapes):
        return 0.0
    if operation.type in _CONVOLUTIONS:
        filter_input, dense_side = _CONVOLUTIONS[operation.type]
        filter_shape = operation.inputs[filter_input].shape if filter_input is not None else operation.outputs[0].shape
        dense = operation.outputs[0] if dense_side == "out" else operation.inputs[2]
        depthwise = operation.type.startswith("Depthwise")
        per_element = math.prod(filter_shape.as_list()[:-2]) * (1 if depthwise else filter_shape.as_list()[-2])
        return 2.0 * dense.shape.num_elements() * per_element
    if operation.type in ("MatMul", "_FusedMatMul", "BatchMatMulV2", "BatchMatMul"):
        transposed = any(operation.node_def.attr[name].b for name in ("transpose_a", "adj_x"))
        inner = operation.inputs[0].shape.as_list()[-2 if transposed else -1]
        return 2.0 * operation.outputs[0].shape.num_elements() * inner
    if operation.type == "Einsum":
        return _einsum_flops(operation)
    return 0.0


def _einsum_flops(operation: tf.Operation) -> float:
    terms = operation.get_attr("equation").decode().split("->")[0].split(",")
    sizes: dict[str, int] = {}
    for term, tensor in zip(terms, operation.inputs):
        if "." in term:
            return 2.0 * operation.outputs[0].shape.num_elements()
        sizes |= dict(zip(term, tensor.shape.as_list()))
    return 2.0 * math.prod(sizes.values())


def _attribute(traced: Traced, attribute) -> str:
    """An attribute as text; a function is named by what it does, since its own name changes from trace to trace."""
    text = str(attribute).replace("\n", " ").strip()
    if attribute.WhichOneof("value") == "func":
        body = next((function for function in traced.graph_def.library.function
                     if function.signature.name == attribute.func.name), None)
        if body is not None:
            nodes = [(node.op, sorted(str(value) for value in node.attr.values())) for node in body.node_def]
            text = "function " + hashlib.sha256(repr(nodes).encode()).hexdigest()[:16]
    return text
