"""How targets follow from where plans come to lie: rounds of `solve_within` with a solver and places made up."""

import dataclasses

import pytest

from checkmate_tf import planning, rounds
from checkmate_tf.bridge import measure
from checkmate_tf.ir.errors import InfeasibleBudgetError
from checkmate_tf.ir.graph import GraphBuilder
from checkmate_tf.ir.placement import Layout
from checkmate_tf.ir.simulate import keep_all_timeline
from checkmate_tf.profiles import Profile
from checkmate_tf.solvers import Answer, Limits, Progress, Status, StoppedBy
from checkmate_tf.solvers.base import Scope

RESIDENT, KEEP, KEEP_LIVE, BUDGET = 1000, 10_000, 7001, 9000
CHEAP, DEAR, CHEAP_TOO = (0, 1, 2, 3, 0, 4, 5, 6), (0, 1, 2, 3, 0, 0, 4, 5, 6), (0, 1, 4, 2, 3, 2, 5, 6)
DEARER = (0, 1, 2, 3, 0, 0, 0, 4, 5, 6)


@dataclasses.dataclass
class Places:
    """What each order takes when placed; as much as keeping everything where nothing is said."""

    peaks: dict[tuple[int, ...], int]
    limit_bytes: int = 1 << 40
    layout: Layout = Layout(stretches=((0, 1 << 30),))

    def placed_bytes(self, plan, limit_bytes):
        return self.peaks.get(plan.order, KEEP)

    def placed(self, plan, limit_bytes):
        return plan, self.placed_bytes(plan, limit_bytes)

    def repaired(self, plan, limit_bytes, seconds, seed):
        return self.placed(plan, limit_bytes)


@dataclasses.dataclass
class Script:
    """A solver that tells and returns, call by call, what is written here; nothing where that is empty."""

    calls: list[tuple[tuple[int, ...], ...]]
    targets: list[int] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)
    name: str = "script"

    def search(self, graph, budget_bytes, limits, report):
        self.targets.append(budget_bytes)
        self.seconds.append(limits.seconds)
        orders = self.calls[len(self.targets) - 1]
        for order in orders:
            report(Progress(1.0, 0.0, 0.0, order))
        return Answer(orders[-1] if orders else None, StoppedBy.DONE)


def prepared(placed, limit_bytes=1 << 40, kind="op"):
    builder = GraphBuilder()
    sources = [builder.op(f"source{number}", bytes=1500, seconds=1.0) for number in range(4)]
    sums = [builder.op(f"sum{number}", sources[2 * number:2 * number + 2], bytes=1, seconds=1.0) for number in range(2)]
    builder.op("total", sums, bytes=1, seconds=1.0)
    graph = builder.build()
    graph = dataclasses.replace(graph, resident_bytes=RESIDENT, ops=tuple(dataclasses.replace(op, kind=kind) for op in graph.ops))
    residents = planning.Residents(RESIDENT, 0, 0, 0, 0)
    return planning.Prepared(None, graph, residents, keep_all_timeline(graph), Profile("made up", 1.0, 1.0, 0.0),
                             Places(placed, limit_bytes))


def solved(placed, calls):
    solver = Script(calls)
    return rounds.solve_within(prepared(placed), BUDGET, solver, Limits(seconds=10), lambda progress: None), solver.targets


def test_the_time_that_is_expected_has_what_caches_save():
    """The plan computes a source again, which lies where something has just been: of four sources that keeping everything misses
    it misses fewer."""
    within = prepared({CHEAP: 8000})
    cached = dataclasses.replace(within.profile, cache_bytes=4096, miss_seconds_per_byte=1e-3)
    for profile, is_alike in ((within.profile, True), (cached, False)):
        solution = rounds.solve_within(dataclasses.replace(within, profile=profile), BUDGET, Script([(CHEAP,)]), Limits(seconds=10),
                                       lambda progress: None)
        assert solution.overhead == pytest.approx(1 / 7)
        assert (solution.expected_overhead == solution.overhead) == is_alike


def test_a_plan_that_takes_more_when_placed_is_made_anew_for_as_much_less():
    solution, targets = solved({CHEAP: 9500, CHEAP_TOO: 8000}, [(CHEAP,), (CHEAP_TOO,)])
    assert solution.plan.order == CHEAP_TOO and solution.budget_bytes == BUDGET
    wanted = BUDGET - (BUDGET - RESIDENT) // 100
    assert targets[1] == KEEP_LIVE - (9500 - wanted)


def test_where_only_a_dearer_plan_fits_a_cheaper_one_is_looked_for():
    solution, targets = solved({DEAR: 8000, CHEAP: 9100, CHEAP_TOO: 8500}, [(DEAR, CHEAP), (CHEAP_TOO,)])
    assert solution.plan.order == CHEAP_TOO and len(targets) == 2 and targets[1] < targets[0]


