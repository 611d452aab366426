"""What must hold of every solver, whatever its idea; and of the judge who reads their answers."""

import dataclasses
import json
import math
import time

import pytest

from checkmate_tf import solvers
from checkmate_tf.ir.errors import GraphError, SolverError
from checkmate_tf.ir.graph import GraphBuilder
from checkmate_tf.ir.simulate import keep_all_timeline, structural_floor
from checkmate_tf.solvers import Answer, Limits, Status, StoppedBy
from checkmate_tf.solvers.base import Scope
from tests import oracle, strategies

SHORT = Limits(seconds=0.15)
SMALL_GRAPHS = range(14)

# Solvers that find the optimum on small graphs, with the scope of `oracle.cheapest` in which they do.
EXACT = {"ilp": "stages"}


def variants():
    """Every solver, and once for each order where it leaves the choice."""
    for name in solvers.names():
        solver = solvers.get(name)
        if any(field.name == "order" for field in dataclasses.fields(solver)):
            yield from ((f"{name}-{order}", dataclasses.replace(solver, order=order)) for order in ("fixed", "free"))
        else:
            yield name, solver


def tight_budgets(graph):
    """The floor, and half way from there to the peak of keeping everything; none where these are the same."""
    floor_bytes, base_bytes = structural_floor(graph)[0], keep_all_timeline(graph).peak_bytes
    return sorted({floor_bytes, (floor_bytes + base_bytes) // 2} - {base_bytes})


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """Compiles what is compiled on first use, so that the tests measure solving."""
    graph = strategies.linear_net(6)
    for _, solver in variants():
        solvers.solve(graph, 7, solver, SHORT)


@pytest.mark.parametrize("solver", [pytest.param(solver, id=name) for name, solver in variants()])
class TestEverySolver:
    def test_its_plans_fit_and_its_bounds_hold_on_graphs_with_everything_in_them(self, solver):
        plans = 0
        for seed in SMALL_GRAPHS:
            graph = strategies.random_graph(seed, max_ops=6)
            for budget in [*tight_budgets(graph), keep_all_timeline(graph).peak_bytes]:
                solution = solvers.solve(graph, budget, solver, SHORT)
                # A bound with a scope holds within it; one without holds for all orders.
                scope = "fixed" if solution.stats.get("bound_scope") == Scope.FIXED else "free"
                assert solution.bound_seconds <= oracle.cheapest(graph, budget, scope) * (1 + 1e-6)
                if solution.plan is not None:
                    plans += 1
                    assert oracle.peak_bytes(graph, solution.plan.order) == solution.peak_bytes <= budget
                    assert oracle.seconds(graph, solution.plan.order) == solution.seconds >= solution.bound_seconds
                    assert solution.seconds >= oracle.cheapest(graph, budget, "free")
                elif solution.status is Status.INFEASIBLE:
                    assert oracle.cheapest(graph, budget, "free") == math.inf
        assert plans > 0

    def test_the_same_seed_gives_the_same_plan(self, solver):
        for graph, budget in ((strategies.linear_net(12), 12), (strategies.random_graph(3, 12, 12), 9)):
            first, second = (solvers.solve(graph, budget, solver, Limits(seconds=0.5, seed=5)) for _ in range(2))
            if first.stopped_by is second.stopped_by is StoppedBy.DONE:  # the clock stops at another step each time
                assert first.plan == second.plan and first.bound_seconds == second.bound_seconds

    def test_below_the_floor_it_is_proved_infeasible(self, solver):
        graph = strategies.linear_net(4)
        solution = solvers.solve(graph, structural_floor(graph)[0] - 1, solver, SHORT)
        assert (solution.status, solution.plan, solution.seconds) == (Status.INFEASIBLE, None, math.inf)

    def test_an_empty_graph_has_an_empty_plan(self, solver):
        solution = solvers.solve(GraphBuilder(resident_bytes=3).build(), 3, solver, SHORT)
        assert solution.status is Status.OPTIMAL and solution.plan.steps == () and solution.seconds == 0.0

    def test_a_single_op_runs_once(self, solver):
        builder = GraphBuilder(resident_bytes=1)
        builder.op("only", bytes=4, seconds=2.0, scratch_bytes=2)
        graph = builder.build([0])
        solution = solvers.solve(graph, 7, solver, SHORT)
        assert solution.status is Status.OPTIMAL and solution.plan.order == (0,)
        assert solvers.solve(graph, 6, solver, SHORT).status is Status.INFEASIBLE

    def test_a_graph_of_zero_costs_and_zero_bytes_is_no_trouble(self, solver):
        builder = GraphBuilder()
        a = builder.op("a")
        builder.op("b", [a])
        builder.op("nothing", [a], bytes=[])
        solution = solvers.solve(builder.build(), 0, solver, SHORT)
        assert solution.status is Status.OPTIMAL and sorted(solution.plan.order) == [0, 1, 2]

    def test_a_cycle_is_a_graph_error(self, solver):
        graph = strategies.linear_net(2)
        ops = list(graph.ops)
        ops[0] = dataclasses.replace(ops[0], inputs=(1,))
        with pytest.raises(GraphError, match="G2"):
            solvers.solve(dataclasses.replace(graph, ops=tuple(ops)), 100, solver, SHORT)

    @pytest.mark.parametrize("changes, invariant", [
        ({"seconds": -1.0}, "G3"), ({"seconds": math.nan}, "G3"), ({"seconds": math.inf}, "G3"),
        ({"scratch_bytes": -1}, "G3"), ({"inputs": (0, 0)}, "G4")])
    def test_unsound_numbers_and_doubled_edges_are_a_graph_error(self, solver, changes, invariant):
        graph = strategies.linear_net(2)
        ops = (graph.ops[0], dataclasses.replace(graph.ops[1], **changes), *graph.ops[2:])
        with pytest.raises(GraphError, match=invariant):
            solvers.solve(dataclasses.replace(graph, ops=ops), 4, solver, SHORT)

    def test_parts_that_have_nothing_to_do_with_each_other_are_no_trouble(self, solver):
        builder = GraphBuilder()
        for part in range(3):
            a = builder.op(f"a{part}", bytes=2, seconds=1.0)
            b = builder.op(f"b{part}", [a], bytes=2, seconds=1.0)
            builder.op(f"c{part}", [a, b], bytes=1, seconds=1.0, backward=True)
        builder.op("alone", bytes=1, seconds=1.0)
        graph = builder.build()
        solution = solvers.solve(graph, 5, solver, SHORT)  # 2 + 2 + 1 while a "c" runs, and nothing beside
        assert solution.plan is not None and set(solution.plan.order) == set(graph.order)

    def test_free_ops_and_values_without_bytes_among_others_are_no_trouble(self, solver):
        builder = GraphBuilder()
        outputs = [builder.op("in", bytes=0, seconds=0.0)]
        for layer in range(5):
            outputs.append(builder.op(f"layer{layer}", outputs[-1:], bytes=layer % 2, seconds=float(layer % 3)))
        gradient: list[int] = []
        for layer in range(5, 0, -1):
            gradient = [builder.op(f"gradient{layer}", [outputs[layer], outputs[layer - 1], *gradient], bytes=layer % 2,
                                   seconds=0.0, backward=True)]
        graph = builder.build()
        for budget in range(structural_floor(graph)[0], keep_all_timeline(graph).peak_bytes + 1):
            solution = solvers.solve(graph, budget, solver, SHORT)
            if solution.plan is not None:
                assert oracle.peak_bytes(graph, solution.plan.order) <= budget
            assert solution.bound_seconds <= oracle.cheapest(graph, budget, "fixed") * (1 + 1e-6)

    def test_the_time_limit_is_kept(self, solver):
        graph = strategies.linear_net(100)
        started = time.monotonic()
        solvers.solve(graph, 12, solver, Limits(seconds=0.5))
        # Without a limit it would go on for a minute or for ever; a busy machine may take some seconds to stop.
        assert time.monotonic() - started < 15.0

    def test_progress_gets_better_only(self, solver):
        seen = []
        solvers.solve(strategies.linear_net(12), 12, solver, Limits(seconds=0.5), seen.append)
        costs = [progress.incumbent_seconds for progress in seen if progress.incumbent_seconds is not None]
        assert costs == sorted(costs, reverse=True)
        assert all(earlier.elapsed_seconds <= later.elapsed_seconds for earlier, later in zip(seen, seen[1:]))

    def test_its_stats_can_be_saved(self, solver, tmp_path):
        graph = strategies.linear_net(12)
        solution = solvers.solve(graph, keep_all_timeline(graph).peak_bytes, solver, SHORT)
        json.dumps(dict(solution.stats), allow_nan=False)
        solution.save(tmp_path / "plan.json")
        assert solvers.Solution.load(tmp_path / "plan.json").plan == solution.plan

    def test_it_is_a_frozen_object_of_options(self, solver):
        assert dataclasses.replace(solver) == solver and solvers.get(solver.name).name == solver.name
        with pytest.raises(dataclasses.FrozenInstanceError):
            solver.name = "other"


@pytest.mark.parametrize("name, scope", EXACT.items())
def test_exact_solvers_equal_the_exhaustive_search(name, scope):
    compared = 0
    for seed in range(200):
        graph = strategies.random_graph(seed, max_ops=7)
        for budget in tight_budgets(graph):
            solution = solvers.solve(graph, budget, solvers.get(name), Limits(seconds=30, gap=0.0))
            assert solution.seconds == oracle.cheapest(graph, budget, scope), f"seed {seed}, budget {budget}"
            assert solution.bound_seconds <= oracle.cheapest(graph, budget, "fixed") * (1 + 1e-6)
            compared += 1
    assert compared > 50


def test_the_exhaustive_scopes_are_nested():
    for seed in range(40):
        graph = strategies.random_graph(seed, max_ops=6)
        for budget in tight_budgets(graph):
            stages, fixed, free = (oracle.cheapest(graph, budget, scope) for scope in ("stages", "fixed", "free"))
            assert stages >= fixed >= free >= graph.seconds


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(SolverError, match="keep_all.*Received: 'magic'"):
        solvers.get("magic")


@dataclasses.dataclass(frozen=True)
class Claims:
    """A solver that answers what it is told."""

    answer: Answer
    name: str = "claims"

    def search(self, graph, budget_bytes, limits, report):
        return self.answer


@dataclasses.dataclass(frozen=True)
class RunsOutOfMemory:
    """A solver that tells a plan and then needs more memory than there is."""

    order: tuple[int, ...] | None
    name: str = "greedy for memory"

    def search(self, graph, budget_bytes, limits, report):
        report(solvers.Progress(graph.seconds, graph.seconds, 0.0, self.order))
        raise MemoryError


class TestJudge:
    GRAPH = strategies.linear_net(3)

    def judged(self, budget, **answer):
        return solvers.solve(self.GRAPH, budget, Claims(Answer(**{"stopped_by": StoppedBy.DONE, **answer})))

    def test_a_plan_over_the_budget_is_an_error(self):
        with pytest.raises(SolverError, match="5 bytes for a budget of 4"):
            self.judged(4, order=self.GRAPH.order)

    @pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1, 3, 4, 5, 6), (0, 1, 2, 3, 4, 5, 99)])
    def test_an_order_that_is_no_plan_is_an_error(self, order):
        with pytest.raises(SolverError, match="no plan"):
            self.judged(100, order=order)

    def test_a_bound_above_its_own_plan_is_an_error(self):
        with pytest.raises(SolverError, match="bound"):
            self.judged(100, order=self.GRAPH.order, bound_seconds=8.0)

    def test_a_bound_that_meets_the_plan_is_optimality(self):
        order = (0, *self.GRAPH.order)
        assert self.judged(100, order=order).status is Status.FEASIBLE
        assert self.judged(100, order=order, bound_seconds=8.0).status is Status.OPTIMAL

    def test_near_enough_to_the_bound_to_stop_is_not_optimality(self):
        answer = Answer((0, *self.GRAPH.order), StoppedBy.DONE, bound_seconds=7.999)
        solution = solvers.solve(self.GRAPH, 100, Claims(answer), Limits(gap=0.01))
        assert solution.status is Status.FEASIBLE and 0 < solution.gap < 0.01

    def test_running_every_op_once_needs_no_bound_to_be_optimal(self):
        solution = self.judged(100, order=self.GRAPH.order)
        assert (solution.status, solution.overhead, solution.gap) == (Status.OPTIMAL, 0.0, 0.0)

    def test_no_order_is_unknown_unless_it_is_proved(self):
        assert self.judged(100, order=None, stopped_by=StoppedBy.TIME).status is Status.UNKNOWN
        assert self.judged(100, order=None, infeasible=True).status is Status.INFEASIBLE

    def test_a_solver_that_runs_out_of_memory_leaves_what_it_told(self):
        nothing = solvers.solve(self.GRAPH, 100, RunsOutOfMemory(None))
        assert (nothing.status, nothing.stopped_by) == (Status.UNKNOWN, StoppedBy.MEMORY)
        plan = solvers.solve(self.GRAPH, 100, RunsOutOfMemory(self.GRAPH.order))
        assert plan.stopped_by is StoppedBy.MEMORY and plan.plan.order == self.GRAPH.order
