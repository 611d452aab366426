import math

import numpy as np
import pytest

from checkmate_tf import solvers
from checkmate_tf.ir.errors import SolverError
from checkmate_tf.ir.graph import GraphBuilder
from checkmate_tf.ir.simulate import keep_all_timeline, structural_floor
from checkmate_tf.solvers import backend, matrices
from checkmate_tf.solvers.backend import End, Engine, LinearModel
from checkmate_tf.solvers.ilp import Ilp
from checkmate_tf.solvers.programs import StageProgram
from tests import oracle, strategies

EXACT = solvers.Limits(seconds=30, gap=0.0)


@pytest.mark.parametrize("engine", list(Engine))
def test_checkmates_linear_net_of_17_ops_at_budget_4(engine):
    # 8 layers, loss, 8 gradients, unit cost and memory (the paper's appendix A). Budget 4 is the floor: a gradient, the
    # one before it, and two activations.
    graph = strategies.linear_net(8)
    assert len(graph.ops) == 17 and structural_floor(graph)[0] == 4
    solution = solvers.solve(graph, 4, Ilp(engine=engine), EXACT)
    assert solution.status is solvers.Status.OPTIMAL
    assert solution.seconds == oracle.cheapest(graph, 4, "stages") == 38.0


@pytest.mark.parametrize("layers, budget", [(3, 4), (4, 4), (4, 5), (5, 5)])
def test_small_linear_nets_cost_what_the_exhaustive_search_finds(layers, budget):
    graph = strategies.linear_net(layers)
    expected = oracle.cheapest(graph, budget, "stages")
    assert solvers.solve(graph, budget, solvers.get("ilp"), EXACT).seconds == expected


def test_engines_agree_with_each_other_and_with_the_whole_program():
    graph = strategies.linear_net(6)
    for budget in (5, 6, 7):
        costs = [solvers.solve(graph, budget, Ilp(engine=engine), EXACT).seconds for engine in Engine]
        program = StageProgram(graph, budget, range(len(graph.ops)))  # eq. 9 as it stands, all stages exact
        outcome = program.model.solve(Engine.HIGHS, seconds=30, gap=0.0, seed=0)
        assert outcome.end is End.OPTIMAL
        assert costs == pytest.approx([outcome.bound / program.cost_unit] * len(costs), rel=1e-6)


def test_a_dropped_result_is_made_again_at_the_end():
    builder = GraphBuilder()
    builder.op("pair", bytes=[1, 2], seconds=1.0)
    builder.op("use", [1], bytes=2, seconds=2.0)
    graph = builder.build([0])
    # Keeping output 0 while "use" runs takes 1 + 2 + 2 = 5 bytes.
    assert solvers.solve(graph, 4, solvers.get("ilp"), EXACT).plan.order == (0, 1, 0)


def test_what_must_run_once_is_kept_or_there_is_no_plan():
    def graph_with(once):
        builder = GraphBuilder()
        a = builder.op("a", bytes=3, seconds=1.0, once=once)
        b = builder.op("b", [a], bytes=1, seconds=1.0)
        c = builder.op("c", [b], bytes=3, seconds=1.0)
        d = builder.op("d", [c], bytes=1, seconds=1.0)
        builder.op("e", [a, d], bytes=1, seconds=1.0)
        return builder.build()
    assert solvers.solve(graph_with(None), 5, solvers.get("ilp"), EXACT).plan.order == (0, 1, 2, 3, 0, 4)
    without = solvers.solve(graph_with("a stateful draw"), 5, solvers.get("ilp"), EXACT)
    assert without.plan is None and without.stats["no_plan"] and without.status is solvers.Status.UNKNOWN


def test_an_op_is_not_run_again_once_its_input_has_been_overwritten():
    def graph_with(overwrites):
        builder = GraphBuilder()
        variable = builder.op("read variable", bytes=1, seconds=1.0)
        a = builder.op("a", [variable], bytes=3, seconds=1.0)
        b = builder.op("b", [a], bytes=1, seconds=1.0)
        builder.op("assign", [b], overwrites=[variable] if overwrites else (), bytes=4, once="a variable write")
        builder.op("c", [a, b], bytes=1, seconds=1.0)
        return builder.build()
    # While "assign" runs, b (1) and its output (4) are there: no room for a (3), but for the variable (1).
    assert solvers.solve(graph_with(False), 6, solvers.get("ilp"), EXACT).plan.order == (0, 1, 2, 3, 1, 4)
    assert solvers.solve(graph_with(True), 6, solvers.get("ilp"), EXACT).plan is None


