"""Variables moved together, so that what is free for a step lies in as few pieces as it can.

Initializers, earlier steps and whatever else ran before leave variables scattered over the allocator's memory, some in chunks
nearly twice their size. What is free lies between them, and a step, which takes whole chunks, then takes up to a fifth more than
its live bytes. Steps written here leave variables where they are (`writes`), so it pays to move them once, before planning:
out of the way first, into host memory; then, the largest first, back into what is smaller than the largest free stretch, each at
its exact size. That stretch is left whole, and beside it the rests of the others.
"""

import bisect
from collections.abc import Callable, Sequence

import tensorflow as tf

from checkmate_tf.bridge import measure, private
from checkmate_tf.bridge.rehearse import Device, OutOfMemory, layout_of
from checkmate_tf.bridge.variables import evacuated
from checkmate_tf.bridge.writes import movable
from checkmate_tf.ir.graph import Graph
from checkmate_tf.ir.placement import WORTH_SPLITTING_BYTES, place
from checkmate_tf.ir.plan import Plan, plan_from_order
from checkmate_tf.ir.simulate import keep_all_timeline
from checkmate_tf.ir.units import in_granules

_WORTH_MOVING = 0.01            # of what a step takes: what it may gain, and what is held beside variables and batch
Stretch = tuple[int, int]       # address, bytes


def compact(graph: Graph, captures: Sequence[tf.Tensor], batch_bytes: int = 0) -> bool:
    """Moves the captured variables of this step together, on the device they are on; their values stay.

    batch_bytes: of the batch, where it is on the device
    Whether they were moved: not where the device tells nothing, or nothing is to be gained.
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
    if not handles or not stretches:
        return False
    if not measure.is_limited() and _gain_bytes(graph, keep, stretches) + beside_bytes <= least_bytes:
        return False
    try:
        with evacuated(handles) as give:
            _pack(device, handles, device.stretches(keep, stretches), give)
    except (OutOfMemory, tf.errors.ResourceExhaustedError):
        return False        # each variable lies where there is room for it, and planning takes memory as it then finds it
    return True


def _gain_bytes(graph: Graph, keep: Plan, stretches: Sequence[Stretch]) -> int:
    """By how much a step takes more in these stretches than in one that has room for it all."""
    in_these, in_one = (place(graph, keep, layout_of(free)).peak_bytes for free in (
        stretches, [(0, in_granules(2 * sum(value.bytes for value in graph.values)))]))
    return in_these - in_one


def _pack(device: Device, handles: Sequence[tf.Tensor], stretches: Sequence[Stretch], give: Callable[[tf.Tensor], None]) -> None:
    """Gives memory to the variables, the largest first: each when the allocator would serve it from the smallest of these free
    stretches from which it would cut its exact size. What is too small for that, and the largest stretch, are taken meanwhile;
    what fits nowhere else comes last, one behind the other at the start of that."""
    *free, largest = sorted(size for _, size in stretches)

    def take(size: int) -> tuple[int, tf.Tensor]:
        device.begin()          # what is left is counted anew: variables have come
        return size, device.allocate(size)

    whole, plugs, left = [take(largest)], [], []
    try:
        for handle in handles:
            size = _bytes_of(handle)
            free = sorted([*free, *(chunk for chunk, _ in plugs if _is_cut(chunk, size))])
            plugs = [plug for plug in plugs if not _is_cut(plug[0], size)]
            place = bisect.bisect_left(free, size)
            while place < len(free) and not _is_cut(free[place], size):
                plugs.append(take(free.pop(place)))
            if place == len(free):
                left.append(handle)
                continue
            rest = free.pop(place) - size
            give(handle)
            if rest:
                bisect.insort(free, rest)
        plugs += map(take, reversed(free))
        whole.clear()
        for handle in left:
            give(handle)
    finally:
        whole.clear()
        plugs.clear()


def _is_cut(chunk: int, size: int) -> bool:
    """Whether a request of this size is served with no more from a free chunk."""
    return chunk == size or chunk >= 2 * size or chunk - size >= WORTH_SPLITTING_BYTES


def _bytes_of(handle: tf.Tensor) -> int:
    return in_granules(private.handle_bytes(handle))
