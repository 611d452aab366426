"""The claim itself: under one hard limit on the device's memory plain Keras dies, and one added line makes it train.

Each run is a process of its own, since the limit is set before TensorFlow is imported. The limit is that of
TensorFlow's best-fit allocator, put on the CPU: what exceeds it fails as it does on a full GPU. The log tells
RESOURCE_EXHAUSTED in any case; whether Python still sees the error depends on the kernel, since oneDNN's abort the
process after it. """

import json
import os
import subprocess
import sys

import pytest

MIB = 1 << 20

SCRIPT = """
import json, sys
sys.path[:0] = {paths!r}
import keras, numpy as np
from checkmate_tf import zoo
keras.utils.set_random_seed(0)
workload = zoo.WORKLOADS[{name!r}]
model = workload.model()
x, y = workload.data(3 * workload.batch_size)
{line}
history = model.fit(x, y, batch_size=workload.batch_size, verbose=0)
print(json.dumps({{"loss": history.history["loss"]}}))
"""

ESTIMATE = """
import json, sys
sys.path[:0] = {paths!r}
import checkmate_tf
from checkmate_tf import zoo
workload = zoo.WORKLOADS[{name!r}]
x, y = workload.data(workload.batch_size)
needs = checkmate_tf.estimate(workload.model(), x, y, profile="cpu", verbose=0)
print(json.dumps({{"resident": needs.resident_bytes, "peak": needs.keep_all_peak_bytes}}))
"""


def _run(script: str, limit_mib: int | None = None, **fields) -> subprocess.CompletedProcess:
    environment = dict(os.environ, TF_CPU_ALLOCATOR_USE_BFC="true", TF_CPP_MIN_LOG_LEVEL="1")
    if limit_mib is not None:
        environment["TF_CPU_BFC_MEM_LIMIT_IN_MB"] = str(limit_mib)
    code = script.format(paths=[path for path in sys.path if path], **fields)
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=280,
                          check=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ResNet50", "UNet"])
def test_plain_keras_dies_where_one_more_line_trains(name):
    needs = _run(ESTIMATE, name=name)
    assert needs.returncode == 0, needs.stderr[-2000:]
    told = json.loads(needs.stdout.splitlines()[-1])
    limit_mib = int(told["resident"] + 0.65 * (told["peak"] - told["resident"])) // MIB
    plain = _run(SCRIPT, limit_mib, name=name, line="")
    assert plain.returncode != 0
    assert "ran out of memory" in plain.stderr and "RESOURCE_EXHAUSTED: OOM when allocating" in plain.stderr
    ours = _run(SCRIPT, limit_mib, name=name,
                line="import checkmate_tf; checkmate_tf.compile(model, 'auto', profile='cpu', time_limit=20, verbose=0)")
    assert ours.returncode == 0, ours.stderr[-3000:]
    assert 0 < json.loads(ours.stdout.splitlines()[-1])["loss"][0] < 10


SWEEP = """
import json, sys
sys.path[:0] = {paths!r}
import tensorflow as tf
from checkmate_tf.bridge import measure
from checkmate_tf.bridge.compact import compact
from checkmate_tf.bridge.extract import extract
from checkmate_tf.bridge.rehearse import Device, claim
from checkmate_tf.bridge.trace import trace
from checkmate_tf.ir.plan import plan_from_order
MIB = 1 << 20
variables = [tf.Variable(tf.fill([size * MIB // 4], float(size))) for size in (1, 3, 2, 2, 3, 4)]
traced = trace(lambda x: tf.add_n([tf.reduce_sum(tf.tile(x, [8]) * value[0]) for value in variables]), tf.TensorSpec([MIB // 4]))
graph = extract(traced)
claim()
device, keep = Device(graph), plan_from_order(graph, graph.order)
told = []
for moves in (False, True):
    if moves:
        assert compact(graph, [handle for _, handle in traced.captures])
    found = device.stretches(keep)
    told.append([sum(size for _, size in found), max(size for _, size in found), measure.measured_memory()[0]])
print(json.dumps({{"told": told, "values": [float(tf.reduce_min(value)) for value in variables]}}))
"""


def test_under_a_limit_nearly_all_free_memory_is_found_and_variables_lie_together():
    done = _run(SWEEP, 64)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "ran out of memory" not in done.stderr           # else the allocator would have waited for ten seconds
    told = json.loads(done.stdout.splitlines()[-1])
    for found_bytes, _, held_bytes in told["told"]:
        assert 0.97 * (64 * MIB - held_bytes) < found_bytes <= 64 * MIB - held_bytes
    (_, before_bytes, _), (_, largest_bytes, held_bytes) = told["told"]
    assert largest_bytes >= before_bytes - MIB          # the last variable found no other chunk of its size
    assert 15 * MIB <= held_bytes < 16 * MIB            # exact sizes
    assert told["values"] == [1, 3, 2, 2, 3, 4]


CLAIM = """
import json, sys
sys.path[:0] = {paths!r}
import tensorflow as tf
from checkmate_tf.bridge.extract import extract
from checkmate_tf.bridge.rehearse import Device, claim
from checkmate_tf.bridge.trace import trace
variable = tf.Variable(tf.ones([1 << 18]))
{line}
graph = extract(trace(lambda x: tf.reduce_sum(x * variable), tf.TensorSpec([1 << 18])))
print(json.dumps(max(size for _, size in Device(graph).stretches(None))))
"""


def test_what_is_not_taken_yet_comes_in_one_piece():
    doubled, whole = (_run(CLAIM, 100, line=line) for line in ("", "claim()"))
    for done in (doubled, whole):
        assert done.returncode == 0, done.stderr[-3000:]
        assert "ran out of memory" not in done.stderr
    assert json.loads(doubled.stdout.splitlines()[-1]) < 65 * MIB
    assert json.loads(whole.stdout.splitlines()[-1]) > 85 * MIB


@pytest.mark.slow
@pytest.mark.parametrize("name, size, limit_mib", [("VGG16", 8, 524), ("BERT", 16, 260)])        # 60 % of the way to keeping everything
def test_a_budget_may_be_all_that_the_device_has(name, size, limit_mib):
    done = _run("import sys; sys.path[:0] = {paths!r}; from checkmate_tf import fidelity; {line}", limit_mib,
                line=f"fidelity.train('{name}', {size}, {limit_mib * MIB}, 20)")
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1])["limited"] == "trains"
