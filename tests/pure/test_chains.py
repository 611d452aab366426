import math

import pytest

from checkmate_tf import solvers
from checkmate_tf.ir.graph import GraphBuilder
from checkmate_tf.ir.plan import plan_from_order
from checkmate_tf.ir.simulate import keep_all_timeline, structural_floor
from checkmate_tf.ir.verify import verify_plan
from checkmate_tf.solvers import blocks, chains, rockmate
from checkmate_tf.solvers.stages import Stage, chain_of
from tests import oracle, strategies

CHAIN_SOLVERS = ("rotor", "rockmate")


def blocks_of_a_dear_and_a_cheap_op(count):
    """Blocks x -> dear -> cheap -> x, with skips around each, and gradients that read dear and cheap: all equal."""
    builder = GraphBuilder()
    made = [builder.op("x", bytes=2, seconds=1.0)]
    for block in range(count):
        dear = builder.op(f"dear{block}", made[-1:], bytes=2, seconds=9.0)
        cheap = builder.op(f"cheap{block}", [made[-1], dear], bytes=4, seconds=1.0)
        made += [dear, cheap, builder.op(f"x{block}", [dear, cheap], bytes=2, seconds=4.0)]
    gradient = builder.op("loss", made[-1:], bytes=2, seconds=1.0)
    for block in range(count - 1, -1, -1):
        gradient = builder.op(f"gradient{block}", [*made[3 * block + 1:3 * block + 3], gradient], bytes=2, seconds=1.0,
                              backward=True)
    return builder.build()


def test_a_linear_net_is_cut_after_every_layer():
    # Layers 0 1 2 and the loss 3; gradients 4 5 6 of layers 2 1 0. What gradient 2 reads, layer 2 and the loss, is there
    # in the last stage, and so on: each gradient comes in the stage behind its layer's.
    stages = chain_of(strategies.linear_net(3), 100)
    assert [stage.forward for stage in stages] == [(0,), (1,), (2,), (3,)]
    assert [stage.backward for stage in stages] == [(), (6,), (5,), (4,)]
    assert [stage.border for stage in stages] == [(0,), (1,), (2,), ()]


def test_a_skip_keeps_its_layers_in_one_stage():
    builder = GraphBuilder()
    a = builder.op("a", bytes=1)
    b = builder.op("b", [a], bytes=1)
    c = builder.op("c", [a, b], bytes=1)
    d = builder.op("d", [c], bytes=1)
    builder.op("back", [d], bytes=1, backward=True)
    assert [stage.forward for stage in chain_of(builder.build(), 100)] == [(0,), (1, 2), (3,)]


def test_small_values_may_go_past_a_border_and_are_kept():
    builder = GraphBuilder()
    statistics = builder.op("statistics", bytes=1)
    made = [builder.op("a", bytes=100_000)]
    for name in "bcd":
        made.append(builder.op(name, [made[-1], statistics], bytes=100_000))
    builder.op("back", made, bytes=1, backward=True)
    stages = chain_of(builder.build(), 100)
    assert [stage.forward for stage in stages] == [(0, 1), (2,), (3,), (4,)]
    assert stages[0].carried == {0} and not any(stage.carried for stage in stages[1:])


def test_a_mask_that_was_traced_early_belongs_to_the_stage_that_reads_it():
    builder = GraphBuilder()
    mask = builder.op("mask", bytes=10)
    made = [builder.op("a", bytes=10)]
    for name in "bc":
        made.append(builder.op(name, made[-1:], bytes=10))
    made.append(builder.op("masked", [made[-1], mask], bytes=10))
    builder.op("back", made, bytes=1, backward=True)
    assert [stage.forward for stage in chain_of(builder.build(), 100)] == [(1,), (2,), (3,), (0, 4)]


def test_backward_ops_come_in_the_stage_of_what_they_depend_on_wherever_they_were_traced():
    # The first gradient to be traced reads the first layer; it does not pull the others with it.
    builder = GraphBuilder()
    made = [builder.op("layer0", bytes=1)]
    for layer in range(1, 4):
        made.append(builder.op(f"layer{layer}", made[-1:], bytes=1))
    helper = builder.op("helper", made[:1], bytes=1, backward=True)
    last = builder.op("gradient3", made[3:], bytes=1, backward=True)
    builder.op("gradient0", [helper, last], bytes=1, backward=True)
    stages = chain_of(builder.build(), 100)
    assert [stage.backward for stage in stages] == [(), (4, 6), (), (5,)]


