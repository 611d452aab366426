"""What computations find in a cache, by hand and against distances counted one by one."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkmate_tf.ir.caches import expected_overhead, missed_bytes
from checkmate_tf.ir.graph import GraphBuilder
from checkmate_tf.ir.placement import ROUNDS, Layout, Requests
from checkmate_tf.ir.plan import plan_from_order
from tests import strategies

CACHE_BYTES = 1024 * 256        # blocks of a granule
HALF = CACHE_BYTES // 2
BLOCKS = 8                      # of a cache in which each block that is used can be looked up
ONE_PLACE = Layout(stretches=((0, 1 << 30),))


def _three(bytes, results=0):
    """Three ops in a chain, each of which takes a second; the values of the last few stay."""
    builder = GraphBuilder()
    a = builder.op("a", bytes=bytes, seconds=1.0)
    b = builder.op("b", [a], bytes=bytes, seconds=1.0)
    c = builder.op("c", [b], bytes=bytes, seconds=1.0)
    return dataclasses.replace(builder.build(), results=(a, b, c)[3 - results:])


def _missed(graph, cache_bytes=CACHE_BYTES):
    return missed_bytes(graph, plan_from_order(graph, graph.order), ONE_PLACE, cache_bytes)


def test_what_fits_is_found_in_the_next_step():
    assert _missed(_three(HALF, results=1)) == 0        # c lies where a was


def test_what_is_used_in_turn_and_does_not_fit_is_never_found_where_it_is_written():
    assert _missed(_three(HALF, results=3)) == 3 * HALF     # each is read while it is there


def test_what_is_read_late_is_missed_twice():
    builder = GraphBuilder()
    a = builder.op("a", bytes=HALF, seconds=1.0)
    b = builder.op("b", bytes=HALF, seconds=1.0)
    c = builder.op("c", [b], bytes=HALF, seconds=1.0)
    d = builder.op("d", [a], bytes=256, seconds=1.0)
    graph = dataclasses.replace(builder.build(), results=(b, c, d))
    assert _missed(graph) == 3 * HALF + 256      # a is found where d has read it, and missed there


def test_an_op_that_does_not_fit_itself_is_priced_with_that():
    assert _missed(_three(HALF + 256, results=3)) == HALF + 256        # a alone fits, b and c touch two of these


def test_there_may_be_no_cache():
    assert _missed(_three(HALF, results=3), cache_bytes=0) == 0


def test_memory_taken_over_is_found():
    builder = GraphBuilder()
    other = builder.op("other", bytes=2 * CACHE_BYTES, seconds=1.0)
    a = builder.op("a", bytes=HALF, seconds=1.0)
    b = builder.op("b", [a], bytes=HALF, seconds=1.0, reuses=[a])
    graph = dataclasses.replace(builder.build(), results=(other, b))
    assert _missed(graph) == HALF
    apart = dataclasses.replace(graph, ops=tuple(dataclasses.replace(op, reuses=()) for op in graph.ops))
    assert _missed(apart) == 2 * HALF


def test_a_plan_that_keeps_less_wins_back_what_it_finds():
    """Two values of half a cache are read late; one that is computed again instead lies where something has just been."""
    builder = GraphBuilder()
    values = [builder.op(f"v{number}", bytes=HALF, seconds=1.0) for number in range(3)]
    last = values[-1]
    for value in reversed(values):
        last = builder.op(f"g{value}", [value, last] if last != value else [value], bytes=256, seconds=1.0)
    graph = dataclasses.replace(builder.build(), results=(last,))
    keep, plan = plan_from_order(graph, graph.order), plan_from_order(graph, (0, 1, 2, 3, 1, 4, 0, 5))
    missed = [missed_bytes(graph, steps, ONE_PLACE, CACHE_BYTES) for steps in (keep, plan)]
    assert missed[1] < missed[0]
    assert expected_overhead(graph, plan, keep, ONE_PLACE, CACHE_BYTES, 0.0) == pytest.approx(2 / 6)
    price = 1e-5
    assert expected_overhead(graph, plan, keep, ONE_PLACE, CACHE_BYTES, price) == pytest.approx(
        (8 + price * missed[1]) / (6 + price * missed[0]) - 1)


def test_without_time_there_is_no_overhead():
    graph = GraphBuilder().build()
    empty = plan_from_order(graph, ())
    assert expected_overhead(graph, empty, empty, ONE_PLACE, CACHE_BYTES, 1.0) == 0.0


@given(strategies.graphs(), st.sampled_from([1, 2, 3]))
def test_a_block_is_found_if_fewer_others_than_there_is_room_for_came_since(graph, scale):
    scaled = [dataclasses.replace(value, bytes=value.bytes * scale * 256) for value in graph.values]
    graph = dataclasses.replace(graph, values=tuple(scaled), ops=tuple(dataclasses.replace(op, requests=()) for op in graph.ops))
    plan = plan_from_order(graph, graph.order)
    memory, requests, made, steps = ONE_PLACE.allocator(), Requests(graph, plan), [], []

    def allocate(size):
        made.append((memory.allocate(size), size))
        return made[-1]

    def compute(read):
        steps.append([*read, *made])
        made.clear()
    for _ in range(ROUNDS):
        first = len(steps)
        requests.play(allocate, lambda held: memory.release(held[0]), compute)
    seen, expected = [], 0
    for number, touched in enumerate(steps):
        whole = sum(size for _, size in touched)
        for address, size in touched:
            for block in range(address // 256, (address + max(size, 1) - 1) // 256 + 1):
                since = set()
                for other in reversed(seen):
                    if other == block or len(since) >= BLOCKS:
                        break
                    since.add(other)
                found = block in seen and len(since) < BLOCKS
                if number >= first and not found and whole <= BLOCKS * 256:
                    expected += min(size, 256)
                seen.append(block)
    assert missed_bytes(graph, plan, ONE_PLACE, BLOCKS * 256, BLOCKS) == expected
