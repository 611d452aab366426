"""Ruin and recreate."""

import math

from checkmate_tf.ir.simulate import keep_all_timeline, structural_floor
from checkmate_tf.solvers import greedy
from checkmate_tf.solvers.base import Deadline, Limits, judge, solve
from checkmate_tf.solvers.rebuild import Rebuild, rebuilds
from tests import oracle
from tests.strategies import linear_net, random_graph


def test_small_graphs_are_solved_to_optimality_in_nearly_all_cases():
    cases = optimal = 0
    for seed in range(150):
        graph = random_graph(seed, max_ops=6)
        for budget in range(structural_floor(graph)[0], keep_all_timeline(graph).peak_bytes):
            least = oracle.cheapest(graph, budget)
            if least == math.inf:
                continue
            solution = solve(graph, budget, Rebuild(rounds=50), Limits(seconds=5))
            assert solution.plan is not None and solution.seconds >= least * (1 - 1e-9)
            cases += 1
            optimal += solution.seconds <= least * (1 + 1e-9)
    assert cases >= 15 and optimal >= 0.95 * cases


def test_a_linear_net_needs_one_more_forward_run_at_the_square_root_of_its_memory():
    # 100 layers in 25 values: checkpoints every 10 layers hold 10, a segment 10 more. Each layer that is no checkpoint
    # runs twice; the last segment need not: 81 runs more. With 25 values some segments can be longer.
    graph = linear_net(100)
    first = next(greedy.attempts(graph, 25, Deadline(math.inf), 0))
    solution = solve(graph, 25, Rebuild(rounds=1000), Limits(seconds=60))
    assert solution.seconds <= graph.seconds + 81 < first.seconds


def test_every_plan_is_better_than_the_one_before_and_fits():
    graph = linear_net(60)
    start = next(greedy.attempts(graph, 12, Deadline(math.inf), 0))
    found = list(rebuilds(graph, 12, start, Deadline(math.inf), 1, rounds=200))
    costs = [start.seconds, *(attempt.seconds for attempt in found)]
    assert len(found) > 2 and all(later < earlier for earlier, later in zip(costs, costs[1:]))
    for attempt in found:
        _, timeline = judge(graph, attempt.order, "rebuild")
        assert timeline.peak_bytes == attempt.peak_bytes <= 12


def test_a_start_that_does_not_fit_is_repaired():
    graph = linear_net(20)
    start = greedy.Attempt(graph.order, keep_all_timeline(graph).peak_bytes, graph.seconds, False)
    *_, last = rebuilds(graph, 10, start, Deadline(math.inf), 0, rounds=20)
    assert last.fits and last.peak_bytes <= 10


def test_the_same_seed_and_rounds_give_the_same_plan():
    graph = linear_net(40)
    one, other = (solve(graph, 12, Rebuild(rounds=100), Limits(seconds=60, seed=3)) for _ in range(2))
    assert one.plan == other.plan
