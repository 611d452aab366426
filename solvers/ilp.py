"""Checkmate's integer program: the cheapest stage plan within the budget, with a proof.

Jain et al., MLSys 2020, eq. 9 in its frontier-advancing form; `programs.py` writes it down. Given the order of first
runs it decides for every stage what is kept and what runs again. One of OR-Tools' integer solvers does the work,
starting from the best of a given order, keep-everything, chains of lower sets and Chen's heuristics.

What the optimum is worth. An optimal S keeps nothing that its stage neither uses nor passes on, and then the paper's U
is what `simulate` finds: eq. 9 gives the cheapest of all *stage plans*, in which between two first runs each op runs
at most once, in the order of indices. That is no bound for other plans: one that runs an op twice there, or out of
order, may need less memory.

So the program is solved in rounds. The first one has only the rows that every plan with these first runs satisfies,
whatever it does in between; its optimum is `bound_seconds`. More often than not its S already fits, and is optimal
among all plans in this order. Otherwise the stages that take too much get the paper's exact memory rows, and so on
until everything fits: that is then the optimum of eq. 9, most of which was never written down. `stats`:

    bound_scope            what `bound_seconds` holds for: plans whose first runs come in the given order
    stage_bound_seconds    the bound for stage plans alone
    no_plan                there is none in this order. It is no proof for others, so the answer is "unknown"
    no_stage_plan          the same for stage plans
    rounds, exact_stages   how often the program was solved, and how many stages needed exact memory

The engines look at the clock between their steps; one that is late by a second is ended, and with it what it knows.
They round within their tolerances, so a plan may come out a few bytes too large although all its stages are exact;
then less memory is allowed. Graphs of more than 400 ops are not tried: the columns and rows grow with the square of
their number, and the first linear relaxation alone takes minutes. The tests compare with an exhaustive search over
stage plans. HiGHS is the default: on the literature's graphs of 45 to 100 ops it took about half of SCIP's time where
both finish, and finished more often.
"""

import dataclasses
import math
import time

import numpy as np

from checkmate_tf.ir.errors import PlanError
from checkmate_tf.ir.graph import Graph
from checkmate_tf.ir.plan import plan_from_order
from checkmate_tf.ir.simulate import simulate
from checkmate_tf.solvers import matrices
from checkmate_tf.solvers.backend import End, Engine, Outcome
from checkmate_tf.solvers.base import Answer, Limits, Progress, Report, Scope, StoppedBy, ignore_progress
from checkmate_tf.solvers.chen import Greedy, articulation_points, forward_ops
from checkmate_tf.solvers.keep_all import KeepAll
from checkmate_tf.solvers.lower_sets import LowerSets
from checkmate_tf.solvers.programs import StageProgram

_STARTS = (KeepAll(), LowerSets(), Greedy("chen_greedy", articulation_points), Greedy("linearized_greedy", forward_ops))
_START_SHARE = 0.1     # of the time, for each of them
_ROUNDING = 1e-6  # what an engine's bound may be off by


@dataclasses.dataclass(frozen=True)
class Ilp:
    """Eq. 9 by one of OR-Tools' integer solvers.

    engine: which one; start: an order to begin with, if one is known; bound_share: the share of the time that is left
    which the first round may take; max_ops: larger graphs are not tried
    """

    name: str = "ilp"
    engine: Engine = Engine.HIGHS
    start: tuple[int, ...] | None = None
    bound_share: float = 0.85
    max_ops: int = 400

    def search(self, graph: Graph, budget_bytes: int, limits: Limits, report: Report) -> Answer:
        if len(graph.ops) > self.max_ops:
            return Answer(None, StoppedBy.SIZE)
        return _Search(self, graph, budget_bytes, limits, report).run()


