"""The values of every variable a step touches, kept on the host while a step may fail half-way.

A step that runs out of memory may have updated some variables and not others. The first step under a new plan is
therefore run with a copy of all of them at hand.
"""

from collections.abc import Mapping

import numpy as np
import tensorflow as tf

from checkmate_tf.bridge import private
from checkmate_tf.bridge.trace import Traced


def snapshot(traced: Traced) -> dict[str, np.ndarray]:
    """Capture name -> a copy of the variable's value, in host memory."""
    copies = {}
    for name, handle in traced.captures:
        dtype = private.handle_dtype(handle)
        if dtype is not None:
            copies[name] = np.array(tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype))
    return copies


def put_back(traced: Traced, copies: Mapping[str, np.ndarray]) -> None:
    """Gives every variable the value that `snapshot` found."""
    for name, handle in traced.captures:
        if name in copies:
            tf.raw_ops.AssignVariableOp(resource=handle, value=copies[name])
