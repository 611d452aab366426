"""From a training step to one optimised TensorFlow graph: traced once, put through Grappler once, kept.

From here on the `Traced` graph is the truth. Extraction reads it, plans name its ops, emission copies its nodes.
Nothing traces again: a plan made on one trace and applied to another is how such tools go wrong.

Sums of three or more values (`AddN`) become chains of `AddV2`: the kernel of AddN adds in an order that depends on
which buffers it may reuse, so its last bits change with the liveness that a plan changes.

Assignments leave their variables where they are (`writes`).
"""

import dataclasses
import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from checkmate_tf.bridge import private
from checkmate_tf.bridge.reads import read_before_loops, rename_tensors
from checkmate_tf.bridge.shapes import keep_shapes, taking_apart, with_shapes
from checkmate_tf.bridge.writes import in_place, is_number
from checkmate_tf.ir.errors import UnsupportedError

GraphDef = tf.compat.v1.GraphDef
SOURCES = frozenset({"Const", "Placeholder"})


@dataclasses.dataclass(frozen=True)
class Traced:
    """A step as one optimised graph, with all that is needed to call it.

    graph_def: the nodes, placeholders left out, in a topological order that follows the order of tracing
    arguments: (name, spec) of each flat tensor argument
    captures: (name, tensor) of what the step closes over: variables' handles and eager tensors
    results: names of the tensors it returns, flat;  pack: puts them back into the step's own structure
    controls: names of nodes that must run for their effects
    function: the same as a concrete function, whose graph has every static shape
    """

    graph_def: GraphDef
    arguments: tuple[tuple[str, tf.TensorSpec], ...]
    captures: tuple[tuple[str, tf.Tensor], ...]
    results: tuple[str, ...]
    controls: tuple[str, ...]
    pack: Callable[[Sequence[tf.Tensor]], Any]
    function: Any

    @property
    def argument_bytes(self) -> int:
        """The bytes of the batch."""
        return sum(self.argument_sizes)

    @property
    def capture_bytes(self) -> int:
        """The bytes of what the step closes over: every variable, each once, and captured tensors."""
        return sum(bytes_behind(tensor) for _, tensor in self.captures)

    @property
    def argument_sizes(self) -> tuple[int, ...]:
        """The bytes of each part of the batch."""
        return tuple(spec.shape.num_elements() * spec.dtype.size for _, spec in self.arguments)

    @property
    def resident_sizes(self) -> tuple[int, ...]:
        """The bytes of each variable and captured tensor, and of each part of the batch."""
        return (*(bytes_behind(tensor) for _, tensor in self.captures), *self.argument_sizes)


def flatten_batch(data: Any) -> list[tf.Tensor]:
    """The tensors of a batch in the order in which a traced step takes them; None leaves are left out."""
    leaves = tf.nest.flatten(data, expand_composites=True)
    return [tf.convert_to_tensor(leaf) for leaf in leaves if leaf is not None]


def batch_specs(data: Any) -> Any:
    """The batch with each tensor or array replaced by its spec; specs and None stay."""
    def spec(leaf):
        if leaf is None or isinstance(leaf, tf.TypeSpec):
            return leaf
        return tf.type_spec_from_value(leaf if tf.is_tensor(leaf) else tf.convert_to_tensor(leaf))
    return tf.nest.map_structure(spec, data)


