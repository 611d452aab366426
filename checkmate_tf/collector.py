"""Python's collector of reference cycles, set aside while a large graph is built.

Tracing makes objects by the million that stay, and the collector looks through all of them again and again: a sixth of the
time from `fit` to the first step of DenseNet121.
"""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_collecting() -> Iterator[None]:
    """Within it, reference cycles wait; afterwards the collector is on again if it was."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
