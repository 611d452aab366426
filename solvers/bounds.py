"""Lower bounds on the cost of every plan, and sometimes the best plan itself: cut relaxations, one cut more each time.

The relaxation (see `relaxation`) charges memory at a few cuts only, so its optimum is a bound, and its solution a set
of recomputations that may be too few. Made into a plan, with everything run as late as it is wanted, either that fits,
and is optimal among all plans in the scope: nobody had to write the other cuts down. Or some first run
holds more than the budget: that is the next cut. With one to five cuts this proves most of what can be proved in seconds;
ResNet50 at 50 % of its memory takes a single cut.

Where several first runs hold too much, a plan that fits, if one is known, says which of them matter: those at which it
holds most. Where no first run holds too much but a rerun does, the rows that see reruns are added.

A program of thousands of columns may take longer than anybody waits. There the linear relaxation of the first one is
solved before it: with a single cut that is nearly as good a bound, in a fraction of a second for 10,000 ops.

The scope is said with each bound: "fixed", plans whose first runs come in the order of indices, or "any" plans. On
wide graphs few ops come in the same order in every plan, and there the second is no more than the plain sum.

Deterministic but for the clock. Effort: seconds, on graphs of thousands of ops where the first program is solved at
all; otherwise nothing is learnt, and nothing claimed.
"""

import dataclasses
import math
import threading
from collections.abc import Callable, Iterator, Sequence

from checkmate_tf.ir.errors import PlanError, SolverError
from checkmate_tf.ir.graph import Graph
from checkmate_tf.ir.plan import Compute, plan_from_order
from checkmate_tf.ir.simulate import simulate
from checkmate_tf.ir.verify import verify_plan
from checkmate_tf.solvers import cuts
from checkmate_tf.solvers.backend import Child, End, Engine, Outcome
from checkmate_tf.solvers.base import Deadline
from checkmate_tf.solvers.relaxation import CutProgram, order_from

_GAP = 1e-6            # to which each program is solved
_ROUNDING = 1e-7       # what an engine's bound may be off by, as a share of the plain sum
_FIRST_SECONDS = 5.0   # for a program; twice as long when it is tried again
_GRACE_SECONDS = 10.0  # that an engine may go on to tell what it knows; who searches beside ends the child when he must
_PATIENCE = 4          # programs that may bring nothing, one that is not solved in its time counting twice
_MANY_COLUMNS = 3_000  # a program that is worth a look at its linear relaxation before
_MOST_ENTRIES = 400_000  # ops and values times phases: beyond this, building alone takes seconds
_ADVICE = 8            # how sharply a known plan's profile tells cuts apart


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """bound_seconds: no plan in the scope is cheaper, infinite if there is none; order: a plan's, that may not fit."""

    bound_seconds: float
    order: tuple[int, ...] | None
    cuts: tuple[int, ...]


def findings(graph: Graph, budget_bytes: int, scope: str, deadline: Deadline, *, seed: int = 0,
             known: Callable[[], Sequence[int] | None] = lambda: None, child: Child | None = None) -> Iterator[Finding]:
    """What ever larger programs find, until nothing is left to add or the deadline.

    scope: "fixed" or "any", see above
    known: is asked for the order of the best plan so far
    child: the process to solve in, if not the one that all share
    """
    held = first_run_bytes(graph, graph.order)
    path = graph.order if scope == "fixed" else cuts.chain(graph, held)
    if not path or max(held) <= budget_bytes:
        return
    chosen = (max(path, key=held.__getitem__),)
    rows_within, seconds, best, patience = False, _FIRST_SECONDS, graph.seconds, _PATIENCE
    while (left := deadline.left_seconds) > 0 and _entries(graph, chosen) < _MOST_ENTRIES:
        phases = cuts.phases(graph, chosen, scope)
        program = CutProgram(graph, budget_bytes, phases, rows_within=rows_within)
        if len(chosen) == 1 and not rows_within and program.model.column_count > _MANY_COLUMNS:
            relaxed = program.model.solve(Engine.HIGHS, seconds=min(left, seconds), gap=_GAP, is_relaxed=True, seed=seed,
                                          child=child, grace_seconds=_GRACE_SECONDS)
            yield Finding(_bound_seconds(graph, program, relaxed), None, chosen)
            left = deadline.left_seconds
        outcome = program.model.solve(Engine.HIGHS, seconds=min(left, seconds), gap=_GAP, seed=seed, child=child,
                                      grace_seconds=_GRACE_SECONDS)
        order = None if outcome.values is None else _plan_order(graph, phases, program.runs(outcome.values))
        bound_seconds = _bound_seconds(graph, program, outcome)
        yield Finding(bound_seconds, order, chosen)
        patience = _PATIENCE if bound_seconds > best else patience - (1 if outcome.end is End.OPTIMAL else 2)
        best = max(best, bound_seconds)
        if outcome.end in (End.INFEASIBLE, End.FAILED) or patience <= 0:
            return
        if outcome.end is End.LIMIT:
            seconds *= 2
        if order is None and outcome.end is End.LIMIT:
            continue
        if order is None:
            return
        more = _next_cut(graph, budget_bytes, phases, first_run_bytes(graph, order), known())
        if more is None and rows_within:
            more = _next_cut(graph, budget_bytes, phases, _bytes_up_to_first_runs(graph, order), known())
        if more is not None:
            chosen = tuple(sorted((*chosen, more)))
        elif rows_within and outcome.end is not End.LIMIT:
            return
        rows_within |= more is None


