"""Many solvers over many budgets: each in turn in one of several processes, rows cached as they come.

    sweep(graph, budgets, solvers, limits)  ->  pandas.DataFrame, a row for each solver and budget

A row is kept on disk under a fingerprint of all that it depends on: the graph with its prices, the budget, the solver with
its options, the limits, and the code of the solvers. So a sweep that was interrupted goes on where it was, and a row for
another graph, another profile or another version is never taken. An interrupt ends the processes; what they had
not answered is not kept.

A plan for a tighter budget is a plan for every wider one, and a bound for a wider budget holds for every tighter one. So a
row of `auto` takes the cheaper plan and the higher bound of its neighbours' before it is told. The solvers that it is held
against are judged at each budget alone, as published.
"""

import concurrent.futures
import dataclasses
import functools
import hashlib
import json
import math
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Sequence

import pandas as pd

import checkmate_tf
from checkmate_tf import solvers as planners
from checkmate_tf.ir.errors import SolverError
from checkmate_tf.ir.graph import Graph
from checkmate_tf.ir.simulate import Timeline, keep_all_timeline, structural_floor
from checkmate_tf.solvers import Limits, Solution, Solver, Status
from checkmate_tf.worker import LENGTH

COLUMNS = {"solver": "str", "budget_bytes": "int64", "peak_bytes": "Int64", "seconds": "float64", "overhead": "float64",
           "bound": "float64", "gap": "float64", "status": "str", "solve_seconds": "float64", "stopped_by": "str",
           "floor_bytes": "int64", "keep_all_bytes": "int64"}
_BUDGETS = 10
_SHARES = "auto"


