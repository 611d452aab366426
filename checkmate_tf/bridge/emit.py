"""From a plan back to TensorFlow: a new concrete function that runs exactly the plan.

Each `Compute` becomes a copy of its node (the first run keeps the name), fed from the latest run of each input; a
view is copied along with its reader. Runs of `Free` (of values of at least `FREED_BYTES`) become a NoOp that waits for
the computation before it, and the next computation waits for that NoOp: the executor counts references and lets a
buffer go when its last reader has run, so what makes a free happen in time is that nothing later may start before.

The computations form one chain of control edges. It takes the place of the control edges of the original (the plan
respects those, `verify_plan` P5), keeps the executor from running ahead, and makes equal copies different for
TensorFlow's own subexpression elimination. Where memory is plenty, a computation waits for all but the latest few before it.
What touches small values only, and runs once, stays off the chain, under its
own control edges: thousands of such ops, most of them the optimizer's, run beside the others. Grappler has run already, and is
off for this function only: it would merge and move nodes across the chain. Only to take loops apart it runs once more, told
to leave all other nodes alone.

A loop that has been taken apart runs ahead: what a turn computes that the next ones do not wait for lags behind, and is held
until then. In plain Keras up to 32 turns do. Here it is as many as there is room for, up to half of that.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from checkmate_tf.bridge import measure, private
from checkmate_tf.bridge.extract import Roots
from checkmate_tf.bridge.loops import CALLING, LOOPS
from checkmate_tf.bridge.shapes import LEAST_TURNS, MOST_TURNS
from checkmate_tf.bridge.trace import GraphDef, Traced, flatten_batch, import_function, is_control, tensor_name
from checkmate_tf.ir.graph import Graph, Op
from checkmate_tf.ir.plan import Compute, Plan
from checkmate_tf.ir.simulate import Timeline, simulate
from checkmate_tf.ir.units import GRANULE_BYTES
from checkmate_tf.ir.verify import verify_plan

# An op with this attribute is not run once and for all when the function is made, with a result that stays; as a list of
# memory shared by outputs, it is empty.
_UNFOLDED = "_scoped_allocator"
RECOMPUTED = "/recompute_"
FREE = "checkmate_tf_free_"
FILLER = "checkmate_tf_filler_"
FREED_BYTES = 1 << 14
_PLENTY = 0.3                    # of what is not resident at the peak, left over: enough for computations to run at once; with a
                                 # tenth, peaks came out above the budget
_PLENTY_LIMITED = 1.0            # the same on a device that has no more at all: what is left over may lie in pieces too small
_AT_ONCE_SHARE = 1 / 3           # of that; the rest is the allocator's, which is asked in another order than planned
_MOST_AT_ONCE = 64               # on these waits what follows a long one; with 16, steps of few ops took up to a tenth longer
_TAKING_APART = ("function", "pruning", "dependency")


@dataclasses.dataclass(frozen=True)
class Emitted:
    """A plan as something to call: `emitted(batch)` runs the step once and returns what the step returns.

    waits: for each computation, by the name of its node, those that it must wait for whatever it reads
    """

    function: Any
    waits: Mapping[str, tuple[str, ...]]
    pack: Callable[[Sequence[tf.Tensor]], Any]
    _config: bytes

    def __call__(self, data: Any) -> Any:
        return self.pack(private.call(self.function, [*flatten_batch(data), *self.function.captured_inputs], self._config))


def emit(traced: Traced, graph: Graph, plan: Plan, spare_bytes: float = 0) -> Emitted:
    """The function that runs `plan`, a plan for `graph`, which was extracted from `traced`.

    spare_bytes: what the device has beyond the plan's peak. Loops run as many turns at a time as fit, at most those they ask for;
    where there is much of it, so do the plan's computations.
    """
    verify_plan(graph, plan)
    timeline = simulate(graph, plan)
    loose = _loose(graph, timeline)
    writer = _Writer(traced)
    window = _Window(graph, timeline, spare_bytes)
    fillers = {} if is_plenty(graph, timeline, spare_bytes) else dict(plan.fillers)
    numbers = itertools.count()
    for position, step in enumerate(plan.steps):
        if isinstance(step, Compute):
            op, filler_bytes = graph.ops[step.op], fillers.get(next(numbers), 0)
            room_bytes = spare_bytes + timeline.peak_bytes - timeline.live_bytes[position]
            done = None if op.index in loose else window.done_before(op, position)
            before = {*op.after, *(reader for value in op.overwrites for reader in graph.consumers[value])} - {op.index}
            writer.compute(op.name, [graph.ops[other].name for other in sorted(before)], done,
                           LEAST_TURNS + room_bytes // max(1, op.scratch_bytes), of_constants=not op.inputs and op.once is None,
                           filler_bytes=filler_bytes)
        elif graph.values[step.value].bytes >= FREED_BYTES:
            value = graph.values[step.value]
            writer.free(graph.ops[value.producer].name, value.port)
    results = [writer.latest(name) for name in traced.results]
    ends = writer.ends()
    graph_def = _with_loops_apart(writer.graph_def, traced, [*results, *ends])
    _wait_for_what_is_read(graph_def, writer.waits)
    function = import_function(graph_def, traced.arguments, traced.captures, results, ends)
    return Emitted(function, writer.waits, traced.pack, private.config_without_optimizers())


def is_plenty(graph: Graph, timeline: Timeline, spare_bytes: float) -> bool:
    """Whether so much is left over beyond a plan's peak that its computations run at once where they can."""
    share = _PLENTY_LIMITED if measure.is_limited() else _PLENTY
    return spare_bytes >= share * (timeline.peak_bytes - graph.resident_bytes)


