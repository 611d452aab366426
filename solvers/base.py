"""What a solver is, what limits it gets, and the one place where its answer is judged.

A solver searches; it returns an `Answer`: an order of computations (or None), a lower bound if it has one, and why
it stopped. `solve` turns the order into a plan, verifies it, simulates it, and only then calls it feasible. A
claim that the simulator refutes is a SolverError, not a result.
"""

import dataclasses
import enum
import json
import math
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from checkmate_tf.ir.errors import PlanError, SolverError
from checkmate_tf.ir.graph import Graph
from checkmate_tf.ir.plan import Compute, Free, Plan, plan_from_order
from checkmate_tf.ir.simulate import Timeline, keep_all_timeline, simulate, structural_floor
from checkmate_tf.ir.units import format_bytes
from checkmate_tf.ir.verify import verify_graph, verify_plan
from checkmate_tf.solvers import ahead


_PROOF = 5e-6                  # the relative gap that is taken for rounding


class Status(enum.StrEnum):
    """What is known about the problem; why the solver stopped is a separate fact."""

    OPTIMAL = "optimal"          # a plan, and a bound that meets it
    FEASIBLE = "feasible"        # a plan
    INFEASIBLE = "infeasible"    # a proof that there is no plan
    UNKNOWN = "unknown"          # neither


class Scope(enum.StrEnum):
    """Which plans a lower bound holds for; in `stats["bound_scope"]`; without that, for all of them."""

    FIXED = "plans whose first runs come in the given order"
    ANY = "all plans"


class StoppedBy(enum.StrEnum):
    """Why the search ended."""

    DONE = "done"                # nothing left to try
    TIME = "time limit"
    SIZE = "graph too large"     # the solver does not take graphs of this size
    MEMORY = "out of memory"     # of the machine that solves
    INTERRUPT = "interrupt"


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """The same for all solvers: wall-clock seconds, relative gap at which to stop (a wider one proves nothing), threads, random
    seed."""

    seconds: float = 60.0
    gap: float = _PROOF
    threads: int = 2
    seed: int = 0


class Deadline:
    """When a search must end: so many seconds from now, with the one it is part of, or when somebody ends it."""

    def __init__(self, seconds: float, whole: "Deadline | None" = None):
        self._until = time.monotonic() + seconds
        self._whole = whole
        self._is_ended = False

    @property
    def left_seconds(self) -> float:
        """Never negative; 0 when it is over."""
        if self._is_ended:
            return 0.0
        left = max(0.0, self._until - time.monotonic())
        return left if self._whole is None else min(left, self._whole.left_seconds)

    @property
    def has_passed(self) -> bool:
        return self.left_seconds <= 0

    def end(self) -> None:
        """From any thread: it is over now."""
        self._is_ended = True


@dataclasses.dataclass(frozen=True, slots=True)
class Progress:
    """A moment of a search: the best cost so far (None before the first plan), a lower bound, seconds spent, and the plan
    as an order of computations, from solvers that tell."""

    incumbent_seconds: float | None
    bound_seconds: float
    elapsed_seconds: float
    order: tuple[int, ...] | None = None


Report = Callable[[Progress], None]


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """What a solver hands back.

    order: op indices in order of computation, or None when no plan was found
    stopped_by: why the search ended
    bound_seconds: a lower bound on the cost of every plan *of any solver*; None where the solver has none
    infeasible: whether the solver has proved that no plan fits
    stats: whatever the solver wants to tell (numbers and short texts)
    """

    order: tuple[int, ...] | None
    stopped_by: StoppedBy
    bound_seconds: float | None = None
    infeasible: bool = False
    stats: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class Solver(Protocol):
    """A frozen object of options with a name and a search."""

    name: str

    def search(self, graph: Graph, budget_bytes: int, limits: Limits, report: Report) -> Answer:
        """Looks for the cheapest order of computations whose peak is at most `budget_bytes`."""


