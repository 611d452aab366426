"""What shapes Grappler is told before it works on a step, and what shapes its result has.

Both know less than tracing did: Grappler of what is fed, and an imported graph of what only Python code knew.
"""

import tensorflow as tf

from checkmate_tf.bridge import private

GraphDef = tf.compat.v1.GraphDef
# Turns at a time. By measurement two take no more memory than what one may hold, and less time than one; more than 16 take
# more memory and no less time.
LEAST_TURNS, MOST_TURNS = 2, 16
_TAKE_APART, _LATER = "_lower_using_switch_merge", "_checkmate_tf_lower_using_switch_merge"


def with_shapes(graph: tf.Graph) -> GraphDef:
    """The graph's nodes for Grappler: placeholders as arguments, control flow as one op each.

    What is fed may have any shape, so behind placeholders Grappler takes no shape for known, and leaves what it does
    away with in plain Keras: `1.0 * x`, unfused activations, shapes as values. Arguments of a function tell theirs,
    those of the variables behind handles included; only of a `VariableShape` it makes no constant, and not of every `ShapeN`,
    which would keep an activation for its shape alone. Loops and branches stay whole until `taking_apart`: as switches and
    merges they could be neither planned nor copied.
    """
    graph_def = _with_attribute_renamed(graph.as_graph_def(add_shapes=True), _TAKE_APART, _LATER)
    position = {tensor.op.name: number for number, tensor in enumerate(graph.inputs)}
    for node in graph_def.node:
        operation = graph.get_operation_by_name(node.name)
        if node.name in position:
            _make_argument(node, operation.outputs[0], position[node.name])
        elif node.op == "VariableShape":
            _make_shape(node, operation)
    return _shapes_known(graph_def, graph)


def taking_apart(graph_def: GraphDef) -> GraphDef:
    """The nodes after Grappler, loops and branches again to be taken apart when they run, as they are in plain Keras: as calls
    of functions the turns of a loop would take up to twice as long. Loops in functions run few turns at a time: how much
    room there is for more is not known of them."""
    for function in graph_def.library.function:
        for node in function.node_def:
            if "parallel_iterations" in node.attr:
                node.attr["parallel_iterations"].i = min(LEAST_TURNS, node.attr["parallel_iterations"].i)
    return _with_attribute_renamed(graph_def, _LATER, _TAKE_APART)


def keep_shapes(imported: tf.Graph, traced: tf.Graph) -> None:
    """Gives back the shapes that Python code had found or set while tracing, which no node tells, and what follows from
    them."""
    found = {operation.name: operation for operation in traced.get_operations()}
    for operation in imported.get_operations():
        if all(tensor.shape.is_fully_defined() for tensor in operation.outputs):
            continue
        original = found.get(operation.name)
        same = original is not None and original.type.removeprefix("Stateless") == operation.type.removeprefix("Stateless")
        sources = [_inferred(operation), original if same else None]
        for source in filter(None, sources):
            for tensor, known in zip(operation.outputs, source.outputs):
                if not tensor.shape.is_fully_defined() and tensor.shape.is_compatible_with(known.shape):
                    tensor.set_shape(known.shape)


def _with_attribute_renamed(graph_def: GraphDef, name: str, other: str) -> GraphDef:
    for node in (*graph_def.node, *(node for function in graph_def.library.function for node in function.node_def)):
        if name in node.attr:
            node.attr[other].CopyFrom(node.attr.pop(name))
    return graph_def


def _make_argument(node, tensor: tf.Tensor, position: int) -> None:
    """Turns a placeholder into an argument of a function, with its shape and what is behind it if it is a handle."""
    node.Clear()
    node.name, node.op = tensor.op.name, "_Arg"
    node.attr["T"].type, node.attr["index"].i = tensor.dtype.as_datatype_enum, position
    node.attr["_output_shapes"].list.shape.append(tensor.shape.as_proto())
    shape, dtype = private.handle_shape(tensor), private.handle_dtype(tensor)
    if shape is not None:
        node.attr["_handle_shapes"].list.shape.append(shape.as_proto())
        node.attr["_handle_dtypes"].list.type.append(dtype.as_datatype_enum)


def _make_shape(node, operation: tf.Operation) -> None:
    """Turns a variable's shape as a value into a constant, where it is known."""
    shape = private.handle_shape(operation.inputs[0])
    if shape is None or not shape.is_fully_defined():
        return
    node.Clear()
    node.name = operation.name
    _fill_constant(node, shape, operation.outputs[0].dtype)


def _fill_constant(node, shape: tf.TensorShape, dtype: tf.DType) -> None:
    """Makes the node, which has a name only, a constant whose value is the shape."""
    node.op = "Const"
    node.attr["dtype"].type = dtype.as_datatype_enum
    node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(shape.as_list(), dtype, [shape.rank]))


def _shapes_known(graph_def: GraphDef, graph: tf.Graph) -> GraphDef:
    """The nodes with a constant for each output of a `ShapeN` that is known before running."""
    known: dict[str, str] = {}
    for node in list(graph_def.node):
        if node.op == "ShapeN":
            operation = graph.get_operation_by_name(node.name)
            for port, (tensor, shape) in enumerate(zip(operation.inputs, operation.outputs)):
                if tensor.shape.is_fully_defined():
                    constant = graph_def.node.add(name=f"{node.name}/of_{port}")
                    _fill_constant(constant, tensor.shape, shape.dtype)
                    known[f"{node.name}:{port}" if port else node.name] = constant.name
    for node in graph_def.node:
        node.input[:] = [known.get(name.removesuffix(":0"), name) for name in node.input]
    return graph_def


def _inferred(operation: tf.Operation) -> tf.Operation | None:
    """The same op alone, on inputs of the shapes that are known by now; None for one that calls functions."""
    node = operation.node_def
    if any(attribute.WhichOneof("value") == "func" for attribute in node.attr.values()):
        return None
    with tf.Graph().as_default() as graph:
        for position, tensor in enumerate(operation.inputs):
            value = tf.get_static_value(tensor)
            (tf.compat.v1.placeholder(tensor.dtype, tensor.shape, f"input_{position}") if value is None else
             tf.constant(value, tensor.dtype, name=f"input_{position}"))
        names = [f"input_{position}:0" for position in range(len(operation.inputs))]
        feeds = {name: graph.get_tensor_by_name(name) for name in names}
        del node.input[:]
        node.input.extend(names)
        alone = tf.graph_util.import_graph_def(GraphDef(node=[node]), input_map=feeds, return_elements=[node.name], name="alone")
        return alone[0]
