import pytest

from checkmate_tf import solvers
from checkmate_tf.ir.errors import SolverError
from checkmate_tf.ir.graph import GraphBuilder
from checkmate_tf.ir.plan import plan_from_order
from checkmate_tf.ir.simulate import keep_all_timeline, simulate, structural_floor
from checkmate_tf.solvers import dtr
from tests import strategies


def dear_or_large():
    """x: 4 bytes, 8 s. y: 2 bytes, 1 s. Then z, of 2 bytes, for which 7 bytes have no room while both are held."""
    builder = GraphBuilder()
    x = builder.op("x", bytes=4, seconds=8.0)
    y = builder.op("y", bytes=2, seconds=1.0)
    z = builder.op("z", bytes=2, seconds=1.0)
    t = builder.op("t", [z], bytes=1, seconds=1.0)
    builder.op("u", [x, y, t], bytes=0, seconds=1.0)
    return builder.build()


@pytest.mark.parametrize("heuristic, evicted", [
    ("size", 0),    # 1/4 < 1/2
    ("lru", 0),     # next read by the same op: the first of equals
    ("local", 1),   # 8/4 > 1/2
    ("msps", 1), ("dtr", 1), ("eq", 1),  # nothing is evicted around them yet: as local
])
def test_which_of_two_values_goes(heuristic, evicted):
    assert dtr.evicting_order(dear_or_large(), 7, heuristic, foresight=True) == (0, 1, 2, 3, evicted, 4)


@pytest.mark.parametrize("heuristic, evicted", [("local", 0), ("msps", 0), ("dtr", 2), ("eq", 2)])
def test_a_value_next_to_an_evicted_one_counts_its_cost(heuristic, evicted):
    """12 bytes. For q the 8 bytes of b go. For r then a (1 s, 2 bytes) or p (1.5 s, 2 bytes), both read next by u.

    By itself a is cheaper, 1/2 < 1.5/2. But b would have to be made from it: (1 + 1)/2 > 1.5/2. That b was not made
    from anything evicted, so the ancestors alone (msps) say as much as nothing. After u nobody but b reads a, so a goes.
    """
    builder = GraphBuilder()
    a = builder.op("a", bytes=2, seconds=1.0)
    b = builder.op("b", [a], bytes=8, seconds=1.0)
    p = builder.op("p", bytes=2, seconds=1.5)
    q = builder.op("q", bytes=6)
    r = builder.op("r", [q], bytes=3)
    builder.op("u", [a, p, r], bytes=0)
    builder.op("t", [b], bytes=0)
    graph = builder.build()
    assert dtr.evicting_order(graph, 12, heuristic, foresight=True) == (0, 1, 2, 3, 4, evicted, 5, 0, 1, 6)


def test_a_component_keeps_its_links_when_a_value_leaves_but_not_its_cost():
    sets = dtr._Components([1.0, 2.0, 4.0])
    sets.join(0, [])
    sets.join(1, [0])
    sets.join(2, [1])
    assert sets.find(0) == sets.find(2) and sets.cost[sets.find(0)] == 7.0
    sets.leave(1)
    assert sets.find(0) == sets.find(2) and sets.cost[sets.find(0)] == 5.0
    assert sets.cost[sets.find(1)] == 0.0


def test_a_linear_net_gets_through_with_a_few_times_the_square_root_of_its_length():
    """The paper's theorem: some multiple of the square root of N is enough for a multiple of N runs."""
    graph = strategies.linear_net(100)
    order = dtr.evicting_order(graph, 40, "eq", foresight=True)
    assert simulate(graph, plan_from_order(graph, order)).peak_bytes <= 40
    assert len(order) <= 2 * len(graph.ops)


@pytest.mark.parametrize("heuristic", dtr.HEURISTICS)
@pytest.mark.parametrize("foresight", [True, False])
def test_every_heuristic_makes_plans_within_its_budget(heuristic, foresight):
    found = 0
    for seed in range(150):
        graph = strategies.random_graph(seed, max_ops=12)
        for budget in range(structural_floor(graph)[0], keep_all_timeline(graph).peak_bytes, 2):
            solution = solvers.solve(graph, budget, dtr.Dtr(heuristic, foresight))
            found += solution.plan is not None
    assert found > 50


def test_an_unknown_heuristic_is_refused():
    with pytest.raises(SolverError, match="msps. Received: 'magic'"):
        solvers.solve(strategies.linear_net(3), 6, dtr.Dtr("magic"))
