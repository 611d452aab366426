"""The simulated allocator against TensorFlow's own, request by request.

In a process of its own, so that little is free but the one region that the test begins with; all requests are larger
than anything that TensorFlow's start may have left free.
"""

import json
import os
import subprocess
import sys

import pytest

SCRIPT = """
import json, random, sys
sys.path[:0] = {paths!r}
import tensorflow as tf
from checkmate_tf.ir.placement import Allocator

held = lambda: tf.config.experimental.get_memory_info("CPU:0")["current"]
empty = lambda size: tf.raw_ops.Empty(shape=[size], dtype=tf.uint8)
region = 1 << 30
choices, ours, live, rows = random.Random({seed}), Allocator(), [], []
empty(1)
before = held()
first = empty(region)
assert held() - before == region
del first
ours.release(ours.allocate(region))
for _ in range(150):
    if live and (choices.random() < 0.45 or ours.held_bytes > region // 2):
        tensor, address = live.pop(choices.randrange(len(live)))
        del tensor
        ours.release(address)
    else:
        size = choices.randint(9 << 20, 90 << 20)
        live.append((empty(size), ours.allocate(size)))
    rows.append([held() - before, ours.held_bytes])
print(json.dumps(rows))
"""


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_every_chunk_is_as_large_as_simulated(seed):
    code = SCRIPT.format(paths=[path for path in sys.path if path], seed=seed)
    environment = dict(os.environ, TF_CPU_ALLOCATOR_USE_BFC="true", TF_CPP_MIN_LOG_LEVEL="3")
    finished = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120,
                              check=False)
    assert finished.returncode == 0, finished.stderr[-2000:]
    rows = json.loads(finished.stdout.splitlines()[-1])
    assert len(rows) == 150 and any(measured > 300 << 20 for measured, _ in rows)
    assert all(measured == simulated for measured, simulated in rows)
