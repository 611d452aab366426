"""Retention intervals: each value is held in a few intervals, and a constraint solver places them.

MOCCASIN, Bartan, Li, Teague, Lott and Dilkina, ICML 2023, arXiv 2304.14463. An op runs at most C times. Run i of op v
has a start s, a presence a, and for each value an end e; with T events

    min sum a w   s.t.  e^i <= s^(i+1);  bytes over all intervals that cover an event <= budget (one `cumulative`);
    each present run reads each input from a present run of its producer with s_u + 1 <= s_v and s_v + 1 <= e_u.

That is O(C n) integers, where Checkmate's program has O(n^2) binaries. As in the paper's code, events come in stages:
in stage j op k <= j may start at event j (j + 1) / 2 + k only, and first runs are fixed to the end of their stages. So
no two runs start together, and the plans are Checkmate's stage plans with at most C runs an op. As the paper does,
first the memory is brought down to the budget, whatever it costs (phase 1), then the cost (phase 2, hinted with what
phase 1 has found). Which run serves which is said with a Boolean for each pair of runs along an edge, in place of the
paper's `reservoir`: CP-SAT proves small cases several times faster that way.

What it leaves on the table. C = 2, the default and the paper's choice, is a restriction: VGG19's published instance at
80 % costs 4.9 % with it and 2.8 % without. So what CP-SAT proves is about the restricted problem only; `stats` has its
bound as `restricted_bound_seconds`, `bound_seconds` stays empty, and its "infeasible" is an "unknown" with
`no_such_plan`: none in stages of this order with so few runs, and without outputs that take over an input's memory,
which the program knows nothing of. Costs are rounded to 1e-6 of the total. Beyond some hundred ops, or where memory is
tight, it finds little in a minute; the paper had 16 cores and an hour. One worker proves the small published instances
two to ten times sooner than eight that share its thread, and several threads would end elsewhere each time. The tests
compare with the exhaustive search over stage plans on graphs where no op needs to run more often than C.
"""

import dataclasses
import math
import time
from collections.abc import Sequence

import numpy as np

from checkmate_tf.ir.errors import PlanError
from checkmate_tf.ir.graph import Graph
from checkmate_tf.ir.plan import plan_from_order
from checkmate_tf.ir.simulate import keep_all_timeline, simulate
from checkmate_tf.solvers import matrices
from checkmate_tf.solvers.backend import ConstraintModel, End
from checkmate_tf.solvers.base import Answer, Limits, Progress, Report, StoppedBy
from checkmate_tf.solvers.rounding import without_idle_runs

_COST_SCALE = 1e6
_SHARE_OF_PHASE_1 = 0.5


@dataclasses.dataclass(frozen=True)
class Intervals:
    """most_runs: the paper's C; start: an order to begin with; workers: of CP-SAT; max_ops: larger ones are not tried."""

    most_runs: int = 2
    start: tuple[int, ...] | None = None
    workers: int = 1
    max_ops: int = 400
    name: str = "intervals"

    def search(self, graph: Graph, budget_bytes: int, limits: Limits, report: Report) -> Answer:
        started = time.monotonic()
        if keep_all_timeline(graph).peak_bytes <= budget_bytes:
            return Answer(graph.order, StoppedBy.DONE)
        if len(graph.ops) > self.max_ops:
            return Answer(None, StoppedBy.SIZE)
        program = _Program(graph, budget_bytes, self.most_runs)
        stats: dict = {"most_runs": self.most_runs}
        hint = program.hint(self.start if self.start is not None else graph.order)
        best, best_seconds, stopped_by = None, math.inf, StoppedBy.DONE
        for phase in (1, 2):
            left = started + limits.seconds - time.monotonic()
            if left <= 0:
                stopped_by = StoppedBy.TIME
                break
            outcome = program.solve(phase, left * (_SHARE_OF_PHASE_1 if phase == 1 else 1.0), limits, self.workers, hint)
            stats["phases"] = phase
            stopped_by = StoppedBy.TIME if outcome.end is End.LIMIT else StoppedBy.DONE
            if outcome.end is End.INFEASIBLE:
                stats["no_such_plan"] = True
                break
            if outcome.values is None:
                break
            order = without_idle_runs(graph, program.order(outcome.values))
            timeline = simulate(graph, plan_from_order(graph, order))
            if timeline.peak_bytes <= budget_bytes and timeline.seconds < best_seconds:
                best, best_seconds = order, timeline.seconds
                report(Progress(best_seconds, graph.seconds, time.monotonic() - started))
            if phase == 1:
                if outcome.values[program.capacity] > program.budget:
                    if outcome.end is End.OPTIMAL:
                        stats["no_such_plan"] = True
                    break
                hint = dict(enumerate(outcome.values.tolist()))
                del hint[program.capacity]
            else:
                stats["restricted_bound_seconds"] = outcome.bound / program.cost_unit
        return Answer(best, stopped_by, stats=stats)


