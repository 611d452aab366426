"""Which ops own no bytes, because what they give lies in the memory of their input.

Reshape and the like always do. A part of a tensor along its first dimension does where its rows are aligned: TensorFlow then
hands out a piece of the buffer, and the whole buffer stays as long as any piece is needed. The same goes for ops that
in their case do nothing but give another shape: a transposition that moves dimensions of size 1 only, a reduction over
such dimensions, a stack of one. The tests hold each against the device's allocator.
"""

import math
from collections.abc import Callable

import tensorflow as tf

ALWAYS = frozenset({"Identity", "Reshape", "Squeeze", "ExpandDims", "StopGradient", "PreventGradient", "Bitcast"})
PIECES = frozenset({"Split", "SplitV", "Unpack", "Slice", "StridedSlice"})
_ALIGNED_BYTES = 64             # of TensorFlow's tensors on every device


def is_view(operation: tf.Operation) -> bool:
    """Whether all outputs of the op lie in its input's memory; shapes and positions that are not static say no."""
    if operation.type in ALWAYS:
        return True
    lies_in_input = _SOMETIMES.get(operation.type)
    return (lies_in_input is not None and all(tensor.shape.is_fully_defined() for tensor in operation.inputs)
            and lies_in_input(operation))


def _split(operation: tf.Operation) -> bool:
    axis, whole = operation.inputs
    return _is_first(tf.get_static_value(axis), whole) and _rows_aligned(whole)


def _split_v(operation: tf.Operation) -> bool:
    whole, sizes, axis = operation.inputs
    sizes = tf.get_static_value(sizes)
    if sizes is None or not _is_first(tf.get_static_value(axis), whole):
        return False
    return _rows_aligned(whole) if whole.shape.rank > 1 else all(_aligned(size, whole) for size in sizes)


def _unpack(operation: tf.Operation) -> bool:
    return _is_first(operation.get_attr("axis"), operation.inputs[0]) and _rows_aligned(operation.inputs[0])


def _slice(operation: tf.Operation) -> bool:
    whole = operation.inputs[0]
    begin, size = map(tf.get_static_value, operation.inputs[1:])
    if begin is None or size is None:
        return False
    ranges = [(first, dimension if count < 0 else first + count) for first, count, dimension in zip(begin, size, whole.shape)]
    return _is_block(whole, ranges)


def _strided_slice(operation: tf.Operation) -> bool:
    whole = operation.inputs[0]
    begin, end, strides = map(tf.get_static_value, operation.inputs[1:])
    masks = {name: operation.get_attr(f"{name}_mask") for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")}
    if begin is None or end is None or strides is None or any(stride != 1 for stride in strides):
        return False
    dimensions = whole.shape.as_list()
    ranges = []
    for place in range(len(begin)):
        has = {name for name, mask in masks.items() if mask >> place & 1}
        if "ellipsis" in has:
            rest = sum(1 for later in range(place + 1, len(begin)) if not masks["new_axis"] >> later & 1)
            ranges += [(0, dimension) for dimension in dimensions[len(ranges):len(dimensions) - rest]]
        elif "new_axis" not in has:
            dimension = dimensions[len(ranges)]
            first, last, _ = slice(None if "begin" in has else int(begin[place]), None if "end" in has else int(end[place])).indices(
                dimension)
            if "shrink_axis" in has:
                first = int(begin[place]) % dimension
                last = first + 1
            ranges.append((first, last))
    return _is_block(whole, ranges + [(0, dimension) for dimension in dimensions[len(ranges):]])


def _transpose(operation: tf.Operation) -> bool:
    whole, order = operation.inputs
    order = tf.get_static_value(order)
    if order is None:
        return False
    moved = [dimension for dimension in order if whole.shape[dimension] != 1]
    return moved == sorted(moved)


def _reduction(operation: tf.Operation) -> bool:
    whole, axes = operation.inputs
    axes = tf.get_static_value(axes)
    return axes is not None and whole.shape.num_elements() > 0 and all(whole.shape[axis] == 1 for axis in axes.reshape(-1).tolist())


def _pack(operation: tf.Operation) -> bool:
    return len(operation.inputs) == 1


_SOMETIMES: dict[str, Callable[[tf.Operation], bool]] = {
    "Split": _split, "SplitV": _split_v, "Unpack": _unpack, "Slice": _slice, "StridedSlice": _strided_slice, "Transpose": _transpose,
    "Sum": _reduction, "Mean": _reduction, "Max": _reduction, "Min": _reduction, "Prod": _reduction, "Pack": _pack}


def _is_block(whole: tf.Tensor, ranges: list[tuple[int, int]]) -> bool:
    """Whether these ranges of the dimensions are all of the tensor, or aligned rows of it."""
    full = [(first, last) == (0, dimension) for (first, last), dimension in zip(ranges, whole.shape)]
    if all(full):
        return True
    if not all(full[1:]):
        return False
    return _rows_aligned(whole) if whole.shape.rank > 1 else all(_aligned(place, whole) for place in ranges[0])


def _is_first(axis: int | None, whole: tf.Tensor) -> bool:
    return axis is not None and axis in (0, -whole.shape.rank)


def _rows_aligned(whole: tf.Tensor) -> bool:
    return _aligned(math.prod(whole.shape[1:]), whole)


def _aligned(elements: int, whole: tf.Tensor) -> bool:
    return elements * whole.dtype.size % _ALIGNED_BYTES == 0
