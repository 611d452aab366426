"""Where values come to lie: TensorFlow's best-fit allocator with coalescing, on paper.

The allocator gets memory from the device in regions, each at least twice as large as the one before, and cuts chunks from
them. A request, rounded up to whole granules, is served by the smallest free chunk that is large enough, the lowest of
equal ones. What is left over is split off only if it is as large as the request itself, or 128 MiB; otherwise the whole
chunk is handed out, and *that* is what the allocator's statistics count and what nobody else can have meanwhile. A chunk
that comes back is joined with free neighbours in its region. So a plan takes more than its live bytes, how much more
depends on the order of sizes, and two plans of the same peak can differ by a tenth.

`place` plays a plan twice into what a `Layout` says is free. Where the device cannot be asked, that is a guess: what an
empty device has left after the residents have been made, each with a temporary of the same size, as initializers do; the
peaks come out within a tenth of what is measured, on either side. On the device at hand it is the stretches of memory
that requests made there were served from (`bridge/rehearse.py`).

`Placer` plays plans compiled (`chunks`), thousands of requests in a millisecond; `Allocator` has the same rules for who wants to see each
address. Where a large value would be handed a chunk much larger than itself, *fillers*, taken for a moment, leave it one of its size.

The rules are those of TensorFlow 2.21 (`bfc_allocator.cc`), which the GPU's allocator and both of the CPU's share. The
tests compare with a naive map of bytes, and with the real allocator.
"""

import bisect
import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import numpy as np

from checkmate_tf.ir import chunks
from checkmate_tf.ir.chunks import FIRST_REGION_BYTES, NO_ADDRESS, NO_MORE, WORTH_SPLITTING_BYTES, Asked, Memory, Space
from checkmate_tf.ir.graph import Graph, Op, Value, taker
from checkmate_tf.ir.plan import Compute, Plan
from checkmate_tf.ir.simulate import taken_over_by
from checkmate_tf.ir.units import GRANULE_BYTES, in_granules

UNLIMITED_BYTES = 1 << 46
_MOST_PIECES = 64
LEAST_FILLER_BYTES = 1 << 18
ROUNDS = 2                      # a second step finds what the first one has left
Held = TypeVar("Held")
_ASK, _RETURN, _TAKE_OVER, _COMPUTE = range(4)
_FILLER = -1 << 40            # other negative numbers are scratch


@dataclasses.dataclass(frozen=True)
class Placement:
    """peak_bytes: whole chunks in use at the worst moment, resident bytes included; region_bytes: memory taken from the
    device for that; lacking_bytes: what would have to be there beyond the limit, where that does not suffice; homeless_bytes: the sum
    over all requests that would be served from that."""

    peak_bytes: int
    region_bytes: int
    lacking_bytes: int = 0
    homeless_bytes: int = 0