@dataclasses.dataclass(frozen=True)
class Solution:
    """A judged answer. Without a plan, `plan` and `timeline` are None and the costs are infinite.

    `base` is the timeline of running every op once; `seconds` is the plan's cost, `base_seconds` that of `base`,
    `overhead` their ratio minus one. `bound_seconds` is a lower bound on the cost of any plan within the budget, `gap`
    = seconds / bound - 1. """

    status: Status
    stopped_by: StoppedBy
    plan: Plan | None
    timeline: Timeline | None
    base: Timeline
    bound_seconds: float
    budget_bytes: int
    solver: str
    stats: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def base_seconds(self) -> float:
        return self.base.seconds

    @property
    def base_peak_bytes(self) -> int:
        return self.base.peak_bytes

    @property
    def seconds(self) -> float:
        return self.timeline.seconds if self.timeline is not None else math.inf

    @property
    def peak_bytes(self) -> int | None:
        return self.timeline.peak_bytes if self.timeline is not None else None

    @property
    def placed_peak_bytes(self) -> int | None:
        """The peak in whole chunks, as the allocator hands them out; the same as `peak_bytes` where nobody looked."""
        return self.stats.get("placed_peak_bytes", self.peak_bytes)

    @property
    def spare_bytes(self) -> int:
        """What the budget leaves beyond the plan's peak."""
        return max(0, self.budget_bytes - max(self.peak_bytes, self.placed_peak_bytes))

    @property
    def overhead(self) -> float:
        return self.seconds / self.base_seconds - 1 if self.base_seconds > 0 else 0.0

    @property
    def expected_overhead(self) -> float:
        """The extra time that a step is expected to take when measured: `overhead`, less what it wins back by finding more in the
        processor's cache (`ir/caches.py`); the same where nobody looked."""
        return self.stats.get("expected_overhead", self.overhead)

    @property
    def gap(self) -> float:
        return max(0.0, self.seconds / self.bound_seconds - 1) if self.bound_seconds > 0 else 0.0

    def __str__(self) -> str:
        return "\n".join(f"{label:>22}  {text}" for label, text in self._rows())

    def _repr_html_(self) -> str:
        return "<table>" + "".join(f"<tr><td>{label}</td><td>{text}</td></tr>" for label, text in self._rows()) + "</table>"

    def _rows(self) -> list[tuple[str, str]]:
        rows = [("solver", self.solver), ("status", f"{self.status.value}, stopped by: {self.stopped_by.value}"),
                ("budget", format_bytes(self.budget_bytes)), ("peak, everything kept", format_bytes(self.base_peak_bytes))]
        if self.plan is not None:
            rows += [("planned peak", format_bytes(self.placed_peak_bytes)), ("extra time", f"+{100 * self.overhead:.2f} %"),
                     ("above the bound", f"at most {100 * self.gap:.2f} %"),
                     ("recomputed", f"{sum(self.timeline.runs) - len(self.timeline.runs)} runs of {len(self.timeline.runs)} ops")]
        return rows

    def save(self, path: str | pathlib.Path) -> None:
        """Writes the solution as JSON; `Solution.load` reads it, and `compile` takes it in place of a budget."""
        if self.plan is None:
            raise PlanError("A solution without a plan cannot be saved.")
        steps = [step.op if isinstance(step, Compute) else -1 - step.value for step in self.plan.steps]
        fields = {"format": _FORMAT, "graph_key": self.plan.graph_key, "steps": steps, "fillers": self.plan.fillers,
                  "makers": self.plan.makers,
                  "timeline": dataclasses.asdict(self.timeline), "base": dataclasses.asdict(self.base), "status": self.status.value,
                  "stopped_by": self.stopped_by.value, "stats": dict(self.stats)}
        for name in _PLAIN_FIELDS:
            fields[name] = getattr(self, name)
        pathlib.Path(path).write_text(json.dumps(fields))

    @classmethod
    def load(cls, path: str | pathlib.Path) -> "Solution":
        """Reads what `save` wrote. Raises PlanError when the file is not such a file."""
        try:
            fields = json.loads(pathlib.Path(path).read_text())
            if fields["format"] != _FORMAT:
                raise ValueError(f"format {fields['format']!r} instead of {_FORMAT!r}")
            steps = tuple(Compute(step) if step >= 0 else Free(-1 - step) for step in fields["steps"])
            return cls(status=Status(fields["status"]), stopped_by=StoppedBy(fields["stopped_by"]),
                       plan=Plan(steps, fields["graph_key"], tuple(map(tuple, fields.get("fillers", ()))),
                                 tuple(fields.get("makers", ()))), timeline=_timeline(fields["timeline"]),
                       base=_timeline(fields["base"]), stats=fields["stats"], **{name: fields[name] for name in _PLAIN_FIELDS})
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise PlanError(f"A plan file must be one that Solution.save wrote. Received: {path} "
                            f"({type(error).__name__}: {error})") from error


