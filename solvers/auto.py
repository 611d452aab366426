"""What `compile` uses when nobody chooses a solver: the cheap and certain first, then search and bound side by side.

1. Keeping everything, if that fits: nothing is cheaper.
2. Beside all that follows, in a thread and a process of its own, lower bounds (see `bounds`). The plans they come from
   are plans here, too, and where one fits it is the best there is.
3. The greedy planner, on the graph as it is and on the shrunk one (see `passes`), where the optimizer runs as soon as
   it can: a plan in milliseconds to seconds.
   In free order, if none of these fits, `treewidth` tries: it does not start from the given order, which may
   leave no room at all.
4. In free order, where a large graph repeats its blocks, `rockmate`: each distinct one is solved once, and all are put
   together as well as a chain allows. What follows polishes that as a whole.
5. Rebuilding the better of both plans, then the other, in turns of growing length. Every turn but the first begins with
   annealing: on real training steps with little memory, running a few ops earlier or later is
   often worth more than any choice of what to recompute. When there is no more to learn about bounds, the second
   thread anneals, too.

It ends when plan and bound meet (or are as near as the limits ask for), when a round of turns gains next to nothing, or
when the time is over. Whatever
happens, also Ctrl-C, the best plan so far is the answer, and no process is left behind. Without any plan,
`stats["smallest_peak_bytes"]` says how far down the search came.

The order of first runs is that of the graph ("fixed") or any ("free"), and so is what the bound holds for. A bound is
found for the whole graph, never the shrunk one, which has fewer plans.
"""

import dataclasses
import math
import threading
import time
from collections.abc import Iterator

from checkmate_tf.ir.errors import SolverError
from checkmate_tf.ir.graph import Graph
from checkmate_tf.ir.passes import Lift, shrink
from checkmate_tf.ir.plan import plan_from_order
from checkmate_tf.ir.simulate import keep_all_timeline, simulate
from checkmate_tf.solvers import anneal, bounds, greedy, rebuild, rockmate, treewidth
from checkmate_tf.solvers.backend import Child
from checkmate_tf.solvers.base import Answer, Deadline, Limits, Progress, Report, Scope, StoppedBy, ignore_progress
from checkmate_tf.solvers.blocks import count_blocks
from checkmate_tf.solvers.greedy import Attempt

_GREEDY_ATTEMPTS = 2
_GREEDY_SHARE = 0.4            # of the time, as long as no plan fits
_SEPARATORS_SHARE = 0.2        # of the time, if still no plan fits
_BLOCKS = 16                   # into how many a large graph is cut
_LEAST_BLOCKS = 3              # fewer are no chain
_DISTINCT_SHARE = 2 / 3        # of them at most may differ
_MANY_OPS = 500                # in a large graph
_BLOCKS_SHARE = 0.25           # of the time
_BOUND_SHARE = 0.6             # of the time, where the thread has something else to do then
_HOPE_SECONDS, _HOPE_SHARE = 5.0, 0.2  # of the time: after that a bound must have reached
_HOPE = 0.6                    # of the plan's overhead
_FIRST_TURN_SECONDS = 1.0
_REPAIR_SECONDS = 0.5
_END_SECONDS = 0.2
_WORTH_SHRINKING = 0.9         # a graph larger than this share of the whole is no other view of it
_ANNEAL_SHARE = {True: 0.6, False: 0.2}  # of a turn in free and in fixed order; later it follows what each half has gained,
_LEAST_SHARE, _MOST_SHARE = 0.2, 0.85    # within these
_WORTH_GOING_ON = 0.01         # of the overhead, gained in the latest turns
_WORTH_WAITING = 0.001         # of the step's time, gained in the latest turns, once somebody has waited that long:
_PATIENT_SECONDS = 20.0
_NEAR = 0.003                  # and the bound is no further away, as a share of itself
_LATEST_TURNS = 3
_LEAST_WALKS = 8               # that must have ended while it is further away
_OTHER_SEED = 1_000_003
_ROUNDING = 1e-6               # what a bound may be above the cost of a plan, by rounding


@dataclasses.dataclass(frozen=True)
class Auto:
    """Always the best plan found within the time limit. order: "fixed" or "free", see above."""

    order: str = "free"
    name: str = "auto"

    def search(self, graph: Graph, budget_bytes: int, limits: Limits, report: Report) -> Answer:
        if self.order not in ("fixed", "free"):
            raise SolverError(f'The order must be "fixed" or "free". Received: "{self.order}"')
        base = keep_all_timeline(graph)
        if base.peak_bytes <= budget_bytes:
            return Answer(graph.order, StoppedBy.DONE)
        search = _Search(graph, budget_bytes, limits, report, self.order == "free", base.peak_bytes)
        try:
            stopped_by = search.run()
        except KeyboardInterrupt:
            if search.best is None:
                raise
            stopped_by = StoppedBy.INTERRUPT
        finally:
            search.end()
        return search.answer(stopped_by)


