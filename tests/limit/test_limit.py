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
