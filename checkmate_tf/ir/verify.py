"""What must hold of every graph and every plan, numbered; called after every pass, solve, lift and emit.

Graphs
  G1  indices count up; a value's producer lists it at its port
  G2  inputs, control edges and overwritten values come from earlier ops
  G3  bytes, scratch and resident bytes are whole and not negative; seconds finite and not negative
  G4  inputs are listed once; results name values
  G5  who reads an overwritten value comes before the op that overwrites it, or is that op
  G6  what an op reuses are inputs, as large as exactly one of its outputs
  G7  a request that is returned was made before, and is returned once
Plans
  P1  the plan's key is the graph's
  P2  what a computation reads is live; what it makes is not live already
  P3  only live values are freed
  P4  every op runs; an op with a reason in `once` runs exactly once
  P5  an op's first run comes after the first run of the ops in its `after`
  P6  nothing uses a value after an op that overwrites it has run
  P7  at the end the results are live and nothing else is
  P8  fillers are of whole positive bytes, for computations of the plan, in order
"""

import math
from collections.abc import Sequence

from checkmate_tf.ir.errors import GraphError, PlanError
from checkmate_tf.ir.graph import Graph
from checkmate_tf.ir.plan import Compute, Plan


def verify_graph(graph: Graph) -> Graph:
    """The same graph, or GraphError naming the invariant that it breaks. Linear time."""
    ops, values = graph.ops, graph.values
    _check(_whole(graph.resident_bytes), "G3", f"resident_bytes is {graph.resident_bytes!r}")
    for index, value in enumerate(values):
        _check(value.index == index, "G1", f"value {value.index} stands at position {index}")
        _check(0 <= value.producer < len(ops), "G1", f"value {index} is made by op {value.producer} of {len(ops)}")
        outputs = ops[value.producer].outputs
        _check(value.port < len(outputs) and outputs[value.port] == index, "G1",
               f"op {value.producer} does not list value {index} at port {value.port}")
        _check(_whole(value.bytes), "G3", f"value {index} of op {ops[value.producer].name!r} has {value.bytes!r} bytes")
    _check(sum(len(op.outputs) for op in ops) == len(values), "G1", "an op lists a value that is not its own")
    for index, op in enumerate(ops):
        _check(op.index == index, "G1", f"op {op.index} stands at position {index}")
        _check(len(set(op.inputs)) == len(op.inputs), "G4", f"op {op.name!r} lists an input twice: {op.inputs}")
        for value in (*op.inputs, *op.overwrites):
            _check(0 <= value < len(values) and values[value].producer < index, "G2",
                   f"op {op.name!r} (index {index}) reads value {value} of a later op, its own, or none (a cycle?)")
        for other in op.after:
            _check(0 <= other < index, "G2", f"op {op.name!r} (index {index}) comes after op {other}")
        for value in op.overwrites:
            late = [reader for reader in graph.consumers[value] if reader > index]
            _check(not late, "G5", f"op {op.name!r} overwrites value {value}, which op {late[:1]} reads later")
        _check(math.isfinite(op.seconds) and op.seconds >= 0, "G3", f"op {op.name!r} takes {op.seconds!r} seconds")
        sizes = {values[value].bytes for value in op.reuses}
        same = (len(sizes) == 1 and set(op.reuses) <= set(op.inputs)
                and sum(values[value].bytes in sizes for value in op.outputs) == 1)
        _check(not op.reuses or same, "G6", f"op {op.name!r} reuses {op.reuses} of its inputs {op.inputs}")
        _check(_is_returned_once(op.requests), "G7", f"op {op.name!r} has requests {op.requests}")
        _check(_whole(op.scratch_bytes), "G3", f"op {op.name!r} has {op.scratch_bytes!r} scratch bytes")
    for value in graph.results:
        _check(0 <= value < len(values), "G4", f"result {value} is not one of {len(values)} values")
    return graph


def verify_plan(graph: Graph, plan: Plan) -> Plan:
    """The same plan, or PlanError naming the invariant that it breaks. Linear time."""
    if plan.graph_key != graph.key:
        raise PlanError("P1: this plan was made for another graph, or for the same model with other shapes: plan again. "
                        f"Received: a plan for graph {plan.graph_key}, a graph with key {graph.key}")
    live = [False] * len(graph.values)
    gone = [False] * len(graph.values)
    runs = [0] * len(graph.ops)
    for number, step in enumerate(plan.steps):
        if isinstance(step, Compute):
            _verify_compute(graph, step.op, number, live, gone, runs)
        elif not (0 <= step.value < len(live) and live[step.value]):
            raise PlanError(f"P3: step {number} frees value {step.value}, which is not live")
        else:
            live[step.value] = False
    for op, count in zip(graph.ops, runs):
        if count == 0 or (op.once is not None and count != 1):
            raise PlanError(f"P4: op {op.name!r} runs {count} times" + (f"; it must run once: {op.once}" if op.once else ""))
    left = {value for value, is_live in enumerate(live) if is_live}
    if left != set(graph.results):
        raise PlanError(f"P7: at the end values {sorted(left)[:5]} are live; the results are {list(graph.results)[:5]}")
    numbers = [number for number, _ in plan.fillers]
    if (numbers != sorted(set(numbers)) or not all(0 <= number < sum(runs) for number in numbers)
            or not all(_whole(size) and size for _, size in plan.fillers)):
        raise PlanError(f"P8: a plan of {sum(runs)} computations has the fillers {plan.fillers[:5]}")
    return plan


def _verify_compute(graph, index, number, live, gone, runs):
    if not 0 <= index < len(graph.ops):
        raise PlanError(f"P2: step {number} computes op {index} of {len(graph.ops)}")
    op = graph.ops[index]
    for value in op.inputs:
        if not live[value]:
            raise PlanError(f"P2: step {number} computes {op.name!r}, whose input "
                            f"{graph.ops[graph.values[value].producer].name!r} is not live")
        if gone[value]:
            raise PlanError(f"P6: step {number} computes {op.name!r} from {graph.ops[graph.values[value].producer].name!r}, "
                            "which has been overwritten")
    for value in op.outputs:
        if live[value]:
            raise PlanError(f"P2: step {number} computes {op.name!r}, whose output is still live")
        live[value] = True
    if runs[index] == 0:
        for other in op.after:
            if runs[other] == 0:
                raise PlanError(f"P5: step {number} computes {op.name!r} before {graph.ops[other].name!r}")
    for value in op.overwrites:
        gone[value] = True
    runs[index] += 1


def _is_returned_once(requests: Sequence[int]) -> bool:
    made, out = 0, set()
    for request in requests:
        if request >= 0:
            made += 1
            out.add(made)
        elif -request in out:
            out.remove(-request)
        else:
            return False
    return True


def _whole(number) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number >= 0


def _check(holds: bool, invariant: str, message: str) -> None:
    if not holds:
        raise GraphError(f"{invariant}: {message}")
