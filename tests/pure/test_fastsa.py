import math

from checkmate_tf import solvers
from checkmate_tf.ir.simulate import keep_all_timeline, structural_floor
from tests import oracle, strategies

FASTSA = solvers.get("fastsa")


def test_on_small_graphs_it_finds_most_optima_in_free_order():
    compared = found = 0
    for seed in range(120):
        graph = strategies.random_graph(seed, max_ops=6)
        for budget in range(structural_floor(graph)[0], keep_all_timeline(graph).peak_bytes):
            best = oracle.cheapest(graph, budget, "free")
            solution = solvers.solve(graph, budget, FASTSA, solvers.Limits(seconds=0.1))
            assert solution.seconds >= best
            compared += best < math.inf
            found += best < math.inf and solution.seconds == best
    assert compared > 10 and found >= 0.7 * compared


def test_a_linear_net_where_order_cannot_help():
    # Layers 0 1 2 3, loss 4: keeping everything holds 6, the exhaustive search in fixed order says what 5 cost.
    graph = strategies.linear_net(4)
    solution = solvers.solve(graph, 5, FASTSA, solvers.Limits(seconds=0.5))
    assert solution.seconds == oracle.cheapest(graph, 5, "free")


def test_the_number_of_moves_follows_from_the_time_limit():
    graph = strategies.linear_net(8)
    solution = solvers.solve(graph, 8, FASTSA, solvers.Limits(seconds=0.2))
    assert solution.stats["moves"] <= 0.2 * FASTSA.moves_per_second


def test_plans_of_training_steps_with_everything_in_them():
    found = 0
    for seed in range(12):
        graph = strategies.training_net(seed, 3 + seed % 6)
        budget = (structural_floor(graph)[0] + 3 * keep_all_timeline(graph).peak_bytes) // 4
        found += solvers.solve(graph, budget, FASTSA, solvers.Limits(seconds=0.2)).plan is not None
    assert found > 6