class _Program:
    """The constraint program. Runs are pairs (op, number)."""

    def __init__(self, graph: Graph, budget_bytes: int, most_runs: int):
        self.model = ConstraintModel()
        self._graph = graph
        self._stages, self._last = matrices.stage_count(graph), matrices.last_stages(graph)
        everything = [*(value.bytes for value in graph.values), *(op.scratch_bytes for op in graph.ops)]
        self._unit = math.gcd(*everything) or 1
        self.budget = max(0, budget_bytes - graph.resident_bytes) // self._unit
        self.cost_unit = _COST_SCALE / graph.seconds if graph.seconds > 0 else 1.0
        self._horizon = self._event(self._stages - 1, max(len(graph.ops) - 1, 0)) + 1
        self.capacity = self.model.column(self.budget, max(self.budget, sum(everything) // self._unit))
        self._fitting = self.model.column(self.budget, self.budget)
        self._starts: list[list[int]] = []
        self._present: list[list[int]] = []
        self._ends: list[list[int]] = []            # by value and run
        self._serves: dict[tuple[int, int, int, int], int] = {}  # value, its run, reader (or N for a result), its run
        self._add_runs(most_runs)
        for op in graph.ops:
            for run in range(len(self._starts[op.index])):
                for value in op.inputs:
                    self._add_reading(value, op.index, run)
        for value in graph.results:
            self._add_reading(value, len(graph.ops), 0)

    def solve(self, phase: int, seconds: float, limits: Limits, workers: int, hint: dict[int, int]):
        """Phase 1 minimises the capacity, phase 2 the cost within the budget."""
        cost = [(self._present[op.index][run], round(op.seconds * self.cost_unit))
                for op in self._graph.ops for run in range(len(self._present[op.index]))]
        capacity = self.capacity if phase == 1 else self._fitting
        return self.model.solve([(self.capacity, 1)] if phase == 1 else cost, capacity, seconds=seconds,
                                gap=limits.gap if phase == 2 else 0.0, seed=limits.seed, workers=workers, start=hint)

    def order(self, values: np.ndarray) -> tuple[int, ...]:
        """The computations of a solution."""
        runs = [(int(values[start]), op) for op, starts in enumerate(self._starts)
                for start, present in zip(starts, self._present[op]) if values[present]]
        return tuple(op for _, op in sorted(runs))

    def hint(self, order: Sequence[int]) -> dict[int, int]:
        """What an order says about the columns; nothing if it is no stage plan or runs an op too often."""
        try:
            runs = matrices.runs_from_order(self._graph, order)
        except PlanError:
            return {}
        if any(runs[:, op].sum() > len(starts) for op, starts in enumerate(self._starts)):
            return {}
        hint: dict[int, int] = {present: 0 for presents in self._present for present in presents}
        hint |= dict.fromkeys(self._serves.values(), 0)
        count = [0] * len(self._starts)
        for stage, op in zip(*np.nonzero(runs)):
            event, run = self._event(int(stage), int(op)), count[op]
            count[op] += 1
            hint[self._starts[op][run]], hint[self._present[op][run]] = event, 1
            for value in self._graph.ops[op].inputs:
                self._hint_reading(hint, value, count, (int(op), run), event + 1)
            for value in self._graph.ops[op].outputs:
                hint[self._ends[value][run]] = event + 1
        for value in self._graph.results:
            self._hint_reading(hint, value, count, (len(self._graph.ops), 0), self._horizon)
        return hint

    def _hint_reading(self, hint, value: int, count: Sequence[int], reader: tuple[int, int], until: int) -> None:
        run = count[self._graph.values[value].producer] - 1
        hint[self._ends[value][run]] = until
        if (value, run, *reader) in self._serves:
            hint[self._serves[value, run, *reader]] = 1

    def _event(self, stage: int, op: int) -> int:
        return stage * (stage + 1) // 2 + op

    def _add_runs(self, most_runs: int) -> None:
        model, graph = self.model, self._graph
        for op in graph.ops:
            stages = range(op.index, int(self._last[op.index]) + 1)
            count = min(most_runs, len(stages)) if op.outputs and not op.overwrites else 1
            events = [self._event(stage, op.index) for stage in stages]
            starts = [model.choice(events[:1] if run == 0 else events[run:]) for run in range(count)]
            present = [model.column(1 if run == 0 else 0, 1) for run in range(count)]
            self._starts.append(starts)
            self._present.append(present)
            for run in range(1, count):
                model.row([(present[run], 1), (present[run - 1], -1)], -1, 0)
            for run in range(count):
                if op.scratch_bytes:
                    model.interval(starts[run], present[run], op.scratch_bytes // self._unit)
            for value in op.outputs:
                ends = [model.column(events[run] + 1, self._horizon) for run in range(count)]
                self._ends.append(ends)
                for run in range(count):
                    model.interval(starts[run], present[run], graph.values[value].bytes // self._unit, end=ends[run],
                                   horizon=self._horizon)
                    if run:
                        model.row([(ends[run - 1], 1), (starts[run], -1)], -self._horizon, 0, condition=present[run])

    def _add_reading(self, value: int, reader: int, run: int) -> None:
        """A run of the reader, or the end for a result, is served by one of the runs of the value's producer."""
        model, producer = self.model, self._graph.values[value].producer
        is_end = reader == len(self._graph.ops)
        count = len(self._starts[producer])
        serving = []
        for made in range(count):
            if count == 1:
                condition = -1 if is_end else self._present[reader][run]
            else:
                condition = self._serves[value, made, reader, run] = model.column(0, 1)
                serving.append((condition, 1))
                model.row([(condition, 1), (self._present[producer][made], -1)], -1, 0)
            if is_end:
                model.row([(self._ends[value][made], 1)], self._horizon, self._horizon, condition=condition)
            else:
                start = self._starts[reader][run]
                model.row([(self._starts[producer][made], 1), (start, -1)], -2 * self._horizon, -1, condition=condition)
                model.row([(self._ends[value][made], 1), (start, -1)], 1, 2 * self._horizon, condition=condition)
        if serving and is_end:
            model.row(serving, 1, 1)
        elif serving:
            model.row([*serving, (self._present[reader][run], -1)], 0, 0)
