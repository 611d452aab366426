"""Two-phase rounding: Checkmate's integer program without the integers, and the cheapest plan for what it keeps.

Jain et al., MLSys 2020, section 5 and Algorithm 2. (1) Solve the linear relaxation of eq. 9 with the budget (1 - eps)
M. (2) Round S alone: what is kept more than a threshold is kept. (3) and (4) R follows from S: `cheapest_runs` runs
what S asks for and nothing more. Rounding R and S together hardly ever gives a plan; R made for S always does. It need
not fit: FREE and U follow by simulation, and a plan over the budget is thrown away.

The paper takes eps = 0.1 and the threshold 0.5, and suggests a search. Here each eps is a linear program and is tried
with 19 thresholds; the cheapest plan that fits is the answer. The program is that of `programs.py`, whose rows are a
little tighter than the paper's (7c): in full up to `exact_ops` ops, beyond that without FREE and U, with only the
memory rows that hold for every plan in this order. HiGHS solves it, in a second for 70 ops, two for 180, and some twelve for
350. What others take for large ones was tried: its interior-point method takes ten times as long; PDLP, a first-order
method, calls keeping and running nothing a solution at a tolerance of 1e-4, and at 1e-6 has none within a minute where the
simplex method takes two seconds.

Where little memory is left, all plans are over the budget: the paper's table leaves such budgets out of its means. Here
the smallest of them are repaired by `fit`, and `stats` says `repaired`. What else had to be added: what must not run
again (`once`, overwritten inputs) is kept from its last stage on, whatever the relaxation says; and runs whose values
nobody reads, which an S rounded value by value can ask for, are left out.

`bound_seconds` comes from the relaxation with the whole budget, where it has no FREE: then it holds for
all plans whose first runs come in the given order (`bound_scope`). With FREE and U it holds for stage plans alone, and
`stats` has it as `stage_bound_seconds`. The tests take S of integer solutions through the rounding and want them back,
and compare the ratios to the optimum with the paper's table 2.
"""

import dataclasses
import math
import time
from collections.abc import Iterator, Sequence

import numpy as np

from checkmate_tf.ir.graph import Graph
from checkmate_tf.ir.plan import plan_from_order
from checkmate_tf.ir.simulate import keep_all_timeline, simulate
from checkmate_tf.solvers import matrices
from checkmate_tf.solvers.backend import End, Engine
from checkmate_tf.solvers.base import Answer, Limits, Progress, Report, Scope, StoppedBy
from checkmate_tf.solvers.fit import fitted
from checkmate_tf.solvers.programs import StageProgram

_MARGINS = (0.0, 0.1, 0.05, 0.2, 0.02, 0.35)  # eps; with none comes the bound, 0.1 is the paper's
_THRESHOLDS = tuple(step / 20 for step in range(1, 20))
_BOUND_SLACK = 1e-6
_REPAIRS, _REPAIR_SECONDS = 20, 1.0


