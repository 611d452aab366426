"""`checkmate-tf benchmark`: what plans cost and hold on this machine, against plain Keras, on built-in workloads.

For each workload, in a process of its own under TensorFlow's best-fit allocator: `fit` at each budget, with the
allocator's peak over the steps under the plan that stays; then plain Keras, our step with everything kept, and each plan in turn,
several times, and the medians of the ratios; then five steps from the same weights under each plan and with
everything kept, every variable compared bit by bit. The last budget is then planned once more in a process whose caches, of measured
ops and of compiled code, are empty.
"""

import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence

import keras
import numpy as np
import tensorflow as tf
from rich.console import Console
from rich.table import Table

import checkmate_tf
from checkmate_tf import planning, zoo
from checkmate_tf.bridge import measure as device
from checkmate_tf.bridge import variables
from checkmate_tf.bridge.emit import emit
from checkmate_tf.ir.errors import UnsupportedError
from checkmate_tf.ir.plan import plan_from_order
from checkmate_tf.ir.units import format_bytes

_STEPS = 3
_SETTLED_FITS = 3
_ROUNDS = 11
_EQUAL_STEPS = 5


def run(names: Sequence[str], shares: Sequence[float], as_json: bool = False) -> int:
    """Measures these workloads (all when none are named) at these budgets, and prints a row each."""
    unknown = [name for name in names if name not in zoo.WORKLOADS]
    if unknown:
        raise UnsupportedError(f"Known workloads are {', '.join(zoo.WORKLOADS)}. Received: {', '.join(unknown)}")
    rows = []
    for name in names or zoo.WORKLOADS:
        measured, code = child(f"benchmark.measure({name!r}, {list(shares)!r})", {})
        if code == 0 and measured:
            cold, code = _cold(name, measured[-1]["budget"])
            measured[-1] |= cold
        if code != 0:
            return code
        rows += measured
        if as_json:
            print("\n".join(json.dumps(row) for row in measured), flush=True)
    if not as_json:
        Console(highlight=False, width=130).print(_table(rows))
    return 0


def child(call: str, environment: Mapping[str, str]) -> tuple[list[dict], int]:
    """(rows, exit code) of a function of this package that prints JSON lines, in a process under the best-fit allocator.

    call: such as "benchmark.measure('VGG16', [0.5])"; environment: what else is to be set there
    """
    finished = subprocess.run([sys.executable, "-c", f"from checkmate_tf import {call.partition('.')[0]}; {call}"], check=False,
                              stdout=subprocess.PIPE, text=True, env=dict(os.environ, TF_CPU_ALLOCATOR_USE_BFC="true",
                                                                          TF_CPP_MIN_LOG_LEVEL="3", **environment))
    return [json.loads(line) for line in finished.stdout.splitlines() if line.startswith("{")], finished.returncode


def _cold(name: str, budget: int) -> tuple[dict, int]:
    """What `train_one_step` measures in a process whose caches are empty, and its exit code."""
    with tempfile.TemporaryDirectory() as cache:
        rows, code = child(f"benchmark.train_one_step({name!r}, {budget})", {"XDG_CACHE_HOME": cache, "NUMBA_CACHE_DIR": cache})
    return rows[-1] if rows else {}, code


def train_one_step(name: str, budget: int) -> None:
    """Prints how long it takes from `compile` to the end of the first step of `fit`, and no more of it; null without a plan."""
    workload = zoo.WORKLOADS[name]
    keras.utils.set_random_seed(0)
    model = workload.model()
    x, y = workload.data(workload.batch_size)
    first = _FirstStep()
    checkmate_tf.compile(model, budget, verbose=0)
    with contextlib.suppress(checkmate_tf.InfeasibleBudgetError):         # told by the null
        model.fit(x, y, batch_size=workload.batch_size, verbose=0, callbacks=[first])
    print(json.dumps({"cold_first_step_seconds": first.seconds}), flush=True)