def sweep(graph: Graph, budgets: Sequence[int], solvers: Sequence[Solver], limits: Limits = Limits(), *,
          workers: int | None = None, cache: pathlib.Path | None = None,
          tell: Callable[[int, int, str], None] = lambda done, total, text: None) -> pd.DataFrame:
    """A row for each solver and budget in bytes, solvers first, budgets in the order given.

    workers: how many processes; by default one for each core, which the solver's threads divide
    cache: a folder where rows are kept; none are without
    tell: called with (rows done, rows in all, the latest) as rows come

    Columns: solver, budget_bytes, peak_bytes, seconds, overhead (over keeping everything), bound (in seconds), gap, status,
    solve_seconds, stopped_by, floor_bytes (no plan can go below), keep_all_bytes. What does not exist is missing (NaN):
    the peak, time, overhead and gap of a budget without a plan, which is no error. Nor is a solver that fails: `stopped_by`
    says why. Raises SolverError where a solver cannot be handed to another process.
    """
    workers = workers or os.cpu_count() or 1
    limits = dataclasses.replace(limits, threads=max(1, (os.cpu_count() or 1) // workers))
    jobs = [(solver, budget_bytes) for solver in solvers for budget_bytes in budgets]
    base, (floor_bytes, _) = keep_all_timeline(graph), structural_floor(graph)
    common = {"floor_bytes": floor_bytes, "keep_all_bytes": base.peak_bytes}
    fingerprint = graph_fingerprint(graph)
    for solver in solvers:
        _check_pickles(solver)
    rows: dict[int, dict] = {}
    files: dict[int, pathlib.Path] = {}
    for number, (solver, budget_bytes) in enumerate(jobs):
        if cache is not None:
            files[number] = pathlib.Path(cache) / f"{_row_key(fingerprint, solver, budget_bytes, limits)}.json"
            row = _kept_row(files[number])
            if row is not None:
                rows[number] = row
    with _Pool(min(workers, max(1, len(jobs) - len(rows)))) as pool:
        futures = {pool.submit((graph, budget_bytes, solver, limits)): number for number, (solver, budget_bytes) in enumerate(jobs)
                   if number not in rows}
        for future in concurrent.futures.as_completed(futures):
            number = futures[future]
            solver, budget_bytes = jobs[number]
            answer = future.result()
            rows[number] = _row(solver, budget_bytes, answer, base)
            if number in files and not isinstance(answer, str):
                _keep_row(files[number], rows[number])
            tell(len(rows), len(jobs), f"{solver.name} at {budget_bytes} bytes")
    told = [rows[number] | common for number in range(len(jobs))]
    _share([row for row in told if row["solver"] == _SHARES and "solve_seconds" in row], base)
    frame = pd.DataFrame(told, columns=list(COLUMNS))
    return frame.astype(COLUMNS)


def default_budgets(base: Timeline, floor_bytes: int, count: int = _BUDGETS) -> list[int]:
    """Budgets from the floor to the peak of keeping everything, both included, in equal steps."""
    steps = max(1, count - 1)
    return [floor_bytes + (base.peak_bytes - floor_bytes) * step // steps for step in range(count)]


def graph_fingerprint(graph: Graph) -> str:
    """A fingerprint of the graph with its prices."""
    digest = hashlib.sha256(graph.key.encode())
    digest.update(repr((graph.resident_bytes, [(op.seconds, op.scratch_bytes, op.backward, op.reuses) for op in graph.ops])).encode())
    return digest.hexdigest()


@functools.cache
def _code_fingerprint() -> str:
    """A fingerprint of the code that rows depend on: the solvers and the graph's floor below."""
    digest = hashlib.sha256(checkmate_tf.__version__.encode())
    folders = [pathlib.Path(planners.__file__).parent, pathlib.Path(checkmate_tf.__file__).parent / "ir"]
    for path in sorted(path for folder in folders for path in folder.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _row_key(fingerprint: str, solver: Solver, budget_bytes: int, limits: Limits) -> str:
    parts = (fingerprint, _code_fingerprint(), pickle.dumps(solver), budget_bytes, limits)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def _row(solver: Solver, budget_bytes: int, answer: Solution | str, base: Timeline) -> dict:
    row = {"solver": solver.name, "budget_bytes": budget_bytes, "bound": base.seconds, "status": "unknown"}
    if isinstance(answer, str):
        return row | {"stopped_by": f"error: {answer}"}
    row |= {"bound": answer.bound_seconds, "status": answer.status.value, "stopped_by": answer.stopped_by.value,
            "solve_seconds": answer.stats["solve_seconds"]}
    if answer.plan is not None:
        row |= {"peak_bytes": answer.peak_bytes, "seconds": answer.seconds, "overhead": answer.overhead, "gap": answer.gap}
    return row


def _share(rows: Sequence[dict], base: Timeline) -> None:
    """Gives rows of one solver what its rows for other budgets know."""
    by_budget = sorted(rows, key=lambda row: row["budget_bytes"])
    best: dict = {}
    for row in by_budget:
        if row.get("seconds", math.inf) > best.get("seconds", math.inf):
            row |= best | {"status": Status.FEASIBLE.value}
        best = {name: row[name] for name in ("peak_bytes", "seconds", "overhead") if name in row}
    bound = base.seconds
    for row in reversed(by_budget):
        bound = max(bound, row["bound"])
        if "seconds" not in row:
            row["bound"] = bound
        elif bound <= row["seconds"] * (1 + Limits().gap):
            row |= {"bound": bound, "gap": max(0.0, row["seconds"] / bound - 1) if bound > 0 else 0.0}
            if row["gap"] <= Limits().gap:
                row["status"] = Status.OPTIMAL.value


def _kept_row(path: pathlib.Path) -> dict | None:
    try:
        row = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return row if isinstance(row, dict) and "solver" in row else None


def _keep_row(path: pathlib.Path, row: dict) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".part")
        with os.fdopen(handle, "w") as file:
            json.dump(row, file)
        os.replace(temporary, path)
    except OSError as error:
        warnings.warn(f"A row could not be kept, and will be solved again next time ({error}).", stacklevel=3)


class _Pool:
    """Worker processes, each fed by a thread; as a context it ends them all, at once where something went wrong."""

    def __init__(self, count: int):
        self._executor = concurrent.futures.ThreadPoolExecutor(count)
        self._local = threading.local()
        self._children: list[subprocess.Popen] = []

    def __enter__(self) -> "_Pool":
        return self

    def __exit__(self, kind, error, trace) -> None:
        if kind is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)
            for child in self._children:
                os.killpg(child.pid, signal.SIGKILL)  # with whatever processes its solver has started
        self._executor.shutdown()
        for child in self._children:
            child.stdin.close()
            child.stdout.close()
            child.wait()

    def submit(self, job: tuple) -> concurrent.futures.Future:
        """The answer to this job, later."""
        return self._executor.submit(self._ask, pickle.dumps(job))

    def _ask(self, request: bytes) -> Solution | str:
        child = getattr(self._local, "child", None)
        if child is None or child.poll() is not None:
            child = self._local.child = _start()
            self._children.append(child)
        try:
            child.stdin.write(LENGTH.pack(len(request)) + request)
            child.stdin.flush()
            header = child.stdout.read(LENGTH.size)
            return pickle.loads(child.stdout.read(*LENGTH.unpack(header))) if header else _died(child)
        except BrokenPipeError:
            return _died(child)


def _check_pickles(solver: Solver) -> None:
    try:
        pickle.dumps(solver)
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        raise SolverError("A solver object must be one that can be pickled, since it runs in another process. "
                          f"Received: {solver!r} ({error})") from error


def _start() -> subprocess.Popen:
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return subprocess.Popen([sys.executable, "-m", "checkmate_tf.worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                            env=dict(os.environ, PYTHONPATH=path), start_new_session=True)


def _died(child: subprocess.Popen) -> str:
    return f"the solver's process ended with exit code {child.wait()}"
