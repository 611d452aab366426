from checkmate_tf.ir.plan import plan_from_order
from checkmate_tf.ir.simulate import keep_all_timeline, simulate, structural_floor
from checkmate_tf.ir.verify import verify_plan
from checkmate_tf.solvers.fit import fitted
from tests import strategies


def test_recomputations_that_the_budget_does_not_ask_for_are_cancelled():
    graph = strategies.linear_net(3)
    needless = (0, 1, 2, 3, 4, 0, 1, 5, 0, 6)
    assert fitted(graph, needless, keep_all_timeline(graph).peak_bytes) == graph.order


def test_what_is_over_the_budget_is_brought_down():
    # Layers 0 1 2, loss 3, gradients 4 5 6; keeping everything holds 5: four outputs and a gradient.
    graph = strategies.linear_net(3)
    order = fitted(graph, graph.order, 4)
    assert simulate(graph, plan_from_order(graph, order)).peak_bytes == 4 and len(order) == 8


def test_first_runs_stay_in_the_order_given():
    for seed in range(60):
        graph = strategies.training_net(seed, 4)
        floor_bytes, base_bytes = structural_floor(graph)[0], keep_all_timeline(graph).peak_bytes
        order = fitted(graph, graph.order, (floor_bytes + base_bytes) // 2)
        verify_plan(graph, plan_from_order(graph, order))
        assert tuple(dict.fromkeys(order)) == graph.order
