"""What a plan's computations find in the processor's cache: the least recently used goes, on paper.

An op is priced by running it over and over, so that what it reads and writes is in the cache, if that has room for it. In a step
most of it is not: outputs come to lie where nothing has been for long, and the backward pass reads what the forward pass wrote.
A step that keeps less goes around in less memory and finds more of it in the cache. So it wins back some of the time that its
recomputation takes, which the sum of its ops' prices does not tell.

What is resident is left out: every plan reads it about as often.
"""

import collections
import dataclasses
import math

from checkmate_tf.ir.graph import Graph
from checkmate_tf.ir.placement import ROUNDS, Layout, Requests
from checkmate_tf.ir.plan import Plan

_BLOCKS = 1024


def missed_bytes(graph: Graph, plan: Plan, layout: Layout, cache_bytes: int, blocks: int = _BLOCKS) -> int:
    """The bytes that the plan's computations read or write and that are not in a cache of this size, when placed in this layout,
    in a step after the first. Ops that touch more than the cache holds count none: their price has that already.

    blocks: that the cache consists of
    """
    if cache_bytes <= 0:
        return 0
    memory, requests = layout.allocator(), Requests(graph, dataclasses.replace(plan, fillers=()))      # nobody touches those
    block_bytes = max(1, cache_bytes // blocks)
    cached: collections.OrderedDict[int, None] = collections.OrderedDict()
    made: list[tuple[int, int]] = []
    missed = 0

    def allocate(size: int) -> tuple[int, int]:
        made.append((memory.allocate(size), size))
        return made[-1]

    def compute(read: list[tuple[int, int]]) -> None:
        nonlocal missed
        touched = [*read, *made]
        made.clear()
        in_price = sum(size for _, size in touched) > cache_bytes
        for address, size in touched:
            last = (address + max(size, 1) - 1) // block_bytes
            for block in range(max(address // block_bytes, last - blocks + 1), last + 1):
                if block in cached:
                    cached.move_to_end(block)
                    continue
                missed += 0 if in_price else min(size, block_bytes)
                cached[block] = None
                if len(cached) > blocks:
                    cached.popitem(last=False)

    for _ in range(ROUNDS):
        missed = 0
        requests.play(allocate, lambda held: memory.release(held[0]), compute)
    return missed


def expected_overhead(graph: Graph, plan: Plan, base: Plan, layout: Layout, cache_bytes: int, seconds_per_byte: float) -> float:
    """The extra time of the plan over that of `base`, as a share of it, with what each misses in the cache at this price. It can
    be negative."""
    def seconds(steps: Plan) -> float:
        priced = math.fsum(graph.ops[op].seconds for op in steps.order)
        return priced + seconds_per_byte * missed_bytes(graph, steps, layout, cache_bytes)
    base_seconds = seconds(base)
    return seconds(plan) / base_seconds - 1 if base_seconds > 0 else 0.0
