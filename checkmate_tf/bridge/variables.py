"""The values of every variable a step touches, on the host: while a step may fail half-way, or to make room on the device.

A step that runs out of memory may have updated some variables and not others. The first step under a new plan is
therefore run with a copy of all of them at hand.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import tensorflow as tf

from checkmate_tf.bridge import private
from checkmate_tf.bridge.trace import Traced
from checkmate_tf.bridge.writes import clear, fill, movable, write

_ALIGNED_BYTES = 64             # at least what Eigen's largest packets are aligned to
_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}       # bytes -> what DLPack and TensorFlow's bitcast know


def snapshot(traced: Traced) -> dict[str, np.ndarray]:
    """Capture name -> a copy of the variable's value, in host memory."""
    copies = {}
    for name, handle in traced.captures:
        if private.handle_dtype(handle) is not None:
            copies[name] = host_copy(_read(handle))
    return copies


def _read(handle: tf.Tensor) -> tf.Tensor:
    return tf.raw_ops.ReadVariableOp(resource=handle, dtype=private.handle_dtype(handle))


def host_copy(tensor: tf.Tensor) -> np.ndarray:
    """The tensor's value in host memory, where `from_host` can use it."""
    return aligned(tensor.numpy())


def aligned(value: np.ndarray) -> np.ndarray:
    """A copy of the array where `from_host` can use it."""
    memory = np.empty(value.nbytes + _ALIGNED_BYTES, np.uint8)
    start = -memory.ctypes.data % _ALIGNED_BYTES
    copy = memory[start:start + value.nbytes].view(value.dtype).reshape(value.shape)
    copy[...] = value
    return copy


def from_host(copy: np.ndarray, dtype: tf.DType) -> tf.Tensor:
    """A tensor on the CPU in the very memory of the copy. TensorFlow itself would make a second one with the device's allocator,
    and the process ends where that has no more."""
    if dtype.size not in _WORDS or dtype.is_bool:
        return tf.convert_to_tensor(copy)
    words = copy.view(_WORDS[dtype.size])
    return tf.bitcast(tf.experimental.dlpack.from_dlpack(words.__dlpack__()), dtype)


@contextlib.contextmanager
def evacuated(handles: Sequence[tf.Tensor]) -> Iterator[Callable[[tf.Tensor], None]]:
    """Takes these movable variables off the device. As a context it gives a function that gives one of them its value back, in new
    memory; at the end, whatever happened, those that are still away get theirs."""
    away = {handle.ref(): host_copy(_read(handle)) for handle in handles}

    def give(handle: tf.Tensor) -> None:
        fill(handle, from_host(away[handle.ref()], private.handle_dtype(handle)))
        del away[handle.ref()]

    try:
        for handle in handles:
            clear(handle)
        yield give
    finally:
        for reference in list(away):
            give(reference.deref())


def put_back(traced: Traced, copies: Mapping[str, np.ndarray]) -> None:
    """Gives every variable the value that `snapshot` found; where it lies as it was planned for, it stays."""
    for name, handle in traced.captures:
        if name in copies:
            value = from_host(copies[name], private.handle_dtype(handle))
            if movable([handle]):
                write(handle, value)
            else:
                tf.raw_ops.AssignVariableOp(resource=handle, value=value)
