"""A plan's requests made on the device itself, with nothing computed.

What a plan takes depends on where free memory lies, and that on everything the process has done before. So the real
allocator is asked: tensors without content, of the sizes and in the order of the plan, cost some microseconds each and
touch no memory. The allocator's peak over that is the peak of the step to come, up to what the runtime itself
allocates (a constant here and there).

`Places` judges plans by both: on paper first, in the stretches of memory that earlier requests were served from, and
what fits there on the device; what that teaches about free memory goes into the paper.

The batches that an input pipeline makes ahead would come to lie in those stretches, each time elsewhere, and one batch at
a bad place can cost a large value's size. So before the stretches are looked up, some *rooms* of exactly a batch's size are
set apart by small tensors that stay: the allocator serves what fits exactly first. The batches that are there already
go within the next steps; plans are judged with and without them.

The constants of a step take memory when it runs first, and stay. While it is planned, tensors of their sizes lie there.

Small values come and go at other moments in a step than in its rehearsal, and the runtime has some of its own. One that is put
in the middle of a large stretch can cost the largest value's size. So they get *pockets*, rooms that are too small for anything else.
"""

import contextlib
import ctypes
import functools
import gc
import math
import operator
import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import tensorflow as tf

from checkmate_tf.bridge import measure, private
from checkmate_tf.bridge.extract import constant_sizes
from checkmate_tf.bridge.measure import measured_memory, reset_peak
from checkmate_tf.bridge.price import tensor_bytes
from checkmate_tf.bridge.trace import Traced
from checkmate_tf.bridge.variables import aligned
from checkmate_tf.ir.chunks import FIRST_REGION_BYTES
from checkmate_tf.ir.graph import Graph
from checkmate_tf.ir.placement import ROUNDS, UNLIMITED_BYTES, Layout, Placer, Requests, joined
from checkmate_tf.ir.plan import Plan, plan_from_order
from checkmate_tf.ir.repair import HOMELESS_DIVISOR, repaired, rules_for
from checkmate_tf.ir.simulate import keep_all_timeline
from checkmate_tf.ir.units import GRANULE_BYTES, in_granules

_LEARNED_SHARE = 0.002          # of the peak: where the paper is off by more, the stretches are looked up
_LEAST_STRETCH_BYTES = 1 << 20
_ROOMS, _FEW_ROOMS = 4, 2        # the fewer where memory is limited
_FENCES_BYTES = (1 << 14, 1 << 18)      # the larger where the smaller ones come from another allocator, as oneDNN's do
_TRIES = 50
_POCKET_BYTES, _POCKET_FENCE_BYTES = 1 << 16, 1 << 10
_MOST_POCKETS, _POCKETS_SHARE = 64, 0.01        # of what is not resident
_POCKET_TRIES = 2000            # so many small pieces may be free elsewhere
_END_PIECES = tuple(_LEAST_STRETCH_BYTES >> halvings for halvings in range(1, 13))      # down to a granule
_ASKED_EACH = 8
_MOST_FRAGMENTS = 256           # that share most of what is free
_SWEPT_SHARE = 0.995
_REPAIRS = 5
_REGIONS_OVER_PEAK = 2.5        # what an allocator has taken, at most, over what of it was in use


class OutOfMemory(Exception):
    """The device has no room for a request under its limit."""


