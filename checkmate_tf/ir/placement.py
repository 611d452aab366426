"""Where values come to lie: TensorFlow's best-fit allocator with coalescing, on paper.

The allocator gets memory from the device in regions, each at least twice as large as the one before, and cuts chunks from
them. A request, rounded up to whole granules, is served by the smallest free chunk that is large enough, the lowest of
equal ones. What is left over is split off only if it is as large as the request itself, or 128 MiB; otherwise the whole
chunk is handed out, and *that* is what the allocator's statistics count and what nobody else can have meanwhile. A chunk
that comes back is joined with free neighbours in its region. So a plan takes more than its live bytes, how much more
depends on the order of sizes, and two plans of the same peak can differ by a tenth.

`place` plays a plan twice into an allocator that has made the residents first, each with a temporary of the same size,
as initializers do: what that leaves free is where the step has to find room. The layout of a real process differs in
small things; on the networks of the benchmark the peaks come out within a tenth of what is measured, on either side.

The rules are those of TensorFlow 2.21 (`bfc_allocator.cc`), which the GPU's allocator and both of the CPU's share. The
tests compare with a naive map of bytes, and with the real allocator.
"""

import bisect
import dataclasses
from collections.abc import Sequence

from checkmate_tf.ir.graph import Graph
from checkmate_tf.ir.plan import Compute, Plan
from checkmate_tf.ir.simulate import taken_over_by

GRANULE_BYTES = 256
FIRST_REGION_BYTES = 2 << 20
WORTH_SPLITTING_BYTES = 128 << 20
UNLIMITED_BYTES = 1 << 46
_ROUNDS = 2


class OutOfMemory(Exception):
    """No chunk and no room for a new region under the limit."""


@dataclasses.dataclass(frozen=True)
class Placement:
    """peak_bytes: whole chunks in use at the worst moment, resident bytes included; region_bytes: memory taken from the
    device for that."""

    peak_bytes: int
    region_bytes: int


class Allocator:
    """Chunks by address. `held_bytes` counts whole chunks; `peak_bytes` is their most since it was last set."""

    def __init__(self, limit_bytes: int = UNLIMITED_BYTES):
        self.held_bytes = self.peak_bytes = self.region_bytes = 0
        self._limit_bytes, self._next_region_bytes = limit_bytes, min(limit_bytes, FIRST_REGION_BYTES)
        self._size: dict[int, int] = {}
        self._before: dict[int, int | None] = {}
        self._after: dict[int, int | None] = {}
        self._free: list[tuple[int, int]] = []          # (size, address), ascending
        self._is_free: set[int] = set()
        self._end = 0

    def allocate(self, size: int) -> int:
        """The address of a chunk of at least this size. Raises OutOfMemory under a limit."""
        size = max(1, -(-size // GRANULE_BYTES)) * GRANULE_BYTES
        place = bisect.bisect_left(self._free, (size, -1))
        if place == len(self._free):
            self._extend(size)
            place = bisect.bisect_left(self._free, (size, -1))
        chunk, address = self._free.pop(place)
        self._is_free.discard(address)
        if chunk >= 2 * size or chunk - size >= WORTH_SPLITTING_BYTES:
            self._link(address + size, chunk - size, address, self._after[address])
            self._size[address] = chunk = size
        self.held_bytes += chunk
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        return address

    def release(self, address: int) -> None:
        """Gives a chunk back."""
        self.held_bytes -= self._size[address]
        after, before = self._after[address], self._before[address]
        if after in self._is_free:
            self._unfree(after)
            self._absorb(address, after)
        if before in self._is_free:
            self._unfree(before)
            self._absorb(before, address)
            address = before
        self._is_free.add(address)
        bisect.insort(self._free, (self._size[address], address))

    def _extend(self, size: int) -> None:
        room = (self._limit_bytes - self.region_bytes) // GRANULE_BYTES * GRANULE_BYTES
        if size > room:
            raise OutOfMemory
        grown = False
        while size > self._next_region_bytes:
            self._next_region_bytes *= 2
            grown = True
        region = min(self._next_region_bytes, room)
        if not grown:
            self._next_region_bytes *= 2
        self.region_bytes += region
        self._link(self._end, region, None, None)
        self._end += region + GRANULE_BYTES             # regions do not touch

    def _link(self, address: int, size: int, before: int | None, after: int | None) -> None:
        """A new free chunk between these two."""
        self._size[address], self._before[address], self._after[address] = size, before, after
        if before is not None:
            self._after[before] = address
        if after is not None:
            self._before[after] = address
        self._is_free.add(address)
        bisect.insort(self._free, (size, address))

    def _unfree(self, address: int) -> None:
        self._is_free.discard(address)
        del self._free[bisect.bisect_left(self._free, (self._size[address], address))]

    def _absorb(self, address: int, after: int) -> None:
        """Joins a chunk with the one right after it."""
        self._size[address] += self._size.pop(after)
        self._after[address] = further = self._after.pop(after)
        del self._before[after]
        if further is not None:
            self._before[further] = address


def place(graph: Graph, plan: Plan, resident_sizes: Sequence[int], limit_bytes: int = UNLIMITED_BYTES) -> Placement:
    """Plays the plan into an allocator that holds residents of these sizes.

    Raises OutOfMemory where a limit is given and does not suffice. Of what is resident in the graph, that which is not in
    `resident_sizes` is added to the peak as it is.
    """
    memory = Allocator(limit_bytes)
    for size in resident_sizes:
        temporary = memory.allocate(size)
        memory.allocate(size)
        memory.release(temporary)
    memory.peak_bytes = resident_bytes = memory.held_bytes
    for _ in range(_ROUNDS):
        _play(graph, plan, memory)
    return Placement(graph.resident_bytes + memory.peak_bytes - resident_bytes, memory.region_bytes)


def smallest_limit(graph: Graph, plan: Plan, resident_sizes: Sequence[int], within_bytes: int = 1 << 20) -> int:
    """The smallest limit, up to `within_bytes`, under which the plan finds room for everything; at least its peak."""
    low = place(graph, plan, resident_sizes).peak_bytes
    high = low
    while not _fits(graph, plan, resident_sizes, high):
        low, high = high, high + max(within_bytes, high // 8)
    while high - low > within_bytes:
        middle = (low + high) // 2
        low, high = (low, middle) if _fits(graph, plan, resident_sizes, middle) else (middle, high)
    return high


def _fits(graph, plan, resident_sizes, limit_bytes) -> bool:
    try:
        place(graph, plan, resident_sizes, limit_bytes)
    except OutOfMemory:
        return False
    return True


def _play(graph: Graph, plan: Plan, memory: Allocator) -> None:
    at: dict[int, int] = {}
    for position, step in enumerate(plan.steps):
        if not isinstance(step, Compute):
            if step.value in at:
                memory.release(at.pop(step.value))
            continue
        op = graph.ops[step.op]
        taken_over = taken_over_by(op, plan, position) if op.reuses else None
        if taken_over in at:
            at[op.outputs[0]] = at.pop(taken_over)
        else:
            at.update((value, memory.allocate(graph.values[value].bytes)) for value in op.outputs if graph.values[value].bytes)
        if op.scratch_bytes:
            memory.release(memory.allocate(op.scratch_bytes))
    for address in at.values():
        memory.release(address)
