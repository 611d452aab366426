"""Rounds of search for a plan that fits the budget when its values are placed, and what to say where there is none.

    solve_within(prepared, ...)   Solution, or InfeasibleBudgetError with floor, cause and remedies

The allocator hands out whole chunks, which can be larger than what was asked for. A plan is therefore judged by where
its values come to lie (`placement`), and made anew for less as long as that takes more than the budget.
"""

import dataclasses
import math
import time
from collections.abc import Sequence

from checkmate_tf import solvers
from checkmate_tf.bridge import measure
from checkmate_tf.bridge.loops import LOOPS
from checkmate_tf.ir import caches
from checkmate_tf.ir.errors import InfeasibleBudgetError
from checkmate_tf.ir.graph import Graph
from checkmate_tf.ir.placement import Layout, place
from checkmate_tf.ir.plan import Plan, plan_from_order
from checkmate_tf.ir.simulate import Timeline, held_at, simulate, structural_floor
from checkmate_tf.ir.units import format_bytes
from checkmate_tf.planning import ENOUGH, Prepared, Residents
from checkmate_tf.report import short_name
from checkmate_tf.solvers import Limits, Solution, Solver, Status, StoppedBy, bounds, ignore_progress
from checkmate_tf.solvers.base import Scope
from checkmate_tf.targets import Targets

_ALLOWANCE = 0.05               # of what is not resident, left to the allocator in the first round
_RESERVE = 0.01                 # of what is not resident, left to what else comes and goes, if there is a plan that leaves it
_LOOPS_RESERVE = 0.05           # the same where turns of loops run ahead on a device that has no more: how far is not told beforehand
_LEAST_STEP = 0.005             # of what is not resident, by which a target changes from round to round
_PIECES_STEP = 0.03             # the same where a plan finds no room though there are bytes enough
_ROUNDS = 8
_ROUND_SHARE = 0.25             # of the time that is left, in each but the last; twice as much after one that finds nothing,
_MOST_SHARE = 0.8               # up to this
_MOST_PLACED = 30
_MOST_NAMED = 5                 # values at a peak
_REPAIR_SHARE = 0.08            # of the time, in each round
_BETTER_SHARE = 0.5             # of the time, in which a cheaper plan is looked for when one fits
_IMPATIENCE = 4                 # by how much more a cheaper plan must promise by then
_BOUND_SECONDS, _BOUND_SHARE = 3.0, 0.1         # of the time, for the bound that the answer is told with
_MARGIN = 0.1                   # of what is not resident, on a budget that an error says will do
_MINIMUM_SEARCH_STEPS = 6
_MINIMUM_SEARCH_SHARE = 0.05


def solve_within(prepared: Prepared, budget_bytes: int, solver: Solver, limits: Limits, report,
                 surplus_bytes: int = 0, before: Solution | None = None, known: Sequence[Solution] = ()) -> Solution:
    """A plan whose peak, as its values come to lie, stays under the budget less what was measured beyond that before.

    A solution from before, made when memory was free elsewhere, is repaired first, if that is all it needs.

    Each round solves for a target below that (`Targets` says which) and places the plans that were the best at some time, the
    cheapest first. Where all take more, the order of the one that comes closest is repaired for a while. Where one fits, a
    cheaper one is looked for as long as plans that did not fit promise much, the more the longer it takes. The time limit is
    for all rounds. A plan fits if it leaves a small reserve to what else comes and goes while a step runs. If none of the plans
    found fits when placed, the one that comes closest is the answer, and a measurement decides. What is known from other
    budgets is the answer where it fits and nothing cheaper is found. A bound for the whole budget may take a tenth of the time
    again. `stats` says what is held at the peak, and what extra time is expected. Raises InfeasibleBudgetError without any plan.
    """
    solution = _solved_or_known(prepared, budget_bytes, solver, limits, report, surplus_bytes, before, known)
    return with_details(prepared, _for_budget(prepared.graph, solution, budget_bytes, limits))


DETAILS = ("held_at_peak", "held_at_base_peak", "expected_overhead")


def with_details(prepared: Prepared, solution: Solution) -> Solution:
    """The solution with what `stats` says beyond the solver: what is held at its peaks, and the extra time expected of it here."""
    graph = prepared.graph
    found = (_largest_at_peak(graph, solution.plan, solution.timeline),
             _largest_at_peak(graph, plan_from_order(graph, graph.order), solution.base), _expected_overhead(prepared, solution))
    return dataclasses.replace(solution, stats={**solution.stats, **dict(zip(DETAILS, found))})


