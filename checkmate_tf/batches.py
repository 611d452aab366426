"""The largest batch whose plan fits a budget.

    largest_batch(family, budget_bytes, max_overhead)  ->  BatchSearch

A family gives the scheduling problem for each batch size: bare graphs (`Bare`), or training steps (`Steps`), which are traced
for two batch sizes only where `lines` can tell all others from those.

The search is between the largest batch for which everything can be kept and the largest for which every op fits by itself.
It bisects; a plan found for a batch is carried to the largest batch at which the same order still fits, by its own peak there.
So the batch below fits, with a plan to show; that the next does not is proved where an op alone needs more than the
budget, and otherwise means that the solver found nothing in its time.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import tensorflow as tf

from checkmate_tf import report, rounds, solvers
from checkmate_tf.carried import carried
from checkmate_tf.ir.errors import InfeasibleBudgetError, UnsupportedError
from checkmate_tf.ir.graph import Graph
from checkmate_tf.ir.plan import plan_from_order
from checkmate_tf.ir.simulate import keep_all_timeline, simulate, structural_floor
from checkmate_tf.lines import Lines
from checkmate_tf.planning import Prepared
from checkmate_tf.solvers import Limits, Solution, Solver, Status, StoppedBy, ignore_progress

MOST_BATCH = 1 << 20


@dataclasses.dataclass(frozen=True)
class Try:
    """A batch size that was planned for: whether its plan fits and costs no more than allowed. Without a plan, peak and
    overhead are None."""

    batch_size: int
    fits: bool
    peak_bytes: int | None
    overhead: float | None


@dataclasses.dataclass(frozen=True)
class BatchSearch:
    """What `max_batch_size` found.

    batch_size: the largest that fits, `solution`: its plan (None for a family of bare graphs without one)
    keep_all_batch_size: the largest that fits without recomputation, 0 if none does
    limit_batch_size: no plan fits a larger one, because an op alone needs more than the budget
    tries: the batch sizes that were planned for, in turn
    """

    batch_size: int
    solution: Solution = dataclasses.field(repr=False)
    budget_bytes: int
    keep_all_batch_size: int
    limit_batch_size: int
    tries: tuple[Try, ...]

    @property
    def is_proven(self) -> bool:
        """Whether no plan at all fits a larger batch; otherwise a better solver, or more time, may find one."""
        return self.batch_size == self.limit_batch_size

    def __str__(self) -> str:
        return report.as_text(report.batch_table(self))

    def _repr_html_(self) -> str:
        return report.as_html(report.batch_table(self))


class Family(Protocol):
    """The same training step for every batch size."""

    def graph(self, batch_size: int) -> Graph:
        """The scheduling problem."""

    def peak_bytes(self, batch_size: int, order: Sequence[int]) -> int:
        """What a plan in this order takes on the device."""

    def solve(self, batch_size: int, budget_bytes: int) -> Solution | None:
        """A plan within the budget, or None."""


def largest_batch(family: Family, budget_bytes: int, max_overhead: float | str | None = None,
                  tell: Callable[[str], None] = lambda text: None) -> BatchSearch:
    """The largest batch of the family with a plan that fits the budget and costs at most `max_overhead` beyond keeping
    everything; "forward" stands for one more run of all forward ops. The solution is as the family gave it.

    Raises InfeasibleBudgetError, without details, where not even a batch of one fits.
    """
    limit = _last(lambda batch_size: structural_floor(family.graph(batch_size))[0] <= budget_bytes, 0, MOST_BATCH)
    kept = _last(lambda batch_size: family.peak_bytes(batch_size, family.graph(batch_size).order) <= budget_bytes, 0, limit)
    best = _kept_all(family.graph(kept), budget_bytes) if kept else None
    tries: list[Try] = []
    low, high, middle = kept, limit + 1, limit
    while low < middle < high:
        tell(f"searching the batch size: {low} fits, trying {middle}")
        found = family.solve(middle, budget_bytes)
        fits = found is not None and _is_allowed(family.graph(middle), found.overhead, max_overhead)
        tries.append(Try(middle, fits, None if found is None else found.placed_peak_bytes, None if found is None else found.overhead))
        if fits:
            low, best = _carried(family, middle, high - 1, found, budget_bytes, max_overhead)
        else:
            high = middle
        middle = (low + high) // 2
    if best is None:
        raise InfeasibleBudgetError("No plan fits a batch of one.", budget_bytes, structural_floor(family.graph(1))[0], False, {})
    return BatchSearch(low, best, budget_bytes, kept, limit, tuple(tries))


def _last(holds: Callable[[int], bool], low: int, high: int) -> int:
    """The last number in [low, high] up to which it holds; at `low` it is taken to."""
    step = 1
    while low + step <= high and holds(low + step):
        low, step = low + step, 2 * step
    high = min(high, low + step - 1)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


def _kept_all(graph: Graph, budget_bytes: int) -> Solution:
    base = keep_all_timeline(graph)
    return Solution(Status.OPTIMAL, StoppedBy.DONE, plan_from_order(graph, graph.order), base, base, base.seconds, budget_bytes,
                    "keep_all", {"solve_seconds": 0.0})


def _is_allowed(graph: Graph, overhead: float, max_overhead: float | str | None) -> bool:
    if max_overhead is None:
        return True
    if max_overhead == "forward":
        max_overhead = sum(op.seconds for op in graph.ops if not op.backward) / graph.seconds if graph.seconds else 0.0
    return overhead <= max_overhead * (1 + 1e-9)


def _carried(family: Family, batch_size: int, most: int, solution: Solution, budget_bytes: int,
             max_overhead: float | str | None) -> tuple[int, Solution]:
    """The largest batch up to `most` at which the same order fits and is allowed, with its solution."""
    order, names = solution.plan.order, [op.name for op in family.graph(batch_size).ops]

    def at(size: int) -> Solution:
        graph = family.graph(size)
        plan = plan_from_order(graph, order)
        base = keep_all_timeline(graph)
        kept = {name: told for name, told in solution.stats.items() if name not in rounds.DETAILS}
        return dataclasses.replace(solution, plan=plan, timeline=simulate(graph, plan), base=base, status=Status.FEASIBLE,
                                   bound_seconds=base.seconds, stats={**kept, "placed_peak_bytes": family.peak_bytes(size, order)})

    def fits(size: int) -> bool:
        if [op.name for op in family.graph(size).ops] != names:  # a step of other ops, to which the order says nothing
            return False
        moved = at(size)
        return moved.placed_peak_bytes <= budget_bytes and _is_allowed(family.graph(size), moved.overhead, max_overhead)

    last = _last(fits, batch_size, most)
    return (last, solution) if last == batch_size else (last, at(last))


@dataclasses.dataclass(frozen=True)
class Bare:
    """A family of bare graphs, made for any batch size."""

    graph: Callable[[int], Graph]
    solver: Solver
    limits: Limits

    def peak_bytes(self, batch_size: int, order: Sequence[int]) -> int:
        """The simulated peak."""
        graph = self.graph(batch_size)
        return simulate(graph, plan_from_order(graph, order)).peak_bytes

    def solve(self, batch_size: int, budget_bytes: int) -> Solution | None:
        """The solver's plan, or None."""
        solution = solvers.solve(self.graph(batch_size), budget_bytes, self.solver, self.limits)
        return solution if solution.plan is not None else None


