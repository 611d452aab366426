"""Simulated annealing over slotted schedules: the planner to beat when seconds are left after greedy.

A walk changes a schedule in random compound moves (`moves` says which), accepts what is better, and what is worse
with a probability that falls as it cools. It may pass through schedules over the budget, at a price that adapts.
Walks differ in temperature, in how far below the budget they aim (so that short spikes above their aim still count as
fitting), in the mix of moves, and in where they start: the first polishes the plan it is given, some start from
keeping everything, and every other one goes on from the best plan so far. They get longer as time passes.

Fixed order keeps the first runs in the order of the graph, which is what most of the literature's numbers mean; free
order may change it, too. Deterministic for a seed and a number of moves: the clock only ends the search.

Why not an exact solver: with the published instances of 250 operations and more, CP-SAT and HiGHS find in minutes
what this finds in seconds; what it cannot do is prove anything. After Imanishi et al., NeurIPS 2023 (FastSA), with
compound drops, an integrated overflow with an adaptive multiplier, and several restarts.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from checkmate_tf.ir.errors import SolverError
from checkmate_tf.ir.graph import Graph
from checkmate_tf.ir.simulate import keep_all_timeline
from checkmate_tf.solvers import greedy, moves, slots
from checkmate_tf.solvers.base import Answer, Deadline, Limits, Progress, Report, StoppedBy

_MOVES_BETWEEN_LOOKS_AT_THE_CLOCK = 10_000
_FIRST_MOVES, _MORE_MOVES_PER_OP, _MOST_MOVES = 200_000, 300, 8_000_000
_RESTART_MOVES_PER_OP, _MOST_RESTART_MOVES = 2_400, 2_000_000
_RUNS = 24  # how often one op may run


@dataclasses.dataclass(frozen=True, slots=True)
class _Walk:
    """Temperatures as shares of the graph's seconds, the aim as one of the budget, shares of drop, remove, shift."""

    hot: float = 1e-2
    cold: float = 1e-5
    aim: float = 1.0
    mix: tuple[float, float, float] = (0.45, 0.30, 0.22)


_POLISH = _Walk(hot=1e-3, cold=1e-6)
_FREE_POLISHES = (_Walk(hot=1e-3, cold=1e-6), _Walk(hot=1e-2, cold=1e-6))
_RESTARTS = (_Walk(hot=3e-2), _Walk(hot=1e-1))
_WALKS = (_Walk(), _Walk(aim=0.99), _Walk(hot=1e-1, cold=1e-4, aim=0.997), _Walk(aim=0.997, mix=(0.30, 0.20, 0.40)))


@dataclasses.dataclass(frozen=True)
class Anneal:
    """Walks until the time is over, or at most this many `moves`. order: "fixed" or "free", see above."""

    order: str = "fixed"
    moves: int | None = None
    name: str = "anneal"

    def search(self, graph: Graph, budget_bytes: int, limits: Limits, report: Report) -> Answer:
        if self.order not in ("fixed", "free"):
            raise SolverError(f'The order of an annealer must be "fixed" or "free". Received: "{self.order}"')
        started = time.monotonic()
        deadline = Deadline(limits.seconds)
        base = keep_all_timeline(graph)
        if base.peak_bytes <= budget_bytes:
            return Answer(graph.order, StoppedBy.DONE)
        first = next(greedy.attempts(graph, budget_bytes, deadline, limits.seed))
        best, smallest_peak_bytes, count = first if first.fits else None, first.peak_bytes, 0
        for attempt in walks(graph, budget_bytes, first, deadline, limits.seed, self.order == "free", self.moves):
            if attempt is None:
                continue
            count += 1
            smallest_peak_bytes = min(smallest_peak_bytes, attempt.peak_bytes)
            if attempt.fits and (best is None or attempt.seconds < best.seconds):
                best = attempt
                report(Progress(best.seconds, base.seconds, time.monotonic() - started))
            if best is not None and best.seconds <= base.seconds * (1 + limits.gap):
                break
        stats = {"walks": count, "smallest_peak_bytes": smallest_peak_bytes}
        return Answer(best.order if best is not None else None,
                      StoppedBy.TIME if deadline.has_passed else StoppedBy.DONE, stats=stats)