class _Window:
    """How many computations may run at once: the next begins when all but the latest few have run, as many as fit beside each
    other with nothing freed meanwhile.

    Only where memory is plenty: in which order they ask for it is not known, nor, then, where values come to lie.
    """

    def __init__(self, graph: Graph, timeline: Timeline, spare_bytes: float):
        self._graph, self._timeline = graph, timeline
        self._limit_bytes = timeline.peak_bytes + _AT_ONCE_SHARE * spare_bytes if is_plenty(graph, timeline, spare_bytes) else 0
        self._held_before: list[float] = []           # of each computation so far, the bytes that are live when it begins
        self._made_bytes: list[float] = []
        self._latest: dict[int, int] = {}
        self._done = 0

    def done_before(self, op: Op, position: int) -> int:
        """How many of the computations so far must have run before this one, the next in the plan, begins."""
        number = len(self._made_bytes)
        made_bytes = op.scratch_bytes + sum(self._graph.values[value].bytes for value in op.outputs)
        self._made_bytes.append(math.inf if op.kind in CALLING else made_bytes)
        self._held_before.append(self._timeline.live_bytes[position - 1] if position else self._graph.resident_bytes)
        done = max(self._done, number + 1 - _MOST_AT_ONCE, self._latest.get(op.index, -1) + 1)
        while done < number and self._held_before[done] + sum(self._made_bytes[done:]) > self._limit_bytes:
            done += 1
        self._latest[op.index], self._done = number, done
        return done


def _loose(graph: Graph, timeline: Timeline) -> set[int]:
    """The ops that touch nothing that is freed, and run once."""
    small = [value.bytes < FREED_BYTES for value in graph.values]
    return {op.index for op in graph.ops if timeline.runs[op.index] == 1 and op.scratch_bytes < FREED_BYTES
            and op.kind not in CALLING and all(small[value] for value in (*op.inputs, *op.outputs))}