@dataclasses.dataclass(frozen=True)
class Rounding:
    """exact_ops: the size up to which the whole program is taken; max_ops: larger graphs are not tried."""

    exact_ops: int = 100
    max_ops: int = 400
    name: str = "rounding"

    def search(self, graph: Graph, budget_bytes: int, limits: Limits, report: Report) -> Answer:
        started = time.monotonic()
        deadline = started + limits.seconds
        if keep_all_timeline(graph).peak_bytes <= budget_bytes:
            return Answer(graph.order, StoppedBy.DONE)
        if len(graph.ops) > self.max_ops:
            return Answer(None, StoppedBy.SIZE)
        is_exact = len(graph.ops) <= self.exact_ops
        stages = range(matrices.stage_count(graph)) if is_exact else ()
        best, best_seconds, bound_seconds, stopped_by = None, math.inf, None, StoppedBy.DONE
        too_large: list[tuple[int, tuple[int, ...]]] = []
        stats: dict = {"whole_program": is_exact, "programs": 0, "plans": 0, "over_budget": 0}
        for margin in _MARGINS:
            if time.monotonic() > deadline:
                stopped_by = StoppedBy.TIME
                break
            aimed_bytes = graph.resident_bytes + int((1 - margin) * (budget_bytes - graph.resident_bytes))
            program = StageProgram(graph, aimed_bytes, stages)
            outcome = program.model.solve(Engine.HIGHS, seconds=max(deadline - time.monotonic(), 0.01), gap=limits.gap,
                                          seed=limits.seed, is_relaxed=True)
            stats["programs"] += 1
            if margin == 0.0 and outcome.end is End.OPTIMAL:
                least_seconds = outcome.bound / program.cost_unit * (1 - _BOUND_SLACK)
                if is_exact:
                    stats["stage_bound_seconds"] = least_seconds
                else:
                    bound_seconds, stats["bound_scope"] = least_seconds, Scope.FIXED.value
            if margin == 0.0 and outcome.end is End.INFEASIBLE:
                stats["no_stage_plan" if is_exact else "no_plan"] = True  # in this order
                break
            if outcome.values is None:
                if outcome.end is End.LIMIT:
                    stopped_by = StoppedBy.TIME
                continue
            for order in rounded_orders(graph, program, outcome.values):
                timeline = simulate(graph, plan_from_order(graph, order))
                stats["plans"] += 1
                if timeline.peak_bytes > budget_bytes:
                    stats["over_budget"] += 1
                    too_large.append((timeline.peak_bytes, order))
                elif timeline.seconds < best_seconds:
                    best, best_seconds = order, timeline.seconds
                    stats |= {"eps": margin}
                    report(Progress(best_seconds, bound_seconds or graph.seconds, time.monotonic() - started))
                if time.monotonic() > deadline and best is not None:
                    break
        for _, order in sorted(too_large)[:_REPAIRS] if best is None else ():
            order = fitted(graph, order, budget_bytes, deadline - time.monotonic() + _REPAIR_SECONDS)
            timeline = simulate(graph, plan_from_order(graph, order))
            if timeline.peak_bytes <= budget_bytes and timeline.seconds < best_seconds:
                best, best_seconds, stats["repaired"] = order, timeline.seconds, True
        return Answer(best, stopped_by, bound_seconds, stats=stats)


def rounded_orders(graph: Graph, program: StageProgram, solution: np.ndarray) -> Iterator[tuple[int, ...]]:
    """The orders that the thresholds give, each once."""
    forced = lasting_values(graph)
    seen = set()
    for threshold in _THRESHOLDS:
        kept = program.kept(solution, threshold) | forced
        key = kept.tobytes()
        if key not in seen:
            seen.add(key)
            yield without_idle_runs(graph, matrices.order_from_runs(matrices.cheapest_runs(graph, kept)))


def lasting_values(graph: Graph) -> np.ndarray:
    """The values that must be kept because they cannot be made in a stage any more but may be read, bool [T, V]."""
    stages, last = matrices.stage_count(graph), matrices.last_stages(graph)
    forced = np.zeros((stages, len(graph.values)), dtype=bool)
    for value in graph.values:
        readers = (int(last[reader]) for reader in graph.consumers[value.index])
        end = stages - 1 if value.index in graph.results else max(readers, default=-1)
        forced[int(last[value.producer]) + 1:end + 1, value.index] = True
    return forced


def without_idle_runs(graph: Graph, order: Sequence[int]) -> tuple[int, ...]:
    """The order without recomputations that nobody reads."""
    first = {}
    for position, op in enumerate(order):
        first.setdefault(op, position)
    needed = [False] * len(graph.values)
    for value in graph.results:
        needed[value] = True
    left = []
    for position in range(len(order) - 1, -1, -1):
        op = graph.ops[order[position]]
        if first[op.index] == position or any(needed[value] for value in op.outputs):
            left.append(op.index)
            for value in op.outputs:
                needed[value] = False
            for value in op.inputs:
                needed[value] = True
    return tuple(reversed(left))
