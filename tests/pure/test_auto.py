"""The solver that is used when nobody chooses one."""

import math
import os
import subprocess
import time

import pytest

from checkmate_tf.ir.errors import SolverError
from checkmate_tf.ir.graph import GraphBuilder, graph_from_instance
from checkmate_tf.ir.simulate import keep_all_timeline, structural_floor
from checkmate_tf.solvers import auto, backend, bounds, rockmate
from checkmate_tf.solvers.anneal import Anneal
from checkmate_tf.solvers.auto import Auto
from checkmate_tf.solvers.base import Limits, Scope, Status, StoppedBy, solve
from checkmate_tf.solvers.layered import layered_instance
from checkmate_tf.solvers.rebuild import Rebuild
from tests import oracle
from tests.strategies import interleaved_chains, linear_net, random_graph


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """Compiles what is compiled on first use, so that the tests measure searching."""
    for solver in (Rebuild(rounds=2), Anneal("free", moves=1000)):
        solve(linear_net(6), 7, solver)


def test_what_fits_is_kept():
    graph = linear_net(20)
    solution = solve(graph, keep_all_timeline(graph).peak_bytes, Auto())
    assert solution.status is Status.OPTIMAL and solution.plan.order == graph.order


def test_a_plan_is_found_wherever_there_is_one():
    found = 0
    for seed in range(60):
        graph = random_graph(seed)
        for budget in range(structural_floor(graph)[0], keep_all_timeline(graph).peak_bytes):
            if oracle.cheapest(graph, budget) < math.inf:
                solution = solve(graph, budget, Auto(), Limits(seconds=0.3))
                assert solution.plan is not None and solution.peak_bytes <= budget
                found += 1
    assert found > 15


def test_an_interrupt_returns_the_best_plan_so_far():
    graph = linear_net(20)

    def interrupt_at_first_plan(progress):
        raise KeyboardInterrupt

    solution = solve(graph, 12, Auto(), Limits(seconds=30), interrupt_at_first_plan)
    assert solution.stopped_by is StoppedBy.INTERRUPT
    assert solution.status is Status.FEASIBLE and solution.peak_bytes <= 12


