"""Passes: what they contract, and that lifted orders are as good as the small graph says."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkmate_tf.ir import passes
from checkmate_tf.ir.errors import GraphError
from checkmate_tf.ir.graph import Graph, GraphBuilder
from checkmate_tf.ir.plan import plan_from_order
from checkmate_tf.ir.simulate import keep_all_timeline, simulate
from checkmate_tf.ir.verify import verify_graph, verify_plan
from tests.strategies import graphs

_PASSES = [passes.gather_sources, passes.contract_tails, passes.contract_chains, passes.fold_small, passes.shrink]


@pytest.mark.parametrize("shrinking", _PASSES, ids=lambda shrinking: shrinking.__name__)
@settings(deadline=None, max_examples=150)
@given(graph=graphs(1, 14), seed=st.integers(0, 1000))
def test_a_lifted_order_is_valid_costs_the_same_and_peaks_no_higher(shrinking, graph, seed):
    small, lift = shrinking(graph)
    for order in (small.order, _random_order(small, random.Random(seed))):
        promised = _timeline(small, order)
        kept = _timeline(graph, lift(order))
        assert kept.seconds == pytest.approx(promised.seconds)
        assert kept.peak_bytes <= promised.peak_bytes


@settings(deadline=None, max_examples=150)
@given(graph=graphs(1, 10), seed=st.integers(0, 1000))
def test_any_convex_groups_can_be_contracted(graph, seed):
    choices = random.Random(seed)
    leader = list(graph.order)
    for op in range(1, len(leader)):
        if choices.random() < 0.5:
            leader[op] = leader[op - 1]
    try:
        small, lift = passes.contract(graph, leader)
    except GraphError as error:
        assert "must run once" in str(error)
        return
    promised = _timeline(small, small.order)
    assert _timeline(graph, lift(small.order)).peak_bytes <= promised.peak_bytes


def test_a_group_takes_over_what_its_members_would():
    builder = GraphBuilder()
    a = builder.op("a", bytes=8)
    b = builder.op("b", [a], bytes=8, reuses=[a])
    c = builder.op("c", [b], bytes=8, reuses=[b])
    builder.op("d", [c], bytes=1)
    small, _ = passes.contract(builder.build(), [0, 1, 1, 3])
    # b and c run in the memory of a, and nothing comes on top.
    assert (small.ops[1].reuses, small.ops[1].scratch_bytes) == ((a,), 0)
    assert keep_all_timeline(small).peak_bytes == 9


def test_a_group_that_needs_new_memory_first_has_it_as_scratch():
    builder = GraphBuilder()
    a = builder.op("a", bytes=8)
    b = builder.op("b", [a], bytes=8)
    c = builder.op("c", [a, b], bytes=8, reuses=[a])
    builder.op("d", [c], bytes=1)
    small, _ = passes.contract(builder.build(), [0, 1, 1, 3])
    # c writes into a, but b is there as well: 16 for both, and the group's own output is one of them.
    assert small.ops[1].reuses == (a,) and small.ops[1].scratch_bytes == 8
    assert keep_all_timeline(small).peak_bytes == 16


def test_groups_that_a_path_leaves_and_enters_again_are_refused():
    builder = GraphBuilder()
    a = builder.op("a", bytes=1)
    b = builder.op("b", [a], bytes=1)
    builder.op("c", [a, b], bytes=1)
    with pytest.raises(GraphError, match="must be convex"):
        passes.contract(builder.build(), [0, 1, 0])


def test_a_hidden_value_that_is_overwritten_needs_a_group_that_runs_once():
    builder = GraphBuilder()
    weight = builder.op("read")
    builder.op("use", [weight], bytes=1)
    builder.op("write", once="writes a variable", overwrites=[weight])
    with pytest.raises(GraphError, match="must run once"):
        passes.contract(builder.build(), [0, 0, 2])


def test_a_contracted_op_has_its_inner_peak_as_scratch():
    # a holds 2, then b 2 + 7 (a goes), c 7 + 3 and 4 of scratch: 14 at the most, 3 of them its output.
    builder = GraphBuilder()
    a = builder.op("a", bytes=2, seconds=1.0)
    b = builder.op("b", [a], bytes=7, seconds=2.0)
    c = builder.op("c", [b], bytes=3, seconds=4.0, scratch_bytes=4)
    builder.op("last", [c])
    small, lift = passes.contract(builder.build(), [2, 2, 2, 3])
    assert (small.ops[0].scratch_bytes, small.ops[0].seconds, small.values[0].bytes) == (11, 7.0, 3)
    assert lift((0, 1)) == (0, 1, 2, 3)


def test_reads_of_variables_become_one_op():
    builder = GraphBuilder()
    first = builder.op("read_w", once="reads a variable")
    x = builder.op("x", [first], bytes=4, seconds=1.0)
    second = builder.op("read_b", once="reads a variable")
    builder.op("y", [x, second], bytes=4, seconds=1.0)
    small, lift = passes.gather_sources(builder.build())
    assert [op.name for op in small.ops] == ["read_w", "x", "y"]
    assert lift(small.order) == (0, 2, 1, 3)


def test_the_optimizer_becomes_one_op_a_gradient():
    # Two gradients of 8 bytes each; from each a first moment is updated, read again, and subtracted from the variable.
    # Only the gradients and what they are made from are left beside one group each.
    builder = GraphBuilder()
    x = builder.op("x", bytes=24, seconds=9.0)
    for name in ("w", "v"):
        read = builder.op(f"read_{name}", once="reads a variable")
        gradient = builder.op(f"gradient_{name}", [x, read], bytes=8, seconds=9.0, backward=True)
        part = builder.op(f"part_{name}", [gradient], bytes=8, seconds=1.0)
        builder.op(f"update_{name}", [part], bytes=(), once="writes a variable")
        moment = builder.op(f"moment_{name}", once="reads a variable", after=[builder.index_of(f"update_{name}")])
        step = builder.op(f"step_{name}", [moment], bytes=8, seconds=1.0)
        builder.op(f"write_{name}", [step], bytes=(), once="writes a variable", overwrites=[read])
    small, _ = passes.contract_tails(builder.build())
    assert [op.name for op in small.ops] == ["x", "read_w", "gradient_w", "part_w", "read_v", "gradient_v", "part_v"]
    # While the group runs, the gradient and one value of 8 bytes are held.
    assert (small.ops[3].kind, small.ops[3].scratch_bytes, small.ops[3].once) == ("group", 8, "writes a variable")


def test_what_condenses_a_large_value_runs_early():
    # Summing the gradient (24 bytes to 8) belongs to no group at the end of the step: that would hold 24 bytes so long.
    builder = GraphBuilder()
    y = builder.op("y", bytes=24, seconds=1.0)
    total = builder.op("sum", [y], bytes=8, seconds=1.0)
    scaled = builder.op("scale", [total], bytes=8, seconds=1.0)
    builder.op("write", [scaled], bytes=(), once="writes a variable")
    builder.op("other", [y], bytes=24, seconds=1.0)
    small, _ = passes.shrink(builder.build())
    assert [op.name for op in small.ops] == ["y", "sum", "scale", "other"]
    assert [op.kind for op in small.ops] == ["y", "sum", "group", "other"]


def test_an_op_with_one_reader_runs_with_it_unless_that_holds_more():
    builder = GraphBuilder()
    a = builder.op("a", bytes=4, seconds=1.0)                   # only read inside: joins `use`
    narrow = builder.op("narrow", [a], bytes=2, seconds=1.0)    # reads 4, makes 2, but `use` needs `a` anyway: joins
    wide = builder.op("widen", [a], bytes=8, seconds=1.0)       # reads 4, makes 8: joins
    use = builder.op("use", [a, wide, narrow], bytes=8, seconds=1.0)
    wider = builder.op("wider", [use], bytes=30, seconds=1.0)   # holds 8 + 30, then 30 + 15; not 8 + 30 + 15
    cut = builder.op("cut", [wider], bytes=15, seconds=1.0)
    builder.op("end", [cut], bytes=40, seconds=1.0)             # would hold 30 bytes instead of 15
    small, _ = passes.contract_chains(builder.build())
    assert [op.name for op in small.ops] == ["use", "wider", "cut", "end"]


def test_a_long_pipeline_of_reads_and_writes_shrinks_and_lifts_back():
    builder = GraphBuilder()
    value = builder.op("input", bytes=1000, seconds=1.0)
    kept = []
    for layer in range(30):
        weight = builder.op(f"read{layer}", once="reads a variable")
        value = builder.op(f"conv{layer}", [value, weight], bytes=1000, seconds=3.0)
        shift = builder.op(f"mean{layer}", [value], bytes=0, seconds=1e-4)
        kept.append((value, weight))
        value = builder.op(f"relu{layer}", [value, shift], bytes=1000, seconds=1.0)
    for layer, (output, weight) in reversed(list(enumerate(kept))):
        value = builder.op(f"back{layer}", [value, output, weight], bytes=1000, seconds=3.0, backward=True)
        gradient = builder.op(f"gradient{layer}", [value, output], bytes=100, seconds=3.0, backward=True)
        builder.op(f"write{layer}", [gradient], once="writes a variable", overwrites=[weight])
    graph = verify_graph(builder.build())
    small, lift = passes.shrink(graph)
    assert len(graph.ops) == 211 and len(small.ops) <= 150
    assert _timeline(graph, lift(small.order)).peak_bytes <= keep_all_timeline(small).peak_bytes


def _timeline(graph: Graph, order):
    return simulate(graph, verify_plan(graph, plan_from_order(graph, order)))


def _random_order(graph: Graph, choices: random.Random) -> tuple[int, ...]:
    """A random valid order with recomputations: any op may run that the invariants P2, P4, P5 and P6 allow."""
    order, ran, gone = [], set(), set()
    while len(ran) < len(graph.ops):
        allowed = [op for op in graph.ops
                   if (op.index not in ran or (op.once is None and not op.overwrites and choices.random() < 0.3))
                   and all(graph.values[value].producer in ran and value not in gone for value in op.inputs)
                   and ran.issuperset(op.after)
                   and all(ran | {op.index} >= set(graph.consumers[value]) for value in op.overwrites)
                   and all(graph.values[value].producer in ran for value in op.overwrites)]
        op = choices.choice(allowed)
        order.append(op.index)
        ran.add(op.index)
        gone.update(op.overwrites)
    return tuple(order)
