"""A plan for one step, carried to another of the same ops: another batch size, or the same one traced again."""

import dataclasses

from checkmate_tf import rounds
from checkmate_tf.ir.errors import PlanError
from checkmate_tf.ir.graph import Graph
from checkmate_tf.ir.plan import plan_from_order
from checkmate_tf.ir.simulate import simulate
from checkmate_tf.ir.verify import verify_plan
from checkmate_tf.planning import Prepared
from checkmate_tf.solvers import Solution


def carried(solution: Solution, graph: Graph, prepared: Prepared, budget_bytes: int) -> Solution | None:
    """The solution's runs, which are of this graph, in the prepared step; all that is told of it is of that step. None where the ops are
    not the same, or it does not fit the budget in bytes when placed. Its status and its bound are as they were."""
    index_of = {op.name: op.index for op in prepared.graph.ops}
    if {(op.name, op.kind, op.once) for op in graph.ops} != {(op.name, op.kind, op.once) for op in prepared.graph.ops}:
        return None
    try:
        plan = plan_from_order(prepared.graph, [index_of[graph.ops[op].name] for op in solution.plan.order])
        plan, placed_bytes = prepared.places.placed(verify_plan(prepared.graph, plan), budget_bytes)
    except PlanError:
        return None
    timeline = simulate(prepared.graph, plan)
    if max(timeline.peak_bytes, placed_bytes) > budget_bytes:
        return None
    return rounds.with_details(prepared, dataclasses.replace(
        solution, plan=plan, timeline=timeline, base=prepared.base, budget_bytes=budget_bytes,
        stats={**solution.stats, "placed_peak_bytes": placed_bytes}))
