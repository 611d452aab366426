import dataclasses
import math

import pytest

from checkmate_tf import solvers
from checkmate_tf.ir.graph import GraphBuilder
from checkmate_tf.ir.simulate import keep_all_timeline, structural_floor
from checkmate_tf.solvers.backend import ConstraintModel, End
from checkmate_tf.solvers.intervals import Intervals
from tests import oracle, strategies

LONG = solvers.Limits(seconds=20, gap=0.0)


def test_a_constraint_model_by_hand():
    """Two intervals of 2 bytes under a capacity of 3, one from 0 to 4: the other starts at 4 of 0, 3, 4 and 9."""
    model = ConstraintModel()
    here = model.column(1, 1)
    first, first_end = model.column(0, 0), model.column(4, 4)
    second, second_end = model.choice([0, 3, 4, 9]), model.column(1, 20)
    model.interval(first, here, 2, end=first_end, horizon=20)
    model.interval(second, here, 2, end=second_end, horizon=20)
    capacity = model.column(3, 3)
    outcome = model.solve([(second, 1)], capacity, seconds=10, gap=0.0, seed=0, workers=1)
    assert (outcome.end, outcome.values[second], outcome.bound) == (End.OPTIMAL, 4, 4)


def test_a_constraint_model_without_solution():
    model = ConstraintModel()
    here, start = model.column(1, 1), model.column(0, 5)
    model.interval(start, here, 4)
    outcome = model.solve([(start, 1)], model.column(3, 3), seconds=10, gap=0.0, seed=0, workers=1)
    assert outcome.end is End.INFEASIBLE and outcome.values is None


@pytest.mark.slow
def test_with_as_many_runs_as_stages_it_is_the_optimum_of_stage_plans():
    compared = 0
    for seed in range(200):
        graph = strategies.random_graph(seed, max_ops=7)
        graph = dataclasses.replace(graph, ops=tuple(dataclasses.replace(op, reuses=()) for op in graph.ops))
        for budget in range(structural_floor(graph)[0], keep_all_timeline(graph).peak_bytes):
            solution = solvers.solve(graph, budget, Intervals(most_runs=7), LONG)
            best = oracle.cheapest(graph, budget, "stages")
            assert solution.seconds == best, f"seed {seed}, budget {budget}"
            compared += 1
    assert compared > 20


def chain_read_three_times():
    """a, of 1 byte and 1 s, is read by three ops; before each runs an op of 5 bytes."""
    builder = GraphBuilder()
    a = builder.op("a", bytes=1, seconds=1.0)
    for number in range(3):
        builder.op(f"wide{number}", bytes=5, seconds=1.0)
        builder.op(f"reader{number}", [a], bytes=1, seconds=1.0)
    return builder.build()


@pytest.mark.parametrize("most_runs, seconds", [(2, math.inf), (3, math.inf), (4, 10.0)])
def test_how_often_an_op_may_run_is_a_restriction(most_runs, seconds):
    # With 5 bytes a cannot be held beside a wide op, so it runs four times: 7 s and 3 s more.
    graph = chain_read_three_times()
    solution = solvers.solve(graph, 5, Intervals(most_runs=most_runs), LONG)
    assert solution.seconds == seconds
    assert solution.bound_seconds == 7.0 and solution.status is not solvers.Status.INFEASIBLE
    if most_runs < 4:
        assert solution.stats["no_such_plan"]


def test_a_hint_that_is_no_stage_plan_is_no_trouble():
    graph = strategies.linear_net(3)
    hinted = Intervals(start=(0, 0, 1, 2, 3, 4, 5, 6))
    assert solvers.solve(graph, 6, hinted, LONG).peak_bytes <= 6
