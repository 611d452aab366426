"""What `compile` uses when nobody chooses a solver: the cheap and certain first, then search as long as it pays.

1. Keeping everything, if that fits: nothing is cheaper.
2. The greedy planner, on the graph as it is and on the shrunk one (see `passes`), where the optimizer runs as soon as
   it can: a plan in milliseconds to seconds.
3. Rebuilding the better of both plans, then the other, in turns of growing length, until a round of turns gains next to
   nothing or the time is over. Every second turn begins with annealing in free order: on real training steps with
   little memory, running a few ops earlier or later is often worth more than any choice of what to recompute.

Whatever happens, also Ctrl-C, the best plan so far is the answer. Without any, `stats["smallest_peak_bytes"]` says
how far down the search came.
"""

import dataclasses
import math
import time
from collections.abc import Iterator

from checkmate_tf.ir.graph import Graph
from checkmate_tf.ir.passes import Lift, shrink
from checkmate_tf.ir.plan import plan_from_order
from checkmate_tf.ir.simulate import keep_all_timeline, simulate
from checkmate_tf.solvers import anneal, greedy, rebuild
from checkmate_tf.solvers.base import Answer, Limits, Progress, Report, StoppedBy
from checkmate_tf.solvers.greedy import Attempt

_GREEDY_ATTEMPTS = 2
_GREEDY_SHARE = 0.4            # of the time, as long as no plan fits
_FIRST_TURN_SECONDS = 1.0
_WORTH_GOING_ON = 0.01         # of the overhead, gained in the latest turns
_WORTH_WAITING = 0.003         # of the step's time, gained in the latest turns, once somebody has waited that long:
_PATIENT_SECONDS = 15.0
_LATEST_TURNS = 3


@dataclasses.dataclass(frozen=True)
class Auto:
    """Always the best plan found within the time limit."""

    name: str = "auto"

    def search(self, graph: Graph, budget_bytes: int, limits: Limits, report: Report) -> Answer:
        base = keep_all_timeline(graph)
        if base.peak_bytes <= budget_bytes:
            return Answer(graph.order, StoppedBy.DONE)
        best = _Best(base.seconds, base.peak_bytes, report)
        try:
            stopped_by = _search(graph, budget_bytes, limits, best)
        except KeyboardInterrupt:
            if best.attempt is None:
                raise
            stopped_by = StoppedBy.INTERRUPT
        return Answer(best.attempt.order if best.attempt is not None else None, stopped_by,
                      stats={"smallest_peak_bytes": best.smallest_peak_bytes, "found_by": best.found_by})


class _Best:
    """The cheapest plan that fits, kept where an interrupt cannot lose it."""

    def __init__(self, bound_seconds: float, smallest_peak_bytes: int, report: Report):
        self.started = time.monotonic()
        self.attempt: Attempt | None = None
        self.found_by = ""
        self.bound_seconds, self.smallest_peak_bytes, self.report = bound_seconds, smallest_peak_bytes, report

    @property
    def seconds(self) -> float:
        return self.attempt.seconds if self.attempt is not None else math.inf

    def take(self, attempt: Attempt, found_by: str) -> None:
        self.smallest_peak_bytes = min(self.smallest_peak_bytes, attempt.peak_bytes)
        if attempt.fits and attempt.seconds < self.seconds:
            self.attempt, self.found_by = attempt, found_by
            self.report(Progress(self.seconds, self.bound_seconds, time.monotonic() - self.started))


@dataclasses.dataclass
class _View:
    """One of the graphs to search on, how to get back from it, and the best attempt on it so far."""

    name: str
    graph: Graph
    lift: Lift
    best: Attempt | None = None

    def take(self, attempt: Attempt) -> None:
        better = (self.best is None or attempt.fits > self.best.fits
                  or (attempt.fits == self.best.fits and (attempt.seconds < self.best.seconds if attempt.fits
                                                          else attempt.peak_bytes < self.best.peak_bytes)))
        if better:
            self.best = attempt


def _search(graph, budget_bytes, limits, best) -> StoppedBy:
    deadline = best.started + limits.seconds
    views = [_View("whole graph", graph, tuple)]
    small, lift = shrink(graph)
    if len(small.ops) < len(graph.ops):
        views.insert(0, _View("shrunk graph", small, lift))
    for view in views:
        greedy_deadline = time.monotonic() + _GREEDY_SHARE / len(views) * limits.seconds
        attempts = greedy.attempts(view.graph, budget_bytes, greedy_deadline, limits.seed)
        for count, attempt in enumerate(attempts, start=1):
            _take(graph, budget_bytes, view, attempt, best, "greedy")
            if count >= _GREEDY_ATTEMPTS and (best.attempt is not None or count > 2 * _GREEDY_ATTEMPTS):
                break
    turn_seconds = _FIRST_TURN_SECONDS
    history = [best.seconds]
    while time.monotonic() < deadline:
        if best.seconds <= best.bound_seconds * (1 + limits.gap) or _is_settled(best, history):
            return StoppedBy.DONE
        turn = len(history) - 1
        for view in sorted(views, key=lambda view: view.best.seconds if view.best.fits else math.inf):
            until = min(deadline, time.monotonic() + turn_seconds)
            for name, attempts in _engines(view, budget_bytes, until, limits.seed + turn, turn):
                for attempt in attempts:
                    _take(graph, budget_bytes, view, attempt, best, name)
        history.append(best.seconds)
        turn_seconds *= 1.5
    return StoppedBy.TIME


def _is_settled(best: _Best, history: list[float]) -> bool:
    """Whether the latest turns gained so little that more of them are not worth the time."""
    if best.attempt is None or len(history) <= _LATEST_TURNS:
        return False
    worth = _WORTH_GOING_ON * (best.seconds - best.bound_seconds)
    if time.monotonic() - best.started > _PATIENT_SECONDS:
        worth = max(worth, _WORTH_WAITING * best.bound_seconds)
    return history[-1 - _LATEST_TURNS] - best.seconds < worth


def _engines(view: _View, budget_bytes: int, until: float, seed: int,
             turn: int) -> Iterator[tuple[str, Iterator[Attempt]]]:
    if turn % 2 == 1:
        half = time.monotonic() + (until - time.monotonic()) / 2
        yield "anneal", anneal.walks(view.graph, budget_bytes, view.best, half, seed, is_free=True)
    yield "rebuild", rebuild.rebuilds(view.graph, budget_bytes, view.best, until, seed)


def _take(graph: Graph, budget_bytes: int, view: _View, attempt: Attempt, best: _Best, found_by: str) -> None:
    """Keeps an attempt that improves on what is known, with the peak that the simulator finds for it."""
    if attempt.fits and attempt.seconds >= best.seconds:
        view.take(attempt)
        return
    peak_bytes = simulate(view.graph, plan_from_order(view.graph, attempt.order)).peak_bytes
    judged = Attempt(attempt.order, peak_bytes, attempt.seconds, peak_bytes <= budget_bytes)
    view.take(judged)
    order = view.lift(attempt.order)
    if view.graph is not graph:
        peak_bytes = simulate(graph, plan_from_order(graph, order)).peak_bytes
    best.take(Attempt(order, peak_bytes, attempt.seconds, peak_bytes <= budget_bytes), f"{found_by} on the {view.name}")