def _expected_overhead(prepared: Prepared, solution: Solution) -> float:
    """The extra time of the solution's plan with what caches save it."""
    graph, profile = prepared.graph, prepared.profile
    if solution.seconds <= solution.base_seconds or not profile.miss_seconds_per_byte:
        return solution.overhead
    return caches.expected_overhead(graph, solution.plan, plan_from_order(graph, graph.order), prepared.places.layout,
                                    profile.cache_bytes, profile.miss_seconds_per_byte)


def solve_within_each(prepared: Prepared, budgets: Sequence[int], solver: Solver, limits: Limits,
                      report) -> list[Solution | InfeasibleBudgetError]:
    """An answer for each of the budgets in bytes, or why there is none. Of two budgets the larger has no dearer plan, and of
    two plans that fit their budgets when placed the dearer takes no more memory."""
    answers: dict[int, Solution | InfeasibleBudgetError] = {}
    found: list[Solution] = []
    for budget_bytes in sorted(set(budgets)):
        try:
            answers[budget_bytes] = solve_within(prepared, budget_bytes, solver, limits, report, known=found)
        except InfeasibleBudgetError as error:
            answers[budget_bytes] = error
        else:
            found.append(answers[budget_bytes])
    for answer in found:
        # One for a larger budget may be cheaper and fit here: where a search ends is a matter of luck.
        limit_bytes = max(answer.budget_bytes, answer.placed_peak_bytes)
        best = min((other for other in found if other.placed_peak_bytes <= limit_bytes),
                   key=lambda other: (other.seconds, other.placed_peak_bytes))
        bound_seconds = min(best.seconds, answer.bound_seconds)
        answers[answer.budget_bytes] = dataclasses.replace(best, budget_bytes=answer.budget_bytes, bound_seconds=bound_seconds,
                                                           status=_status(best.seconds, bound_seconds))
    return [answers[budget_bytes] for budget_bytes in budgets]


def _for_budget(graph: Graph, solution: Solution, budget_bytes: int, limits: Limits) -> Solution:
    """The solution as the answer for this budget, with a bound for all of that: its search was for less, to leave room to the
    allocator, and what that proved holds for less."""
    if solution.budget_bytes >= budget_bytes:
        return solution
    bound_seconds, scope = solution.base_seconds, solution.stats.get("bound_scope")
    if scope is not None and solution.seconds > bound_seconds:
        found_seconds = bounds.lower_bound(graph, budget_bytes, "fixed" if scope == Scope.FIXED else "any",
                                           min(_BOUND_SECONDS, _BOUND_SHARE * limits.seconds), seed=limits.seed,
                                           known=solution.plan.order)
        bound_seconds = min(max(bound_seconds, found_seconds), solution.seconds)
    return dataclasses.replace(solution, budget_bytes=budget_bytes, bound_seconds=bound_seconds,
                               status=_status(solution.seconds, bound_seconds))


def _status(seconds: float, bound_seconds: float) -> Status:
    """Of a plan that takes so long."""
    return Status.OPTIMAL if seconds <= bound_seconds * (1 + Limits().gap) else Status.FEASIBLE


def _largest_at_peak(graph: Graph, plan: Plan, timeline: Timeline) -> list[list]:
    """[name of the op, bytes] of the largest values held at the peak."""
    held = held_at(graph, plan, timeline.peak_step)[:_MOST_NAMED]
    return [[short_name(graph.ops[graph.values[value].producer].name), graph.values[value].bytes] for value in held]


def _solved_or_known(prepared: Prepared, budget_bytes: int, solver: Solver, limits: Limits, report, surplus_bytes: int,
                     before: Solution | None, known: Sequence[Solution]) -> Solution:
    limit_bytes, spread = _left(prepared, budget_bytes, surplus_bytes)
    cheapest = _cheapest_known(prepared, known, limit_bytes - int(_RESERVE * spread))
    if cheapest is None:
        return _solved_within(prepared, budget_bytes, solver, limits, report, surplus_bytes, before)
    try:
        solution = _solved_within(prepared, budget_bytes, solver, limits, report, surplus_bytes, before, cheapest.seconds)
    except InfeasibleBudgetError:
        return cheapest
    return min(cheapest, solution, key=lambda answer: _rank(answer, limit_bytes))