def test_a_given_start_is_improved_or_returned():
    graph = strategies.linear_net(8)
    start = solvers.solve(graph, 5, solvers.get("ilp"), EXACT).plan.order
    again = solvers.solve(graph, 5, Ilp(start=start), solvers.Limits(seconds=1e-3))
    assert again.plan.order == start and again.stopped_by is solvers.StoppedBy.TIME
    worse = (0, *start)  # the first layer twice in a row: a plan, but no stage plan
    assert solvers.solve(graph, 5, Ilp(start=worse), EXACT).seconds == oracle.seconds(graph, start)


def test_sizes_with_no_common_divisor_never_break_the_budget():
    builder = GraphBuilder()
    sizes = [1_000_000_007, 998_244_353, 1_000_003, 2_147_483_647, 179_424_673]
    values = [builder.op(f"f{i}", [], bytes=size, seconds=1.0) for i, size in enumerate(sizes)]
    last = ()
    for i in reversed(range(5)):
        last = (builder.op(f"g{i}", [values[i], *last], bytes=104_729, seconds=1.0),)
    graph = builder.build()
    for budget in (2_400_000_000, 3_000_000_000, 4_000_000_000):
        solution = solvers.solve(graph, budget, solvers.get("ilp"), EXACT)
        assert solution.status is solvers.Status.OPTIMAL and solution.peak_bytes <= budget


def test_too_large_a_graph_is_declined_at_once():
    graph = strategies.linear_net(200)
    solution = solvers.solve(graph, 300, solvers.get("ilp"))
    assert len(graph.ops) == 401
    assert (solution.status, solution.stopped_by) == (solvers.Status.UNKNOWN, solvers.StoppedBy.SIZE)


def test_progress_only_gets_better():
    seen = []
    solvers.solve(strategies.linear_net(10), 7, solvers.get("ilp"), EXACT, seen.append)
    costs = [progress.incumbent_seconds for progress in seen if progress.incumbent_seconds is not None]
    bounds = [progress.bound_seconds for progress in seen]
    assert costs == sorted(costs, reverse=True) and bounds == sorted(bounds) and costs[-1] >= bounds[-1]


@pytest.mark.parametrize("engine", list(Engine))
def test_the_backend_solves_a_knapsack_and_proves_it(engine):
    # max 5a + 4b + 3c with 2a + 3b + c <= 4: a and c, 8.
    model = LinearModel()
    columns = model.columns(3, cost=np.array([-5.0, -4.0, -3.0]))
    model.row(columns, [2.0, 3.0, 1.0], high=4.0)
    outcome = model.solve(engine, seconds=10, gap=0.0, seed=0, start={0: 0, 1: 1, 2: 1})
    assert outcome.end is End.OPTIMAL and outcome.bound == pytest.approx(-8.0)
    np.testing.assert_allclose(outcome.values, [1, 0, 1], atol=1e-6)


@pytest.mark.parametrize("engine", list(Engine))
def test_the_backend_says_infeasible(engine):
    model = LinearModel()
    model.row(model.columns(2), 1.0, low=3.0)
    outcome = model.solve(engine, seconds=10, gap=0.0, seed=0)
    assert outcome.end is End.INFEASIBLE and outcome.values is None


def test_factors_of_one_cell_are_added_up():
    model = LinearModel()
    column = model.columns(1, upper=10.0, cost=-1.0)
    model.rows([(column, 1.0), (column, 2.0)], high=6.0)
    assert model.solve(Engine.HIGHS, seconds=10, gap=0.0, seed=0).bound == pytest.approx(-2.0)


def test_a_model_that_is_refused_is_a_solver_error():
    model = LinearModel()
    model.row(model.columns(1), float("nan"), high=1.0)
    with pytest.raises(SolverError, match="refused"):
        model.solve(Engine.HIGHS, seconds=1, gap=0.0, seed=0)


