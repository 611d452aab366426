"""Machine code that several processes have put into the cache fits together."""

import subprocess
import sys

_NUMBER = """
from checkmate_tf.ir import compiled
from numba.core.bytecode import FunctionIdentity
print(next(FunctionIdentity._unique_ids))
"""


def test_compiled_functions_are_numbered_differently_in_every_process():
    """Equal numbers let one function be called for another: a greedy search, then a default one in another process, crashed."""
    numbers = {subprocess.run([sys.executable, "-c", _NUMBER], check=True, capture_output=True, text=True).stdout for _ in range(3)}
    assert len(numbers) == 3