def walks(graph: Graph, budget_bytes: int, start: greedy.Attempt, deadline: Deadline, seed: int, is_free: bool,
          most_moves: int | None = None,
          known: Callable[[], greedy.Attempt | None] = lambda: None) -> Iterator[greedy.Attempt | None]:
    """What each walk found, from any start, until the deadline or the moves are used up.

    Between times it yields None, so that who has other things to do can do them and come back to the same walk.
    known: is asked before each walk for a better plan that somebody else may have found
    """
    problem, rules = slots.problem_from(graph), moves.order_rules(graph)
    random = np.random.Generator(np.random.PCG64(seed))
    best = start
    number, moves_left = 0, math.inf if most_moves is None else most_moves
    while not deadline.has_passed and moves_left > 0:
        other = known()
        if other is not None and other.fits and (not best.fits or other.seconds < best.seconds):
            best = other
        walk, order, length = (_free_walk if is_free else _fixed_walk)(graph, best, number)
        length = min(length, moves_left)
        moves_left -= length
        for found in _walk(graph, problem, rules, order, budget_bytes, walk, length, deadline, random, is_free):
            if found is not None and found.fits and (not best.fits or found.seconds < best.seconds):
                best = found
            yield found
        number += 1


def _fixed_walk(graph, best, number) -> tuple[_Walk, Sequence[int], int]:
    """The walk of this number, where it starts, and its moves: every other one polishes the best plan."""
    length = min(_FIRST_MOVES << (number // 4), _MOST_MOVES)
    if number % 2 == 0:
        return _POLISH, best.order, length
    return _WALKS[number // 2 % len(_WALKS)], graph.order if number // 2 % 2 == 0 else best.order, length


def _free_walk(graph, best, number) -> tuple[_Walk, Sequence[int], int]:
    """The same where first runs move: every fourth walk begins anew, hot and long, to find another order."""
    turn, kind = divmod(number, 4)
    if kind == 0:
        length = min(_RESTART_MOVES_PER_OP * len(graph.ops), _MOST_RESTART_MOVES) << (turn // 4)
        return _RESTARTS[turn % len(_RESTARTS)], graph.order, min(length, _MOST_MOVES)
    length = min((_FIRST_MOVES + _MORE_MOVES_PER_OP * len(graph.ops)) << turn, _MOST_MOVES)
    return (_WALKS[turn % len(_WALKS)] if kind == 3 else _FREE_POLISHES[kind - 1]), best.order, length


def _walk(graph, problem, rules, order: Sequence[int], budget_bytes, walk, length, deadline, random,
          is_free) -> Iterator[greedy.Attempt | None]:
    held_budget = budget_bytes - graph.resident_bytes
    schedule = slots.schedule_from(problem, order, int(walk.aim * held_budget), room=len(graph.ops), runs=_RUNS)
    state = moves.walk_for(problem, schedule)
    mix = np.array(walk.mix)
    batches = max(1, length // _MOVES_BETWEEN_LOOKS_AT_THE_CLOCK)
    temperatures = np.geomspace(walk.hot, walk.cold, batches + 1)
    for batch in range(batches):
        moves.anneal(problem, schedule, rules, state, random, mix, is_free, held_budget,
                     _MOVES_BETWEEN_LOOKS_AT_THE_CLOCK, temperatures[batch], temperatures[batch + 1])
        if deadline.has_passed:
            break
        yield None
    best_cost = float(state.numbers[moves.BEST])
    if math.isinf(best_cost):
        yield greedy.attempt_from(graph, schedule)
        return
    ended = np.flatnonzero(state.best < 0)
    found = state.best[:ended[0]] if len(ended) else state.best
    # The peak of the best plan was not kept, only that it fits.
    yield greedy.Attempt(tuple(found.tolist()), budget_bytes, best_cost * graph.seconds, True)
