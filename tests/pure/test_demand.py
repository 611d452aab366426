import random

import pytest

from checkmate_tf.ir.graph import GraphBuilder
from checkmate_tf.ir.plan import plan_from_order
from checkmate_tf.ir.verify import verify_plan
from checkmate_tf.solvers.demand import Player
from tests import strategies


def chain(*, once=None, overwritten=False):
    """a -> b -> c, then d, which overwrites a or not, then e, which reads b."""
    builder = GraphBuilder()
    a = builder.op("a", bytes=1, once=once)
    b = builder.op("b", [a], bytes=1)
    builder.op("c", [b], bytes=1)
    builder.op("d", bytes=1, once="a write" if overwritten else None, overwrites=[a] if overwritten else [])
    builder.op("e", [b], bytes=1)
    return builder.build()


def test_what_is_missing_is_made_again_with_what_it_was_made_from():
    player = Player(chain())
    for op in (0, 1, 2):
        player.run(op)
    assert player.forget(0) and player.forget(1)
    assert player.finish() == (0, 1, 2, 3, 0, 1, 4)


def test_a_value_that_cannot_be_made_again_is_not_forgotten():
    player = Player(chain(once="a draw"))
    for op in (0, 1, 2):
        player.run(op)
    assert not player.forget(0) and player.forget(1)
    assert player.finish() == (0, 1, 2, 3, 1, 4)


def test_what_an_overwrite_would_lose_is_made_before_it():
    player = Player(chain(overwritten=True))
    for op in (0, 1, 2):
        player.run(op)
    assert player.forget(1)
    player.run(3)
    assert not player.forget(1)  # a is gone
    assert player.finish() == (0, 1, 2, 1, 3, 4)


def test_a_first_run_brings_what_must_come_before_it():
    builder = GraphBuilder()
    a = builder.op("a", bytes=1)
    builder.op("reads a", [a], bytes=1)
    builder.op("writes a", bytes=1, once="a write", overwrites=[a])
    builder.op("after the write", bytes=1, after=[2])
    player = Player(builder.build())
    player.run(3)
    assert player.order == [0, 1, 2, 3]


@pytest.mark.parametrize("seed", range(300))
def test_whatever_is_forgotten_in_whatever_order_it_stays_a_plan(seed):
    graph, choices = strategies.random_graph(seed, max_ops=14), random.Random(seed)
    player = Player(graph)
    ops = choices.sample(graph.order, len(graph.ops))
    for op in ops:
        player.run(op)
        for value in graph.values:
            if player.held[value.index] and choices.random() < 0.5:
                player.forget(value.index)
    verify_plan(graph, plan_from_order(graph, player.finish()))
