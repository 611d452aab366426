"""`checkmate-tf demo`: one network, one hard memory limit, with and without the one line.

Three processes: the first, without a limit, asks how much the step needs and sets the limit between the floor and that;
the second trains with plain Keras under the limit and dies; the third is the same script with one line added. The
limit is TensorFlow's own, on its best-fit allocator: an allocation above it fails as it does on a full GPU.
"""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

from rich.console import Console
from rich.table import Table

from checkmate_tf.ir.units import format_bytes

_BATCH_SIZE = 16
_PICTURES = 96
_SHARE = 0.6
_MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class Run:
    """What a process left behind: its exit code, what it wrote as JSON (or nothing), its errors, its seconds."""

    code: int
    told: dict
    errors: str
    seconds: float


def run(to_file: str = "checkmate_tf_demo.png") -> int:
    """Runs the three processes, prints the table and saves the picture. Returns 0 where all went as announced."""
    console = Console(highlight=False)
    console.print(f"A U-Net learns to remove noise from pictures (128 x 128, batch {_BATCH_SIZE}, Adam).", markup=False)
    needs = _child("estimate", None, None)
    if needs.code != 0:
        console.print(needs.errors, markup=False)
        return 1
    resident, peak = needs.told["resident_bytes"], needs.told["keep_all_peak_bytes"]
    limit_mib = int((resident + _SHARE * (peak - resident)) / _MIB) + 1
    console.print(f"A step needs {format_bytes(peak)}, of which {format_bytes(resident)} are weights, optimizer slots and the batch. "
                  f"Both runs below get {limit_mib} MiB and not a byte more.", markup=False)
    plain = _child("plain", limit_mib, None)
    console.print(f"plain Keras: {_outcome(plain)}", markup=False)
    picture = str(pathlib.Path(to_file).resolve())
    ours = _child("checkmate", limit_mib, picture)
    console.print(f"with checkmate_tf.compile(model, budget=\"auto\"): {_outcome(ours)}", markup=False)
    console.print(_table(limit_mib * _MIB, plain, ours))
    if ours.code == 0:
        console.print(f"The memory of the step over time: {picture}", markup=False)
    else:
        console.print(ours.errors[-2000:], markup=False)
    return 0 if plain.code != 0 and ours.code == 0 else 1


def child(role: str, answer: str, picture: str | None) -> None:
    """What one of the processes does; writes what it found to the file `answer` as JSON."""
    import numpy as np

    import checkmate_tf
    from checkmate_tf import zoo
    import keras
    keras.utils.set_random_seed(0)
    clean, _ = zoo.photo_crops(_PICTURES, 128)
    noisy = clean + np.random.default_rng(1).normal(0, 0.1, clean.shape).astype(np.float32)
    model = zoo.unet()
    model.compile("adam", "mse")
    told = {}
    if role == "estimate":
        needs = checkmate_tf.estimate(model, noisy[:_BATCH_SIZE], clean[:_BATCH_SIZE], verbose=0)
        told = {"resident_bytes": needs.resident_bytes, "keep_all_peak_bytes": needs.keep_all_peak_bytes}
    else:
        if role == "checkmate":
            checkmate_tf.compile(model, budget="auto")
        history = model.fit(noisy, clean, batch_size=_BATCH_SIZE, epochs=2, verbose=2)
        told = {"loss": history.history["loss"]}
    if role == "checkmate":
        solution = model.checkmate.solution
        checkmate_tf.plot_memory(solution, picture)
        told |= {"planned": solution.placed_peak_bytes, "measured": model.checkmate.measured_peak_bytes,
                 "everything": solution.base_peak_bytes, "overhead": solution.expected_overhead}
    pathlib.Path(answer).write_text(json.dumps(told))


def _child(role: str, limit_mib: int | None, picture: str | None) -> Run:
    environment = dict(os.environ, TF_CPU_ALLOCATOR_USE_BFC="true", TF_CPP_MIN_LOG_LEVEL="3")
    if limit_mib is not None:
        environment["TF_CPU_BFC_MEM_LIMIT_IN_MB"] = str(limit_mib)
    with tempfile.TemporaryDirectory() as folder:
        answer = os.path.join(folder, "answer.json")
        started = time.monotonic()
        # A child says what it does on standard output, live; only its errors are kept, to be told in one line.
        finished = subprocess.run([sys.executable, "-m", "checkmate_tf", "demo", "--role", role, "--answer", answer,
                                   *(["--plot", picture] if picture else [])],
                                  env=environment, stderr=subprocess.PIPE, text=True)
        told = json.loads(pathlib.Path(answer).read_text()) if os.path.exists(answer) else {}
    return Run(finished.returncode, told, finished.stderr, time.monotonic() - started)


def _outcome(finished: Run) -> str:
    if finished.code == 0:
        return f"trained, loss {finished.told['loss'][0]:.4f} then {finished.told['loss'][-1]:.4f}, in {finished.seconds:.0f} s"
    reason = next((name for name in ("ResourceExhaustedError", "RESOURCE_EXHAUSTED", "OOM") if name in finished.errors), "error")
    return f"died ({reason}) after {finished.seconds:.0f} s"


def _table(limit_bytes: int, plain: Run, ours: Run) -> Table:
    table = Table(title=f"One limit of {format_bytes(limit_bytes)}", title_justify="left")
    for column in ("", "plain Keras", "with checkmate_tf"):
        table.add_column(column, justify="left" if not column else "right")
    table.add_row("training", "died" if plain.code else "done", "died" if ours.code else "done")
    if ours.code == 0:
        told = ours.told
        table.add_row("peak of a step, simulated", format_bytes(told["everything"]), format_bytes(told["planned"]))
        table.add_row("peak of a step, measured", "above the limit",
                      format_bytes(told["measured"]) if told["measured"] else "not measured")
        table.add_row("extra time of a step, predicted", "", f"{100 * told['overhead']:.1f} %")
        table.add_row("last loss", "", f"{told['loss'][-1]:.4f}")
    return table
