"""Memory that is taken for a moment, so that a large value is handed no more than its size.

The allocator cuts a chunk only where what is left over is as large as the request, or 128 MiB; else it hands out all of it. A value
of 41 MB in the last free stretch of 62 takes 62, and holds them as long as it lives. With 21 MB of that taken first, which is
cut, the value finds a chunk of exactly its size; when it has been computed, the 21 are free again. Nothing is written there:
a filler costs two ops that do nothing.
"""

import dataclasses

from checkmate_tf.ir.graph import Graph
from checkmate_tf.ir.placement import UNLIMITED_BYTES, Layout, Requests
from checkmate_tf.ir.plan import Plan

_LEAST_BYTES = 1 << 18


def filled(graph: Graph, plan: Plan, layout: Layout, limit_bytes: int = UNLIMITED_BYTES, least_bytes: int = _LEAST_BYTES) -> Plan:
    """The same computations with a filler before each whose first large request would be handed at least `least_bytes` too much in this
    layout, as far as one helps there. Whether all of them together lower the peak, `place` says.
    """
    memory = layout.allocator(limit_bytes)
    fillers: list[tuple[int, int]] = []
    held: list[int] = []            # the filler of the computation at hand
    computed, is_first = 0, True

    def allocate(size: int) -> int:
        nonlocal is_first
        if is_first and size >= least_bytes:
            is_first = False
            filler_bytes = memory.filler_for(size)
            if filler_bytes >= least_bytes:
                fillers.append((computed, filler_bytes))
                held.append(memory.allocate(filler_bytes))
        return memory.allocate(size)

    def compute(_) -> None:
        nonlocal computed, is_first
        while held:
            memory.release(held.pop())
        computed, is_first = computed + 1, True

    Requests(graph, dataclasses.replace(plan, fillers=())).play(allocate, memory.release, compute)
    return dataclasses.replace(plan, fillers=tuple(fillers))