def test_the_dearer_plan_is_the_answer_where_none_is_cheaper():
    solution, targets = solved({DEAR: 8000, CHEAP: 9100, CHEAP_TOO: 9100}, [(DEAR, CHEAP)] + [(CHEAP_TOO,)] * 10)
    assert solution.plan.order == DEAR and len(targets) > 1


def test_where_a_round_finds_nothing_the_next_one_has_more_time():
    solver = Script([(), (CHEAP_TOO,)])
    solution = rounds.solve_within(prepared({CHEAP_TOO: 8000}), BUDGET, solver, Limits(seconds=10), lambda progress: None)
    assert solution.plan.order == CHEAP_TOO
    assert solver.targets[1] > solver.targets[0] and solver.seconds[1] > 1.2 * solver.seconds[0]


def test_where_pieces_are_too_small_the_next_target_is_a_little_lower_however_much_is_lacking():
    """A limit as large as the budget: what takes more when placed does not say by how much a plan must shrink."""
    solver = Script([(CHEAP,), (CHEAP_TOO,)])
    within = prepared({CHEAP: 9900, CHEAP_TOO: 8000}, limit_bytes=BUDGET)
    solution = rounds.solve_within(within, BUDGET, solver, Limits(seconds=10), lambda progress: None)
    assert solution.plan.order == CHEAP_TOO
    assert solver.targets[1] == KEEP_LIVE - int(0.03 * (BUDGET - RESIDENT))


def test_what_the_device_would_not_serve_is_no_answer(monkeypatch):
    """Without such a limit the plan that comes closest is the answer, and a measurement decides."""
    monkeypatch.setattr(rounds, "infeasible", lambda *arguments: InfeasibleBudgetError("none", BUDGET, KEEP, False, {}))
    calls = [(CHEAP,)] + [()] * 100
    assert solved({CHEAP: 9900}, calls)[0].placed_peak_bytes == 9900
    with pytest.raises(InfeasibleBudgetError):
        rounds.solve_within(prepared({CHEAP: 9900}, limit_bytes=BUDGET), BUDGET, Script(calls), Limits(seconds=10),
                            lambda progress: None)


@pytest.mark.parametrize("kind, is_limited, share", [("While", True, 0.05), ("While", False, 0), ("MatMul", True, 0)])
def test_turns_of_loops_are_left_something_where_a_device_has_no_more(monkeypatch, kind, is_limited, share):
    monkeypatch.setattr(measure, "is_limited", lambda: is_limited)
    assert rounds.loops_reserve_bytes(prepared({}, kind=kind), BUDGET) == int(share * (BUDGET - RESIDENT))


def test_near_enough_to_the_bound_is_where_auto_ends_and_others_do_not():
    assert planning.limits_for("auto", 5.0).gap > planning.limits_for("ilp", 5.0).gap == Limits().gap


@dataclasses.dataclass
class Interrupted(Script):
    """Somebody presses Ctrl-C in the second round, before it has a plan."""

    def search(self, graph, budget_bytes, limits, report):
        if self.targets:
            raise KeyboardInterrupt
        return super().search(graph, budget_bytes, limits, report)


def test_an_interrupt_while_a_cheaper_plan_is_looked_for_leaves_the_dearer_one():
    solver = Interrupted([(DEAR, CHEAP)])
    places = prepared({DEAR: 8000, CHEAP: 9100})
    solution = rounds.solve_within(places, BUDGET, solver, Limits(seconds=10), lambda progress: None)
    assert solution.plan.order == DEAR


@dataclasses.dataclass
class Stopped(Script):
    """Somebody presses Ctrl-C in each round, after it has a plan."""

    def search(self, graph, budget_bytes, limits, report):
        return dataclasses.replace(super().search(graph, budget_bytes, limits, report), stopped_by=StoppedBy.INTERRUPT)


def test_after_an_interrupt_no_further_round_begins():
    solver = Stopped([(DEAR, CHEAP)])
    solution = rounds.solve_within(prepared({DEAR: 8000, CHEAP: 9100}), BUDGET, solver, Limits(seconds=10), lambda progress: None)
    assert solution.plan.order == DEAR and len(solver.targets) == 1


def test_what_is_known_from_a_tighter_budget_is_the_answer_where_a_search_finds_only_dearer_plans():
    within = prepared({CHEAP: 8000, DEAR: 8000})
    first = rounds.solve_within(within, BUDGET - 100, Script([(CHEAP,)] * 20), Limits(seconds=10), lambda progress: None)
    again = rounds.solve_within(within, BUDGET, Script([(DEAR,)] * 20), Limits(seconds=10), lambda progress: None, known=[first])
    assert first.plan.order == again.plan.order == CHEAP
    assert again.budget_bytes == BUDGET and again.bound_seconds <= again.seconds


