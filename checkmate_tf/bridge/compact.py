"""Variables moved together, so that what is free for a step lies in as few pieces as it can.

Initializers, earlier steps and whatever else ran before leave variables scattered over the allocator's memory, some in chunks
nearly twice their size. What is free lies between them, and a step, which takes whole chunks, then takes up to a fifth more than
its live bytes. Steps written here leave variables where they are (`writes`), so it pays to move them once, before planning:
out of the way first, into the largest free stretch or into new memory; then, the largest first, back into what is smaller than
that, each at its exact size. The largest stretch is left whole, and beside it the rests of the others.
"""

import bisect
import operator
from collections.abc import Iterable, Sequence

import tensorflow as tf

from checkmate_tf.bridge import measure, private
from checkmate_tf.bridge.rehearse import Device, address_of
from checkmate_tf.bridge.writes import movable, settle
from checkmate_tf.ir.graph import Graph
from checkmate_tf.ir.placement import WORTH_SPLITTING_BYTES, Layout, OutOfMemory, place
from checkmate_tf.ir.plan import Plan, plan_from_order
from checkmate_tf.ir.simulate import keep_all_timeline
from checkmate_tf.ir.units import in_granules

_WORTH_MOVING = 0.01            # of what a step takes: what it may gain, and what is held beside variables and batch
Stretch = tuple[int, int]       # address, bytes


def compact(graph: Graph, captures: Sequence[tf.Tensor], batch_bytes: int = 0) -> bool:
    """Moves the captured variables of this step together, on the device they are on; their values stay.

    batch_bytes: of the batch, where it is on the device
    Whether all of them were looked at: not where the device tells nothing, nothing is to be gained, or its limit leaves no room for
    a second copy of each while they move.
    """
    if measure.measured_memory() is None:
        return False
    handles = sorted(movable(captures), key=private.handle_bytes, reverse=True)
    keep = plan_from_order(graph, graph.order)
    device = Device(graph)
    stretches = device.stretches(keep)
    total_bytes = sum(map(_bytes_of, handles))
    beside_bytes = measure.measured_memory()[0] - batch_bytes - total_bytes
    least_bytes = _WORTH_MOVING * (keep_all_timeline(graph).peak_bytes - graph.resident_bytes)
    if not handles or not stretches or _gain_bytes(graph, keep, stretches) + beside_bytes <= least_bytes:
        return False
    largest = max(stretches, key=operator.itemgetter(1))
    others = [stretch for stretch in stretches if stretch != largest]
    fits = largest[1] >= total_bytes + _bytes_of(handles[0])
    limit_bytes = measure.memory_limit()
    needed_bytes = measure.measured_memory()[0] + sum(size for _, size in stretches) + 2 * total_bytes
    if not fits and limit_bytes is not None and needed_bytes > limit_bytes:
        return False
    try:
        known = (*others, *_evacuate(device, handles, others if fits else stretches))
        now = device.stretches(keep, known)
        smaller = [stretch for stretch in now if _overlaps(stretch, known) and not _overlaps(stretch, [largest])]
        _pack(device, handles, smaller, [stretch for stretch in now if stretch not in smaller])
    except (OutOfMemory, tf.errors.ResourceExhaustedError):
        return False        # each variable is whole wherever it is by now, and planning takes memory as it then finds it
    return True


def _gain_bytes(graph: Graph, keep: Plan, stretches: Sequence[Stretch]) -> int:
    """By how much a step takes more in these stretches than in one that has room for it all."""
    in_these, in_one = (place(graph, keep, Layout(stretches=tuple(free))).peak_bytes for free in (
        stretches, [(0, in_granules(2 * sum(value.bytes for value in graph.values)))]))
    return in_these - in_one


def _evacuate(device: Device, handles: Sequence[tf.Tensor], taken: Sequence[Stretch]) -> list[Stretch]:
    """Moves the variables to where none of these free stretches is. Returns where they were."""
    held = _plugs(device, taken)
    before = list(map(_memory, handles))
    settle(handles)
    left = [(address_of(tensor), _bytes_of(handle)) for tensor, handle in zip(before, handles) if _is_known_to_dlpack(tensor.dtype)]
    del held
    return left


def _pack(device: Device, handles: Sequence[tf.Tensor], into: Sequence[Stretch], taken: Sequence[Stretch]) -> None:
    """Moves the variables, the largest first, each into the smallest of these free stretches from which the allocator would cut
    its exact size; those that are too small for that, and what must stay free, are taken meanwhile."""
    before = _plugs(device, taken)                      # later also where each was: else the next would go there
    free = sorted(size for _, size in into)
    plugs: list[tuple[int, tf.Tensor]] = []
    for handle in handles:
        size = _bytes_of(handle)
        free = sorted([*free, *(chunk for chunk, _ in plugs if _is_cut(chunk, size))])
        plugs = [plug for plug in plugs if not _is_cut(plug[0], size)]
        place = bisect.bisect_left(free, size)
        while place < len(free) and not _is_cut(free[place], size):
            plugs.append((free[place], device.allocate(free.pop(place))))
        if place == len(free):
            continue
        rest = free.pop(place) - size
        before.append(_memory(handle))
        settle([handle])
        if rest:
            bisect.insort(free, rest)


def _is_cut(chunk: int, size: int) -> bool:
    """Whether a request of this size is served with no more from a free chunk."""
    return chunk == size or chunk >= 2 * size or chunk - size >= WORTH_SPLITTING_BYTES


def _plugs(device: Device, stretches: Iterable[Stretch]) -> list[tf.Tensor]:
    """Tensors that take these free stretches: what fits exactly is served from there."""
    device.begin()
    return [device.allocate(size) for size in sorted((size for _, size in stretches), reverse=True)]


def _memory(handle: tf.Tensor) -> tf.Tensor:
    """A tensor that shares the variable's memory, so that this is held when the variable has moved."""
    return tf.raw_ops.ReadVariableOp(resource=handle, dtype=private.handle_dtype(handle))


def _is_known_to_dlpack(dtype: tf.DType) -> bool:
    """Of those of one byte some are not, such as truth values."""
    return dtype.size > 1


def _bytes_of(handle: tf.Tensor) -> int:
    return in_granules(private.handle_bytes(handle))


def _overlaps(stretch: Stretch, others: Iterable[Stretch]) -> bool:
    start, size = stretch
    return any(other < start + size and start < other + taken for other, taken in others)
