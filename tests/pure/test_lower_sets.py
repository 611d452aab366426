import itertools


import pytest

from checkmate_tf import solvers
from checkmate_tf.ir.graph import GraphBuilder
from checkmate_tf.ir.simulate import keep_all_timeline
from checkmate_tf.solvers import lower_sets
from checkmate_tf.solvers.chen import forward_ops, order_without
from tests import oracle, strategies


def diamond():
    """top -> left and right -> bottom, and a gradient that reads them all."""
    builder = GraphBuilder()
    top = builder.op("top", bytes=1, seconds=1.0)
    left = builder.op("left", [top], bytes=2, seconds=1.0)
    right = builder.op("right", [top], bytes=4, seconds=1.0)
    bottom = builder.op("bottom", [left, right], bytes=8, seconds=1.0)
    builder.op("back", [top, left, right, bottom], bytes=1, seconds=1.0, backward=True)
    return builder.build()


def diamonds(count):
    """Diamonds one after the other: x, two branches, the next x that adds them; gradients read a diamond each."""
    builder = GraphBuilder()
    made = [builder.op("x", bytes=2, seconds=1.0)]
    for number in range(count):
        left = builder.op(f"left{number}", made[-1:], bytes=3, seconds=1.0)
        right = builder.op(f"right{number}", made[-1:], bytes=4, seconds=2.0)
        made += [left, right, builder.op(f"x{number}", [left, right], bytes=2, seconds=1.0)]
    gradient = made[-1]
    for number in range(count - 1, -1, -1):
        gradient = builder.op(f"gradient{number}", [*made[3 * number:3 * number + 3], gradient], bytes=2, seconds=1.0,
                              backward=True)
    return builder.build()


def test_the_lower_sets_of_a_diamond():
    # top; top with either side; with both; everything.
    family = lower_sets.all_lower_sets(diamond(), (0, 1, 2, 3), 100)
    assert [tuple(row.nonzero()[0].tolist()) for row in family] == [(0,), (0, 1), (0, 2), (0, 1, 2), (0, 1, 2, 3)]
    assert lower_sets.all_lower_sets(diamond(), (0, 1, 2, 3), 4) is None


def test_the_pruned_family_of_a_diamond_misses_no_set_of_ancestors_and_no_beginning():
    family = lower_sets.pruned_lower_sets(diamond(), (0, 1, 2, 3))
    assert {tuple(row.nonzero()[0].tolist()) for row in family} == {(0,), (0, 1), (0, 2), (0, 1, 2), (0, 1, 2, 3)}


def every_chain(graph):
    """The orders of all chains of lower sets, by plain enumeration."""
    forward = forward_ops(graph)
    readers = {op: [reader.index for reader in graph.ops
                    if any(graph.values[value].producer == op for value in reader.inputs)] for op in forward}
    sets = [frozenset(subset) for size in range(len(forward) + 1) for subset in itertools.combinations(forward, size)
            if all(graph.values[value].producer in subset for op in subset for value in graph.ops[op].inputs)]
    whole = frozenset(forward)
    chains = [(whole,)]
    while chains:
        chain = chains.pop()
        below = [lower for lower in sets if lower < chain[0]]
        chains.extend((lower, *chain) for lower in below)
        if len(chain) == 1:
            continue
        dropped, earlier = set(), frozenset()
        for lower in chain[:-1]:
            boundary = {op for op in lower if any(reader in whole - lower for reader in readers[op])}
            dropped |= lower - earlier - boundary
            earlier = lower
        yield order_without(graph, dropped)


@pytest.mark.parametrize("graph", [strategies.linear_net(layers) for layers in (3, 5, 7)] + [diamonds(3)])
def test_nothing_cheaper_is_among_all_chains_of_lower_sets(graph):
    orders = {order: (oracle.peak_bytes(graph, order), oracle.seconds(graph, order)) for order in every_chain(graph)}
    base_bytes = keep_all_timeline(graph).peak_bytes
    compared = 0
    for budget in sorted({peak for peak, _ in orders.values() if peak < base_bytes}):
        best = min(seconds for peak, seconds in orders.values() if peak <= budget)
        assert solvers.solve(graph, budget, solvers.get("lower_sets")).seconds <= best
        compared += 1
    assert compared > 0


def test_plans_of_training_steps_with_everything_in_them():
    found = 0
    for seed in range(8):
        graph = strategies.training_net(seed, 3 + seed % 6)
        for share in (0.6, 0.9):
            budget = int(share * keep_all_timeline(graph).peak_bytes)
            found += solvers.solve(graph, budget, solvers.get("lower_sets")).plan is not None
    assert found > 2


def test_large_graphs_get_the_pruned_family():
    builder = GraphBuilder()
    ends = [builder.op("start", bytes=1, seconds=1.0)]
    for branch in range(12):  # 2^12 lower sets and more
        ends.append(builder.op(f"branch{branch}", ends[:1], bytes=2, seconds=1.0))
    join = builder.op("join", ends[1:], bytes=1, seconds=1.0)
    gradient = builder.op("loss", [join], bytes=1, seconds=1.0)
    for branch in range(12):
        builder.op(f"gradient{branch}", [ends[1 + branch], gradient], bytes=1, seconds=1.0, backward=True)
    graph = builder.build()
    solution = solvers.solve(graph, keep_all_timeline(graph).peak_bytes, solvers.get("lower_sets"))
    assert solution.overhead == 0.0
    tighter = solvers.solve(graph, keep_all_timeline(graph).peak_bytes - 1, solvers.get("lower_sets"))
    assert not tighter.stats["all_sets"]
    longer = solvers.solve(strategies.linear_net(40), 40, solvers.get("lower_sets"))
    assert longer.stats["all_sets"] and longer.peak_bytes <= 40