class Places:
    """Where plans for a graph come to lie.

    traced: the step that the graph is of, which knows what is resident
    on_device: whether the step will run here, so that the device can be asked
    batch: the batch, where it is on the device

    limit_bytes: what the device's allocator may hand out in all, where it can be asked
    """

    def __init__(self, traced: Traced, graph: Graph, on_device: bool, batch: Sequence[tf.Tensor] = ()):
        self._graph, self._placer, self._rules = graph, Placer(graph), rules_for(graph)
        self._layouts = [Layout(traced.resident_sizes)]
        self._device = Device(graph) if on_device and measure.measured_memory() is not None else None
        self.limit_bytes = (measure.memory_limit() if self._device is not None else None) or UNLIMITED_BYTES
        self._constants: list[tf.Tensor] = []
        if self._device is None:
            return
        large = [tensor for tensor in batch if tensor_bytes(tensor) >= _LEAST_STRETCH_BYTES]
        self._batches = _batches_around(large, _variables(traced))
        self._fences = [fence for tensor in batch if tensor_bytes(tensor) >= _POCKET_BYTES
                        for fence in self._device.rooms(in_granules(tensor_bytes(tensor)))]
        self._fences += self._device.pockets()
        self._constants = self._device.held(size for size in constant_sizes(traced) if size >= _POCKET_BYTES)
        self._learn(plan_from_order(graph, graph.order))

    @property
    def layout(self) -> Layout:
        """What is free when a step begins, as far as it is known."""
        return self._layouts[0]

    def placed_bytes(self, plan: Plan, limit_bytes: int) -> int:
        """The peak of the plan in whole chunks, resident bytes included: on paper, and what is at most `limit_bytes` there
        on the device, if the step will run on this one. More than the device has where its own limit is in the way."""
        paper_bytes = max(map(functools.partial(self._on_paper, plan), self._layouts))
        if self._device is None or paper_bytes > limit_bytes:
            return paper_bytes
        try:
            rehearsed_bytes = self._graph.resident_bytes + self._device.peak_bytes(plan)
        except OutOfMemory:
            return max(paper_bytes, self.limit_bytes) + 1
        if rehearsed_bytes - paper_bytes > _LEARNED_SHARE * paper_bytes:
            self._learn(plan)
        return max(rehearsed_bytes, paper_bytes)

    def placed(self, plan: Plan, limit_bytes: int) -> tuple[Plan, int]:
        """The plan and its peak as `placed_bytes` has it; where that is above the limit, with fillers, if those lower it."""
        bare_bytes = self.placed_bytes(plan, limit_bytes)
        if bare_bytes <= limit_bytes:
            return plan, bare_bytes
        with_fillers = self._placer.filled(plan, self.layout, self._paper_limit(self.layout))
        if not with_fillers.fillers:
            return plan, bare_bytes
        filled_bytes = self.placed_bytes(with_fillers, limit_bytes)
        return (with_fillers, filled_bytes) if filled_bytes < bare_bytes else (plan, bare_bytes)

    def repaired(self, plan: Plan, limit_bytes: int, seconds: float, seed: int = 0) -> tuple[Plan, int]:
        """A plan with the same computations and its peak as `placed` has it: at most the limit if one is found in the time."""
        best, best_bytes = plan, math.inf
        order, aimed_bytes, started = plan.order, limit_bytes, time.monotonic()
        for number in range(_REPAIRS):
            left = seconds - (time.monotonic() - started)
            layouts = [(layout, self._paper_limit(layout)) for layout in self._layouts]
            found, paper_bytes = repaired(self._placer, self._rules, order, layouts, aimed_bytes, self.limit_bytes, left, seed + number)
            placed_bytes = max(paper_bytes, self.placed_bytes(found, limit_bytes))
            if placed_bytes < best_bytes:
                best, best_bytes = found, placed_bytes
            if placed_bytes <= limit_bytes or paper_bytes > aimed_bytes:
                break
            # The device says more than the paper, which knows better now, or has to aim lower.
            order, aimed_bytes = found.order, min(limit_bytes, aimed_bytes - GRANULE_BYTES)
            again_bytes = max(self._on_paper(found, layout) for layout in self._layouts)
            if again_bytes <= aimed_bytes:
                aimed_bytes = again_bytes - GRANULE_BYTES
        return best, best_bytes

    def _paper_limit(self, layout: Layout) -> int:
        is_limited = self._device is not None and measure.is_limited()
        return sum(size for _, size in layout.stretches) if is_limited else UNLIMITED_BYTES

    def _on_paper(self, plan: Plan, layout: Layout) -> int:
        """The plan's peak in this layout; above what the device has by what is lacking there, where free memory lies in pieces too
        small."""
        placement = self._placer.place(plan, layout, self._paper_limit(layout))
        if not placement.lacking_bytes:
            return placement.peak_bytes
        # Of two plans that lack as much, the one that does so less often is nearer to one that fits.
        return max(placement.peak_bytes, self.limit_bytes + placement.lacking_bytes + placement.homeless_bytes // HOMELESS_DIVISOR)

    def give_way(self) -> None:
        """Gives back what lies where the constants of the step will: they come with its function, when that runs first."""
        self._constants.clear()

    def fits_now(self, plan: Plan) -> bool:
        """Whether a device whose memory is limited serves all of the plan's requests as it is now."""
        if self._device is None or not measure.is_limited():
            return True
        try:
            self._device.peak_bytes(plan)
        except OutOfMemory:
            return False
        return True

    def look_again(self, plan: Plan) -> None:
        """Forgets where memory was free and looks again, with the requests of this plan: steps have run since."""
        if self._device is not None:
            self._layouts = [layout_of(())]
            self._learn(plan)

    def _learn(self, plan: Plan) -> None:
        now = self._device.stretches(plan, self._layouts[0].stretches or ())
        later = joined((*now, *self._batches))
        self._layouts = [layout_of(stretches) for stretches in dict.fromkeys((now, later))]


class Device:
    """Makes the requests of plans for one graph, as tensors without content."""

    def __init__(self, graph: Graph):
        self._graph = graph
        self._shapes: dict[int, tf.Tensor] = {}
        self._left_bytes = math.inf
        self._most_bytes = keep_all_timeline(graph).peak_bytes - graph.resident_bytes

    def peak_bytes(self, plan: Plan) -> int:
        """The bytes that the plan's requests take, in whole chunks, beyond what is held now. Raises OutOfMemory."""
        requests = Requests(self._graph, plan)
        held_bytes = self.begin()
        reset_peak()
        for _ in range(ROUNDS):
            requests.play(self.allocate, self.release)
        return measured_memory()[1] - held_bytes

    def stretches(self, plan: Plan, known: Iterable[tuple[int, int]] = ()) -> tuple[tuple[int, int], ...]:
        """(address, bytes) of free memory: what is known of it, the chunks that the plan's requests are served from, and
        what is free right behind those, as far as memory lasts or could be needed. Where that is limited, nearly all there is."""
        if measure.is_limited():
            return self._all_free()
        found, held = list(known), []

        def allocate(size: int) -> tf.Tensor:
            tensor, taken_bytes = self.served(size)
            if taken_bytes > 0:         # small tensors may come from another allocator
                found.append((address_of(tensor), taken_bytes))
            return tensor

        self.begin()
        with contextlib.suppress(OutOfMemory):
            Requests(self._graph, plan).play(allocate, self.release)
            # With all that is known taken, what goes on being served from right behind it belongs to it. The first
            # that is not is from elsewhere, a new region most likely, of which enough is taken to tell it is large.
            taken = joined(found)
            largest = max((size for _, size in taken), default=0)
            for _, known_size in sorted(taken, key=operator.itemgetter(1), reverse=True):
                held.append(allocate(known_size))
            if largest < 2 * self._most_bytes:
                size = part_bytes = min(largest, self._most_bytes)
                behind_bytes = 0
                while size >= _LEAST_STRETCH_BYTES and behind_bytes < self._most_bytes:
                    held.append(allocate(size))
                    if _belongs(found[-1][0], taken, joined(found)):
                        behind_bytes += size
                    else:
                        size //= 2
                held.append(allocate(2 * part_bytes))
            found += self._small_ends(taken, found, held)
        return joined(found)

    def _small_ends(self, taken: Sequence[tuple[int, int]], found: Sequence[tuple[int, int]],
                    held: list[tf.Tensor]) -> list[tuple[int, int]]:
        """(address, bytes) of what is free right behind these stretches, all of which is held, in pieces of less than large ones.

        A chunk is handed out whole or cut by its size, so that a few bytes of it more or less decide where large values come to lie.
        """
        ends: list[tuple[int, int]] = []
        for size in (size for size in _END_PIECES for _ in range(_ASKED_EACH)):
            tensor, taken_bytes = self.served(size)
            if taken_bytes <= 0:            # small tensors may come from another allocator
                break
            held.append(tensor)
            piece = (address_of(tensor), taken_bytes)
            if _belongs(piece[0], taken, joined([*found, *ends, piece])):
                ends.append(piece)
        return ends

    def _all_free(self) -> tuple[tuple[int, int], ...]:
        """(address, bytes) of nearly all free memory, taken piece by piece. No piece is larger than the largest fragment must be:
        the allocator would wait long for what it does not have."""
        found, held = [], []
        self.begin()
        free_bytes = left_bytes = self._left_bytes
        with contextlib.suppress(OutOfMemory):
            while left_bytes > (1 - _SWEPT_SHARE) * free_bytes:
                tensor, taken_bytes = self.served(int(max(GRANULE_BYTES, left_bytes / _MOST_FRAGMENTS)))
                if taken_bytes <= 0:
                    break
                held.append(tensor)
                found.append((address_of(tensor), taken_bytes))
                left_bytes -= taken_bytes
        return joined(found)

    def rooms(self, size: int) -> list[tf.Tensor]:
        """Sets some rooms of this size apart, for batches; the tensors that keep them so."""
        with contextlib.suppress(OutOfMemory):
            self.begin()
            fence_bytes = next((tried for tried in _FENCES_BYTES if self.served(tried)[1] > 0), max(_FENCES_BYTES))
            return self._fences(size, fence_bytes, _FEW_ROOMS if measure.is_limited() else _ROOMS, _TRIES)
        return []

    def held(self, sizes: Iterable[int]) -> list[tf.Tensor]:
        """Tensors of these sizes, as far as there is room, the largest first."""
        held: list[tf.Tensor] = []
        with contextlib.suppress(OutOfMemory):
            self.begin()
            for size in sorted(sizes, reverse=True):
                held.append(self.allocate(size))
        return held

    def pockets(self) -> list[tf.Tensor]:
        """Sets pockets apart for the small values of a step; the tensors that keep them so."""
        with contextlib.suppress(OutOfMemory):
            self.begin()
            if self.served(_POCKET_FENCE_BYTES)[1] > 0:        # else small values come from another allocator
                number = min(_pockets_needed(self._graph), _MOST_POCKETS, int(_POCKETS_SHARE * self._most_bytes / _POCKET_BYTES))
                return self._fences(_POCKET_BYTES, _POCKET_FENCE_BYTES, number, _POCKET_TRIES)
        return []

    def _fences(self, size: int, fence_bytes: int, rooms: int, tries: int) -> list[tf.Tensor]:
        """Small tensors with free memory of exactly this size, but for the first, right before each; where that succeeds."""
        fences, others = [], []
        with contextlib.suppress(OutOfMemory):
            for _ in range(rooms + _TRIES):
                if len(fences) > rooms:
                    break
                room, taken_bytes = self.served(size)
                others.append(room)
                if taken_bytes != size:
                    continue
                for _ in range(tries):
                    fence = self.allocate(fence_bytes)
                    if address_of(fence) == address_of(room) + size:
                        fences.append(fence)
                        break
                    others.append(fence)
        return fences

    def served(self, size: int) -> tuple[tf.Tensor, int]:
        """A tensor of so many bytes, and the bytes of the chunk that it was given."""
        held_bytes = measured_memory()[0]
        tensor = self.allocate(size)
        return tensor, measured_memory()[0] - held_bytes

    def begin(self) -> int:
        """The bytes held now; what is left of a limit is counted from there."""
        held_bytes, limit_bytes = measured_memory()[0], measure.memory_limit()
        self._left_bytes = limit_bytes - held_bytes if limit_bytes is not None else math.inf
        return held_bytes

    def allocate(self, size: int) -> tf.Tensor:
        """A tensor of so many bytes. Raises OutOfMemory."""
        # What cannot fit is not tried: the allocator would wait for it.
        if size > self._left_bytes:
            raise OutOfMemory
        shape = self._shapes.get(size)
        if shape is None:
            shape = self._shapes[size] = _shape(size)
        try:
            tensor = tf.raw_ops.Empty(shape=shape, dtype=tf.uint8)
        except tf.errors.ResourceExhaustedError as error:
            raise OutOfMemory from error
        self._left_bytes -= tensor.shape.num_elements()
        return tensor

    def release(self, tensor: tf.Tensor) -> None:
        """Counts the tensor as gone; it goes when its last reference does."""
        self._left_bytes += tensor.shape.num_elements()


def layout_of(stretches: Sequence[tuple[int, int]]) -> Layout:
    """What this device's allocator finds, with these stretches of memory free."""
    return Layout(stretches=tuple(stretches), small_bytes=measure.least_told_bytes())


def claim() -> None:
    """Has an allocator with a limit take all memory that it has not taken yet, so that it lies in one piece. It would do so in many,
    each time at most doubling what it has. Nothing where it has no limit of its own."""
    if not measure.is_limited():
        return
    gc.collect()                    # what lies in the way although nobody needs it
    outside_bytes = int(measure.memory_limit() - _REGIONS_OVER_PEAK * measure.highest_peak()) - FIRST_REGION_BYTES
    if outside_bytes > 0:
        with contextlib.suppress(tf.errors.ResourceExhaustedError):
            tf.raw_ops.Empty(shape=_shape(outside_bytes), dtype=tf.uint8)


def _variables(traced: Traced) -> list[tuple[int, int]]:
    """(address, bytes) of the large variables of the step."""
    found = []
    for _, handle in traced.captures:
        dtype = private.handle_dtype(handle)
        if dtype is not None and private.handle_bytes(handle) >= _LEAST_STRETCH_BYTES:
            found.append((address_of(tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)), private.handle_bytes(handle)))
    return found


