"""The solver that is used when nobody chooses one."""

import math

import pytest

from checkmate_tf.ir.graph import GraphBuilder
from checkmate_tf.ir.simulate import keep_all_timeline, structural_floor
from checkmate_tf.solvers.auto import Auto
from checkmate_tf.solvers.base import Limits, Status, StoppedBy, solve
from tests import oracle
from tests.strategies import linear_net, random_graph


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
    # Both values must be kept from their only run on: 4 + 4 bytes, and 1 for the op between. No op alone needs as much.
    builder = GraphBuilder()
    first = builder.op("first", bytes=4, once="a stateful draw")
    second = builder.op("second", bytes=4, once="a stateful draw")
    middle = builder.op("middle", [second], bytes=1, seconds=1.0)
    builder.op("last", [first, middle], seconds=1.0)
    graph = builder.build()
    assert structural_floor(graph)[0] == 5
    solution = solve(graph, 8, Auto(), Limits(seconds=0.1))
    assert solution.status is Status.UNKNOWN and solution.plan is None
    assert solution.stats["smallest_peak_bytes"] == 9