def trace(function: Callable, specs: Any, autograph: bool = False) -> Traced:
    """Traces `function(data)` on these specs, runs Grappler on the result, and keeps both in one `Traced`.

    autograph: whether Python's own branches and loops over tensors are to be translated, as `tf.function` does by itself

    Raises UnsupportedError when a spec has an unknown dimension.
    """
    for leaf in tf.nest.flatten(specs):
        if isinstance(leaf, (tf.SparseTensorSpec, tf.RaggedTensorSpec)):
            raise UnsupportedError("How much a sparse or ragged batch holds differs from batch to batch; make it dense before "
                                   "the model, with `tf.sparse.to_dense` or `to_tensor(shape=...)` in the input pipeline. "
                                   f"Received: {leaf}")
        if leaf is not None and not leaf.shape.is_fully_defined():
            raise UnsupportedError("The shapes of a batch must be fully known, the batch dimension included, to plan its "
                                   f"memory. Received: {leaf}")
    concrete = tf.function(function, autograph=autograph).get_concrete_function(specs)
    graph = concrete.graph
    arguments = len(graph.inputs) - len(graph.internal_captures)
    placeholders = [tensor.op.name for tensor in graph.inputs]
    controls = [op.name for op in graph.control_outputs]
    keep = [*(f"{name}:0" for name in placeholders), *(tensor.name for tensor in graph.outputs), *controls]
    graph_def = _own_functions(taking_apart(private.optimize(with_shapes(graph), keep)))
    created = {op.name: position for position, op in enumerate(graph.get_operations())}
    captures = tuple(zip(placeholders[arguments:], concrete.captured_inputs))
    graph_def = read_before_loops(_strip(graph_def, set(placeholders)), dict(captures))
    results = tuple(tensor.name for tensor in graph.outputs)
    graph_def = in_place(_chain_sums(graph_def), dict(captures), results, graph)
    graph_def = _in_order(graph_def, created, set(placeholders))
    named = tuple((name, tf.TensorSpec(tensor.shape, tensor.dtype))
                  for name, tensor in zip(placeholders[:arguments], graph.inputs))
    there = {node.name for node in graph_def.node}
    controls = tuple(name for name in controls if name in there)         # reads go where they served an assignment alone
    imported = import_function(graph_def, named, captures, results, controls)
    keep_shapes(imported.graph, graph)
    return Traced(graph_def, named, captures, results, controls, _packer(concrete), imported)


def import_function(graph_def: GraphDef, arguments: Sequence[tuple[str, tf.TensorSpec]],
                    captures: Sequence[tuple[str, tf.Tensor]], results: Sequence[str], controls: Sequence[str]):
    """A concrete function of these nodes: arguments fed, captures captured, controls run before it returns.

    Without results it returns a zero, since TensorFlow prunes a function that returns nothing to nothing. No automatic
    control dependencies are added: the order is the one that the nodes' own edges give. """
    # Grappler may have folded the only reader of a constant that was captured; feeding nobody is refused.
    read = {tensor_name(name)[0] for node in graph_def.node for name in node.input} | {tensor_name(name)[0] for name in results}

    def body(*tensors):
        graph = tf.compat.v1.get_default_graph()
        feeds = {f"{name}:0": tensor for (name, _), tensor in zip(arguments, tensors) if name in read}
        feeds |= {f"{name}:0": graph.capture(tensor) for name, tensor in captures if name in read}
        direct = {name: feeds[name] for name in results if name in feeds}
        fetched = [name for name in results if name not in direct]
        found = tf.graph_util.import_graph_def(graph_def, input_map=feeds, return_elements=[*fetched, *controls], name="")
        by_name = dict(zip([*fetched, *controls], found)) | direct
        with tf.control_dependencies([by_name[name] for name in controls]):
            return [tf.identity(by_name[name]) for name in results] or [tf.constant(0)]

    specs = [tf.TensorSpec(spec.shape, spec.dtype, name=f"argument_{position}")
             for position, (_, spec) in enumerate(arguments)]
    return tf.compat.v1.wrap_function(body, specs)


def bytes_behind(tensor: tf.Tensor) -> int:
    """The bytes of a captured tensor, or of the variable that a captured handle points to."""
    if tensor.dtype == tf.resource:
        return private.handle_bytes(tensor)
    return tensor.shape.num_elements() * tensor.dtype.size if tensor.shape.is_fully_defined() else 0


def tensor_name(name: str) -> tuple[str, int]:
    """("node", port) of a data input as GraphDefs write it: "node", or "node:1"."""
    node, _, port = name.partition(":")
    return node, int(port or 0)


def is_control(name: str) -> bool:
    """Whether an input of a NodeDef is a control edge."""
    return name.startswith("^")


def _packer(concrete) -> Callable[[Sequence[tf.Tensor]], Any]:
    structure = concrete.structured_outputs

    def pack(flat: Sequence[tf.Tensor]) -> Any:
        remaining = iter(flat)
        leaves = [next(remaining) if tf.is_tensor(leaf) else leaf
                  for leaf in tf.nest.flatten(structure, expand_composites=True)]
        return tf.nest.pack_sequence_as(structure, leaves, expand_composites=True)
    return pack