def test_what_can_no_longer_be_made_is_not_asked_for():
    # The option wants `shift` again after the update of the variable it reads, though nobody needs it any more.
    builder = GraphBuilder()
    variable = builder.op("variable", bytes=0, once="reads a variable")
    shift = builder.op("shift", [variable], bytes=1)
    scaled = builder.op("scaled", [shift], bytes=1)
    loss = builder.op("loss", [scaled], bytes=1)
    gradient = builder.op("gradient", [shift, loss], bytes=1, backward=True)
    builder.op("update", [gradient], bytes=0, once="writes a variable", overwrites=[variable], backward=True)
    graph = builder.build()
    stage = Stage((0, 1, 2, 3), (4, 5), frozenset(), (), frozenset(), 0, 0)
    option = chains.option_of(graph, stage, stage.forward, (4, 5, 1), frozenset({shift, loss}))
    order = chains.play(graph, [stage], [chains.Action("keep", 0, option), chains.Action("back", 0, option)])
    assert order == (0, 1, 2, 3, 4, 5)
    verify_plan(graph, plan_from_order(graph, order))


def test_long_chains_are_merged_evenly():
    stages = chain_of(strategies.linear_net(40), 6)
    assert len(stages) == 6 and max(len(stage.forward) for stage in stages) <= 9


@pytest.mark.parametrize("layers", [3, 4])
def test_on_linear_nets_rotor_equals_the_exhaustive_search(layers):
    graph = strategies.linear_net(layers)
    for budget in range(structural_floor(graph)[0], keep_all_timeline(graph).peak_bytes):
        solution = solvers.solve(graph, budget, solvers.get("rotor"))
        assert solution.seconds == oracle.cheapest(graph, budget, "fixed") < math.inf


def test_the_peak_of_a_part_is_what_the_simulator_finds_for_the_whole():
    for seed in range(100):
        graph = strategies.random_graph(seed, max_ops=9)
        found = chains.peak_within(graph, graph.order, frozenset(graph.results), frozenset())
        assert graph.resident_bytes + found == max(keep_all_timeline(graph).peak_bytes, graph.resident_bytes)


def test_a_block_has_an_option_between_everything_and_nothing():
    # Without `cheap` 4 of a block's 8 bytes (dear 2, cheap 4, x 2) are saved for one second.
    graph = blocks_of_a_dear_and_a_cheap_op(4)
    stages = chain_of(graph, 100)
    options, distinct = blocks.block_options(graph, stages, rockmate.Rockmate().inner, math.inf,
                                               solvers.Limits(seconds=0.0))
    # The first stage is `x` alone, the last the loss; of the four blocks between only the last differs in its gradient.
    inner = [stage for stage in range(len(stages)) if len(stages[stage].forward) == 3]
    assert len(inner) == 4 and distinct < len(stages)
    for stage in inner:
        keeping = chains.keeping_option(graph, stages[stage])
        assert any((option.seconds, option.saved_bytes) == (keeping.seconds + 1.0, keeping.saved_bytes - 4)
                   for option in options[stage])


def test_equal_blocks_are_recognized():
    # Twelve of 16 blocks: the first ops, the loss and the two blocks beside them differ.
    count, distinct = blocks.count_blocks(blocks_of_a_dear_and_a_cheap_op(14), 100)
    assert count == 16 and distinct <= 5


def test_rockmate_is_cheaper_than_rotor_where_blocks_are_mixed():
    graph = blocks_of_a_dear_and_a_cheap_op(4)
    budget = keep_all_timeline(graph).peak_bytes - 8
    rotor, mixed = (solvers.solve(graph, budget, solvers.get(name)) for name in CHAIN_SOLVERS)
    assert mixed.overhead < rotor.overhead


@pytest.mark.slow
@pytest.mark.parametrize("name", CHAIN_SOLVERS)
def test_plans_of_training_steps_with_everything_in_them(name):
    found = 0
    for seed in range(8):
        graph = strategies.training_net(seed, 3 + seed % 6)
        floor_bytes, base_bytes = structural_floor(graph)[0], keep_all_timeline(graph).peak_bytes
        for budget in (base_bytes - 1, (floor_bytes + base_bytes) // 2):
            found += solvers.solve(graph, budget, solvers.get(name)).plan is not None
    assert found > 3


@pytest.mark.parametrize("name, fallback", [("rotor", "chen_greedy"), ("rockmate", "hiremate")])
def test_without_a_chain_the_fallback_is_named(name, fallback):
    builder = GraphBuilder()
    first = builder.op("first", bytes=4, seconds=1.0)
    second = builder.op("second", [first], bytes=4, seconds=1.0)
    third = builder.op("third", [first, second], bytes=4, seconds=1.0)
    fourth = builder.op("fourth", [first, third], bytes=8, seconds=1.0)
    builder.op("back", [first, fourth], bytes=1, seconds=1.0, backward=True)
    builder.op("more", [second], bytes=1, seconds=1.0, backward=True)
    graph = builder.build()
    solution = solvers.solve(graph, keep_all_timeline(graph).peak_bytes - 1, solvers.get(name))
    assert (solution.stats["stages"], solution.stats["fallback"]) == (2, fallback)
