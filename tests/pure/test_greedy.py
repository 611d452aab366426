"""The greedy planner, and the slotted schedule it changes."""

import math

import numpy as np
import pytest

from checkmate_tf.ir.graph import GraphBuilder
from checkmate_tf.ir.plan import plan_from_order
from checkmate_tf.ir.simulate import keep_all_timeline, simulate, structural_floor
from checkmate_tf.solvers import slots
from checkmate_tf.solvers.base import Deadline, Limits, Status, solve
from checkmate_tf.solvers.greedy import Greedy, attempts
from tests import oracle
from tests.strategies import linear_net, random_graph

_LIMITS = Limits(seconds=5)


def test_slots_hold_what_the_simulator_says():
    for seed in range(40):
        graph = random_graph(seed, max_ops=12)
        schedule = slots.schedule_from(slots.problem_from(graph), graph.order, 0)
        timeline = keep_all_timeline(graph)
        assert slots.peak_of(schedule) + graph.resident_bytes == timeline.peak_bytes
        assert slots.order_of(schedule).tolist() == list(graph.order)


def test_runs_come_and_go_without_a_trace():
    checked = 0
    for seed in range(60):
        graph = random_graph(seed, max_ops=12)
        problem = slots.problem_from(graph)
        schedule = slots.schedule_from(problem, graph.order, 5)
        before = [array.copy() for array in _contents(problem, schedule)]
        random = np.random.default_rng(seed)
        slots.begin(schedule)
        for _ in range(10):
            op = int(random.integers(len(graph.ops)))
            first = int(schedule.run_slot[op, 0])
            limit = slots.deadline(problem, schedule, op)
            free = [slot for slot in range(first + 1, min(limit, len(schedule.op_at) - 1)) if schedule.op_at[slot] < 0]
            if problem.pinned[op] or not free:
                continue
            slots.insert(problem, schedule, op, int(random.choice(free)))
            timeline = simulate(graph, plan_from_order(graph, slots.order_of(schedule).tolist()))
            assert slots.peak_of(schedule) + graph.resident_bytes == timeline.peak_bytes
            assert schedule.counters[slots.OVERFLOW] == np.maximum(_held(schedule) - 5, 0).sum()
            checked += 1
        slots.undo(problem, schedule)
        for was, now in zip(before, _contents(problem, schedule)):
            np.testing.assert_array_equal(was, now)
    assert checked > 100


def test_a_dropped_value_is_recomputed_right_before_its_next_use():
    # a (8 bytes, 1 second) is needed by b and by the last op; in between, `wide` and `narrow` take 5 + 5 bytes. Keeping
    # a holds 18 bytes there. With 14, only dropping a helps: a again before `last`, for 1 second more.
    builder = GraphBuilder()
    a = builder.op("a", bytes=8, seconds=1.0)
    b = builder.op("b", [a], bytes=1, seconds=10.0)
    wide = builder.op("wide", [b], bytes=5, seconds=10.0)
    narrow = builder.op("narrow", [wide], bytes=5, seconds=10.0)
    c = builder.op("c", [narrow], bytes=1, seconds=10.0)
    builder.op("last", [a, c], bytes=1, seconds=10.0)
    solution = solve(builder.build(), 14, Greedy(), _LIMITS)
    assert solution.plan.order == (0, 1, 2, 3, 4, 0, 5)
    assert solution.overhead == pytest.approx(1 / 51)


def test_plans_on_small_graphs_are_found_and_close_to_optimal():
    ratios, missed = [], 0
    for seed in range(200):
        graph = random_graph(seed)
        for budget in range(structural_floor(graph)[0], keep_all_timeline(graph).peak_bytes):
            least = oracle.cheapest(graph, budget)
            if least == math.inf:
                continue
            solution = solve(graph, budget, Greedy(), Limits(seconds=0.2))
            missed += solution.plan is None
            if solution.plan is not None and least > 0:
                assert solution.seconds >= least * (1 - 1e-9)
                ratios.append(solution.seconds / least)
    assert missed == 0
    assert len(ratios) > 50 and sum(ratios) / len(ratios) < 1.02


def test_a_linear_net_of_500_layers_fits_a_tenth_of_its_memory():
    graph = linear_net(500)
    peak = keep_all_timeline(graph).peak_bytes
    solution = solve(graph, peak // 10, Greedy(attempts=1), _LIMITS)
    # One more forward run suffices: 25 checkpoints and a segment of 20 layers take 45 of the 50. Uniform chains are the
    # hardest case for a greedy choice; a quarter more than that is what it may cost.
    assert solution.status is Status.FEASIBLE
    assert solution.seconds <= graph.seconds + 1.25 * 500


def test_an_op_that_runs_once_is_kept_whatever_it_costs():
    builder = GraphBuilder()
    draw = builder.op("draw", bytes=8, once="a stateful draw")
    cheap = builder.op("cheap", bytes=8, seconds=5.0)
    middle = builder.op("middle", [draw, cheap], bytes=1, seconds=1.0)
    peak = builder.op("peak", [middle], bytes=9, seconds=1.0)
    builder.op("last", [draw, cheap, peak], seconds=1.0)
    # All kept, `peak` holds 8 + 8 + 1 + 9 = 26 bytes; without `cheap` 18, and `last` needs 8 + 8 + 9 = 25.
    solution = solve(builder.build(), 25, Greedy(), _LIMITS)
    assert solution.timeline.runs == (1, 2, 1, 1, 1)


def test_nothing_is_recomputed_from_what_has_been_overwritten():
    builder = GraphBuilder()
    weight = builder.op("read", bytes=0, once="reads a variable")
    scaled = builder.op("scale", [weight], bytes=8, seconds=1.0)
    builder.op("use", [scaled], bytes=1, seconds=1.0)
    builder.op("write", once="writes a variable", overwrites=[weight])
    peak = builder.op("peak", bytes=9, seconds=1.0)
    builder.op("last", [scaled, peak], seconds=1.0)
    # Only dropping `scale` during `peak` could save anything, but its input is gone by then.
    solution = solve(builder.build(), 17, Greedy(), Limits(seconds=0.1))
    assert solution.plan is not None and solution.overhead == 0
    assert solve(builder.build(), 16, Greedy(), Limits(seconds=0.1)).plan is None


def test_the_same_seed_gives_the_same_attempts():
    graph = linear_net(30)
    for number, (one, other) in enumerate(zip(attempts(graph, 20, Deadline(math.inf), 7), attempts(graph, 20, Deadline(math.inf), 7))):
        assert one == other
        if number == 5:
            break


def _contents(problem, schedule):
    slots_of = [schedule.run_slot[op, :runs] for op, runs in enumerate(schedule.runs)]
    uses = [schedule.last_use[value, :schedule.runs[op]] for value, op in enumerate(problem.producer)]
    return [schedule.op_at, schedule.runs, np.concatenate(slots_of), np.concatenate([[0], *uses]), _held(schedule),
            schedule.over, schedule.counters[[slots.OVERFLOW, slots.LENGTH, slots.MANY]]]


def _held(schedule):
    return schedule.held + np.repeat(schedule.lazy, slots.BLOCK)
