"""A planner for large graphs: start from keeping everything, and drop at the worst step what pays best.

As long as something is over the budget, the step that holds the most is found, and there the idle value (live, but used
only before and after) whose loss frees most bytes per second of recomputation; `drops` explains how a chain of
recomputations is priced. The order of first runs stays that of the graph. When all fits, recomputations that have
become unnecessary are removed, dearest first.

Why not the obvious ways: dropping in graph order, or by size alone, spends seconds on small values of cheap steps;
pricing a value by its own op alone makes long chains once its inputs are gone too. Neither sees that a second drop in
a chain is nearly free. A greedy choice is never taken back here (but for the removal at the end), so the result
depends on how a step's hurt is weighed: a few weightings are tried, then random factors on the scores; the cheapest
plan that fits is the answer. Each attempt costs a few passes over the live values and their inputs: some milliseconds
for hundreds of ops, seconds for ten thousand.

Works on the literature's instances within a few percent of the best known extra cost; see `anneal` for the rest.
"""

import dataclasses
import math
import time
from collections.abc import Iterator

import numpy as np

from checkmate_tf.ir.graph import Graph
from checkmate_tf.ir.simulate import keep_all_timeline
from checkmate_tf.solvers import drops, slots
from checkmate_tf.solvers.base import Answer, Deadline, Limits, Progress, Report, StoppedBy

_SPREADS = (0.1, 1.0, 0.0)
_NOISES = (0.1, 0.3, 0.7)
_DROPS_BETWEEN_LOOKS_AT_THE_CLOCK = 50
_OPS_BETWEEN_LOOKS_AT_THE_CLOCK = 200
_PATIENCE = 20  # looks without progress


@dataclasses.dataclass(frozen=True, slots=True)
class Attempt:
    """An order with its peak, resident bytes included, and its cost as the search counts them."""

    order: tuple[int, ...]
    peak_bytes: int
    seconds: float
    fits: bool


@dataclasses.dataclass(frozen=True)
class Greedy:
    """Fixed order. Ends after `attempts` attempts if one of them fits, otherwise when the time is over."""

    attempts: int = 6
    name: str = "greedy"

    def search(self, graph: Graph, budget_bytes: int, limits: Limits, report: Report) -> Answer:
        started = time.monotonic()
        base = keep_all_timeline(graph)
        if base.peak_bytes <= budget_bytes:
            return Answer(graph.order, StoppedBy.DONE)
        best, smallest_peak_bytes, count = None, base.peak_bytes, 0
        deadline = Deadline(limits.seconds)
        for attempt in attempts(graph, budget_bytes, deadline, limits.seed):
            count += 1
            smallest_peak_bytes = min(smallest_peak_bytes, attempt.peak_bytes)
            if attempt.fits and (best is None or attempt.seconds < best.seconds):
                best = attempt
                report(Progress(best.seconds, base.seconds, time.monotonic() - started))
            if best is not None and (count >= self.attempts or best.seconds <= base.seconds * (1 + limits.gap)):
                break
        stats = {"attempts": count, "smallest_peak_bytes": smallest_peak_bytes}
        return Answer(best.order if best is not None else None,
                      StoppedBy.TIME if deadline.has_passed else StoppedBy.DONE, stats=stats)


def attempts(graph: Graph, budget_bytes: int, deadline: Deadline, seed: int) -> Iterator[Attempt]:
    """Plans, good and bad, until the deadline; the first ones come without randomness."""
    problem = slots.problem_from(graph)
    candidates = drops.candidates_of(problem)
    random = np.random.default_rng(seed)
    number = 0
    while number == 0 or not deadline.has_passed:
        spread = _SPREADS[number % len(_SPREADS)]
        noise = 0.0 if number < len(_SPREADS) else _NOISES[number // len(_SPREADS) % len(_NOISES)]
        factor = np.exp(noise * random.standard_normal(len(candidates)))
        yield _attempt(graph, problem, budget_bytes, deadline, spread, candidates, factor)
        number += 1


def lower(problem: slots.Problem, schedule: slots.Schedule, candidates: np.ndarray, factor: np.ndarray, spread: float,
          deadline: Deadline) -> int:
    """`drops.lower` with an eye on the clock: FITS, STUCK, NO_ROOM, or STOPPED without progress or time."""
    pad = drops.scratchpad(len(problem.scratch), len(problem.producer))
    weight = np.zeros(len(schedule.op_at) + 1)
    rate = 1e3 * float(schedule.counters[slots.BUDGET])
    least, patience = math.inf, _PATIENCE
    while True:
        state, rate = drops.lower(problem, schedule, pad, weight, spread, candidates, factor, rate,
                                  _DROPS_BETWEEN_LOOKS_AT_THE_CLOCK)
        overflow = int(schedule.counters[slots.OVERFLOW])
        patience = _PATIENCE if overflow < least else patience - 1
        least = min(least, overflow)
        if state != drops.STOPPED or patience == 0 or deadline.has_passed:
            return state


def tidy(problem: slots.Problem, schedule: slots.Schedule, deadline: Deadline) -> None:
    """Removes recomputations, dearest first, as long as the schedule still fits, again and again, until the deadline."""
    removed = 1
    while removed > 0:
        many = schedule.many[:schedule.counters[slots.MANY]].copy()
        many = many[np.argsort(-problem.cost[many])]
        removed = 0
        for start in range(0, len(many), _OPS_BETWEEN_LOOKS_AT_THE_CLOCK):
            if deadline.has_passed:
                return
            removed += drops.tidy(problem, schedule, many[start:start + _OPS_BETWEEN_LOOKS_AT_THE_CLOCK])


def attempt_from(graph: Graph, schedule: slots.Schedule) -> Attempt:
    """What the schedule amounts to."""
    return Attempt(tuple(slots.order_of(schedule).tolist()), slots.peak_of(schedule) + graph.resident_bytes,
                   float(schedule.spent[0]) * graph.seconds, int(schedule.counters[slots.OVERFLOW]) == 0)


def _attempt(graph, problem, budget_bytes, deadline, spread, candidates, factor) -> Attempt:
    schedule = slots.schedule_from(problem, graph.order, budget_bytes - graph.resident_bytes)
    while lower(problem, schedule, candidates, factor, spread, deadline) == drops.NO_ROOM:
        schedule = slots.schedule_from(problem, slots.order_of(schedule), budget_bytes - graph.resident_bytes)
    if schedule.counters[slots.OVERFLOW] == 0:
        tidy(problem, schedule, deadline)
    return attempt_from(graph, schedule)
