"""FastSA as published: annealing by single insertions, removals and rotations. A yardstick for `anneal`.

Imanishi, Xu, Takagi, Wang and Castillo, "A fast heuristic to optimize time-space tradeoff for large models", NeurIPS
2023. An order lies in many more slots than it has runs. A move adds a run of a random op in a random empty slot,
removes a random run, or rotates: it moves one to an empty slot. With the first run of each op free to move as well, the
order is found along with the recomputations. What is minimised is

    max(budget, peak) * cost

so that a schedule over the budget is worth the more the nearer it comes, and one within it only its cost counts. The
temperature falls geometrically from 0.1 % of the objective to a ten thousandth of that.

Values live from their run to their last use before the next one, so each move changes the lives of an op's outputs and
inputs only. The paper keeps the bytes in a segment tree, here they are in the blocks of `slots`: the peak is the
largest of the blocks' maxima. Left out are the paper's first stage on grouped ops and the smoothed maximum.
`moves_per_second` turns the time limit into a number of moves, so that the search is the same on every machine that
keeps up.

Why `anneal` does otherwise: that a value is dropped between two uses takes one insertion, but dropping a chain takes
many that are each bad alone; and the peak is blind to all overflow but the worst. No bound comes from here. The tests
compare with the exhaustive search in free order on graphs small enough for it.
"""

import dataclasses
import time

import numpy as np

from checkmate_tf.ir.graph import Graph
from checkmate_tf.ir.simulate import keep_all_timeline
from checkmate_tf.solvers import moves, slots
from checkmate_tf.solvers.base import Answer, Limits, Progress, Report, StoppedBy
from checkmate_tf.ir.compiled import compiled, leaf

_HOT, _COLD = 1e-3, 1e-7
_MOST_MOVES = 22_000_000
_BATCH = 10_000
_RUNS = 24


@dataclasses.dataclass(frozen=True)
class FastSA:
    """One walk in free order, from keeping everything."""

    moves_per_second: int = 700_000
    name: str = "fastsa"

    def search(self, graph: Graph, budget_bytes: int, limits: Limits, report: Report) -> Answer:
        started = time.monotonic()
        deadline = started + limits.seconds
        base = keep_all_timeline(graph)
        if base.peak_bytes <= budget_bytes:
            return Answer(graph.order, StoppedBy.DONE)
        problem, rules = slots.problem_from(graph), moves.order_rules(graph)
        schedule = slots.schedule_from(problem, graph.order, budget_bytes - graph.resident_bytes, runs=_RUNS)
        random = np.random.Generator(np.random.PCG64(limits.seed))
        best = np.full(len(schedule.op_at), -1, np.int64)
        cost = np.full(1, np.inf)
        batches = max(1, int(min(_MOST_MOVES, limits.seconds * self.moves_per_second)) // _BATCH)
        temperatures = np.geomspace(_HOT, _COLD, batches + 1)
        stopped_by, known = StoppedBy.DONE, np.inf
        for batch in range(batches):
            walk(problem, schedule, rules, random, best, cost, _BATCH, temperatures[batch], temperatures[batch + 1])
            if cost[0] < known:
                known = float(cost[0])
                report(Progress(known * graph.seconds, base.seconds, time.monotonic() - started))
            if time.monotonic() > deadline:
                stopped_by = StoppedBy.TIME
                break
        order = tuple(best[best >= 0].tolist()) if np.isfinite(known) else None
        return Answer(order, stopped_by, stats={"moves": (batch + 1) * _BATCH})


@compiled
def walk(problem, schedule, rules, random, best, best_cost, count, hot, cold):
    """So many moves; the cheapest order that fits is left in `best`, its share of the graph's seconds in `best_cost`."""
    counters = schedule.counters
    cooling = (cold / hot) ** (1.0 / count)
    temperature = hot
    if counters[slots.CHANGES] > 4096 + 8 * counters[slots.LENGTH]:
        slots.spread(problem, schedule, slots.order_of(schedule), -1, 0)
    current = _objective(schedule)
    for _ in range(count):
        temperature *= cooling
        slots.begin(schedule)
        kind = int(random.random() * 3)
        if kind == 0:
            _add(problem, schedule, random)
        elif kind == 1:
            _remove(problem, schedule, rules, random)
        else:
            _rotate(problem, schedule, rules, random)
        if counters[slots.LOGGED] == 0:
            continue
        changed = _objective(schedule)
        if changed - current > -temperature * current * np.log(1.0 - random.random()):
            slots.undo(problem, schedule)
            continue
        current = changed
        if counters[slots.OVERFLOW] == 0 and schedule.spent[0] < best_cost[0] - 1e-12:
            best_cost[0] = schedule.spent[0]
            best[:] = schedule.op_at
    counters[slots.LOGGING] = 0


@leaf
def _objective(schedule):
    """max(budget, peak) * cost, as shares of the budget and of the graph's seconds."""
    budget = max(schedule.counters[slots.BUDGET], 1)
    if schedule.counters[slots.OVERFLOW] == 0:
        return schedule.spent[0]
    peak = 0
    for block in range(len(schedule.highest)):
        peak = max(peak, schedule.highest[block])
    return peak / budget * schedule.spent[0]


@leaf
def _add(problem, schedule, random):
    slot = int(random.random() * (len(schedule.op_at) - 1))
    op = int(random.random() * len(problem.scratch))
    if (schedule.op_at[slot] < 0 and not problem.pinned[op] and schedule.run_slot[op, 0] < slot
            and schedule.runs[op] < schedule.run_slot.shape[1] and slots.deadline(problem, schedule, op) > slot):
        slots.insert(problem, schedule, op, slot)


@leaf
def _remove(problem, schedule, rules, random):
    many = schedule.counters[slots.MANY]
    if many == 0:
        return
    op = schedule.many[int(random.random() * many)]
    run = int(random.random() * schedule.runs[op])
    if run == 0:
        if not slots.is_idle_run(problem, schedule, op, 0):
            return
        for place in range(rules.before_start[op], rules.before_start[op + 1]):
            if schedule.run_slot[rules.before_op[place], 0] < schedule.run_slot[op, 1]:
                return
    slots.remove(problem, schedule, op, run)


@leaf
def _rotate(problem, schedule, rules, random):
    op = int(random.random() * len(problem.scratch))
    run = int(random.random() * schedule.runs[op])
    low, high = moves._room_around(problem, schedule, rules, op, run)
    slot = low + 1 + int(random.random() * (high - low - 1))
    if low < slot < high and schedule.op_at[slot] < 0:
        slots.shift(problem, schedule, op, run, slot)
