"""The judge: what a plan holds at each step, and what it costs.

During a `Compute` the device holds the resident bytes, every live value (the op's inputs among them), all outputs
of the op, used or not, and its scratch. An output that takes over the memory of an input (`Op.reuses`) is not held
twice: it does so where that input is freed right after the run. During a `Free` the device holds what is left. Every peak and every cost that a
report quotes comes from here (or from an allocator); a solver whose own numbers differ is wrong. Linear in
the steps.
"""

import dataclasses
import math

from checkmate_tf.ir.errors import PlanError
from checkmate_tf.ir.graph import Graph, Op
from checkmate_tf.ir.plan import Compute, Plan, plan_from_order


@dataclasses.dataclass(frozen=True)
class Timeline:
    """What `simulate` found.

    live_bytes: bytes held during each step, resident ones included   # int [steps]
    peak_bytes, peak_step: their maximum, and the first step that reaches it (-1 for a plan without steps)
    start_seconds: when each step begins   # float [steps]
    seconds: the sum over computations
    runs: how often each op ran   # int [ops]
    """

    live_bytes: tuple[int, ...]
    start_seconds: tuple[float, ...]
    peak_bytes: int
    peak_step: int
    seconds: float
    runs: tuple[int, ...]


def simulate(graph: Graph, plan: Plan) -> Timeline:
    """Runs the plan on paper. It must be valid (`verify_plan`); a plan for another graph raises PlanError."""
    if plan.graph_key != graph.key:
        raise PlanError("This plan was made for another graph, or for the same model with other shapes: plan again. "
                        f"Received: a plan for graph {plan.graph_key}, a graph with key {graph.key}")
    values, ops = graph.values, graph.ops
    held = graph.resident_bytes
    live_bytes, start_seconds = [], []
    clock_seconds = 0.0
    runs = [0] * len(ops)
    taken_over = None
    for position, step in enumerate(plan.steps):
        start_seconds.append(clock_seconds)
        if isinstance(step, Compute):
            op = ops[step.op]
            taken_over = taken_over_by(op, plan, position) if op.reuses else None
            held += sum(values[value].bytes for value in op.outputs)
            held -= values[taken_over].bytes if taken_over is not None else 0
            live_bytes.append(held + op.scratch_bytes)
            clock_seconds += op.seconds
            runs[step.op] += 1
        else:
            held -= values[step.value].bytes if step.value != taken_over else 0
            live_bytes.append(held)
    peak_bytes = max(live_bytes, default=graph.resident_bytes)
    peak_step = live_bytes.index(peak_bytes) if live_bytes else -1
    seconds = math.fsum(ops[op].seconds * count for op, count in enumerate(runs))
    return Timeline(tuple(live_bytes), tuple(start_seconds), peak_bytes, peak_step, seconds, tuple(runs))


def taken_over_by(op: Op, plan: Plan, position: int) -> int | None:
    """The value whose memory the output of the op takes over when it runs as step `position`, or None."""
    freed = set()
    for step in plan.steps[position + 1:position + 1 + len(op.inputs) + len(op.outputs)]:
        if isinstance(step, Compute):
            break
        freed.add(step.value)
    return next((value for value in op.reuses if value in freed), None)


def held_at(graph: Graph, plan: Plan, step: int) -> tuple[int, ...]:
    """The values that take memory during a step of the plan, those that the op makes among them; largest first."""
    held: set[int] = set()
    for position, item in enumerate(plan.steps[:step + 1]):
        if isinstance(item, Compute):
            op = graph.ops[item.op]
            taken_over = taken_over_by(op, plan, position)
            held.update(op.outputs)
            held.discard(taken_over)
        else:
            held.discard(item.value)
    return tuple(sorted((value for value in held if graph.values[value].bytes),
                        key=lambda value: (-graph.values[value].bytes, value)))


def keep_all_timeline(graph: Graph) -> Timeline:
    """The timeline of computing each op once in the given order: the peak and cost without recomputation."""
    return simulate(graph, plan_from_order(graph, graph.order))


def needed_bytes(graph: Graph, op: Op) -> int:
    """The least that a run of the op holds by itself: inputs, outputs and scratch."""
    touched = sum(graph.values[value].bytes for value in {*op.inputs, *op.outputs})
    return touched + op.scratch_bytes - max((graph.values[value].bytes for value in op.reuses), default=0)


def structural_floor(graph: Graph) -> tuple[int, int]:
    """(bytes, op): no plan can go below these bytes, because this op alone needs them.

    Any plan runs every op, and while an op runs its inputs, outputs and scratch are held together with the resident
    bytes (max over v of M_v plus its inputs, as in Checkmate's section 4.1; an output that can take over an input's
    memory counts once). The op is -1 for an empty graph.
    """
    worst, worst_op = graph.resident_bytes, -1
    for op in graph.ops:
        held = graph.resident_bytes + needed_bytes(graph, op)
        if held > worst:
            worst, worst_op = held, op.index
    return worst, worst_op
