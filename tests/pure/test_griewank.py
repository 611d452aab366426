import functools
import math

import pytest

from checkmate_tf import solvers
from checkmate_tf.ir.plan import plan_from_order
from checkmate_tf.ir.simulate import simulate
from checkmate_tf.solvers import griewank
from checkmate_tf.solvers.chen import forward_ops
from tests import strategies


@functools.cache
def fewest_advances(steps, snapshots):
    """By dynamic programming: to reverse the last step first, advance over all others, with or without a snapshot."""
    if steps == 1:
        return 0
    if snapshots == 0:
        return steps - 1 + fewest_advances(steps - 1, 0)
    return min(middle + fewest_advances(steps - middle, snapshots - 1) + fewest_advances(middle, snapshots)
               for middle in range(1, steps))


def advances(steps, snapshots):
    """What `split` makes of it."""
    if steps == 1:
        return 0
    if snapshots == 0:
        return steps * (steps - 1) // 2
    middle = griewank.split(steps, snapshots)
    return middle + advances(steps - middle, snapshots - 1) + advances(middle, snapshots)


@pytest.mark.parametrize("steps", range(1, 40))
@pytest.mark.parametrize("snapshots", [1, 2, 3, 5, 9])
def test_the_split_takes_the_fewest_advances(steps, snapshots):
    with_start = snapshots + 1
    repetitions = next(r for r in range(99) if math.comb(with_start + r, with_start) >= steps)
    formula = repetitions * steps - math.comb(with_start + repetitions, with_start + 1)
    assert advances(steps, snapshots) == fewest_advances(steps, snapshots) == formula


def test_snapshots_stand_where_an_advance_leaves_them():
    # 10 steps, 2 snapshots and the start: C(3 + 2, 3) = 10, so r = 2. The first at C(3 + 0, 3) = 1 or later and
    # 10 - C(2 + 2, 2) = 4 or later; then 6 steps with one fewer: r = 2 again, at 6 - C(1 + 2, 1) = 3 or later.
    assert griewank.places(0, 10, 2) == [4, 7]


def test_a_net_of_three_layers_without_snapshots_starts_anew_for_each_gradient():
    # Layers 0 1 2, loss 3, gradients 4 5 6 of layers 2 1 0. Steps end at 0, 1, 2; the last is the loss with what it
    # reads. Gradient 2 reads layer 2 and the loss. Gradient 1 reads layers 1 and 2 and misses 1: from the start again.
    # Gradient 0 reads layers 0 and 1, and 0 is there because segment 1 reads it.
    graph = strategies.linear_net(3)
    assert griewank.revolving_order(graph, forward_ops(graph), 0) == (0, 1, 2, 3, 4, 0, 1, 5, 6)
    # With one more layer: gradients 5 6 7 8 of layers 3 2 1 0.
    graph = strategies.linear_net(4)
    assert griewank.revolving_order(graph, forward_ops(graph), 0) == (0, 1, 2, 3, 4, 5, 0, 1, 2, 6, 7, 0, 8)


@pytest.mark.parametrize("layers", [5, 9, 20, 40])
def test_a_linear_net_takes_no_more_runs_than_the_formula_allows(layers):
    graph = strategies.linear_net(layers)
    for snapshots in (1, 2, 3, 4):
        order = griewank.revolving_order(graph, forward_ops(graph), snapshots)
        # Every advance is a run, and every segment is run once more for its own reversal, but for the last.
        most = fewest_advances(layers + 2, snapshots) + layers + 2
        assert len(order) <= len(graph.ops) + most
        # Snapshots; the segment, what it reads, the two gradients; and what passes while it advances.
        assert simulate(graph, plan_from_order(graph, order)).peak_bytes <= snapshots + 6


def test_it_goes_where_chen_does_not():
    graph = strategies.linear_net(40)
    assert all(solvers.solve(graph, 8, solvers.get(name)).plan is None for name in ("chen_sqrt", "chen_greedy"))
    assert solvers.solve(graph, 8, solvers.get("griewank")).peak_bytes <= 8
    assert solvers.solve(graph, 8, solvers.get("griewank_linearized")).peak_bytes <= 8


def test_numbers_of_snapshots_go_down_to_none():
    assert griewank.snapshot_counts(3) == (3, 2, 1, 0)
    assert griewank.snapshot_counts(20) == (20, 17, 14, *range(12, -1, -1))