def measure(name: str, shares: Sequence[float]) -> None:
    """Measures one workload in this process; prints a JSON line a budget."""
    workload = zoo.WORKLOADS[name]
    keras.utils.set_random_seed(0)
    model = workload.model()
    x, y = workload.data(workload.batch_size * _STEPS)
    batch = tuple(tf.constant(part[:workload.batch_size]) for part in (x, y))
    started = time.monotonic()
    needs = checkmate_tf.estimate(model, *batch, verbose=0)
    estimate_seconds = time.monotonic() - started
    rows, solutions = [], {}
    for share in shares:
        budget = int(needs.resident_bytes + share * (needs.keep_all_peak_bytes - needs.resident_bytes))
        row = {"workload": name, "share": share, "budget": budget, "estimate_seconds": estimate_seconds}
        rows.append(row)
        checkmate_tf.compile(model, budget, verbose=0)
        first = _FirstStep()
        try:
            model.fit(x, y, batch_size=workload.batch_size, verbose=0, callbacks=[first])
        except checkmate_tf.InfeasibleBudgetError as error:
            row |= {"minimum": error.minimum_bytes, "proven": error.minimum_is_proven}
            continue
        measured_peak, replans = _settled_peak(model, x, y, workload.batch_size)
        solution = model.checkmate.solution
        solutions[share] = solution
        row |= {"first_step_seconds": first.seconds, "live_peak": solution.peak_bytes, "simulated_peak": solution.placed_peak_bytes,
                "predicted_overhead": solution.expected_overhead, "measured_peak": measured_peak, "replans": replans,
                "saved_plan_seconds": _saved_plan_seconds(model, solution, x, y, workload.batch_size),
                "solver": solution.stats.get("found_by", solution.solver), "solve_seconds": solution.stats["solve_seconds"]}
    checkmate_tf.restore(model)
    prepared = planning.prepare(model, batch, "auto", lambda text: None, batch_is_there=True)
    traced, graph = prepared.traced, prepared.graph
    steps = {"keep": emit(traced, graph, plan_from_order(graph, graph.order), math.inf)}
    steps |= {share: emit(traced, graph, solution.plan, solution.spare_bytes) for share, solution in solutions.items()}
    equal = _equal_after_steps(traced, steps, batch)
    model.make_train_function(force=True)
    started = time.monotonic()
    model.train_function(iter([batch]))
    plain_first_seconds = time.monotonic() - started
    measured = ratios({"plain": lambda: model.train_function(iter([batch])), **{
        share: lambda step=step: step(batch) for share, step in steps.items()}})
    for row in rows:
        row |= {"resident": needs.resident_bytes, "keep_all_peak": needs.keep_all_peak_bytes, "keep_ratio": measured["keep"],
                "plain_first_seconds": plain_first_seconds}
        if row["share"] in solutions:
            row |= {"ratio": measured[row["share"]], "equal": equal[row["share"]]}
        print(json.dumps(row), flush=True)


def _settled_peak(model, x, y, batch_size: int) -> tuple[int, int]:
    """The allocator's peak over a whole `fit` under one plan, and how many more plans came before that one."""
    replans = 0
    while True:
        plan = model.checkmate.solution.plan
        device.reset_peak()
        for _ in range(_SETTLED_FITS):
            model.fit(x, y, batch_size=batch_size, verbose=0)
        if model.checkmate.solution.plan == plan:
            return device.measured_memory()[1], replans
        replans += 1


def _saved_plan_seconds(model, solution, x, y, batch_size: int) -> float:
    """The time from `fit` to the end of the first step when the plan is given."""
    checkmate_tf.compile(model, solution, verbose=0)
    first = _FirstStep()
    model.fit(x, y, batch_size=batch_size, verbose=0, callbacks=[first])
    return first.seconds


def _equal_after_steps(traced, steps: dict, batch) -> dict:
    """For each plan, whether every variable has the same bits as with everything kept after some steps."""
    start = variables.snapshot(traced)
    ends = {}
    for share, step in steps.items():
        variables.put_back(traced, start)
        for _ in range(_EQUAL_STEPS):
            step(batch)
        ends[share] = variables.snapshot(traced)
    variables.put_back(traced, start)
    return {share: all(np.array_equal(end[name], value, equal_nan=True) for name, value in ends["keep"].items())
            for share, end in ends.items()}


def ratios(runs: dict[object, Callable]) -> dict:
    """The median over rounds of each run's time over that of "plain", all of them in turn in every round."""
    seconds: dict[object, list[float]] = {name: [] for name in runs}
    for name, function in runs.items():
        function()
    for _ in range(_ROUNDS):
        for name, function in runs.items():
            started = time.perf_counter()
            for value in function().values():
                keras.ops.convert_to_numpy(value)
            seconds[name].append(time.perf_counter() - started)
    return {name: float(np.median(np.divide(times, seconds["plain"]))) for name, times in seconds.items()}


class _FirstStep(keras.callbacks.Callback):
    """Knows how long it took from its making to the end of the first step."""

    def __init__(self):
        super().__init__()
        self.seconds, self._started = None, time.monotonic()

    def on_train_batch_end(self, batch, logs=None):
        if self.seconds is None:
            self.seconds = time.monotonic() - self._started


def _cold_cell(row: dict) -> str:
    if "cold_first_step_seconds" not in row:
        return ""
    return "no plan" if row["cold_first_step_seconds"] is None else f"{row['cold_first_step_seconds']:.0f} s"


def _table(rows: Sequence[dict]) -> Table:
    table = Table(title="Budgets between resident bytes and the keep-everything peak, on this machine", title_justify="left")
    for column in ("workload", "share", "budget", "simulated", "measured", "predicted", "step / plain", "kept / plain", "same bits",
                   "first step", "all cold", "saved plan", "plain's first"):
        table.add_column(column, justify="left" if column == "workload" else "right")
    for row in rows:
        cells = [row["workload"], f"{100 * row['share']:.0f} %", format_bytes(row["budget"])]
        if "ratio" in row:
            cells += [format_bytes(row["simulated_peak"]), format_bytes(row["measured_peak"]),
                      f"{100 * row['predicted_overhead']:+.1f} %", f"{row['ratio']:.2f}", f"{row['keep_ratio']:.2f}",
                      "yes" if row["equal"] else "NO", f"{row['first_step_seconds']:.0f} s",
                      _cold_cell(row),
                      f"{row['saved_plan_seconds']:.0f} s", f"{row['plain_first_seconds']:.0f} s"]
        else:
            cells += [f"needs {format_bytes(row['minimum'])}", "", "", "", f"{row['keep_ratio']:.2f}", "", "", "", "", ""]
        table.add_row(*cells)
    return table