class Allocator:
    """Chunks by address. `held_bytes` counts whole chunks; `peak_bytes` is their most since it was last set.

    stretches: (address, bytes) of memory that is there already and free, each bounded by something that stays
    small_bytes: requests of fewer bytes are served elsewhere, as by oneDNN's allocator; they count, and lie in nobody's way

    A request for which the limit leaves no room is served nevertheless, from memory of just that size; all of that is `lent_bytes`.
    """

    def __init__(self, limit_bytes: int = UNLIMITED_BYTES, stretches: Sequence[tuple[int, int]] = (), small_bytes: int = 0):
        self.held_bytes = self.peak_bytes = self.region_bytes = self.lent_bytes = self.served_from_lent_bytes = 0
        self._first_lent = NO_ADDRESS
        self._limit_bytes, self._next_region_bytes = limit_bytes, min(limit_bytes, FIRST_REGION_BYTES)
        self._size: dict[int, int] = {}
        self._before: dict[int, int | None] = {}
        self._after: dict[int, int | None] = {}
        self._free: list[tuple[int, int]] = []          # (size, address), ascending
        self._is_free: set[int] = set()
        self._end = 0
        self._small_bytes, self._least_address = small_bytes, 0
        self._free_elsewhere: dict[int, list[int]] = collections.defaultdict(list)       # negative addresses by size
        for address, size in stretches:
            self._link(address, size, None, None)
            self.region_bytes += size
            self._end = max(self._end, address + size + GRANULE_BYTES)
        while self._next_region_bytes <= self.region_bytes:
            self._next_region_bytes *= 2

    def allocate(self, size: int) -> int:
        """The address of a chunk of at least this size; negative where small requests are served."""
        is_small = size < self._small_bytes
        size = max(GRANULE_BYTES, in_granules(size))
        if is_small:
            return self._allocate_elsewhere(size)
        place = bisect.bisect_left(self._free, (size, -1))
        if place == len(self._free):
            self._extend(size)
            place = bisect.bisect_left(self._free, (size, -1))
        chunk, address = self._free.pop(place)
        self._is_free.discard(address)
        if chunk >= 2 * size or chunk - size >= WORTH_SPLITTING_BYTES:
            self._link(address + size, chunk - size, address, self._after[address])
            self._size[address] = chunk = size
        if address >= self._first_lent:
            self.served_from_lent_bytes += chunk
        self._hold(chunk)
        return address

    def release(self, address: int) -> None:
        """Gives a chunk back."""
        self.held_bytes -= self._size[address]
        if address < 0:
            self._free_elsewhere[self._size[address]].append(address)
            return
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

    def _allocate_elsewhere(self, size: int) -> int:
        self._hold(size)
        if self._free_elsewhere[size]:
            return self._free_elsewhere[size].pop()
        self._least_address -= size
        self._size[self._least_address] = size
        return self._least_address

    def _hold(self, size: int) -> None:
        self.held_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)

    def _extend(self, size: int) -> None:
        room = (self._limit_bytes - self.region_bytes) // GRANULE_BYTES * GRANULE_BYTES
        if size > room:
            self.lent_bytes += size
            self._first_lent = min(self._first_lent, self._end)
            self._link(self._end, size, None, None)
            self._end += size + GRANULE_BYTES
            return
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


@dataclasses.dataclass(frozen=True)
class Layout:
    """What is free when a step begins: what residents of these sizes have left of an empty device, or, where the device
    has been asked, these stretches (address, bytes), in which requests below `small_bytes` do not lie."""

    resident_sizes: tuple[int, ...] = ()
    stretches: tuple[tuple[int, int], ...] | None = None
    small_bytes: int = 0

    def allocator(self, limit_bytes: int = UNLIMITED_BYTES) -> Allocator:
        """An allocator in this state. The limit counts the residents, or what lies in the stretches alone."""
        if self.stretches is not None:
            return Allocator(limit_bytes, self.stretches, self.small_bytes)
        memory = Allocator(limit_bytes, small_bytes=self.small_bytes)
        for size in self.resident_sizes:
            temporary = memory.allocate(size)
            memory.allocate(size)
            memory.release(temporary)
        return memory

    def space(self, limit_bytes: int = UNLIMITED_BYTES) -> Space:
        """The same for compiled code."""
        return Space(np.array(() if self.stretches is not None else self.resident_sizes, np.int64),
                     np.array(self.stretches or (), np.int64).reshape(-1, 2), int(limit_bytes), self.small_bytes)