def _left(prepared: Prepared, budget_bytes: int, surplus_bytes: int) -> tuple[int, int]:
    """The bytes that a plan may take when placed, and how many of them are not resident."""
    limit_bytes = budget_bytes - surplus_bytes - loops_reserve_bytes(prepared, budget_bytes)
    return limit_bytes, max(0, limit_bytes - prepared.residents.total)


def _solved_within(prepared: Prepared, budget_bytes: int, solver: Solver, limits: Limits, report, surplus_bytes: int,
                   before: Solution | None, known_seconds: float = math.inf) -> Solution:
    """The answer has the target it was found for as its budget. known_seconds: what a plan takes that fits; a search that finds
    only dearer ones, and does not prove that there are no others, was too short."""
    limit_bytes, spread = _left(prepared, budget_bytes, surplus_bytes)
    if place_keep_all(prepared, limit_bytes) <= limit_bytes:
        target_bytes = wanted_bytes = limit_bytes
    else:
        target_bytes = limit_bytes - int(_ALLOWANCE * spread)
        wanted_bytes = limit_bytes - int(_RESERVE * spread)
    targets = Targets(limit_bytes, target_bytes, int(_LEAST_STEP * spread))
    closest, cheapest_seconds = None, math.inf
    started = time.monotonic()
    repair_seconds = _REPAIR_SHARE * limits.seconds
    if before is not None and before.peak_bytes <= wanted_bytes:
        placed, _ = _best_placed(prepared, before, (), wanted_bytes)
        closest = _repaired(prepared, placed, wanted_bytes, repair_seconds, limits.seed)
        if closest.placed_peak_bytes <= wanted_bytes:
            return closest
    share = _ROUND_SHARE
    for number in range(_ROUNDS):
        fits = closest is not None and closest.placed_peak_bytes <= wanted_bytes
        end = started + (_BETTER_SHARE if fits else 1 - _REPAIR_SHARE) * limits.seconds
        left = max(0.0, end - time.monotonic())
        shared = dataclasses.replace(limits, seconds=left if number == _ROUNDS - 1 else share * left, seed=limits.seed + number)
        orders: list[tuple[int, ...]] = []
        try:
            solution = solvers.solve(prepared.graph, targets.now, solver, shared, _noting(orders, report))
        except KeyboardInterrupt:
            if not fits:
                raise
            return closest
        if solution.plan is None:
            goes_on = targets.no_plan()
            if solution.status is Status.UNKNOWN:
                share = min(_MOST_SHARE, 2 * share)
        else:
            share = _ROUND_SHARE
            placed, cheapest_bytes = _best_placed(prepared, solution, orders, wanted_bytes)
            found = _repaired(prepared, placed, wanted_bytes, repair_seconds, shared.seed)
            if closest is None or _rank(found, wanted_bytes) < _rank(closest, wanted_bytes):
                closest = found
            cheapest_seconds = min(cheapest_seconds, solution.seconds)
            is_dearer = found.placed_peak_bytes <= wanted_bytes and found.seconds > solution.seconds
            peak_bytes, over_bytes = ((solution.peak_bytes, cheapest_bytes - wanted_bytes) if is_dearer else
                                      (found.peak_bytes, found.placed_peak_bytes - wanted_bytes))
            if wanted_bytes + over_bytes > prepared.places.limit_bytes:     # tells pieces that are too small, not by how much
                over_bytes = min(over_bytes, int(_PIECES_STEP * spread))
            goes_on = targets.placed(peak_bytes, over_bytes)
        waited = (time.monotonic() - started) / limits.seconds
        is_interrupted = solution.stopped_by is StoppedBy.INTERRUPT
        is_too_short = solution.plan is not None and solution.bound_seconds < known_seconds < (1 - ENOUGH) * solution.seconds
        if is_too_short and waited < _BETTER_SHARE and not is_interrupted:
            share = min(_MOST_SHARE, 2 * share)
            continue
        if closest is not None and closest.placed_peak_bytes <= wanted_bytes:
            enough = ENOUGH * (1 + _IMPATIENCE * waited / _BETTER_SHARE)
            if closest.seconds <= (1 + enough) * cheapest_seconds or waited >= _BETTER_SHARE:
                return closest
        if not goes_on or waited >= 1 - _REPAIR_SHARE or is_interrupted:
            break
    if closest is not None and closest.placed_peak_bytes > prepared.places.limit_bytes:
        closest = None                                  # the device would not serve it
    if closest is None and place_keep_all(prepared, limit_bytes) <= limit_bytes:     # where a solver gave up for another reason
        kept = solvers.solve(prepared.graph, limit_bytes, solvers.get("keep_all"), limits, report)
        return _best_placed(prepared, kept, (), limit_bytes)[0]
    if closest is None and surplus_bytes > _LEAST_STEP * spread:  # another plan may well take less beyond its placement
        halved = dataclasses.replace(limits, seconds=limits.seconds / 2, seed=limits.seed + _ROUNDS)
        return _solved_within(prepared, budget_bytes, solver, halved, report, surplus_bytes // 2, None, known_seconds)
    if closest is None:
        raise infeasible(prepared, budget_bytes, solver, limits, surplus_bytes)
    return closest


def _cheapest_known(prepared: Prepared, known: Sequence[Solution], limit_bytes: int) -> Solution | None:
    """Of these, the cheapest that fits as values come to lie now."""
    for solution in sorted(known, key=lambda solution: solution.seconds):
        if solution.peak_bytes <= limit_bytes:
            plan, placed_bytes = prepared.places.placed(plan_from_order(prepared.graph, solution.plan.order), limit_bytes)
            if placed_bytes <= limit_bytes:
                return dataclasses.replace(solution, plan=plan, stats={**solution.stats, "placed_peak_bytes": placed_bytes})
    return None


def loops_reserve_bytes(prepared: Prepared, budget_bytes: int) -> int:
    """What is left to turns of loops beyond any plan, on a device with a limit of its own."""
    if not measure.is_limited() or not any(op.kind in LOOPS for op in prepared.graph.ops):
        return 0
    return max(0, int(_LOOPS_RESERVE * (budget_bytes - prepared.residents.total)))


def _noting(orders: list[tuple[int, ...]], report):
    """The same report, noting every plan that is told."""
    def noting(progress):
        if progress.order is not None and (not orders or orders[-1] != progress.order):
            orders.append(progress.order)
        report(progress)
    return noting


def _rank(placed: Solution, limit_bytes: int) -> tuple[bool, float]:
    """Lower is better: the cheapest that fits, or else the one that comes closest."""
    fits = placed.placed_peak_bytes <= limit_bytes
    return not fits, placed.seconds if fits else placed.placed_peak_bytes


def _best_placed(prepared: Prepared, solution: Solution, orders: Sequence[tuple[int, ...]],
                 limit_bytes: int) -> tuple[Solution, int]:
    """Of a solution and the plans that came before it, dearer ones first, the cheapest that fits when placed, or the one that
    comes closest if none does; and what the solution itself takes."""
    best, cheapest_bytes = None, None
    for order in [solution.plan.order, *reversed(orders)][:_MOST_PLACED]:
        plan, placed_bytes = prepared.places.placed(plan_from_order(prepared.graph, order), limit_bytes)
        cheapest_bytes = placed_bytes if cheapest_bytes is None else cheapest_bytes
        if best is None or placed_bytes < best.placed_peak_bytes:
            best = dataclasses.replace(solution, plan=plan, timeline=simulate(prepared.graph, plan),
                                       stats={**solution.stats, "placed_peak_bytes": placed_bytes})
        if placed_bytes <= limit_bytes:
            break
    if best.seconds > solution.seconds and best.status is Status.OPTIMAL:
        best = dataclasses.replace(best, status=Status.FEASIBLE)
    return best, cheapest_bytes


def _repaired(prepared: Prepared, solution: Solution, limit_bytes: int, seconds: float, seed: int) -> Solution:
    """The same runs in an order that takes less when placed, if that is needed and one is found in the time."""
    if solution.placed_peak_bytes <= limit_bytes:
        return solution
    plan, placed_bytes = prepared.places.repaired(solution.plan, limit_bytes, seconds, seed)
    if placed_bytes >= solution.placed_peak_bytes:
        return solution
    return dataclasses.replace(solution, plan=plan, timeline=simulate(prepared.graph, plan),
                               stats={**solution.stats, "placed_peak_bytes": placed_bytes})


def place_keep_all(prepared: Prepared, limit_bytes: int) -> int:
    """The peak of keeping everything in whole chunks; on the device only if it is at most the limit on paper."""
    return prepared.places.placed_bytes(plan_from_order(prepared.graph, prepared.graph.order), limit_bytes)


def infeasible(prepared: Prepared, budget_bytes: int, solver: Solver, limits: Limits,
               surplus_bytes: int = 0) -> InfeasibleBudgetError:
    """The error for a budget that the solver found no plan for: what sets the floor, what works, what would help."""
    graph, residents = prepared.graph, prepared.residents
    floor_bytes, floor_op = structural_floor(graph)
    proven = budget_bytes < floor_bytes
    reached_bytes = _smallest_reached(prepared, solver, limits, max(budget_bytes - surplus_bytes, floor_bytes))
    # One large value in a chunk twice its size is what tells places apart in which memory is free elsewhere.
    largest_bytes = max((value.bytes for value in graph.values), default=0)
    working_bytes = surplus_bytes + reached_bytes + max(largest_bytes, int(_MARGIN * (reached_bytes - residents.total)))
    rows = residents.rows()
    if floor_op >= 0:
        rows[f"inputs, outputs and scratch of {graph.ops[floor_op].name}"] = floor_bytes - residents.total
    lines = [f"No plan for this step fits the budget of {format_bytes(budget_bytes)}"
             + (": its floor, which no recomputation can go below, is " + format_bytes(floor_bytes) + "." if proven else
                f" (none was found; the proven floor is {format_bytes(floor_bytes)})."),
             f"The smallest budget known to work is {format_bytes(working_bytes)} ({working_bytes} bytes); keeping everything takes "
             f"{format_bytes(prepared.base.peak_bytes)}.", "What is held at the floor:"]
    lines += [f"  {format_bytes(size):>9}  {label}" for label, size in rows.items()]
    if surplus_bytes:
        lines.append(f"  {format_bytes(surplus_bytes):>9}  measured on top by the allocator, which hands out whole chunks")
    lines.append(_remedy(residents, budget_bytes))
    lines.append(f"Received: budget of {budget_bytes} bytes")
    return InfeasibleBudgetError("\n".join(lines), budget_bytes, working_bytes, working_bytes == floor_bytes, rows)


def _smallest_reached(prepared: Prepared, solver: Solver, limits: Limits, above_bytes: int) -> int:
    """The smallest budget above this, up to keep-everything's peak, for which a quick search finds a plan that fits when
    placed, here and where nothing else has been before: the budget will be tried in another process."""
    empty = Layout(prepared.traced.resident_sizes)
    low, high = above_bytes, place_keep_all(prepared, 0)
    quick = dataclasses.replace(limits, seconds=_MINIMUM_SEARCH_SHARE * limits.seconds)
    for _ in range(_MINIMUM_SEARCH_STEPS):
        if high - low <= 0.01 * high:
            break
        middle = (low + high) // 2
        orders: list[tuple[int, ...]] = []
        found = solvers.solve(prepared.graph, middle, solver, quick, _noting(orders, ignore_progress))
        if found.plan is not None:
            found = _repaired(prepared, _best_placed(prepared, found, orders, middle)[0], middle, quick.seconds / 3, 0)
        reached = math.inf if found.plan is None else max(
            found.placed_peak_bytes, place(prepared.graph, found.plan, empty).peak_bytes)
        low, high = (low, reached) if reached < high else (middle, high)
    return max(high, above_bytes + 1)


def _remedy(residents: Residents, budget_bytes: int) -> str:
    if residents.weights + residents.optimizer + residents.other_variables >= budget_bytes:
        return ("Weights and optimizer slots alone exceed the budget, and recomputation cannot help there: use an optimizer with "
                "fewer slots (SGD, Adafactor, Lion), freeze layers, or use a smaller model.")
    if residents.total >= budget_bytes:
        return ("What is resident exceeds the budget before the step begins: use a smaller batch, or drop other tensors and models "
                "that live on this device.")
    return "A smaller batch or smaller inputs lower the floor; so does a layer with smaller outputs where the floor is set."