_FORMAT = "checkmate_tf plan 1"
_PLAIN_FIELDS = ("bound_seconds", "budget_bytes", "solver")


def _timeline(fields: Mapping[str, Any]) -> Timeline:
    return Timeline(**{name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()})


def ignore_progress(progress: Progress) -> None:
    """A report that nobody reads."""


def solve(graph: Graph, budget_bytes: int, solver: Solver, limits: Limits = Limits(),
          report: Report = ignore_progress) -> Solution:
    """Runs the solver and judges its answer.

    The first call on a machine waits until the search is compiled, which the limits do not count (`ahead`). A budget below the
    structural floor is answered without a search: infeasible. A solver that runs out of memory leaves the latest plan that it has
    reported, if it tells plans. Raises GraphError for a malformed graph, SolverError when the answer is no valid plan, breaks the
    budget, or beats its own bound.
    """
    verify_graph(graph)
    ahead.start()
    ahead.wait()
    started = time.monotonic()
    base = keep_all_timeline(graph)
    floor_bytes, _ = structural_floor(graph)
    if budget_bytes < floor_bytes:
        answer = Answer(None, StoppedBy.DONE, infeasible=True)
    else:
        answer = _searched(graph, budget_bytes, solver, limits, report)
    stats = {"solve_seconds": time.monotonic() - started, **answer.stats}
    bound_seconds = max(base.seconds, answer.bound_seconds or 0.0)
    common = {"stopped_by": answer.stopped_by, "bound_seconds": bound_seconds, "base": base, "budget_bytes": budget_bytes,
              "solver": solver.name, "stats": stats}
    if answer.order is None:
        return Solution(Status.INFEASIBLE if answer.infeasible else Status.UNKNOWN, plan=None, timeline=None, **common)
    plan, timeline = judge(graph, answer.order, solver.name)
    if timeline.peak_bytes > budget_bytes:
        raise SolverError(f"Solver {solver.name!r} returned a plan of {timeline.peak_bytes} bytes for a budget of "
                          f"{budget_bytes}.")
    if timeline.seconds < bound_seconds * (1 - 1e-9):
        raise SolverError(f"Solver {solver.name!r} claims the bound {bound_seconds} but returned a plan that takes "
                          f"{timeline.seconds}.")
    proved = timeline.seconds <= bound_seconds * (1 + min(max(limits.gap, 1e-9), _PROOF))
    return Solution(Status.OPTIMAL if proved else Status.FEASIBLE, plan=plan, timeline=timeline, **common)


def _searched(graph: Graph, budget_bytes: int, solver: Solver, limits: Limits, report: Report) -> Answer:
    latest: list[tuple[int, ...]] = []

    def noting(progress: Progress) -> None:
        if progress.order is not None:
            latest[:] = [progress.order]
        report(progress)
    try:
        return solver.search(graph, budget_bytes, limits, noting)
    except MemoryError:
        return Answer(latest[0] if latest else None, StoppedBy.MEMORY)


def judge(graph: Graph, order: Sequence[int], solver_name: str) -> tuple[Plan, Timeline]:
    """The order as a verified plan with its timeline; SolverError when it is not a valid one."""
    try:
        plan = verify_plan(graph, plan_from_order(graph, order))
    except PlanError as error:
        raise SolverError(f"Solver {solver_name!r} returned an order that is no plan: {error}") from error
    return plan, simulate(graph, plan)
