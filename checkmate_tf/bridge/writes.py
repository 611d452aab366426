"""Assignments that leave variables where they are.

A plain assignment makes the value's memory the variable's. Variables would then lie elsewhere after every step, in the middle of
what the next one needs, and what the allocator takes for the same step would change from run to run, by a tenth and more.

So a variable that gets its own value plus or minus something is added to, or taken from, in place: the same bits, in one pass
over memory less. Any other value is copied into the variable, as a slice that is all of it. TensorFlow would copy such a
variable at each later read; a further op ends that.
"""

from collections.abc import Iterable, Mapping

import tensorflow as tf

from checkmate_tf.bridge import private

GraphDef = tf.compat.v1.GraphDef
_MOST_RANK = 7                  # of slices that TensorFlow assigns to
_READS = ("ReadVariableOp", "VariableShape", "ResourceGather", "ResourceGatherNd")
_SUMMED = (tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.int64)
_IN_PLACE = {"Add": "AssignAddVariableOp", "AddV2": "AssignAddVariableOp", "Sub": "AssignSubVariableOp"}


def in_place(graph_def: GraphDef, captures: Mapping[str, tf.Tensor], results: Iterable[str], shapes: tf.Graph) -> GraphDef:
    """The nodes with assignments of numbers to captured variables rewritten; they keep their names.

    captures: name -> handle of the variable;  results: names of the tensors that the graph returns
    shapes: the graph before Grappler, which tells the shapes of tensors that it has as well
    """
    return _Rewriter(graph_def, captures, results, shapes).rewritten()


class _Rewriter:
    """See `in_place`."""

    def __init__(self, graph_def, captures, results, shapes):
        self._graph_def, self._captures, self._shapes = graph_def, captures, shapes
        self._nodes = {node.name: node for node in graph_def.node}
        self._readers: dict[str, list[str]] = {_source(name): [""] for name in results}
        self._writers: dict[str, list[str]] = {}
        for node in graph_def.node:
            for name in node.input:
                self._readers.setdefault(_source(name), []).append(node.name)
            for handle in {_source(name) for name in node.input if not name.startswith("^")} & captures.keys():
                if node.op not in _READS:
                    self._writers.setdefault(handle, []).append(node.name)

    def rewritten(self) -> GraphDef:
        replaced: dict[str, list] = {}
        ranks = set()
        for node in self._graph_def.node:
            shape = self._shape(node)
            if not _is_writable(shape):
                continue
            summed = self._summed(node, shape)
            if summed is not None:
                replaced |= summed
            elif is_number(tf.as_dtype(node.attr["dtype"].type)):
                replaced[node.name] = _copy(node, shape.rank)
                ranks.add(shape.rank)
        written = GraphDef(library=self._graph_def.library, versions=self._graph_def.versions)
        for rank in sorted(ranks):
            for number in (0, 1):
                bound = written.node.add(name=_bound(number, rank), op="Const")
                bound.attr["dtype"].type = tf.int32.as_datatype_enum
                bound.attr["value"].tensor.CopyFrom(tf.make_tensor_proto([number] * rank, tf.int32, [rank]))
        for node in self._graph_def.node:
            written.node.extend(replaced.get(node.name, [node]))
        return written

    def _shape(self, node) -> tf.TensorShape | None:
        """The shape of the captured variable that a node assigns to."""
        handle = self._captures.get(_source(node.input[0])) if node.op == "AssignVariableOp" else None
        return private.handle_shape(handle) if handle is not None else None

    def _summed(self, node, shape: tf.TensorShape) -> dict[str, list] | None:
        """What takes the place of which nodes, where the variable gets what was read of it plus or minus something, and nothing
        else is written to it in between."""
        handle, value, *controls = node.input
        total = self._nodes.get(_source(value))
        if (total is None or total.op not in _IN_PLACE or tf.as_dtype(total.attr["T"].type) not in _SUMMED
                or self._readers[total.name] != [node.name]):
            return None
        for place in range(1 if total.op == "Sub" else 2):
            read = self._nodes.get(_source(total.input[place]))
            if not (self._is_read(read, handle) and self._is_of(total.input[1 - place], shape)
                    and all(self._is_outside(other, read, node) for other in self._writers[_source(handle)])):
                continue
            gone = {total.name} | ({read.name} if set(self._readers[read.name]) <= {total.name, node.name} else set())
            controls = dict.fromkeys(name for name in (*controls, *total.input[2:], *read.input[1:]) if _source(name) not in gone)
            made = tf.compat.v1.NodeDef(name=node.name, op=_IN_PLACE[total.op], device=node.device,
                                        input=[handle, total.input[1 - place], *controls])
            made.attr["dtype"].CopyFrom(node.attr["dtype"])
            return {**{name: [] for name in gone}, node.name: [made]}
        return None

    def _is_of(self, tensor: str, shape: tf.TensorShape) -> bool:
        """Whether it is known that the tensor is of this shape."""
        try:
            outputs = self._shapes.get_operation_by_name(_source(tensor)).outputs
        except KeyError:
            return False
        port = int(tensor.partition(":")[2] or 0)
        return port < len(outputs) and outputs[port].shape.is_fully_defined() and outputs[port].shape == shape

    def _is_read(self, node, handle: str) -> bool:
        return node is not None and node.op == "ReadVariableOp" and _source(node.input[0]) == _source(handle)

    def _is_outside(self, other: str, read, node) -> bool:
        """Whether an edge says that another write of the variable comes before the read, or after the assignment; at once or by a
        read of its own."""
        if other == node.name or "^" + other in read.input:
            return True
        inputs = [_source(name) for name in self._nodes[other].input]
        further = [_source(name) for name in inputs for name in (self._nodes[name].input if name in self._nodes else ())]
        later = [name for name in (*inputs, *further) if self._is_read(self._nodes.get(name), node.input[0])]
        return node.name in inputs or any("^" + node.name in self._nodes[name].input for name in later)