def _batches_around(batch: Sequence[tf.Tensor], variables: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """(address, bytes) where parts of this batch and of those made ahead lie, if they lie one behind the other."""
    found = []
    for tensor in batch:
        size = in_granules(tensor_bytes(tensor))
        for step in (1, -1):
            address = address_of(tensor)
            for _ in range(_ROOMS):
                if any(start < address + size and address < start + taken for start, taken in variables):
                    break
                found.append((address, size))
                address += step * size
    return found


def _pockets_needed(graph: Graph) -> int:
    """How many pockets hold the small values of a step that keeps everything, each in a chunk up to twice its size."""
    held_bytes = most_bytes = 0

    def allocate(size: int) -> int:
        nonlocal held_bytes, most_bytes
        taken_bytes = 1 << (size - 1).bit_length() if size <= _POCKET_BYTES else 0
        held_bytes += taken_bytes
        most_bytes = max(most_bytes, held_bytes)
        return taken_bytes

    def release(taken_bytes: int) -> None:
        nonlocal held_bytes
        held_bytes -= taken_bytes
    Requests(graph, plan_from_order(graph, graph.order)).play(allocate, release)
    return math.ceil(most_bytes / _POCKET_BYTES)


def _shape(size: int) -> tf.Tensor:
    """Of a tensor of bytes: two dimensions, since one would end at 2 GiB. On the device it would lie in the way."""
    shape = aligned(np.array([in_granules(size) // GRANULE_BYTES, GRANULE_BYTES], np.int32))
    return tf.experimental.dlpack.from_dlpack(shape.__dlpack__())


def _belongs(address: int, taken: Iterable[tuple[int, int]], now: Iterable[tuple[int, int]]) -> bool:
    """Whether the stretch that the address is in by now has grown from one of those taken before."""
    start, size = next((start, size) for start, size in now if start <= address < start + size)
    return any(start <= before < start + size for before, _ in taken)


def address_of(tensor: tf.Tensor) -> int:
    """Where the tensor lies, from its DLPack form, whose first field that is."""
    capsule = tf.experimental.dlpack.to_dlpack(tensor)
    return ctypes.c_void_p.from_address(_capsule_pointer(capsule, b"dltensor")).value


_capsule_pointer: Callable = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype, _capsule_pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