def lower_bound(graph: Graph, budget_bytes: int, scope: str, seconds: float, *, seed: int = 0,
                known: Sequence[int] | None = None) -> float:
    """Seconds below which no plan in the scope is, as far as so much time tells, in a process of its own that ends with it; at
    least the plain sum. known: the order of a plan that fits."""
    found_seconds, child = graph.seconds, Child()
    end = threading.Timer(seconds, child.cancel)
    end.start()
    try:
        for finding in findings(graph, budget_bytes, scope, Deadline(seconds), seed=seed, known=lambda: known, child=child):
            found_seconds = max(found_seconds, finding.bound_seconds)
    except (SolverError, MemoryError):
        pass        # OR-Tools is not there, was ended or is out of memory: what is known stays what it is
    finally:
        end.cancel()
        child.stop()
    return found_seconds


def first_run_bytes(graph: Graph, order: Sequence[int]) -> list[int]:
    """What a plan in this order holds at the first run of each op, resident bytes included."""
    plan = plan_from_order(graph, order)
    held = [0] * len(graph.ops)
    for step, live_bytes in zip(reversed(plan.steps), reversed(simulate(graph, plan).live_bytes)):
        if isinstance(step, Compute):
            held[step.op] = live_bytes
    return held


def _bound_seconds(graph: Graph, program: CutProgram, outcome: Outcome) -> float:
    if outcome.end is End.INFEASIBLE:
        return math.inf
    return max(graph.seconds, outcome.bound / program.cost_unit - _ROUNDING * graph.seconds)


def _plan_order(graph, phases, runs) -> tuple[int, ...] | None:
    order = order_from(graph, phases, runs)
    try:
        verify_plan(graph, plan_from_order(graph, order))
    except PlanError:  # an engine's rounding may cost a run
        return None
    return order


def _bytes_up_to_first_runs(graph: Graph, order: Sequence[int]) -> list[int]:
    """For each op the most that a plan in this order holds after the first run before, up to its own."""
    plan = plan_from_order(graph, order)
    held = [0] * len(graph.ops)
    most = 0
    for step, live_bytes in zip(plan.steps, simulate(graph, plan).live_bytes):
        most = max(most, live_bytes)
        if isinstance(step, Compute) and held[step.op] == 0:
            held[step.op], most = most, 0
    return held


def _next_cut(graph, budget_bytes, phases, held, known) -> int | None:
    """An op at whose first run a plan holds too much; it must be a cut beside the others in every plan."""
    may = [op for op in graph.order if held[op] > budget_bytes and phases.earliest[op] == phases.latest[op]
           and op not in phases.cuts]
    if known is None:
        return max(may, key=held.__getitem__, default=None)
    advice = first_run_bytes(graph, known)
    return max(may, key=lambda op: (held[op] - budget_bytes) * (advice[op] / budget_bytes) ** _ADVICE, default=None)


def _entries(graph, chosen) -> int:
    return (len(graph.ops) + sum(len(op.inputs) + len(op.outputs) for op in graph.ops)) * (len(chosen) + 1)