def _own_functions(graph_def: GraphDef) -> GraphDef:
    """The same with functions under names of our own.

    TensorFlow has registered the bodies of loops and branches as they were traced, and refuses changed ones under
    their names. """
    own = {function.signature.name: f"{function.signature.name}_checkmate_tf" for function in graph_def.library.function}

    def rename(node) -> None:
        node.op = own.get(node.op, node.op)
        for attribute in node.attr.values():
            for reference in (attribute.func, *attribute.list.func) if attribute.HasField("func") or attribute.list.func else ():
                reference.name = own.get(reference.name, reference.name)

    for function in graph_def.library.function:
        function.signature.name = own[function.signature.name]
        for node in function.node_def:
            rename(node)
    for node in graph_def.node:
        rename(node)
    del graph_def.library.gradient[:]
    return graph_def


def _strip(graph_def: GraphDef, placeholders: set[str]) -> GraphDef:
    """Without placeholders, and without notes to the runtime that would be wrong on a copy."""
    kept = GraphDef(library=graph_def.library, versions=graph_def.versions)
    for node in graph_def.node:
        if node.name in placeholders:
            continue
        for attribute in ("_class", "_output_shapes", "_xla_inferred_shapes"):
            node.attr.pop(attribute, None)
        # A placeholder runs before everything, so waiting for one says nothing.
        inputs = [name for name in node.input if not (is_control(name) and name[1:] in placeholders)]
        del node.input[:]
        node.input.extend(inputs)
        kept.node.append(node)
    return kept


def _chain_sums(graph_def: GraphDef) -> GraphDef:
    """AddN of three or more numbers as a chain of AddV2, left to right, the last under the old name; in functions, too."""
    for function in graph_def.library.function:
        nodes = _with_chained_sums(function.node_def, ":z:0")
        del function.node_def[:]
        function.node_def.extend(nodes)
        rename_tensors(function, {f"{node.name}:sum:0": f"{node.name}:z:0" for node in nodes if node.op == "AddV2"})
    return GraphDef(node=_with_chained_sums(graph_def.node, ""), library=graph_def.library, versions=graph_def.versions)


def _with_chained_sums(nodes: Iterable, port: str) -> list:
    """port: how the result of a sum is called, behind the node's name"""
    chained = []
    for node in nodes:
        data = [name for name in node.input if not is_control(name)]
        dtype = tf.as_dtype(node.attr["T"].type) if node.op == "AddN" else None
        if dtype is None or len(data) < 3 or not is_number(dtype):
            chained.append(node)
            continue
        controls = [name for name in node.input if is_control(name)]
        total = data[0]
        for position, term in enumerate(data[1:], start=1):
            last = position == len(data) - 1
            link = tf.compat.v1.NodeDef(name=node.name if last else f"{node.name}/sum_{position}", op="AddV2",
                                        device=node.device, input=[total, term, *(controls if position == 1 else [])])
            link.attr["T"].CopyFrom(node.attr["T"])
            chained.append(link)
            total = link.name + port
    return chained


def _in_order(graph_def: GraphDef, created: Mapping[str, int], placeholders: set[str]) -> GraphDef:
    """The nodes in the topological order closest to the order of tracing.

    A node that Grappler made takes the place of its name's longest known prefix, or of its first consumer.
    """
    nodes = {node.name: node for node in graph_def.node}
    waiting = {}
    followers: dict[str, list[str]] = {name: [] for name in nodes}
    for node in graph_def.node:
        inputs = {tensor_name(name.lstrip("^"))[0] for name in node.input} - placeholders
        waiting[node.name] = len(inputs)
        for name in inputs:
            followers[name].append(node.name)
    place = {name: created.get(name) for name in nodes}
    for name in nodes:
        prefix = name
        while place[name] is None and "/" in prefix:
            prefix = prefix.rpartition("/")[0]
            place[name] = created.get(prefix)
        if place[name] is None:
            place[name] = min((created[other] for other in followers[name] if other in created), default=len(created))
    position = {node.name: i for i, node in enumerate(graph_def.node)}
    ready = [(place[name], position[name], name) for name, count in waiting.items() if count == 0]
    heapq.heapify(ready)
    ordered = GraphDef(library=graph_def.library, versions=graph_def.versions)
    while ready:
        name = heapq.heappop(ready)[2]
        ordered.node.append(nodes[name])
        for other in followers[name]:
            waiting[other] -= 1
            if waiting[other] == 0:
                heapq.heappush(ready, (place[other], position[other], other))
    return ordered