class Steps:
    """The family of a model's training steps. `prepare` traces one for a batch size; peaks are those of placed values."""

    def __init__(self, prepare: Callable[[int], Prepared], batch_size: int, solver: Solver, limits: Limits,
                 tell=ignore_progress):
        self._prepare, self._solver, self._limits, self._tell = prepare, solver, limits, tell
        sizes = (max(2, batch_size), 2 * max(2, batch_size))
        self._lines = Lines.through(sizes, tuple(prepare(size) for size in sizes))
        self.at = functools.lru_cache(maxsize=16)(prepare if self._lines is None else self._lines.at)

    def graph(self, batch_size: int) -> Graph:
        """The step's graph."""
        return self.at(batch_size).graph

    def peak_bytes(self, batch_size: int, order: Sequence[int]) -> int:
        """The peak in whole chunks, or that of the live bytes if it is higher."""
        return _placed(self.at(batch_size), order)

    def solve(self, batch_size: int, budget_bytes: int) -> Solution | None:
        """What `plan` would give, or None where that fails or comes out above the budget."""
        return _solved(self.at(batch_size), budget_bytes, self._solver, self._limits, self._tell)

    def _carried(self, search: BatchSearch, prepared: Prepared) -> Solution | None:
        found = carried(search.solution, self.graph(search.batch_size), prepared, search.budget_bytes)
        return found and dataclasses.replace(found, bound_seconds=min(max(found.bound_seconds, prepared.base.seconds), found.seconds))

    def confirmed(self, search: BatchSearch, max_overhead: float | str | None) -> BatchSearch:
        """The same for steps as they are traced: the batch found with a plan for that, or a smaller one where there is none,
        or a larger one where the next has a plan, too. Raises InfeasibleBudgetError, without details, if none is left."""
        if self._lines is None:
            return search
        tries = list(search.tries)

        def traced(batch_size: int) -> Solution | None:
            prepared = self._prepare(batch_size)
            found = (self._carried(search, prepared)
                     or _solved(prepared, search.budget_bytes, self._solver, self._limits, self._tell))
            fits = found is not None and _is_allowed(prepared.graph, found.overhead, max_overhead)
            tries.append(Try(batch_size, fits, *((None, None) if found is None else (found.placed_peak_bytes, found.overhead))))
            return found if fits else None

        batch_size = search.batch_size
        solution = traced(batch_size)
        while solution is None and batch_size > 1:
            batch_size -= 1
            solution = traced(batch_size)
        if solution is None:
            raise InfeasibleBudgetError("No plan fits a batch of one.", search.budget_bytes, search.budget_bytes, False, {})
        while search.batch_size <= batch_size < search.limit_batch_size and (larger := traced(batch_size + 1)) is not None:
            batch_size, solution = batch_size + 1, larger
        return dataclasses.replace(search, batch_size=batch_size, solution=solution, tries=tuple(tries))