class _Writer:
    """Appends nodes to a GraphDef while it remembers which copy of each node is the latest."""

    def __init__(self, traced: Traced):
        self.graph_def = GraphDef(library=traced.graph_def.library, versions=traced.graph_def.versions)
        self.waits: dict[str, tuple[str, ...]] = {}
        self._templates = {node.name: node for node in traced.graph_def.node}
        self._roots = Roots(traced)
        self._operations = traced.function.graph
        self._runs: dict[str, int] = {}
        self._views: dict[str, dict[tuple[str, ...], str]] = {}
        self._sources: set[str] = set()
        self._chain: list[str] = []
        self._done: list[int] = []                          # how many of those had run when each of them began
        self._place: dict[str, int] = {}                    # in the chain
        self._freed: list[tuple[str, tf.DType]] = []        # what is read in pieces and freed since
        self._has_freed = False
        self._frees: list[str] = []

    def ends(self) -> list[str]:
        """The nodes that nothing waits for, when all are there."""
        self._free_nodes(is_waited_for=False)
        waited_for = {tensor_name(name.lstrip("^"))[0] for node in self.graph_def.node for name in node.input}
        return [name for name in (*self.waits, *self._frees) if name not in waited_for]

    def compute(self, name: str, before: Sequence[str], done: int | None, most_turns: float, of_constants: bool,
                filler_bytes: int = 0) -> None:
        """One more run of this op; of a loop, with at most so many turns at a time.

        before: ops that must have run; done: how many of the computations on the chain must have, None off the chain;
        filler_bytes: to be held meanwhile
        """
        template = self._templates[name]
        inputs = [self.latest(other) for other in template.input if not is_control(other)]
        run = self._runs.get(name, -1) + 1
        self._runs[name] = run
        waits = [other for other in (_run_name(other, self._runs[other]) for other in before)
                 if done is None or self._place.get(other, done) >= done]
        # What the last of those that are done has waited for is not waited for again.
        chained = self._chain[self._done[done - 1]:done] if done else []
        heads = (self._free_nodes(is_waited_for=done == len(self._chain)) if done is not None else []) or chained
        controls = [f"^{other}" for other in dict.fromkeys((*waits, *heads))]
        if filler_bytes and done is not None:
            controls.append(f"^{self._filler(filler_bytes, template.device, controls)}")
        node = self._append(template, _run_name(name, run), [*inputs, *controls])
        self.waits[node.name] = (*waits, *chained)
        if done is not None:
            self._place[node.name] = len(self._chain)
            self._chain.append(node.name)
            self._done.append(done)
        if of_constants:
            node.attr[_UNFOLDED].list.SetInParent()
        if node.op in LOOPS:
            turns = node.attr["parallel_iterations"]
            turns.i = int(min(turns.i, MOST_TURNS, most_turns))

    def _filler(self, size: int, device: str, controls: Sequence[str]) -> str:
        """A node whose memory is held until what is computed next has run."""
        name = f"{FILLER}{len(self.waits)}"
        shape = self.graph_def.node.add(name=f"{name}/shape", op="Const")
        shape.attr["dtype"].type = tf.int32.as_datatype_enum
        shape.attr["value"].tensor.CopyFrom(tf.make_tensor_proto([size // GRANULE_BYTES, GRANULE_BYTES], tf.int32))
        node = self.graph_def.node.add(name=name, op="Empty", device=device, input=[shape.name, *controls])
        node.attr["dtype"].type, node.attr["init"].b = tf.uint8.as_datatype_enum, False
        self._freed.append((f"{name}:0", tf.uint8))
        self._has_freed = True
        return name

    def free(self, name: str, port: int) -> None:
        """What is computed when all before has run waits until this value is gone, too.

        A value that is read in pieces is held until its readers have run: else the last piece would be written into, and keep
        all of it.
        """
        self._has_freed = True
        if self._roots.is_cut(name, port):
            dtype = self._operations.get_operation_by_name(name).outputs[port].dtype
            self._freed.append((f"{_run_name(name, self._runs[name])}:{port}", dtype))

    def _free_nodes(self, is_waited_for: bool) -> list[str]:
        """Nodes after which all so far has run and what is freed is gone; none where nothing was, or nobody waits for that."""
        if not (self._has_freed if is_waited_for else self._freed):
            return []
        running = self._chain[self._done[-1]:]
        name = f"{FREE}{len(self.waits)}"
        self.graph_def.node.add(name=name, op="NoOp", input=[f"^{other}" for other in running])
        for position, (held, dtype) in enumerate(self._freed):
            node = self.graph_def.node.add(name=f"{FREE}{len(self.waits)}_{position}", op="Identity", input=[held, f"^{name}"])
            node.attr["T"].type = dtype.as_datatype_enum
            name = node.name
        self._frees.append(name)
        self._freed, self._has_freed = [], False
        return [name] if is_waited_for else []

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
            self._append(template, copies[tuple(inputs)], inputs)
        return f"{copies[tuple(inputs)]}:{port}"

    def _source(self, template) -> None:
        if template.name not in self._sources:
            self._sources.add(template.name)
            self._append(template, template.name, [])

    def _append(self, template, name: str, inputs: Sequence[str]):
        node = self.graph_def.node.add()
        node.CopyFrom(template)
        node.name = name
        del node.input[:]
        node.input.extend(inputs)
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


def _wait_for_what_is_read(graph_def: GraphDef, computations: Mapping[str, Any]) -> None:
    """Draws a control edge beside each edge of data from one computation to another.

    oneDNN's pass merges some ops into the one that reads them, where both wait for the same, and then fails if that is anything.
    """
    for node in graph_def.node:
        if node.name in computations:
            read = {tensor_name(name)[0] for name in node.input if not is_control(name)} & computations.keys()
            node.input.extend(sorted({f"^{name}" for name in read} - set(node.input)))


def _run_name(name: str, run: int) -> str:
    return name if run == 0 else f"{name}{RECOMPUTED}{run}"