def settle(captures: Iterable[tf.Tensor]) -> None:
    """Gives each variable memory of its own, if it shares what it has with a tensor; its value stays.

    Else the first write in place would move it.
    """
    for handle in movable(captures):
        _write(handle, tf.zeros([0] * private.handle_shape(handle).rank, private.handle_dtype(handle)), whole=False)


def clear(handle: tf.Tensor) -> None:
    """Takes a movable variable's memory away, until it is filled."""
    tf.raw_ops.AssignVariableOp(resource=handle, value=tf.zeros([0], private.handle_dtype(handle)), validate_shape=False)


def fill(handle: tf.Tensor, value: tf.Tensor) -> None:
    """Gives a movable variable new memory of its exact size, with this value."""
    memory = tf.raw_ops.Empty(shape=value.shape, dtype=value.dtype)
    tf.raw_ops.AssignVariableOp(resource=handle, value=memory, validate_shape=False)
    del memory
    write(handle, value)


def write(handle: tf.Tensor, value: tf.Tensor) -> None:
    """Gives a movable variable this value, in place where nothing shares its memory."""
    _write(handle, value, whole=True)


def _write(handle: tf.Tensor, value: tf.Tensor, whole: bool) -> None:
    """Writes into all of a variable, in place where nothing shares its memory, or into nothing of it."""
    rank = private.handle_shape(handle).rank
    zeros, ones, mask = [0] * rank, [1] * rank, (1 << rank) - 1 if whole else 0
    tf.raw_ops.ResourceStridedSliceAssign(ref=handle, begin=zeros, end=zeros, strides=ones, value=value, begin_mask=mask,
                                          end_mask=mask, ellipsis_mask=0, new_axis_mask=0, shrink_axis_mask=0)
    tf.raw_ops.DisableCopyOnRead(resource=handle)


def movable(captures: Iterable[tf.Tensor]) -> list[tf.Tensor]:
    """The handles of those variables that `settle` gives memory of their own where they share it."""
    shapes = ((handle, private.handle_shape(handle)) for handle in captures)
    return [handle for handle, shape in shapes if _is_writable(shape) and shape.rank and is_number(private.handle_dtype(handle))]


def is_number(dtype: tf.DType) -> bool:
    """Whether values of this dtype lie in memory as they are."""
    return dtype.is_floating or dtype.is_integer or dtype.is_complex or dtype.is_bool


def _is_writable(shape: tf.TensorShape | None) -> bool:
    return shape is not None and shape.is_fully_defined() and shape.num_elements() > 0 and shape.rank <= _MOST_RANK


def _copy(node, rank: int) -> list:
    handle, value, *controls = node.input
    copied = tf.compat.v1.NodeDef(name=f"{node.name}/copied", op="ResourceStridedSliceAssign", device=node.device,
                                  input=[handle, _bound(0, rank), _bound(0, rank), _bound(1, rank), value, *controls])
    copied.attr["T"].CopyFrom(node.attr["dtype"])
    copied.attr["Index"].type = tf.int32.as_datatype_enum
    for mask in ("begin_mask", "end_mask"):
        copied.attr[mask].i = (1 << rank) - 1
    return [copied, tf.compat.v1.NodeDef(name=node.name, op="DisableCopyOnRead", device=node.device, input=[handle, "^" + copied.name])]


def _bound(number: int, rank: int) -> str:
    return f"checkmate_tf_{number}_x{rank}"


def _source(name: str) -> str:
    return name.lstrip("^").partition(":")[0]