def resized(specs: Any, batch_size: int | None = None) -> tuple[Any, int]:
    """Specs of a batch with another first dimension, and the first dimension that they had.

    Raises UnsupportedError where the parts of the batch do not share one.
    """
    leaves = [leaf for leaf in tf.nest.flatten(specs) if leaf is not None]
    sizes = {leaf.shape[0] if leaf.shape.rank else None for leaf in leaves}
    if len(sizes) != 1 or None in sizes:
        raise UnsupportedError("All parts of a batch must have the same first dimension, the batch size, to search for the largest. "
                               f"Received: shapes {', '.join(str(leaf.shape) for leaf in leaves)}")
    size = sizes.pop()

    def spec(leaf):
        return leaf if leaf is None else tf.TensorSpec([batch_size or size, *leaf.shape[1:]], leaf.dtype)
    return tf.nest.map_structure(spec, specs), size


def _placed(prepared: Prepared, order: Sequence[int]) -> int:
    plan = plan_from_order(prepared.graph, order)
    return prepared.places.placed_bytes(plan, limit_bytes=0)


def _solved(prepared: Prepared, budget_bytes: int, solver: Solver, limits: Limits, tell) -> Solution | None:
    try:
        solution = rounds.solve_within(prepared, budget_bytes, solver, limits, tell)
    except InfeasibleBudgetError:
        return None
    return solution if max(solution.placed_peak_bytes, solution.peak_bytes) <= budget_bytes else None