def joined(stretches: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """The same memory in as few stretches as possible: those that overlap or touch become one."""
    found: list[list[int]] = []
    for address, size in sorted(stretches):
        if found and address <= found[-1][1]:
            found[-1][1] = max(found[-1][1], address + size)
        else:
            found.append([address, address + size])
    return tuple((start, end - start) for start, end in found)


class Placer:
    """Places plans for one graph, whose tables are made once: `chunks` does the rest."""

    def __init__(self, graph: Graph):
        self.graph = graph
        requests = [asked_by(graph, op) for op in graph.ops]
        values = len(graph.values)
        scratch = max((-held for asked in requests for held, _ in asked if held < 0), default=0)
        self._requests = np.array([sum(size > 0 for _, size in asked) for asked in requests], np.int64)
        self.asked = Asked(
            np.array([value.bytes > 0 for value in graph.values], np.bool_),
            starts(requests), flat([held if held >= 0 else values - 1 - held for held, _ in asked] for asked in requests),
            flat([size for _, size in asked] for asked in requests),
            np.array([-1 if found is None else found for found in (taker(graph.values, op) for op in graph.ops)], np.int64),
            starts([op.reuses for op in graph.ops]), flat(op.reuses for op in graph.ops),
            np.array([len(op.inputs) + len(op.outputs) for op in graph.ops], np.int64), values + scratch + 1)

    def place(self, plan: Plan, layout: Layout = Layout(), limit_bytes: int = UNLIMITED_BYTES) -> Placement:
        """Plays the plan into this layout, twice: a second step finds what the first one has left.

        What is resident in the graph is added to the peak as it is, but for what the layout counts.
        """
        resident_bytes, state, _ = self._played(plan, layout, limit_bytes, ROUNDS, -1)
        return Placement(self.graph.resident_bytes + int(state[chunks.PEAK] - resident_bytes),
                         *(int(state[number]) for number in (chunks.REGIONS, chunks.LENT, chunks.FROM_LENT)))

    def filled(self, plan: Plan, layout: Layout, limit_bytes: int = UNLIMITED_BYTES, least_bytes: int = LEAST_FILLER_BYTES) -> Plan:
        """The same computations with a filler before each whose first large request would be handed at least `least_bytes` too much in
        this layout, as far as one helps there. Whether all of them together lower the peak, `place` says.

        A chunk is cut only where what is left over is as large as the request, or 128 MiB; else all of it is handed out. A value of 41 MB in
        the last free stretch of 62 takes 62, and holds them as long as it lives. With 21 MB of that taken first, which is cut, the
        value finds a chunk of exactly its size; when it has been computed, the 21 are free again. Nothing is written there.
        """
        *_, found = self._played(dataclasses.replace(plan, fillers=()), layout, limit_bytes, 1, least_bytes)
        return dataclasses.replace(plan, fillers=fillers_from(found))

    def memory(self, order: Sequence[int], *spaces: Space) -> Memory:
        """Enough to play plans of these computations into each of the spaces."""
        return chunks.memory_for(self.asked, int(self._requests[list(order)].sum()), max(spaces, key=lambda space: len(space.stretches)
                                                                                         + 3 * len(space.residents)))

    def _played(self, plan: Plan, layout: Layout, limit_bytes: int, rounds: int, finds_from: int) -> tuple:
        steps = np.array([step.op if isinstance(step, Compute) else -1 - step.value for step in plan.steps], np.int64)
        fillers = np.zeros(len(plan.order), np.int64)
        for number, size in plan.fillers:
            fillers[number] = size
        found = np.zeros(len(plan.order), np.int64)
        space = layout.space(limit_bytes)
        memory = self.memory(plan.order, space)
        resident_bytes = chunks.play(self.asked, space, memory, steps, len(steps), fillers, found, finds_from, rounds, NO_MORE, NO_MORE)
        return resident_bytes, memory.state, found


def fillers_from(found: np.ndarray) -> tuple[tuple[int, int], ...]:
    """(number of a computation, bytes) from bytes for each."""
    return tuple((int(number), int(found[number])) for number in np.flatnonzero(found))


def starts(lists: Sequence[Sequence]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum([len(each) for each in lists])]).astype(np.int64)


def flat(lists: Iterable[Sequence[int]]) -> np.ndarray:
    return np.array([number for each in lists for number in each], np.int64)


def place(graph: Graph, plan: Plan, layout: Layout = Layout(), limit_bytes: int = UNLIMITED_BYTES) -> Placement:
    """As `Placer.place`, for a graph of which not many plans are placed."""
    return Placer(graph).place(plan, layout, limit_bytes)


