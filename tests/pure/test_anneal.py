"""The annealer: its moves keep schedules valid and undoable, and what it finds is as good as an exhaustive search's."""

import math

import numpy as np
import pytest

from checkmate_tf.ir.errors import SolverError
from checkmate_tf.ir.graph import GraphBuilder
from checkmate_tf.ir.simulate import keep_all_timeline, structural_floor
from checkmate_tf.solvers import greedy, moves, slots
from checkmate_tf.solvers.anneal import Anneal, walks
from checkmate_tf.solvers.base import Deadline, Limits, Status, judge, solve
from tests import oracle
from tests.strategies import linear_net, random_graph

_MIX = np.array([0.4, 0.2, 0.3])


@pytest.mark.parametrize("is_free", [False, True], ids=["fixed", "free"])
def test_a_hot_walk_stays_within_the_rules(is_free):
    recomputed = 0
    for seed in range(60):
        graph = random_graph(seed, max_ops=14)
        budget = structural_floor(graph)[0] - graph.resident_bytes
        problem = slots.problem_from(graph)
        schedule = slots.schedule_from(problem, graph.order, budget, room=30)
        walk = moves.walk_for(problem, schedule)
        random = np.random.Generator(np.random.PCG64(seed))
        rules = moves.order_rules(graph)
        for _ in range(5):
            moves.anneal(problem, schedule, rules, walk, random, _MIX, is_free, budget, 100, 10.0, 10.0)
            order = slots.order_of(schedule).tolist()
            _, timeline = judge(graph, order, "walk")
            assert slots.peak_of(schedule) + graph.resident_bytes == timeline.peak_bytes
            assert schedule.spent[0] * (graph.seconds or 1.0) == pytest.approx(timeline.seconds)
            held = schedule.held + np.repeat(schedule.lazy, slots.BLOCK)
            assert schedule.counters[slots.OVERFLOW] == np.maximum(held - budget, 0).sum()
            if not is_free:
                assert list(dict.fromkeys(order)) == list(graph.order)
            recomputed += len(order) > len(graph.ops)
    assert recomputed > 50


@pytest.mark.parametrize("move", [moves._advance, moves._postpone], ids=["advance", "postpone"])
def test_first_runs_move_with_what_they_wait_for_or_what_waits_for_them(move):
    most = 0
    for seed in range(60):
        graph = random_graph(seed, max_ops=14)
        problem, rules = slots.problem_from(graph), moves.order_rules(graph)
        schedule = slots.schedule_from(problem, graph.order, 0, room=30)
        walk, random = moves.walk_for(problem, schedule), np.random.Generator(np.random.PCG64(seed))
        for _ in range(10):
            slots.begin(schedule)
            move(problem, schedule, rules, walk, random)
            most = max(most, int(schedule.counters[slots.LOGGED]))
            _, timeline = judge(graph, slots.order_of(schedule).tolist(), "walk")
            assert slots.peak_of(schedule) + graph.resident_bytes == timeline.peak_bytes
            assert timeline.seconds == pytest.approx(graph.seconds)  # nothing is run again
    assert most > 3


def test_an_attempt_is_what_it_claims_to_be():
    """A walk that starts from a plan that fits and ends elsewhere once claimed the start's peak for where it ended."""
    for seed in range(40):
        graph = random_graph(seed, max_ops=14)
        floor_bytes, base_bytes = structural_floor(graph)[0], keep_all_timeline(graph).peak_bytes
        budget = (floor_bytes + base_bytes) // 2
        start = next(greedy.attempts(graph, budget, Deadline(math.inf), seed))
        for attempt in walks(graph, budget, start, Deadline(math.inf), seed, is_free=True, most_moves=20_000):
            if attempt is None:
                continue
            _, timeline = judge(graph, attempt.order, "walk")
            assert timeline.seconds == pytest.approx(attempt.seconds)
            assert timeline.peak_bytes <= attempt.peak_bytes
            assert attempt.fits == (timeline.peak_bytes <= budget)


@pytest.mark.parametrize("scope", ["fixed", "free"])
def test_small_graphs_are_solved_to_optimality_in_nearly_all_cases(scope):
    cases = optimal = 0
    for seed in range(150):
        graph = random_graph(seed, max_ops=6)
        for budget in range(structural_floor(graph)[0], keep_all_timeline(graph).peak_bytes):
            least = oracle.cheapest(graph, budget, scope)
            if least == math.inf:
                continue
            solution = solve(graph, budget, Anneal(scope, moves=20_000), Limits(seconds=5))
            assert solution.plan is None or solution.seconds >= least * (1 - 1e-9)
            cases += 1
            optimal += solution.seconds <= least * (1 + 1e-9)
    assert cases >= 15 and optimal >= 0.95 * cases


def test_free_order_finds_what_fixed_order_cannot():
    # b must not run before a in fixed order, where a's 8 bytes stay until `last`: 8 + 8 + 2 during `b`. The other way
    # around, b is condensed to 2 bytes first.
    builder = GraphBuilder()
    a = builder.op("a", bytes=8, once="a stateful draw")
    b = builder.op("b", bytes=8, seconds=1.0)
    small = builder.op("small", [b], bytes=2, seconds=1.0)
    builder.op("last", [a, small], bytes=1, seconds=1.0)
    graph = builder.build()
    assert solve(graph, 12, Anneal("fixed", moves=20_000), Limits(seconds=5)).plan is None
    solution = solve(graph, 12, Anneal("free", moves=20_000), Limits(seconds=5))
    assert solution.plan.order == (1, 2, 0, 3) and solution.status is Status.OPTIMAL


def test_the_same_seed_and_moves_give_the_same_plan():
    graph = linear_net(40)
    one, other = (solve(graph, 15, Anneal(moves=50_000), Limits(seconds=60, seed=3)) for _ in range(2))
    assert one.plan == other.plan and one.stats["walks"] == other.stats["walks"]


def test_a_linear_net_needs_one_more_forward_run_at_the_square_root_of_its_memory():
    # 36 layers and the loss in 14 values: checkpoints every 6 layers hold 6, a segment 6 more. Each layer that is no
    # checkpoint runs twice; the last segment need not.
    graph = linear_net(36)
    solution = solve(graph, 14, Anneal(moves=300_000), Limits(seconds=60))
    assert solution.seconds <= graph.seconds + 30


def test_an_unknown_order_is_refused():
    with pytest.raises(SolverError, match='Received: "sorted"'):
        solve(linear_net(4), 5, Anneal("sorted"))