@dataclasses.dataclass
class _View:
    """One of the graphs to search on, how to get back from it, and the best attempt on it so far."""

    name: str
    graph: Graph
    lift: Lift
    best: Attempt | None = None
    walks: Iterator[Attempt | None] | None = None  # of the annealer, resumed in every turn
    anneal_share: float | None = None

    def take(self, attempt: Attempt) -> None:
        better = (self.best is None or attempt.fits > self.best.fits
                  or (attempt.fits == self.best.fits and (attempt.seconds < self.best.seconds if attempt.fits
                                                          else attempt.peak_bytes < self.best.peak_bytes)))
        if better:
            self.best = attempt


class _Search:
    """One search: the best plan and bound so far, the views, the clock, and the thread beside it."""

    def __init__(self, graph: Graph, budget_bytes: int, limits: Limits, report: Report, is_free: bool, peak_bytes: int):
        self._graph, self._budget_bytes, self._limits, self._report = graph, budget_bytes, limits, report
        self._is_free = is_free
        self._started = time.monotonic()
        self._deadline = Deadline(limits.seconds)
        self.best: Attempt | None = None
        self._found_by = ""
        self._ended_walks = 0
        self._smallest_peak_bytes = peak_bytes
        self._bound_seconds = graph.seconds
        self._nearly: Attempt | None = None  # of the bound's plans the latest that does not fit
        self._told: tuple[float, float] | None = None
        self._lock = threading.Lock()
        self._views = [_View("whole graph", graph, tuple)]
        self._child = Child()
        self._is_bounding = True
        self._failure: BaseException | None = None
        self._beside = threading.Thread(target=self._run_beside, name="bounds", daemon=True)

    def run(self) -> StoppedBy:
        self._beside.start()
        if self._limits.threads < 2:
            self._beside.join()
        if self._is_free:
            small, lift = shrink(self._graph)
            if len(small.ops) < _WORTH_SHRINKING * len(self._graph.ops):
                self._views.insert(0, _View("shrunk graph", small, lift))
        self._plan_greedily()
        if self.best is None and self._is_free:
            self._plan_along_separators()
        if self._is_free and len(self._views[0].graph.ops) >= _MANY_OPS and not self._deadline.has_passed:
            self._plan_along_blocks()
        turn_seconds = _FIRST_TURN_SECONDS
        history = [self._seconds]
        while not self._deadline.has_passed:
            if self._is_settled(history):
                return StoppedBy.DONE
            for view in sorted(self._views, key=lambda view: view.best.seconds if view.best.fits else math.inf):
                self._repair()
                self._take_turn(view, turn_seconds, len(history) - 1)
            history.append(self._seconds)
            turn_seconds *= 1.5
        self._tell()
        return StoppedBy.DONE if self._is_proved() else StoppedBy.TIME

    def _take_turn(self, view: _View, turn_seconds: float, turn: int) -> None:
        """Anneals, from the second turn on, and rebuilds; each for the longer the more it gains."""
        share = 0.0
        if turn > 0:
            share = view.anneal_share = view.anneal_share or _ANNEAL_SHARE[self._is_free]
        costs = [self._seconds]
        if share > 0:
            view.walks = view.walks or self._walks(view, self._limits.seed)
            self._take_all(view, view.walks, "anneal", Deadline(share * turn_seconds, self._deadline))
            costs.append(self._seconds)
        until = Deadline((1 - share) * turn_seconds, self._deadline)
        self._take_all(view, rebuild.rebuilds(view.graph, self._budget_bytes, view.best, until, self._limits.seed + turn),
                       "rebuild")
        costs.append(self._seconds)
        if share > 0 and costs[-1] < costs[0] < math.inf:
            annealed, rebuilt = (costs[0] - costs[1]) / share, (costs[1] - costs[2]) / (1 - share)
            wanted = (share + annealed / (annealed + rebuilt)) / 2
            view.anneal_share = min(max(wanted, _LEAST_SHARE), _MOST_SHARE)

    def end(self) -> None:
        """Ends whatever runs beside. Raises what went wrong there."""
        self._deadline.end()
        self._child.cancel()
        if self._beside.ident is not None:
            self._beside.join(_END_SECONDS)  # it may be in the middle of a large program; then it ends soon after
        if self._failure is not None:
            raise self._failure

    def answer(self, stopped_by: StoppedBy) -> Answer:
        stats = {"smallest_peak_bytes": self._smallest_peak_bytes, "found_by": self._found_by}
        if math.isinf(self._bound_seconds) and self.best is None:
            if self._is_free:
                return Answer(None, StoppedBy.DONE, infeasible=True, stats=stats)
            stats["no_plan"] = True  # in this order: no proof for others
        bound_seconds = None
        if math.isfinite(self._bound_seconds):
            bound_seconds = self._bound_seconds
            if self.best is not None and self._seconds < bound_seconds <= self._seconds * (1 + _ROUNDING):
                bound_seconds = self._seconds
        stats["bound_scope"] = (Scope.ANY if self._is_free else Scope.FIXED).value
        return Answer(self.best.order if self.best is not None else None, stopped_by, bound_seconds, stats=stats)

    @property
    def _seconds(self) -> float:
        return self.best.seconds if self.best is not None else math.inf

    def _is_proved(self) -> bool:
        return self._seconds <= self._bound_seconds * (1 + self._limits.gap)

    def _is_settled(self, history: list[float]) -> bool:
        """Whether the latest turns gained so little that more of them are not worth the time."""
        if self.best is None or len(history) <= _LATEST_TURNS:
            return False
        if self._is_bounding and time.monotonic() - self._started < _PATIENT_SECONDS:
            return False
        is_near = self._seconds <= (1 + _NEAR) * self._bound_seconds
        if self._is_free and self._ended_walks < _LEAST_WALKS and not is_near:
            return False  # on a large graph a single walk takes several turns
        worth = _WORTH_GOING_ON * (self._seconds - self._bound_seconds)
        if is_near and time.monotonic() - self._started > _PATIENT_SECONDS:
            worth = max(worth, _WORTH_WAITING * self._bound_seconds)
        return history[-1 - _LATEST_TURNS] - self._seconds < worth

    def _plan_greedily(self) -> None:
        for view in self._views:
            until = Deadline(_GREEDY_SHARE / len(self._views) * self._limits.seconds, self._deadline)
            attempts = greedy.attempts(view.graph, self._budget_bytes, until, self._limits.seed)
            for count, attempt in enumerate(attempts, start=1):
                self._take(view, attempt, "greedy")
                if count >= _GREEDY_ATTEMPTS and (self.best is not None or count > 2 * _GREEDY_ATTEMPTS):
                    break

    def _plan_along_separators(self) -> None:
        """Where the given order leaves no room, one made from scratch may."""
        seconds = min(_SEPARATORS_SHARE * self._limits.seconds, self._deadline.left_seconds)
        limits = dataclasses.replace(self._limits, seconds=seconds)
        answer = treewidth.Treewidth().search(self._graph, self._budget_bytes, limits, ignore_progress)
        if answer.order is not None:
            seconds = math.fsum(self._graph.ops[op].seconds for op in answer.order)
            self._take(self._views[-1], Attempt(answer.order, self._budget_bytes, seconds, True), "treewidth")

    def _plan_along_blocks(self) -> None:
        """What is best for a block is best for its equals; the chain of them is planned exactly."""
        view = self._views[0]
        blocks, distinct = count_blocks(view.graph, _BLOCKS)
        if blocks < _LEAST_BLOCKS or distinct > _DISTINCT_SHARE * blocks:
            return
        seconds = min(_BLOCKS_SHARE * self._limits.seconds, self._deadline.left_seconds)
        limits = dataclasses.replace(self._limits, seconds=seconds)
        answer = rockmate.Rockmate((_BLOCKS,)).search(view.graph, self._budget_bytes, limits, ignore_progress)
        if answer.order is not None:
            seconds = math.fsum(view.graph.ops[op].seconds for op in answer.order)
            self._take(view, Attempt(answer.order, self._budget_bytes, seconds, True), "rockmate")

    def _walks(self, view: _View, seed: int) -> Iterator[Attempt | None]:
        return anneal.walks(view.graph, self._budget_bytes, view.best, self._deadline, seed, self._is_free,
                            known=lambda: view.best)

    def _repair(self) -> None:
        """Makes the latest plan of the bounds fit, which is cheaper than any that does."""
        nearly, self._nearly = self._nearly, None
        if nearly is not None and nearly.seconds < self._seconds:
            whole = self._views[-1]
            until = Deadline(_REPAIR_SECONDS, self._deadline)
            self._take_all(whole, rebuild.rebuilds(self._graph, self._budget_bytes, nearly, until, self._limits.seed),
                           "rebuild of a bound's plan")

    def _take_all(self, view: _View, attempts: Iterator[Attempt | None], found_by: str,
                  until: Deadline | None = None) -> None:
        """Takes attempts until there are no more, or a deadline that they do not know themselves."""
        for attempt in attempts:
            if attempt is not None:
                self._take(view, attempt, found_by)
                self._ended_walks += found_by == "anneal"
            if until is not None and until.has_passed:
                break

    def _take(self, view: _View, attempt: Attempt, found_by: str) -> None:
        """Keeps an attempt that improves on what is known, with the peak that the simulator finds for it."""
        if attempt.fits and attempt.seconds >= self._seconds:
            with self._lock:
                view.take(attempt)
        else:
            peak_bytes = _peak_bytes(view.graph, attempt.order)
            judged = Attempt(attempt.order, peak_bytes, attempt.seconds, peak_bytes <= self._budget_bytes)
            order = view.lift(attempt.order)
            if view.graph is not self._graph:
                peak_bytes = _peak_bytes(self._graph, order)
            with self._lock:
                view.take(judged)
                self._smallest_peak_bytes = min(self._smallest_peak_bytes, peak_bytes)
                if peak_bytes <= self._budget_bytes and attempt.seconds < self._seconds:
                    self.best = Attempt(order, peak_bytes, attempt.seconds, True)
                    self._found_by = f"{found_by} on the {view.name}"
        if self._is_proved():
            self._deadline.end()
        self._tell()

    def _tell(self) -> None:
        """Reports what is new, from the thread that searches only."""
        now = (self._seconds, self._bound_seconds)
        if threading.current_thread() is not self._beside and now != self._told:
            self._told = now
            incumbent_seconds = self._seconds if self.best is not None else None
            self._report(Progress(incumbent_seconds, self._bound_seconds, time.monotonic() - self._started,
                                  self.best.order if self.best is not None else None))

    def _run_beside(self) -> None:
        try:
            self._bound()
            self._is_bounding = False
            if self._limits.threads >= 2:
                self._anneal_beside()
        except (SolverError, MemoryError):
            pass  # OR-Tools is not there, was ended or is out of memory: the bound stays what it is
        except BaseException as failure:
            self._failure = failure
        finally:
            self._is_bounding = False
            self._child.stop()

    def _bound(self) -> None:
        scope = "any" if self._is_free else "fixed"
        share = _BOUND_SHARE if self._is_free or self._limits.threads < 2 else 1.0
        until = Deadline(share * self._limits.seconds, self._deadline)
        for finding in bounds.findings(self._graph, self._budget_bytes, scope, until, seed=self._limits.seed,
                                       known=lambda: self.best.order if self.best is not None else None,
                                       child=self._child):
            with self._lock:
                self._bound_seconds = max(self._bound_seconds, finding.bound_seconds)
            if finding.order is not None:
                seconds = math.fsum(self._graph.ops[op].seconds for op in finding.order)
                attempt = Attempt(finding.order, _peak_bytes(self._graph, finding.order), seconds, False)
                if attempt.peak_bytes <= self._budget_bytes:
                    self._take(self._views[-1], dataclasses.replace(attempt, fits=True), "bound")
                else:
                    self._nearly = attempt
            if self._is_proved() or math.isinf(self._bound_seconds):
                self._deadline.end()
            if self._is_free and self._is_hopeless():
                return

    def _is_hopeless(self) -> bool:
        """Whether after some time the bound is so far from the plan that a second search is of more use."""
        is_late = time.monotonic() - self._started > max(_HOPE_SECONDS, _HOPE_SHARE * self._limits.seconds)
        base_seconds = self._graph.seconds
        return is_late and self._bound_seconds - base_seconds < _HOPE * (self._seconds - base_seconds)

    def _anneal_beside(self) -> None:
        while not self._deadline.has_passed:
            view = min(self._views, key=lambda view: view.best.seconds if view.best and view.best.fits else math.inf)
            if view.best is None:
                time.sleep(0.01)
                continue
            self._take_all(view, self._walks(view, self._limits.seed + _OTHER_SEED), "anneal")


def _peak_bytes(graph: Graph, order) -> int:
    return simulate(graph, plan_from_order(graph, order)).peak_bytes
