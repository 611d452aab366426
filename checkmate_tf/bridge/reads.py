"""Variables that a loop does nothing with but read are read before it, and the loop is given their values.

A loop that reads variables itself has state and could not be recomputed. As an input the value says what it says of every
op: which write makes it stale.
"""

from collections.abc import Mapping, Sequence

import tensorflow as tf

from checkmate_tf.bridge import private

GraphDef = tf.compat.v1.GraphDef


def read_before_loops(graph_def: GraphDef, handles: Mapping[str, tf.Tensor]) -> GraphDef:
    """The same nodes, each loop with only values among its variables where that can be.

    handles: what the placeholders stand for that are no nodes
    """
    functions = {function.signature.name: function for function in graph_def.library.function}
    used = {name for node in graph_def.node for name in node.input}
    changed = GraphDef(library=graph_def.library, versions=graph_def.versions)
    for node in graph_def.node:
        if node.op == "While":
            positions = _resources(node)
            if all(f"{node.name}:{position}" not in used and _is_known(handles.get(node.input[position]))
                   and _only_read(node, functions, position) for position in positions):
                changed.node.extend(_read(node, handles, positions))
                _call_with_values(node, functions, changed.library, positions)
            if not any(private.is_stateful(inner.op) for called in _called(node) for inner in functions[called.name].node_def):
                node.op = "StatelessWhile"
        changed.node.append(node)
    return changed


def _resources(node) -> list[int]:
    return [position for position, dtype in enumerate(node.attr["T"].list.type) if dtype == tf.resource.as_datatype_enum]


def _called(node) -> list:
    return [node.attr[attribute].func for attribute in ("cond", "body")]


def _is_known(handle: tf.Tensor | None) -> bool:
    """Whether it is the handle of a variable of known dtype and shape."""
    return handle is not None and None not in (private.handle_dtype(handle), private.handle_shape(handle))


def _read(node, handles: Mapping[str, tf.Tensor], positions: Sequence[int]) -> list:
    """Reads of these variables of the loop, which then takes what they give."""
    types, shapes = node.attr["T"].list.type, node.attr["output_shapes"].list.shape
    controls = node.input[len(types):]
    reads = []
    for position in positions:
        handle = handles[node.input[position]]
        read = tf.compat.v1.NodeDef(name=f"{node.name}/read_{position}", op="ReadVariableOp", device=node.device,
                                    input=[node.input[position], *controls])
        read.attr["dtype"].type = types[position] = private.handle_dtype(handle).as_datatype_enum
        node.input[position] = read.name
        if shapes:
            shapes[position].CopyFrom(private.handle_shape(handle).as_proto())
        reads.append(read)
    node.attr.pop("_read_only_resource_inputs", None)
    return reads


def _call_with_values(node, functions: dict, library, positions: Sequence[int]) -> None:
    """Has the loop call functions that take values at these positions; others may call the present ones."""
    for called in _called(node) if positions else ():
        name = f"{called.name}_of_values"
        if name not in functions:
            functions[name] = library.function.add()
            functions[name].CopyFrom(functions[called.name])
            functions[name].signature.name = name
            _take_values(functions[name], {position: node.attr["T"].list.type[position] for position in positions})
        called.name = name


def rename_tensors(function, names: Mapping[str, str]) -> None:
    """Has all that the function's nodes read, and what it returns, under the new names."""
    for node in function.node_def:
        node.input[:] = [names.get(name, name) for name in node.input]
    for output, tensor in list(function.ret.items()):
        function.ret[output] = names.get(tensor, tensor)


def _only_read(node, functions: Mapping, position: int) -> bool:
    """Whether the functions of this loop only read the variable at this position, and pass its handle on."""
    for called in _called(node):
        function = functions[called.name]
        argument = function.signature.input_arg[position].name
        if any(argument in inner.input and inner.op != "ReadVariableOp" for inner in function.node_def):
            return False
        returned = {output.name: place for place, output in enumerate(function.signature.output_arg)}
        if any(returned[output] != position for output, tensor in function.ret.items() if tensor == argument):
            return False
    body = functions[node.attr["body"].func.name]
    return body.ret[body.signature.output_arg[position].name] == body.signature.input_arg[position].name


def _take_values(function, types: Mapping[int, int]) -> None:
    """Gives the function values of these types (by position) in place of handles."""
    reads = {}
    for position, dtype in types.items():
        argument = function.signature.input_arg[position]
        argument.type = dtype
        argument.ClearField("handle_data")
        function.arg_attr.pop(position, None)
        function.resource_arg_unique_id.pop(position, None)
        for output in function.signature.output_arg:
            if function.ret[output.name] == argument.name:
                output.type = dtype
                output.ClearField("handle_data")
        for node in function.node_def:
            if node.op == "ReadVariableOp" and node.input[0] == argument.name:
                reads[f"{node.name}:value:0"] = f"{node.name}:output:0"
                node.op = "Identity"
                node.attr.clear()
                node.attr["T"].type = dtype
    rename_tensors(function, reads)
