import math

import pytest

from checkmate_tf import solvers
from checkmate_tf.ir.graph import GraphBuilder
from checkmate_tf.ir.plan import plan_from_order
from checkmate_tf.ir.simulate import simulate
from checkmate_tf.ir.verify import verify_plan
from checkmate_tf.solvers import treewidth
from tests import strategies

GRAPHS = [strategies.random_graph(seed, max_ops=14, min_ops=1) for seed in range(60)] + [
    strategies.training_net(seed, 4) for seed in range(10)] + [strategies.linear_net(12)]


def edges(graph):
    return [(made, op.index) for op in graph.ops for made in graph.predecessors[op.index]]


def ring(size):
    """Two chains from the first op to the last."""
    builder = GraphBuilder()
    values = [builder.op("0", bytes=1)]
    for op in range(1, size - 1):
        values.append(builder.op(str(op), [values[max(0, op - 2)]], bytes=1))
    builder.op("last", values[-2:], bytes=1)
    return builder.build()


@pytest.mark.parametrize("graph, width", [
    (strategies.linear_net(1), 2),   # layer, loss, gradient: a triangle
    (strategies.linear_net(20), 2),  # a strip of triangles
    (ring(9), 2),
])
def test_the_width_of_graphs_whose_treewidth_is_known(graph, width):
    bags, _ = treewidth.decomposition(treewidth.neighbours(graph))
    assert max(bag.bit_count() for bag in bags) - 1 == width


def test_a_tree_has_width_one():
    builder = GraphBuilder()
    values = [builder.op("root", bytes=1)]
    for op in range(1, 15):
        values.append(builder.op(str(op), [values[(op - 1) // 2]], bytes=1))
    bags, _ = treewidth.decomposition(treewidth.neighbours(builder.build()))
    assert max(bag.bit_count() for bag in bags) == 2


@pytest.mark.parametrize("graph", GRAPHS)
def test_a_tree_decomposition_is_one_by_its_definition(graph):
    bags, parents = treewidth.decomposition(treewidth.neighbours(graph))
    sets = [set(treewidth.bits(bag)) for bag in bags]
    assert all(op in sets[op] for op in graph.order)
    assert all(any({a, b} <= bag for bag in sets) for a, b in edges(graph))
    for op in graph.order:  # the bags with an op hang together: all but one have a parent with it
        with_op = [node for node in graph.order if op in sets[node]]
        assert sum(parents[node] < 0 or op not in sets[parents[node]] for node in with_op) == 1


def parts_within(part):
    yield part
    for child in part.children:
        yield from parts_within(child)


@pytest.mark.parametrize("graph", GRAPHS)
def test_separators_separate_and_parts_cover_everything(graph):
    near = treewidth.neighbours(graph)
    found = treewidth.decomposition(near)
    roots = [treewidth.separator_tree(*found, depth) for depth in (1, 2, 9)]
    roots += [treewidth.pieces(near, treewidth.line(near), count) for count in (2, 4)]
    for root in roots:
        assert root.ops == (1 << len(graph.ops)) - 1
        for part in parts_within(root):
            covered = part.bag
            for child in part.children:
                assert not covered & child.ops
                covered |= child.ops
            assert covered == part.ops
            where = {op: number for number, child in enumerate(part.children) for op in treewidth.bits(child.ops)}
            assert all(where[a] == where[b] for a, b in edges(graph) if a in where and b in where)


def test_balanced_bags_make_a_shallow_tree():
    found = treewidth.decomposition(treewidth.neighbours(strategies.linear_net(64)))

    def levels(part):
        return 1 + max(map(levels, part.children), default=0)

    assert levels(treewidth.separator_tree(*found, 99)) <= math.log2(129) + 1


@pytest.mark.parametrize("graph", GRAPHS)
def test_every_schedule_is_a_plan(graph):
    for _, part in treewidth._parts(graph, math.inf, {}):
        order = treewidth._scheduled(graph, part, 10_000, math.inf)
        verify_plan(graph, plan_from_order(graph, order))


def smallest_peak(layers):
    graph = strategies.linear_net(layers)
    orders = (treewidth._scheduled(graph, part, 10**6, math.inf) for _, part in treewidth._parts(graph, math.inf, {}))
    return min(simulate(graph, plan_from_order(graph, order)).peak_bytes for order in orders)


def test_memory_grows_with_the_logarithm_of_a_net():
    peaks = [smallest_peak(layers) for layers in (16, 32, 64, 128)]
    assert all(later - earlier <= 3 for earlier, later in zip(peaks, peaks[1:]))  # a bag has three ops


def test_it_finds_plans_where_chen_does_not():
    graph = strategies.linear_net(100)
    assert all(solvers.solve(graph, 10, solvers.get(name)).plan is None
               for name in ("chen_sqrt", "chen_greedy", "linearized_sqrt", "linearized_greedy"))
    assert solvers.solve(graph, 10, solvers.get("treewidth")).peak_bytes <= 10


@pytest.mark.slow
def test_it_finds_a_plan_where_everybody_who_starts_from_the_given_order_fails():
    graph = strategies.interleaved_chains(30, 40)
    limits = solvers.Limits(seconds=1)
    assert solvers.solve(graph, 3, solvers.get("treewidth"), solvers.Limits(seconds=30)).plan is not None
    for name in solvers.names():
        if name not in ("treewidth", "auto", "anneal"):
            assert solvers.solve(graph, 3, solvers.get(name), limits).plan is None, name