def smallest_limit(graph: Graph, plan: Plan, layout: Layout = Layout(), within_bytes: int = 1 << 20) -> int:
    """The smallest limit, up to `within_bytes`, under which the plan finds room for everything; at least its peak."""
    placer = Placer(graph)
    low = placer.place(plan, layout).peak_bytes
    high = low
    while placer.place(plan, layout, high).lacking_bytes:
        low, high = high, high + max(within_bytes, high // 8)
    while high - low > within_bytes:
        middle = (low + high) // 2
        low, high = (middle, high) if placer.place(plan, layout, middle).lacking_bytes else (low, middle)
    return high


class Requests:
    """What a plan asks of an allocator, in order: outputs and scratch as their op asks for them, frees as they come; an output
    that takes over an input's memory asks for nothing. Of a value in many pieces some stand for all. Fillers come before what their
    computation asks for, and go after it."""

    def __init__(self, graph: Graph, plan: Plan):
        self._graph = graph
        asked_by_op: dict[int, list[tuple[int, int]]] = {}
        # What is done; to which value or scratch, or the op; and bytes, the value taken over, or the output that took over one, or -1.
        self._steps: list[tuple[int, int, int]] = []
        fillers, computed = dict(plan.fillers), 0
        for position, step in enumerate(plan.steps):
            if not isinstance(step, Compute):
                if graph.values[step.value].bytes:
                    self._steps.append((_RETURN, step.value, 0))
                continue
            op, filler = graph.ops[step.op], fillers.get(computed)
            computed += 1
            if filler:
                self._steps.append((_ASK, _FILLER, filler))
            if op.index not in asked_by_op:
                asked_by_op[op.index] = asked_by(graph, op)
            asked = asked_by_op[op.index]
            taken_over, output = taken_over_by(op, plan, position) if op.reuses else None, None
            if taken_over is not None and graph.values[taken_over].bytes:
                output = taker(graph.values, op)
                self._steps.append((_TAKE_OVER, output, taken_over))
                asked = [(held, size) for held, size in asked if held != output]
            self._steps += [(_ASK if size else _RETURN, held, size) for held, size in asked]
            self._steps.append((_COMPUTE, op.index, -1 if output is None else output))
            if filler:
                self._steps.append((_RETURN, _FILLER, 0))

    def play(self, allocate: Callable[[int], Held], release: Callable[[Held], object],
             compute: Callable[[list[Held]], object] | None = None) -> None:
        """Makes every request once; what is left at the end is released.

        compute: is called when an op has made its requests, with what it reads and what it has taken over
        """
        at: dict[int, list[Held]] = {}
        for kind, held, other in self._steps:
            if kind == _ASK:
                at.setdefault(held, []).append(allocate(other))
            elif kind == _RETURN:
                _release_all(at.pop(held, []), release)
            elif kind == _TAKE_OVER:
                at[held] = at.pop(other)
            elif compute is not None:
                op = self._graph.ops[held]
                compute([place for value in (*op.inputs, *((other,) if other >= 0 else ())) for place in at.get(value, ())])
        for left in at.values():
            _release_all(left, release)


def _release_all(pieces: list[Held], release: Callable[[Held], object]) -> None:
    """Holds none of them longer than until it is released."""
    while pieces:
        release(pieces.pop())


def asked_by(graph: Graph, op: Op) -> list[tuple[int, int]]:
    """What a run of the op asks for, in order: (value, bytes), (negative number, bytes) for scratch, and either with 0 when
    it is given back.

    A request that the run does not give back is the first output of that size that is still without one; an output for which
    there is none comes last.
    """
    outputs = {value: graph.values[value].bytes for value in op.outputs if graph.values[value].bytes}
    if not op.requests:
        scratch = [(-1, op.scratch_bytes), (-1, 0)] if op.scratch_bytes else []
        return [*_pieces(graph, outputs), *scratch]
    sizes = [size for size in op.requests if size >= 0]
    returned = {-request for request in op.requests if request < 0}
    named: dict[int, int] = {}
    for number, size in enumerate(sizes, 1):
        value = next((value for value, bytes in outputs.items() if in_granules(bytes) == in_granules(size)), None)
        if number in returned or value is None:
            named[number] = -number
        else:
            named[number] = value
            del outputs[value]
    made = itertools.count(1)
    asked = [(named[next(made)], request) if request >= 0 else (named[-request], 0) for request in op.requests]
    left = [(-number, 0) for number, held in named.items() if held < 0 and number not in returned]
    return [*asked, *_pieces(graph, outputs), *left]


def _pieces(graph: Graph, values: Iterable[int]) -> list[tuple[int, int]]:
    return [(value, size) for value in values for size in requested(graph.values[value])]


def requested(value: Value) -> list[int]:
    """The bytes of each request for a value."""
    pieces = min(value.pieces, _MOST_PIECES)
    return [value.bytes // pieces] * pieces