def test_a_cheaper_plan_found_for_a_larger_budget_is_taken_for_a_tighter_one_in_which_it_fits():
    """The search for the tight budget comes first and finds the dear plan, the one for the loose budget the cheap one."""
    within = prepared({CHEAP: 8000, DEAR: 7900})
    solver = Script([(DEAR,), (CHEAP,)])
    loose, tight = rounds.solve_within_each(within, [BUDGET, BUDGET - 100], solver, Limits(seconds=10), lambda progress: None)
    assert len(solver.targets) == 2 and solver.targets[0] < solver.targets[1]
    assert tight.plan.order == loose.plan.order == CHEAP
    assert tight.budget_bytes == BUDGET - 100 and loose.budget_bytes == BUDGET


@dataclasses.dataclass
class NothingBelow(Script):
    def search(self, graph, budget_bytes, limits, report):
        return super().search(graph, budget_bytes, limits, report) if budget_bytes >= KEEP_LIVE else Answer(None, StoppedBy.DONE)


def test_a_budget_without_a_plan_among_several_is_told(monkeypatch):
    monkeypatch.setattr(rounds, "infeasible", lambda *arguments: InfeasibleBudgetError("none", RESIDENT, KEEP, False, {}))
    solver = NothingBelow([(CHEAP,)])
    none, answer = rounds.solve_within_each(prepared({CHEAP: 8000}), [RESIDENT, BUDGET], solver, Limits(seconds=10),
                                            lambda progress: None)
    assert isinstance(none, InfeasibleBudgetError) and answer.plan.order == CHEAP


@dataclasses.dataclass
class Proving(Script):
    """Proves each of its plans to be the cheapest for its target."""

    scope: str = "any"

    def search(self, graph, budget_bytes, limits, report):
        answer = super().search(graph, budget_bytes, limits, report)
        return dataclasses.replace(answer, bound_seconds=float(len(answer.order)), stats={"bound_scope": self.scope})


def test_what_is_proved_for_a_target_below_the_budget_is_not_claimed_for_the_budget():
    """Nothing needs to be recomputed within the budget: the bound is the plain sum, whatever the solver proved for less."""
    solution = rounds.solve_within(prepared({CHEAP: 8000}), BUDGET, Proving([(CHEAP,)]), Limits(seconds=20), lambda progress: None)
    assert solution.plan.order == CHEAP and solution.seconds == len(CHEAP)
    assert solution.bound_seconds == solution.base_seconds == 7 and solution.status is Status.FEASIBLE


def test_the_bound_for_the_whole_budget_is_found_anew():
    """With less than everything in the given order one of the sources is computed twice."""
    budget_bytes, order = KEEP_LIVE - 300, (0, 1, 2, 3, 4, 2, 5, 6)
    solution = rounds.solve_within(prepared({order: budget_bytes - 100}), budget_bytes, Proving([(order,)] * 9, scope=Scope.FIXED),
                                   Limits(seconds=20), lambda progress: None)
    assert solution.bound_seconds == pytest.approx(8.0) and solution.status is Status.OPTIMAL


def test_where_a_cheaper_plan_is_known_a_search_that_finds_only_dearer_ones_goes_on():
    within = prepared({CHEAP: 8000, DEAR: 8000, DEARER: 8000})
    known = rounds.solve_within(within, BUDGET - 100, Script([(DEAR,)]), Limits(seconds=10), lambda progress: None)
    solver = Script([(DEARER,), (CHEAP,)])
    found = rounds.solve_within(within, BUDGET, solver, Limits(seconds=10), lambda progress: None, known=[known])
    assert found.plan.order == CHEAP
    assert len(solver.seconds) == 2 and solver.seconds[1] > solver.seconds[0]


def test_but_not_one_that_proves_that_there_are_no_others_for_its_target():
    within = prepared({DEAR: 8000, DEARER: 8000})
    known = rounds.solve_within(within, BUDGET - 100, Script([(DEAR,)]), Limits(seconds=10), lambda progress: None)
    solver = Proving([(DEARER,)])
    found = rounds.solve_within(within, BUDGET, solver, Limits(seconds=10), lambda progress: None, known=[known])
    assert found.plan.order == DEAR and len(solver.targets) == 1


def test_nor_one_that_was_interrupted():
    within = prepared({DEAR: 8000, DEARER: 8000})
    known = rounds.solve_within(within, BUDGET - 100, Script([(DEAR,)]), Limits(seconds=10), lambda progress: None)
    solver = Stopped([(DEARER,)] * 9)
    found = rounds.solve_within(within, BUDGET, solver, Limits(seconds=10), lambda progress: None, known=[known])
    assert found.plan.order == DEAR and len(solver.targets) == 1
