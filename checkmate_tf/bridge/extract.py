"""From a traced step to the scheduling problem: which nodes are ops, which bytes they make, what must hold.

Four sorts of nodes:

- *sources*: constants and arguments. Always there; their bytes are resident.
- *views* own no bytes (`views`). They are folded: who reads a view reads the value under it, and emission copies the
  view with its reader.
- *relays*: NoOps only carry control edges, which are followed through them (and through sources and views).
- *ops*: everything else, reads of variables included. A read makes a value of no bytes (it aliases the
  variable) and runs once.

Two kernels of oneDNN hand memory to one another that the graph does not show: a pooling whose gradient reads its
result keeps a *workspace* for it (which element of each window was the largest). It appears here as one more output.

Statefulness is decided in `_once`, and nowhere else (but for the zeros that a loop fills). A write of a variable overwrites the values that earlier
reads of it made, so that no recomputation can see a mixture of old and new weights; where the step itself uses an
old value after the write (a seed that is drawn and advanced), TensorFlow keeps a copy and nothing is overwritten.

The ops come out in an order of their own: the order of tracing, but each op that frees at least as much as it makes
runs as soon as it can. That puts every optimizer update right behind its gradient.
"""

import collections
import dataclasses
import heapq
import math
from collections.abc import Iterable, Mapping

import tensorflow as tf

from checkmate_tf.bridge import private
from checkmate_tf.bridge.loops import LOOPS, Inside
from checkmate_tf.bridge.trace import SOURCES, Traced, is_control, tensor_name
from checkmate_tf.bridge.views import PIECES, is_view
from checkmate_tf.ir.errors import UnsupportedError
from checkmate_tf.ir.graph import Graph, Op, Value
from checkmate_tf.ir.units import in_granules
from checkmate_tf.ir.verify import verify_graph

_READS = frozenset({"ReadVariableOp", "VariableShape", "ResourceGather", "ResourceGatherNd"})
_UNSIZED = frozenset({tf.resource, tf.variant, tf.string})
_WORKSPACE_READERS = {"MaxPoolGrad": "MaxPool", "MaxPool3DGrad": "MaxPool3D"}      # both: result of the pooling as input 1
POOLED_RESULT = 1
_BYTE_ELEMENTS = 256           # up to this window an element's place in it takes one byte, else four


@dataclasses.dataclass
class _Draft:
    """An op while the graph is being built: values by name, everything mutable."""

    name: str
    kind: str
    inputs: list[tuple[str, int]]
    after: set[str]
    sizes: list[tuple[int, tuple[int, ...], str]]
    once: str | None
    backward: bool
    scratch_bytes: int
    pieces: Mapping[int, int]
    overwrites: list[tuple[str, int]] = dataclasses.field(default_factory=list)


def extract(traced: Traced) -> Graph:
    """The Graph of a traced step, without prices. Its resident bytes are variables, batch and constants.

    Raises UnsupportedError for a value whose shape is not static, naming the op and the dimension.
    """
    drafts = _drafts(traced)
    _mark_helpers_of_backward(traced, drafts)
    _add_workspaces(traced, drafts)
    _join_filled_zeros(traced, drafts)
    _add_overwrites(traced, drafts)
    names = _schedule(drafts)
    index_of = {name: index for index, name in enumerate(names)}
    values: list[Value] = []
    value_of: dict[tuple[str, int], int] = {}
    for index, name in enumerate(names):
        for port, (size, shape, dtype) in enumerate(drafts[name].sizes):
            value_of[name, port] = len(values)
            values.append(Value(len(values), index, port, size, shape, dtype, drafts[name].pieces.get(port, 1)))
    ops = []
    for index, name in enumerate(names):
        draft = drafts[name]
        inputs = tuple(dict.fromkeys(value_of[tensor] for tensor in draft.inputs))
        producers = {values[value].producer for value in inputs}
        after = tuple(sorted({index_of[other] for other in draft.after} - producers))
        ops.append(Op(index, name, draft.kind, inputs,
                      tuple(value_of[name, port] for port in range(len(draft.sizes))), after,
                      scratch_bytes=draft.scratch_bytes, once=draft.once,
                      overwrites=tuple(value_of[tensor] for tensor in draft.overwrites), backward=draft.backward))
    roots = Roots(traced)
    results = {value_of[tensor] for name in traced.results for tensor in roots.of(name)}
    return verify_graph(Graph(tuple(ops), tuple(values), tuple(sorted(results)), _resident_bytes(traced)))


