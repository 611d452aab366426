"""From a plan back to TensorFlow: a new concrete function that runs exactly the plan.

Each `Compute` becomes a copy of its node (the first run keeps the name), fed from the latest run of each input; a
view is copied along with its reader. Runs of `Free` (of values of at least `FREED_BYTES`) become a NoOp that waits for
the computation before it, and the next computation waits for that NoOp: the executor counts references and lets a
buffer go when its last reader has run, so what makes a free happen in time is that nothing later may start before.

The computations form one chain of control edges. It replaces every control edge of the original (the plan
respects those, `verify_plan` P5), keeps the executor from running ahead, and makes equal copies different for
TensorFlow's own subexpression elimination. Grappler has run already, and is off for this function only: it would
merge and move nodes across the chain. Only to take loops apart it runs once more, told to leave all other nodes alone.

A loop that has been taken apart runs ahead: what a turn computes that the next ones do not wait for lags behind, and is held
until then. In plain Keras up to 32 turns do. Here it is as many as there is room for, up to half of that.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from checkmate_tf.bridge import private
from checkmate_tf.bridge.extract import Roots
from checkmate_tf.bridge.loops import LOOPS
from checkmate_tf.bridge.shapes import LEAST_TURNS, MOST_TURNS
from checkmate_tf.bridge.trace import GraphDef, Traced, flatten_batch, import_function, is_control, tensor_name
from checkmate_tf.ir.graph import Graph
from checkmate_tf.ir.plan import Compute, Plan
from checkmate_tf.ir.simulate import simulate
from checkmate_tf.ir.verify import verify_plan

# An op with this attribute is not run once and for all when the function is made, with a result that stays; as a list of
# memory shared by outputs, it is empty.
_UNFOLDED = "_scoped_allocator"
RECOMPUTED = "/recompute_"
FREE = "checkmate_tf_free_"
FREED_BYTES = 1 << 14
_TAKING_APART = ("function", "pruning", "dependency")


@dataclasses.dataclass(frozen=True)
class Emitted:
    """A plan as something to call: `emitted(batch)` runs the step once and returns what the step returns.

    nodes: names of the computations' nodes, in the order in which they run
    """

    function: Any
    nodes: tuple[str, ...]
    pack: Callable[[Sequence[tf.Tensor]], Any]
    _config: bytes

    def __call__(self, data: Any) -> Any:
        outputs = tf.raw_ops.StatefulPartitionedCall(
            args=[*flatten_batch(data), *self.function.captured_inputs], Tout=[tensor.dtype for tensor in self.function.outputs],
            f=self.function, config_proto=self._config)
        return self.pack(outputs)


def emit(traced: Traced, graph: Graph, plan: Plan, spare_bytes: float = math.inf) -> Emitted:
    """The function that runs `plan`, a plan for `graph`, which was extracted from `traced`.

    spare_bytes: what the device has beyond the plan's peak. Loops run as many turns at a time as fit, at most those they ask for.
    """
    verify_plan(graph, plan)
    timeline = simulate(graph, plan)
    writer = _Writer(traced)
    for position, step in enumerate(plan.steps):
        if isinstance(step, Compute):
            op = graph.ops[step.op]
            room_bytes = spare_bytes + timeline.peak_bytes - timeline.live_bytes[position]
            writer.compute(op.name, LEAST_TURNS + room_bytes // max(1, op.scratch_bytes), of_constants=not op.inputs and op.once is None)
        elif graph.values[step.value].bytes >= FREED_BYTES:
            value = graph.values[step.value]
            writer.free(graph.ops[value.producer].name, value.port)
    results = [writer.latest(name) for name in traced.results]
    graph_def = _with_loops_apart(writer.graph_def, traced, [*results, *writer.chain_end])
    function = import_function(graph_def, traced.arguments, traced.captures, results, writer.chain_end)
    return Emitted(function, tuple(writer.nodes), traced.pack, private.config_without_optimizers())


class _Writer:
    """Appends nodes to a GraphDef while it remembers which copy of each node is the latest."""

    def __init__(self, traced: Traced):
        self.graph_def = GraphDef(library=traced.graph_def.library, versions=traced.graph_def.versions)
        self.nodes: list[str] = []
        self._templates = {node.name: node for node in traced.graph_def.node}
        self._roots = Roots(traced)
        self._operations = traced.function.graph
        self._runs: dict[str, int] = {}
        self._views: dict[str, dict[tuple[str, ...], str]] = {}
        self._sources: set[str] = set()
        self._chain: str | None = None

    @property
    def chain_end(self) -> list[str]:
        """The node that runs last, as a list of at most one."""
        return [self._chain] if self._chain is not None else []

    def compute(self, name: str, most_turns: float, of_constants: bool) -> None:
        """One more run of this op; of a loop, with at most so many turns at a time."""
        template = self._templates[name]
        inputs = [self.latest(other) for other in template.input if not is_control(other)]
        run = self._runs.get(name, -1) + 1
        self._runs[name] = run
        node = self._append(template, _run_name(name, run), inputs, chained=True)
        if of_constants:
            node.attr[_UNFOLDED].list.SetInParent()
        if node.op in LOOPS:
            turns = node.attr["parallel_iterations"]
            turns.i = int(min(turns.i, MOST_TURNS, most_turns))
        self.nodes.append(_run_name(name, run))

    def free(self, name: str, port: int) -> None:
        """What is computed next waits until everything so far has run.

        A value that is read in pieces is held until then: else the last piece would be written into, and keep all of it.
        """
        if self._roots.is_cut(name, port):
            held = f"{_run_name(name, self._runs[name])}:{port}"
            node = self.graph_def.node.add(name=f"{FREE}{len(self.nodes)}_{port}_of_{name}", op="Identity", input=[held, "^" + self._chain])
            node.attr["T"].type = self._operations.get_operation_by_name(name).outputs[port].dtype.as_datatype_enum
            self._chain = node.name
        elif self._chain is not None and not self._chain.startswith(FREE):
            node = self.graph_def.node.add(name=f"{FREE}{len(self.nodes)}", op="NoOp", input=["^" + self._chain])
            self._chain = node.name

    def latest(self, tensor: str) -> str:
        """The tensor of this name as the latest runs left it."""
        name, port = tensor_name(tensor)
        template = self._templates.get(name)
        if template is None:
            return tensor
        if name in self._runs:
            return f"{_run_name(name, self._runs[name])}:{port}"
        if not self._roots.is_view(name):
            self._source(template)
            return f"{name}:{port}"
        inputs = [self.latest(other) for other in template.input if not is_control(other)]
        copies = self._views.setdefault(name, {})
        if tuple(inputs) not in copies:
            copies[tuple(inputs)] = _run_name(name, len(copies))
            self._append(template, copies[tuple(inputs)], inputs, chained=False)
        return f"{copies[tuple(inputs)]}:{port}"

    def _source(self, template) -> None:
        if template.name not in self._sources:
            self._sources.add(template.name)
            self._append(template, template.name, [], chained=False)

    def _append(self, template, name: str, inputs: Sequence[str], chained: bool):
        node = self.graph_def.node.add()
        node.CopyFrom(template)
        node.name = name
        del node.input[:]
        node.input.extend(inputs)
        if chained:
            if self._chain is not None:
                node.input.append("^" + self._chain)
            self._chain = name
        return node


def _with_loops_apart(graph_def: GraphDef, traced: Traced, ends: Sequence[str]) -> GraphDef:
    """The nodes with each loop taken apart, but for one that gives a result or ends the chain.

    TensorFlow would do so itself, but leave many nodes that do nothing in every turn. All other nodes stay, and their order.
    """
    if not any(node.op in LOOPS for node in graph_def.node):
        return graph_def
    given = [*traced.arguments, *traced.captures]
    whole = GraphDef(node=graph_def.node, library=graph_def.library, versions=graph_def.versions)
    for position, (name, tensor) in enumerate(given):
        node = whole.node.add(name=name, op="_Arg")
        node.attr["T"].type, node.attr["index"].i = tensor.dtype.as_datatype_enum, position
    apart = private.optimize(whole, [*ends, *(node.name for node in whole.node if node.op not in LOOPS)], _TAKING_APART)
    # Functions that are left, as of loops that are not to be taken apart, are known under their names as they were.
    functions = {function.signature.name: function for library in (apart.library, graph_def.library) for function in library.function}
    library = tf.compat.v1.GraphDef().library
    library.function.extend(functions.values())
    return GraphDef(node=[node for node in apart.node if node.op != "_Arg"], library=library, versions=apart.versions)


def _run_name(name: str, run: int) -> str:
    return name if run == 0 else f"{name}{RECOMPUTED}{run}"
