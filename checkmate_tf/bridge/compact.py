"""Variables moved together, so that what is free for a step lies in as few pieces as it can.

Initializers, earlier steps and whatever else ran before leave variables scattered over the allocator's memory, some in chunks
nearly twice their size. What is free lies between them, and a step, which takes whole chunks, then takes up to a fifth more than
its live bytes. Steps written here leave variables where they are (`writes`), so it pays to move them once, before planning:
out of the way first, into host memory; then back, each at its exact size, so that they fill the smaller of the free stretches one
after the other. The largest is left, but for what does not fit elsewhere.
"""

import dataclasses
from collections.abc import Callable, Sequence

import tensorflow as tf

from checkmate_tf.bridge import measure, private
from checkmate_tf.bridge.rehearse import POCKET_BYTES, Device, OutOfMemory, address_of
from checkmate_tf.bridge.variables import evacuated
from checkmate_tf.bridge.writes import movable
from checkmate_tf.ir.graph import Graph
from checkmate_tf.ir.placement import Layout, place
from checkmate_tf.ir.plan import Plan, plan_from_order
from checkmate_tf.ir.simulate import keep_all_timeline
from checkmate_tf.ir.units import in_granules

_WORTH_MOVING = 0.01            # of what a step takes: what it may gain, and what is held beside variables and batch
_LEAST_FILLED_BYTES = POCKET_BYTES              # stretches no larger are left to smaller variables and to the runtime
_LEAST_BESIDE_BYTES = 1 << 15   # smaller ones would come to lie elsewhere
_BESIDE = "beside"
_MOST_IN_THE_WAY = 50
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
            # Small tensors that come and go meanwhile would come first in the memory that is to be filled.
            fences = device.pockets(least=1)
            free = [stretch for stretch in device.stretches(keep, stretches) if stretch[1] > _LEAST_FILLED_BYTES]
            large = [handle for handle in handles if _bytes_of(handle) >= _LEAST_FILLED_BYTES]
            # TensorFlow itself does not survive it when there is nothing left for a tensor of eight bytes.
            has_room = not measure.is_limited() or len(fences) > 1
            if free and large and has_room:
                _pack(device, _best_packing(graph, keep, large, free), give)
            del fences
    except (OutOfMemory, tf.errors.ResourceExhaustedError):
        return False        # each variable lies where there is room for it, and planning takes memory as it then finds it
    return True


def _gain_bytes(graph: Graph, keep: Plan, stretches: Sequence[Stretch]) -> int:
    """By how much a step takes more in these stretches than in one that has room for it all."""
    in_these, in_one = (place(graph, keep, Layout(stretches=tuple(free))).peak_bytes for free in (
        stretches, [(0, in_granules(2 * sum(value.bytes for value in graph.values)))]))
    return in_these - in_one


@dataclasses.dataclass(frozen=True)
class _Packing:
    """The variables that come to lie in each free stretch, in this order, those in the largest at last; what then stays free of each."""

    chosen: Sequence[tuple[Stretch, list[tf.Tensor]]]
    rests: Sequence[Stretch]


def _filled(handles: Sequence[tf.Tensor], stretches: Sequence[Stretch]) -> _Packing:
    """One stretch after the other is filled, the largest variables first; the last takes what is left."""
    chosen, rests, left = [], [], list(handles)
    for address, size in stretches[:-1]:
        filling, others, rest = [], [], size
        for handle in left:
            fits = _bytes_of(handle) <= rest
            (filling if fits else others).append(handle)
            rest -= _bytes_of(handle) if fits else 0
        chosen.append(((address, size), filling))
        rests.append((address, rest))
        left = others
    return _closed(chosen, rests, stretches[-1], left)


def _best_fit(handles: Sequence[tf.Tensor], stretches: Sequence[Stretch]) -> _Packing:
    """Each variable, the largest first, goes where the allocator would cut it from the smallest stretch; the last takes what is left."""
    chosen: list[list[tf.Tensor]] = [[] for _ in stretches[:-1]]
    rests, left = [size for _, size in stretches[:-1]], []
    for handle in handles:
        size = _bytes_of(handle)
        fitting = [(rest, number) for number, rest in enumerate(rests) if rest == size or rest >= 2 * size]
        if not fitting:
            left.append(handle)
            continue
        _, number = min(fitting)
        chosen[number].append(handle)
        rests[number] -= size
    return _closed(list(zip(stretches, chosen)), [(address, rest) for (address, _), rest in zip(stretches, rests)], stretches[-1], left)


def _closed(chosen: list, rests: list[Stretch], largest: Stretch, left: list[tf.Tensor]) -> _Packing:
    rest = max(0, largest[1] - sum(map(_bytes_of, left)))
    return _Packing([*chosen, (largest, left)], [*rests, (largest[0], rest)])


def _best_packing(graph: Graph, keep: Plan, handles: Sequence[tf.Tensor], stretches: Sequence[Stretch]) -> _Packing:
    """Under a limit, the smaller stretches filled, the smallest first, which leaves few pieces; else the packing with which keeping
    everything takes least."""
    *smaller, largest = sorted(stretches, key=lambda stretch: stretch[1])
    upwards = _filled(handles, [*smaller, largest])
    if measure.is_limited():
        return upwards

    def peak_bytes(packing: _Packing) -> int:
        return place(graph, keep, Layout(stretches=tuple(stretch for stretch in packing.rests if stretch[1]))).peak_bytes
    return min((_best_fit(handles, [*smaller, largest]), upwards, _filled(handles, [*reversed(smaller), largest])), key=peak_bytes)


def _pack(device: Device, packing: _Packing, give: Callable[[tf.Tensor], None]) -> None:
    """Gives memory to the variables: one free stretch after the other is filled while all others are taken."""
    taken: dict[object, tf.Tensor] = {}
    taken_bytes: dict[object, int] = {}
    in_the_way: list[tf.Tensor] = []

    def take(name: object, size: int) -> tf.Tensor:
        device.begin()          # what is left is counted anew: variables have come
        taken[name], taken_bytes[name] = device.served(size)
        return taken[name]

    try:
        for number, (stretch, _) in sorted(enumerate(packing.chosen), key=lambda numbered: -numbered[1][0][1]):
            take(number, stretch[1])
        for number, ((start, _), chosen) in enumerate(packing.chosen):
            del taken[number]
            free = whole = taken_bytes[number]          # a little more may be free than is known
            for handle in chosen:
                size = _bytes_of(handle)
                # A chunk that is not cut for the variable is cut for the rest of it.
                if size + _LEAST_BESIDE_BYTES <= free < 2 * size:
                    while not start <= address_of(take(_BESIDE, free - size)) < start + whole:
                        in_the_way.append(taken[_BESIDE])       # free memory that nobody knew of
                        if len(in_the_way) > _MOST_IN_THE_WAY:
                            raise OutOfMemory
                give(handle)
                taken.pop(_BESIDE, None)
                free = max(0, free - size)
            if free > _LEAST_FILLED_BYTES and number < len(packing.chosen) - 1:
                take(number, free)
    finally:
        taken.clear()
        in_the_way.clear()


def _bytes_of(handle: tf.Tensor) -> int:
    return in_granules(private.handle_bytes(handle))
