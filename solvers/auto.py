"""What `compile` uses when nobody chooses a solver: the cheap and certain first, then search as long as it pays.

1. Keeping everything, if that fits: nothing is cheaper.
2. The greedy planner, from its fixed to its random attempts: a plan in milliseconds to seconds.

Whatever happens, also Ctrl-C, the best plan so far is the answer. Without any, `stats["smallest_peak_bytes"]` says how far
down the search came.
"""

import dataclasses
import time

from checkmate_tf.ir.graph import Graph
from checkmate_tf.ir.simulate import keep_all_timeline
from checkmate_tf.solvers import greedy
from checkmate_tf.solvers.base import Answer, Limits, Progress, Report, StoppedBy

_GREEDY_ATTEMPTS = 6


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
            if best.order is None:
                raise
            stopped_by = StoppedBy.INTERRUPT
        return Answer(best.order, stopped_by, stats={"smallest_peak_bytes": best.smallest_peak_bytes, "found_by": best.found_by})


class _Best:
    """The cheapest plan that fits, kept where an interrupt cannot lose it."""

    def __init__(self, bound_seconds: float, smallest_peak_bytes: int, report: Report):
        self.started = time.monotonic()
        self.order, self.seconds, self.found_by = None, None, ""
        self.bound_seconds, self.smallest_peak_bytes, self.report = bound_seconds, smallest_peak_bytes, report

    def take(self, attempt: greedy.Attempt, found_by: str) -> None:
        self.smallest_peak_bytes = min(self.smallest_peak_bytes, attempt.peak_bytes)
        if attempt.fits and (self.order is None or attempt.seconds < self.seconds):
            self.order, self.seconds, self.found_by = attempt.order, attempt.seconds, found_by
            self.report(Progress(self.seconds, self.bound_seconds, time.monotonic() - self.started))


def _search(graph, budget_bytes, limits, best) -> StoppedBy:
    deadline = best.started + limits.seconds
    for count, attempt in enumerate(greedy.attempts(graph, budget_bytes, deadline, limits.seed), start=1):
        best.take(attempt, "greedy")
        if best.order is not None and count >= _GREEDY_ATTEMPTS:
            return StoppedBy.DONE
    return StoppedBy.TIME