class _Search:
    """One search: the best order so far, the bounds, the clock."""

    def __init__(self, options: Ilp, graph: Graph, budget_bytes: int, limits: Limits, report: Report):
        self._options, self._graph, self._budget_bytes, self._limits = options, graph, budget_bytes, limits
        self._report = report
        self._started = time.monotonic()
        self._order, self._stage_order, self._seconds = None, None, math.inf
        self._bound_seconds = graph.seconds
        self._stats = {"bound_scope": Scope.FIXED.value, "engine": options.engine.value}

    def run(self) -> Answer:
        self._offer(self._options.start)
        limits = dataclasses.replace(self._limits, seconds=_START_SHARE * self._limits.seconds)
        for solver in _STARTS:
            self._offer(solver.search(self._graph, self._budget_bytes, limits, ignore_progress).order)
        try:
            stopped_by = StoppedBy.DONE if self._is_proved() else self._solve_rounds()
        except MemoryError:
            stopped_by = StoppedBy.MEMORY
        bound_seconds = self._bound_seconds
        if self._seconds < bound_seconds <= self._seconds * (1 + _ROUNDING):
            bound_seconds = self._seconds
        return Answer(self._order, stopped_by, bound_seconds, stats=self._stats)

    def _solve_rounds(self) -> StoppedBy:
        """Solves the program, first with certain memory alone, then with exact memory where it takes too much."""
        budget_bytes, exact, is_first = self._budget_bytes, set(), True
        while self._left() > 0:
            program = StageProgram(self._graph, budget_bytes, exact)
            outcome = self._solve(program, self._left() * (self._options.bound_share if is_first else 1.0))
            self._stats |= {"rounds": self._stats.get("rounds", 0) + 1, "exact_stages": len(exact)}
            if outcome.end is End.INFEASIBLE:
                if budget_bytes == self._budget_bytes:
                    self._stats["no_plan" if is_first else "no_stage_plan"] = True
                return StoppedBy.DONE
            if budget_bytes == self._budget_bytes:
                self._take_bound(outcome.bound / program.cost_unit, is_first)
            if outcome.values is not None:
                too_large, excess_bytes = self._judge(program.kept(outcome.values))
                if self._is_proved() or (not too_large and outcome.end is End.OPTIMAL):
                    return StoppedBy.DONE
                if not too_large:  # the time was not enough for an optimum, and there is nothing to add
                    return StoppedBy.TIME
                budget_bytes -= excess_bytes if too_large <= exact else 0
            elif is_first:
                too_large = set(range(matrices.stage_count(self._graph)))  # nothing to learn from: eq. 9 as it stands
            else:
                return StoppedBy.TIME
            exact, is_first = exact | too_large, False
        return StoppedBy.TIME

    def _solve(self, program: StageProgram, seconds: float) -> Outcome:
        start = None if self._stage_order is None else program.start(self._stage_order)
        return program.model.solve(self._options.engine, seconds=seconds, gap=self._limits.gap, seed=self._limits.seed,
                                   start=start)

    def _take_bound(self, bound_seconds: float, holds_for_all_plans: bool) -> None:
        self._stats["stage_bound_seconds"] = max(bound_seconds, self._stats.get("stage_bound_seconds", 0.0))
        if holds_for_all_plans:
            self._bound_seconds = max(bound_seconds, self._bound_seconds)
            self._tell()

    def _judge(self, kept: np.ndarray) -> tuple[set[int], int]:
        """The stages of the cheapest plan for this S that take too much memory, and the bytes over the budget."""
        runs = matrices.cheapest_runs(self._graph, kept)
        self._offer(matrices.order_from_runs(runs))
        peaks_bytes = matrices.memory(self._graph, runs, matrices.kept_from_runs(self._graph, runs)).max(axis=1)
        too_large = np.nonzero(peaks_bytes > self._budget_bytes)[0]
        return set(too_large.tolist()), max(0, int(peaks_bytes.max()) - self._budget_bytes)

    def _offer(self, order: tuple[int, ...] | None) -> None:
        """Takes the order if it fits and is cheaper."""
        if order is None:
            return
        timeline = simulate(self._graph, plan_from_order(self._graph, order))
        if timeline.peak_bytes > self._budget_bytes or timeline.seconds >= self._seconds:
            return
        self._order, self._seconds = order, timeline.seconds
        try:
            matrices.runs_from_order(self._graph, order)
            self._stage_order = order
        except PlanError:
            pass  # a plan, but no stage plan: the engine cannot start from it
        self._tell()

    def _is_proved(self) -> bool:
        return self._seconds <= self._bound_seconds * (1 + self._limits.gap)

    def _left(self) -> float:
        return self._started + self._limits.seconds - time.monotonic()

    def _tell(self) -> None:
        incumbent_seconds = None if self._order is None else self._seconds
        self._report(Progress(incumbent_seconds, self._bound_seconds, time.monotonic() - self._started))