class Roots:
    """Which values of ops lie under a tensor once views are looked through."""

    def __init__(self, traced: Traced):
        self._nodes = {node.name: node for node in traced.graph_def.node}
        self._views = {name for name in self._nodes if is_view(traced.function.graph.get_operation_by_name(name))}
        self._cut: set[tuple[str, int]] | None = None
        self._known: dict[str, tuple[tuple[str, int], ...]] = {}

    def is_view(self, name: str) -> bool:
        """Whether the node owns no bytes, as its outputs lie in its input's memory."""
        return name in self._views

    def is_cut(self, name: str, port: int) -> bool:
        """Whether this value of an op is read in pieces."""
        if self._cut is None:
            self._cut = {root for view in self._views if self._nodes[view].op in PIECES
                         for tensor in self._nodes[view].input if not is_control(tensor) for root in self.of(tensor)}
        return (name, port) in self._cut

    def is_op(self, name: str) -> bool:
        """Whether the node computes something: neither a source, nor a view, nor a relay."""
        node = self._nodes.get(name)
        return node is not None and name not in self._views and node.op not in SOURCES and node.op != "NoOp"

    def of(self, tensor: str) -> tuple[tuple[str, int], ...]:
        """(op name, port) of each value that must be there to have this tensor: none for a source."""
        name, port = tensor_name(tensor)
        if self.is_op(name):
            return ((name, port),)
        if name not in self._known:
            node = self._nodes.get(name)
            inputs = [other for other in node.input if not is_control(other)] if node is not None else []
            self._known[name] = tuple(dict.fromkeys(root for other in inputs for root in self.of(other)))
        return self._known[name]


def _drafts(traced: Traced) -> dict[str, _Draft]:
    """Every op in the order of tracing."""
    roots, inside = Roots(traced), inside_of(traced)
    relayed: dict[str, frozenset[str]] = {}
    drafts: dict[str, _Draft] = {}
    for node in traced.graph_def.node:
        after: set[str] = set()
        for name in node.input:
            source, _ = tensor_name(name.lstrip("^"))
            if is_control(name):
                after.update({source} if roots.is_op(source) else
                             {*relayed.get(source, ()), *(op for op, _ in roots.of(source))})
            elif not roots.is_op(source):
                after.update(relayed.get(source, ()))
        if not roots.is_op(node.name):
            relayed[node.name] = frozenset(after)
            continue
        inputs = [root for name in node.input if not is_control(name) for root in roots.of(name)]
        operation = traced.function.graph.get_operation_by_name(node.name)
        backward = ("gradient_tape" in node.name or any(drafts[op].backward for op, _ in inputs))
        sizes = [_size(tensor) for tensor in operation.outputs]
        lists = inside.lists(operation)
        for position, (count, size) in lists.items():
            sizes[position] = (count * in_granules(size), (count, size), "uint8")
        drafts[node.name] = _Draft(node.name, node.op, inputs, after, sizes, _once(operation), backward,
                                   inside.scratch_bytes(operation), {position: count for position, (count, _) in lists.items()})
    return drafts


def _mark_helpers_of_backward(traced: Traced, drafts: dict[str, _Draft]) -> None:
    """What a gradient function of the user computes from forward values only (the sigmoid in that of `silu`, say) has neither
    the tape's name nor a backward op before it; but it was traced after the tape began, and only backward ops read it.
    """
    readers: dict[str, list[str]] = {name: [] for name in drafts}
    for draft in drafts.values():
        for name, _ in draft.inputs:
            readers[name].append(draft.name)
    names = list(drafts)
    first = next((place for place, name in enumerate(names) if drafts[name].backward), len(names))
    returned = {root for name in traced.results for root, _ in Roots(traced).of(name)}
    for name in reversed(names[first:]):
        if readers[name] and name not in returned and all(drafts[reader].backward for reader in readers[name]):
            drafts[name].backward = True


def inside_of(traced: Traced) -> Inside:
    """What looks into the loops and branches of a step."""
    return Inside({function.signature.name: function for function in traced.graph_def.library.function}, _held_bytes)


def _held_bytes(tensor: tf.Tensor) -> int:
    """The bytes of a tensor inside of a loop; what has no size or none that is known counts as nothing."""
    if tensor.dtype in _UNSIZED or not tensor.shape.is_fully_defined():
        return 0
    return 0 if tensor.op.type == "ReadVariableOp" else in_granules(tensor.shape.num_elements() * tensor.dtype.size)


def pooling_of(operation: tf.Operation) -> tf.Operation | None:
    """The pooling that leaves a workspace for this gradient of it, or None."""
    kind = _WORKSPACE_READERS.get(operation.type)
    if kind is None:
        return None
    result = operation.inputs[POOLED_RESULT]
    return result.op if result.op.type == kind and result.value_index == 0 and workspace_bytes(result.op) else None


