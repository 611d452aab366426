"""Variables moved together, so that what is free for a step lies in as few pieces as it can.

Initializers, earlier steps and whatever else ran before leave variables scattered over the allocator's memory, some in chunks
nearly twice their size. What is free lies between them, and a step, which takes whole chunks, then takes up to a fifth more than
its live bytes. Steps written here leave variables where they are (`writes`), so it pays to move them once, before planning:
out of the way first, into host memory; then back, each at its exact size, so that they fill the smaller of the free stretches one
after the other. The largest is left, but for what does not fit elsewhere.

What a variable is to lie in must be all that serves it, so all other free stretches are taken meanwhile, but for a *reserve*: small
tensors come and go all the time, and TensorFlow ends the process where it finds no eight bytes for a constant.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence

import tensorflow as tf

from checkmate_tf.bridge import measure, private
from checkmate_tf.bridge.rehearse import Device, OutOfMemory, address_of, layout_of
from checkmate_tf.bridge.variables import evacuated
from checkmate_tf.bridge.writes import movable
from checkmate_tf.ir.graph import Graph
from checkmate_tf.ir.placement import place
from checkmate_tf.ir.plan import Plan, plan_from_order
from checkmate_tf.ir.simulate import keep_all_timeline
from checkmate_tf.ir.units import GRANULE_BYTES, in_granules

_WORTH_MOVING = 0.01            # of what a step takes: what it may gain, and what is held beside variables and batch
_RESERVE_BYTES = 1 << 15
_REST, _RESERVE = "rest", "reserve"
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
            free = [stretch for stretch in device.stretches(keep, stretches) if stretch[1] >= _least_filled_bytes()]
            large = [handle for handle in handles if _bytes_of(handle) >= _least_filled_bytes()]
            if free and large:
                _pack(device, _best_packing(graph, keep, large, free), give)
    except (OutOfMemory, tf.errors.ResourceExhaustedError):
        return False        # each variable lies where there is room for it, and planning takes memory as it then finds it
    return True


def _gain_bytes(graph: Graph, keep: Plan, stretches: Sequence[Stretch]) -> int:
    """By how much a step takes more in these stretches than in one that has room for it all."""
    in_these, in_one = (place(graph, keep, layout_of(free)).peak_bytes for free in (
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
        return place(graph, keep, layout_of([stretch for stretch in packing.rests if stretch[1]])).peak_bytes
    return min((_best_fit(handles, [*smaller, largest]), upwards, _filled(handles, [*reversed(smaller), largest])), key=peak_bytes)


def _pack(device: Device, packing: _Packing, give: Callable[[tf.Tensor], None]) -> None:
    """Gives memory to the variables: one free stretch after the other is filled while all others are taken."""
    taken: dict[object, tf.Tensor] = {}
    in_the_way: list[tf.Tensor] = []

    def take(name: object, size: int) -> int:
        """The bytes of the chunk that is taken; 0 where there is none."""
        device.begin()          # what is left is counted anew: variables have come
        with contextlib.suppress(OutOfMemory):
            taken[name], chunk = device.served(size)
            return chunk
        return 0

    def take_rest(start: int, whole: int, size: int) -> None:
        """Takes so much of this free stretch, and what other free memory, which nobody knew of, serves that first."""
        while len(in_the_way) < _MOST_IN_THE_WAY and take(_REST, size):
            if start <= address_of(taken[_REST]) < start + whole:
                return
            in_the_way.append(taken[_REST])

    last, (start, largest) = len(packing.chosen) - 1, packing.chosen[-1][0]
    chunks = {}
    try:
        for number, ((_, size), _) in sorted(enumerate(packing.chosen[:-1]), key=lambda numbered: -numbered[1][0][1]):
            chunks[number] = take(number, size)
        take(_RESERVE, _RESERVE_BYTES)
        is_within = _RESERVE in taken and start <= address_of(taken[_RESERVE]) < start + largest
        chunks[last] = take(last, largest - _RESERVE_BYTES if is_within else largest)
        taken.pop(_RESERVE, None)
        for number, ((start, _), chosen) in enumerate(packing.chosen):
            taken.pop(number, None)
            free = whole = chunks[number]           # a little more may be free than is known
            for handle in chosen:
                size = _bytes_of(handle)
                # A chunk that is not cut for the variable is cut for the rest of it.
                if size + _least_filled_bytes() <= free < 2 * size:
                    take_rest(start, whole, free - size)
                give(handle)
                taken.pop(_REST, None)
                if start <= _address(handle) < start + whole:
                    free = max(0, free - size)
            if free >= _least_filled_bytes() and number < last:
                take(number, free)
    finally:
        taken.clear()
        in_the_way.clear()


def _least_filled_bytes() -> int:
    """Of stretches and of what lies there: what is smaller may come to lie in the reserve or elsewhere."""
    return max(_RESERVE_BYTES + GRANULE_BYTES, measure.least_told_bytes())


def _address(handle: tf.Tensor) -> int:
    return address_of(tf.raw_ops.ReadVariableOp(resource=handle, dtype=private.handle_dtype(handle)))


def _bytes_of(handle: tf.Tensor) -> int:
    return in_granules(private.handle_bytes(handle))
