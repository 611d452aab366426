"""A plan: computations in order, and when each value is let go.

Solvers answer with an order of computations only. The frees follow from it, in one function: a value is freed
right after its last use before it is computed anew, or at once if nobody uses it. Uses are served by the
latest run.
"""

import dataclasses
import functools
from collections.abc import Sequence

from checkmate_tf.ir.errors import PlanError
from checkmate_tf.ir.graph import Graph


@dataclasses.dataclass(frozen=True, slots=True)
class Compute:
    """Run this op, once more or for the first time."""

    op: int


@dataclasses.dataclass(frozen=True, slots=True)
class Free:
    """Let go of this value."""

    value: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """Steps in order, for the graph whose key is `graph_key` and for no other.

    fillers: (number of a computation, bytes) in order: so much memory is taken before that and given back after it, so that the
        allocator has a chunk of just the size of what it makes (`placement.Placer.filled`)
    makers: for each value the op that makes it, -1 where it takes no bytes; what draws a plan without its graph asks
        for it, and a plan is the same plan without
    """

    steps: tuple[Compute | Free, ...]
    graph_key: str
    fillers: tuple[tuple[int, int], ...] = ()
    makers: tuple[int, ...] = dataclasses.field(default=(), compare=False)

    @functools.cached_property
    def order(self) -> tuple[int, ...]:
        """The computations alone, as op indices."""
        return tuple(step.op for step in self.steps if isinstance(step, Compute))


def plan_from_order(graph: Graph, order: Sequence[int]) -> Plan:
    """The plan that runs the ops in this order and frees each value as early as the order allows.

    Raises PlanError when a step uses a value that no earlier step computes, or an index is not an op. Linear in
    the steps and their inputs.
    """
    if any(not 0 <= op < len(graph.ops) for op in order):
        bad = next(op for op in order if not 0 <= op < len(graph.ops))
        raise PlanError(f"An order names ops by index, 0 to {len(graph.ops) - 1}. Received: {bad}")
    needed = [False] * len(graph.values)
    for value in graph.results:
        needed[value] = True
    frees_after: list[list[int]] = [[] for _ in order]
    for position in range(len(order) - 1, -1, -1):
        op = graph.ops[order[position]]
        for value in op.outputs:
            if not needed[value]:
                frees_after[position].append(value)
            needed[value] = False
        for value in op.inputs:
            if not needed[value]:
                frees_after[position].append(value)
            needed[value] = True
    missing = next((value for value, is_needed in enumerate(needed) if is_needed), None)
    if missing is not None:
        producer = graph.ops[graph.values[missing].producer]
        raise PlanError(f"The order uses an output of op {producer.name!r} (index {producer.index}) before, or without, "
                        f"computing it. Received: an order of {len(order)} steps")
    steps: list[Compute | Free] = []
    for position, op in enumerate(order):
        steps.append(Compute(op))
        steps.extend(Free(value) for value in frees_after[position])
    makers = tuple(value.producer if value.bytes else -1 for value in graph.values)
    return Plan(tuple(steps), graph.key, makers=makers)


def pretty(graph: Graph, plan: Plan) -> str:
    """One line a step, recomputations marked: for tests and for people reading a small plan."""
    seen: set[int] = set()
    lines = []
    for step in plan.steps:
        if isinstance(step, Compute):
            op = graph.ops[step.op]
            lines.append(f"{'recompute' if step.op in seen else 'compute'} {op.name}")
            seen.add(step.op)
        else:
            value = graph.values[step.value]
            name = graph.ops[value.producer].name
            lines.append(f"free {name}" + (f":{value.port}" if value.port else ""))
    return "\n".join(lines)