def workspace_bytes(operation: tf.Operation) -> int:
    """The bytes of the workspace that an op leaves if it is a pooling, else 0."""
    on_cpu = not tf.config.list_logical_devices("GPU")
    if operation.type not in _WORKSPACE_READERS.values() or not on_cpu or not private.uses_onednn():
        return 0
    window = math.prod(operation.get_attr("ksize"))
    return operation.outputs[0].shape.num_elements() * (1 if window <= _BYTE_ELEMENTS else 4)


def _add_workspaces(traced: Traced, drafts: Mapping[str, _Draft]) -> None:
    """Gives each pooling the workspace that its gradient reads as one more output."""
    for name, draft in drafts.items():
        pooling = pooling_of(traced.function.graph.get_operation_by_name(name))
        if pooling is None:
            continue
        size = workspace_bytes(pooling)
        if len(drafts[pooling.name].sizes) == len(pooling.outputs):
            drafts[pooling.name].sizes.append((in_granules(size), (size,), "uint8"))
        draft.inputs.append((pooling.name, len(pooling.outputs)))


def _join_filled_zeros(traced: Traced, drafts: Mapping[str, _Draft]) -> None:
    """Has a list that a loop fills lie where the zeros lay that it began with, each of which goes when its place is filled.

    Who reads the list then reads the zeros, which must be the first ones: made anew they would lie elsewhere.
    """
    readers = collections.Counter(tensor for draft in drafts.values() for tensor in draft.inputs)
    zeros_of: dict[tuple[str, int], tuple[str, int]] = {}
    for name, draft in drafts.items():
        if draft.kind in LOOPS:
            for position, tensor in enumerate(traced.function.graph.get_operation_by_name(name).inputs):
                zeros = tensor.op.name, tensor.value_index
                if (tensor.op.type == "ZerosLike" and tensor.dtype == tf.variant and readers[zeros] == 1
                        and draft.sizes[position] == drafts[tensor.op.name].sizes[0]):
                    draft.sizes[position] = _size(tensor)
                    drafts[tensor.op.name].once = "is filled by a loop"
                    zeros_of[name, position] = zeros
    for draft in drafts.values():
        draft.inputs += [zeros_of[tensor] for tensor in draft.inputs if tensor in zeros_of]


def _size(tensor: tf.Tensor) -> tuple[int, tuple[int, ...], str]:
    """(bytes, shape, dtype) of an output, in whole granules; reads alias their variable and take none."""
    dtype = tensor.dtype
    if dtype in _UNSIZED:
        return 0, (), dtype.name
    if not tensor.shape.is_fully_defined():
        unknown = ("its rank" if tensor.shape.rank is None else
                   f"dimension {[i for i, size in enumerate(tensor.shape) if size is None][0]} of {tensor.shape}")
        raise UnsupportedError(
            f"Every shape in the step must be known before it runs; op {tensor.op.name!r} ({tensor.op.type}) leaves "
            f"{unknown} open. Give the batch a fixed shape, and replace boolean masks, `where` without branches and random "
            "crops by fixed-size forms, or move them into the input pipeline; where it is an optimizer that updates an "
            "embedding, take one that does not merge slices, such as SGD, Adam, AdamW or Lion. Received: "
            f"output {tensor.value_index} with shape {tensor.shape}")
    shape = tuple(tensor.shape.as_list())
    if tensor.op.type == "ReadVariableOp":
        return 0, shape, dtype.name
    return in_granules(tensor.shape.num_elements() * dtype.size), shape, dtype.name


def _once(operation: tf.Operation) -> str | None:
    """Why an op must run exactly once, or None where it may run again on the same inputs."""
    kind = operation.type
    if not operation.op_def.is_stateful:
        return None
    if kind in _READS:
        return "reads a variable"
    if kind.startswith(("Assign", "Resource", "Scatter", "DisableCopyOnRead")):
        return "writes a variable"
    if kind in ("While", "If", "Case", "StatefulPartitionedCall", "PartitionedCall"):
        return "is control flow with state inside"
    if kind.startswith(("Random", "Stateful", "Rng", "Multinomial", "TruncatedNormal", "ParameterizedTruncated")):
        return "draws from a random state"
    if kind in ("Assert", "Print", "PrintV2", "PyFunc", "EagerPyFunc", "PyFuncStateless") or "Summary" in kind:
        return "has an effect outside of the graph"
    if kind.startswith("Collective"):
        return "takes part in a collective"
    return "is stateful"