def test_an_interrupt_without_a_plan_is_passed_on(monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr("checkmate_tf.solvers.greedy.attempts", interrupted)
    with pytest.raises(KeyboardInterrupt):
        solve(linear_net(20), 12, Auto())


def test_without_a_plan_the_smallest_peak_reached_is_told():
    # Both values must be kept from their only run on: 4 + 4 bytes, and 1 for the op between. No op alone needs as much,
    # and in another order, "first" right before "last", nobody would.
    builder = GraphBuilder()
    first = builder.op("first", bytes=4, once="a stateful draw")
    second = builder.op("second", bytes=4, once="a stateful draw")
    middle = builder.op("middle", [second], bytes=1, seconds=1.0)
    builder.op("last", [first, middle], seconds=1.0)
    graph = builder.build()
    assert structural_floor(graph)[0] == 5
    solution = solve(graph, 8, Auto("fixed"), Limits(seconds=0.1))
    assert solution.status is Status.UNKNOWN and solution.plan is None
    assert solution.stats["smallest_peak_bytes"] == 9
    assert solve(graph, 8, Auto(), Limits(seconds=10)).peak_bytes == 5


def hard_net():
    """A net that takes seconds to prove: sizes and costs without a pattern, and many values to choose from."""
    builder = GraphBuilder()
    forward = []
    for layer in range(60):
        forward.append(builder.op(f"layer{layer}", forward[-1:] + forward[-4:-3], bytes=100 + 37 * layer * layer % 91,
                                  seconds=1.0 + layer * layer * 29 % 17))
    gradient = []
    for layer in reversed(range(60)):
        gradient = [builder.op(f"gradient{layer}", [*gradient, forward[layer], *forward[max(0, layer - 4):layer]],
                               bytes=100 + 53 * layer % 61, seconds=2.0 + layer * 31 % 13)]
    return builder.build()


def children():
    """The processes that run OR-Tools for this one."""
    listed = subprocess.run(["ps", "-o", "pid=,args=", "--ppid", str(os.getpid())], capture_output=True, text=True).stdout
    return {line.split()[0] for line in listed.splitlines() if "engine.py" in line and "<defunct>" not in line}


@pytest.mark.parametrize("order, scope", [("fixed", Scope.FIXED), ("free", Scope.ANY)])
def test_plan_and_bound_meet_and_the_scope_is_told(order, scope):
    graph = linear_net(20)
    solution = solve(graph, 16, Auto(order), Limits(seconds=60))
    assert (solution.status, solution.stopped_by) == (Status.OPTIMAL, StoppedBy.DONE)
    assert solution.stats["bound_scope"] == scope
    assert solution.seconds == pytest.approx(solution.bound_seconds, rel=1e-5) and solution.seconds > graph.seconds


def test_most_small_graphs_are_proved_in_both_orders():
    proved = compared = 0
    for seed in range(20):
        graph = random_graph(seed, max_ops=7, min_ops=4)
        floor_bytes, base_bytes = structural_floor(graph)[0], keep_all_timeline(graph).peak_bytes
        for order, scope in (("fixed", "fixed"), ("free", "free")):
            cheapest = oracle.cheapest(graph, (floor_bytes + base_bytes) // 2, scope)
            solution = solve(graph, (floor_bytes + base_bytes) // 2, Auto(order), Limits(seconds=2))
            assert solution.bound_seconds <= cheapest * (1 + 1e-6)
            if solution.status is Status.OPTIMAL:
                assert solution.seconds == pytest.approx(cheapest)
                proved += 1
            compared += cheapest < math.inf
    assert proved > 0.6 * compared


def test_in_fixed_order_first_runs_keep_to_it():
    graph = hard_net()
    budget = keep_all_timeline(graph).peak_bytes * 7 // 10
    solution = solve(graph, budget, Auto("fixed"), Limits(seconds=2))
    assert tuple(dict.fromkeys(solution.plan.order)) == graph.order
    assert solution.stats["bound_scope"] == Scope.FIXED


def test_progress_carries_the_bound():
    seen = []
    graph = hard_net()
    solution = solve(graph, keep_all_timeline(graph).peak_bytes * 6 // 10, Auto(), Limits(seconds=4), seen.append)
    bounds_seconds = [progress.bound_seconds for progress in seen]
    assert bounds_seconds == sorted(bounds_seconds) and bounds_seconds[-1] > graph.seconds
    assert solution.bound_seconds == pytest.approx(bounds_seconds[-1], rel=1e-6)


@pytest.mark.parametrize("threads", [1, 2])
def test_no_process_is_left_behind_and_the_time_limit_is_kept(threads):
    graph = hard_net()
    before, started = children(), time.monotonic()
    solution = solve(graph, keep_all_timeline(graph).peak_bytes // 2, Auto(), Limits(seconds=1.5, threads=threads))
    assert time.monotonic() - started < 6.0
    assert solution.plan is not None and children() <= before


def test_an_interrupt_leaves_no_process_behind():
    graph = hard_net()
    before = children()

    def interrupt_at_first_plan(progress):
        raise KeyboardInterrupt

    solution = solve(graph, keep_all_timeline(graph).peak_bytes // 2, Auto(), Limits(seconds=30),
                     interrupt_at_first_plan)
    assert solution.stopped_by is StoppedBy.INTERRUPT and solution.plan is not None and children() <= before


def test_without_or_tools_there_is_a_plan_and_the_plain_bound(monkeypatch, tmp_path):
    dying = tmp_path / "dying.py"
    dying.write_text("import sys; sys.exit(3)")
    monkeypatch.setattr(backend, "_ENGINE", dying)
    graph = hard_net()
    solution = solve(graph, keep_all_timeline(graph).peak_bytes * 7 // 10, Auto(), Limits(seconds=1))
    assert solution.status is Status.FEASIBLE and solution.bound_seconds == graph.seconds


def test_that_nothing_fits_is_proved_where_it_can_be():
    # Both values are kept from their only run on, and "middle" makes 1 byte beside them.
    builder = GraphBuilder()
    first = builder.op("first", bytes=4, seconds=1.0, once="a stateful draw")
    second = builder.op("second", [first], bytes=4, seconds=1.0, once="a stateful draw")
    middle = builder.op("middle", [second], bytes=1, seconds=1.0)
    builder.op("last", [first, middle], seconds=1.0)
    graph = builder.build()
    assert structural_floor(graph)[0] == 8
    assert solve(graph, 8, Auto(), Limits(seconds=10)).status is Status.INFEASIBLE
    in_order = solve(graph, 8, Auto("fixed"), Limits(seconds=10))
    assert in_order.status is Status.UNKNOWN and in_order.stats["no_plan"]


def test_where_the_given_order_leaves_no_room_another_is_made():
    graph = interleaved_chains(16, 30)
    solution = solve(graph, 4, Auto(), Limits(seconds=8))
    assert solution.plan is not None and solution.peak_bytes <= 4


@pytest.mark.parametrize("is_repeated", [True, False])
def test_repeated_blocks_are_solved_once_and_where_there_are_none_nobody_tries(is_repeated, monkeypatch):
    asked = []
    real = rockmate.Rockmate.search
    monkeypatch.setattr(rockmate.Rockmate, "search", lambda *arguments: asked.append(real(*arguments)) or asked[-1])
    monkeypatch.setattr(auto, "_MANY_OPS", 40)
    monkeypatch.setattr(bounds, "findings", lambda *arguments, **settings: iter(()))  # nothing is proved before
    graph = linear_net(64) if is_repeated else graph_from_instance(layered_instance(120))
    budget_bytes = (structural_floor(graph)[0] + 2 * keep_all_timeline(graph).peak_bytes) // 3
    solution = solve(graph, budget_bytes, Auto(), Limits(seconds=3, threads=1))
    assert solution.plan is not None and [answer.order is not None for answer in asked] == [True] * is_repeated


def test_an_unknown_order_is_refused():
    with pytest.raises(SolverError, match='"random"'):
        solve(linear_net(20), 12, Auto("random"))