def test_exact_memory_is_what_makes_the_program_exact():
    certain_is_too_little = 0
    for seed in range(300):
        graph = strategies.random_graph(seed, max_ops=6)
        floor_bytes, base_bytes = structural_floor(graph)[0], keep_all_timeline(graph).peak_bytes
        for budget in {floor_bytes, (floor_bytes + base_bytes) // 2} - {base_bytes}:
            costs = []
            for exact_stages in ((), range(matrices.stage_count(graph))):
                program = StageProgram(graph, budget, exact_stages)
                outcome = program.model.solve(Engine.HIGHS, seconds=30, gap=0.0, seed=0)
                is_feasible = outcome.end is not End.INFEASIBLE
                costs.append(outcome.bound / program.cost_unit if is_feasible else math.inf)
            assert costs[1] == pytest.approx(oracle.cheapest(graph, budget, "stages"), rel=1e-6), f"seed {seed}"
            certain_is_too_little += costs[0] < costs[1] * (1 - 1e-6)
    assert certain_is_too_little > 0


def test_engines_that_die_are_a_solver_error_and_start_again(monkeypatch, tmp_path):
    dying = tmp_path / "dying.py"
    dying.write_text("import sys; print(flush=True); sys.stdin.buffer.read(8); sys.exit(3)")
    model = LinearModel()
    model.row(model.columns(2, cost=1.0), 1.0, low=1.0)
    backend._CHILD.stop()
    monkeypatch.setattr(backend, "_ENGINE", dying)
    with pytest.raises(SolverError, match="exit code 3"):
        model.solve(Engine.HIGHS, seconds=10, gap=0.0, seed=0)
    monkeypatch.undo()
    assert model.solve(Engine.HIGHS, seconds=10, gap=0.0, seed=0).bound == pytest.approx(1.0)


def test_an_engine_killed_for_want_of_memory_leaves_what_was_known_before(monkeypatch, tmp_path):
    killed = tmp_path / "killed.py"
    killed.write_text("import os, sys; print(flush=True); sys.stdin.buffer.read(8); os.kill(os.getpid(), 9)")
    monkeypatch.setattr(backend, "_ENGINE", killed)
    graph = strategies.linear_net(8)
    for solver, has_plan in ((Ilp(), True), (solvers.get("rounding"), False), (solvers.get("intervals"), False)):
        backend._CHILD.stop()
        solution = solvers.solve(graph, 6, solver, solvers.Limits(seconds=5))
        assert solution.stopped_by is solvers.StoppedBy.MEMORY, solver.name
        assert (solution.plan is not None) == has_plan
    backend._CHILD.stop()


def test_engines_over_their_time_are_ended(monkeypatch, tmp_path):
    sleeping = tmp_path / "sleeping.py"
    sleeping.write_text("import time; print(flush=True); time.sleep(60)")
    model = LinearModel()
    model.row(model.columns(2, cost=1.0), 1.0, low=1.0)
    backend._CHILD.stop()
    monkeypatch.setattr(backend, "_ENGINE", sleeping)
    outcome = model.solve(Engine.HIGHS, seconds=1.0, gap=0.0, seed=0, grace_seconds=0.2)
    assert outcome.end is End.LIMIT and outcome.values is None and outcome.bound == -math.inf
    assert backend._CHILD._process.wait(timeout=10) != 0


def test_an_engine_that_is_slow_to_start_is_there_for_the_next_request(monkeypatch, tmp_path):
    slow = tmp_path / "slow.py"
    slow.write_text(f"import runpy, time; time.sleep(2); runpy.run_path({str(backend._ENGINE)!r}, run_name='__main__')")
    model = LinearModel()
    model.row(model.columns(2, cost=1.0), 1.0, low=1.0)
    backend._CHILD.stop()
    monkeypatch.setattr(backend, "_ENGINE", slow)
    assert model.solve(Engine.HIGHS, seconds=0.1, gap=0.0, seed=0, grace_seconds=0.1).end is End.LIMIT
    assert model.solve(Engine.HIGHS, seconds=30, gap=0.0, seed=0).bound == pytest.approx(1.0)