def _add_overwrites(traced: Traced, drafts: Mapping[str, _Draft]) -> None:
    """Says of each variable write which reads it makes stale, where every use of the read can come first.

    The order of tracing does not tell: a weight decay depends on nothing but its variable, and stands anywhere. Only what
    follows from the write cannot come before it.
    """
    readers: dict[tuple[str, int], list[str]] = {}
    followers: dict[str, set[str]] = {name: set() for name in drafts}
    for name, draft in drafts.items():
        for tensor in draft.inputs:
            readers.setdefault(tensor, []).append(name)
        for other in {op for op, _ in draft.inputs} | draft.after:
            followers[other].add(name)
    reads: dict[str, list[str]] = {}
    for name, draft in drafts.items():
        handles = {tensor.name for tensor in traced.function.graph.get_operation_by_name(name).inputs
                   if tensor.dtype == tf.resource}
        if draft.kind == "ReadVariableOp":
            for handle in handles:
                reads.setdefault(handle, []).append(name)
        elif draft.once is not None and draft.kind not in _READS:
            for read in dict.fromkeys(read for handle in sorted(handles) for read in reads.get(handle, ())):
                uses = readers.get((read, 0), [])
                if not _reaches(followers, name, {read, *uses} - {name}):
                    draft.overwrites.append((read, 0))
                    for use in uses:
                        if use != name:
                            followers[use].add(name)


def _reaches(followers: Mapping[str, set[str]], start: str, goals: set[str]) -> bool:
    """Whether one of these ops has to come after `start`."""
    seen, waiting = {start}, [start]
    while waiting:
        for name in followers[waiting.pop()]:
            if name in goals:
                return True
            if name not in seen:
                seen.add(name)
                waiting.append(name)
    return False


def _schedule(drafts: Mapping[str, _Draft]) -> list[str]:
    """The order of tracing, with each op that frees at least what it makes moved up to where it can first run.

    Of several such ops the one that frees most goes first.
    """
    position = {name: index for index, name in enumerate(drafts)}
    readers: dict[tuple[str, int], set[str]] = {}
    for name, draft in drafts.items():
        for tensor in draft.inputs:
            readers.setdefault(tensor, set()).add(name)
    before = {name: {op for op, _ in draft.inputs} | draft.after for name, draft in drafts.items()}
    for name, draft in drafts.items():
        for tensor in draft.overwrites:
            before[name] |= readers.get(tensor, set()) - {name}
    followers: dict[str, list[str]] = {name: [] for name in drafts}
    for name, others in before.items():
        for other in others:
            followers[other].append(name)
    waiting = {name: len(others) for name, others in before.items()}
    remaining = {tensor: len(names) for tensor, names in readers.items()}

    def growth(name: str) -> int:
        made = sum(size for port, (size, _, _) in enumerate(drafts[name].sizes) if remaining.get((name, port), 0))
        freed = sum(drafts[op].sizes[port][0] for op, port in set(drafts[name].inputs) if remaining[op, port] == 1)
        return made - freed

    done: set[str] = set()
    ready: list[tuple[int, int, str]] = []
    at_once: list[tuple[int, int, str]] = []

    def offer(names: Iterable[str]) -> None:
        for name in names:
            if waiting[name] == 0 and name not in done:
                grown = growth(name)
                heapq.heappush(*((at_once, (grown, position[name], name)) if grown <= 0 else (ready, (0, position[name], name))))

    offer(drafts)
    order = []
    while at_once or ready:
        name = heapq.heappop(at_once or ready)[-1]
        if name in done:
            continue
        done.add(name)
        order.append(name)
        for other in followers[name]:
            waiting[other] -= 1
        offer(followers[name])
        for tensor in set(drafts[name].inputs):
            remaining[tensor] -= 1
            if remaining[tensor] == 1:
                offer(reader for reader in readers[tensor] if reader not in done)
    return order


def _resident_bytes(traced: Traced) -> int:
    return traced.capture_bytes + traced.argument_bytes + sum(constant_sizes(traced))


def constant_sizes(traced: Traced) -> list[int]:
    """The bytes of each constant of the step."""
    return [_constant_bytes(node) for node in traced.graph_def.node if node.op == "Const"]


def _constant_bytes(node) -> int:
    tensor = node.attr["value"].tensor
    dtype = tf.as_dtype(tensor.dtype)
    if dtype in _UNSIZED:
        return 0
    return in_granules(tf.TensorShape(tensor.tensor_shape).num_elements() * dtype.size)
