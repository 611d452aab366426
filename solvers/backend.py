"""The door to OR-Tools: an integer program goes in as plain arrays, what was found and why it ended comes out.

The engines run in a child process (`engine`, which says why), started when first needed and kept. A child that dies or
overruns its limit is a SolverError or no answer, never the end of this process; an interrupt ends the child.
"""

import atexit
import concurrent.futures
import dataclasses
import enum
import math
import pathlib
import pickle
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import BinaryIO

import numpy as np

from checkmate_tf.ir.errors import SolverError

_ENGINE = pathlib.Path(__file__).with_name("engine.py")
_LENGTH = struct.Struct("<Q")
_GRACE_SECONDS = 1.0


class EngineOutOfMemory(SolverError, MemoryError):
    """The process that runs an engine was ended by a signal: by the system, or by itself for want of memory."""


class Engine(str, enum.Enum):
    """Which of OR-Tools' solvers does the work."""

    SCIP = "scip"
    HIGHS = "highs"


class End(str, enum.Enum):
    """Why the engine stopped."""

    OPTIMAL = "optimal"            # to within the gap asked for
    INFEASIBLE = "infeasible"
    LIMIT = "limit"
    FAILED = "failed"              # numerical trouble


@dataclasses.dataclass(frozen=True)
class Outcome:
    """values: one number a variable, or None without a solution; bound: no solution is cheaper."""

    end: End
    values: np.ndarray | None
    bound: float


class LinearModel:
    """An integer program in the making. Collects columns and rows; indices are given out in the order of calls.

    Minimises cost @ x subject to lower <= x <= upper, some x integer, and low <= A x <= high.
    """

    def __init__(self):
        self._columns: list[tuple[np.ndarray, ...]] = []
        self._entries: list[tuple[np.ndarray, ...]] = []
        self._bounds: list[tuple[np.ndarray, np.ndarray]] = []
        self.column_count = 0
        self.row_count = 0

    def columns(self, count: int, *, lower=0.0, upper=1.0, cost=0.0, integer: bool = True) -> np.ndarray:
        """Adds `count` variables; their indices. Bounds and costs are numbers or arrays."""
        self._columns.append(tuple(np.broadcast_to(field, count) for field in (lower, upper, cost, integer)))
        self.column_count += count
        return np.arange(self.column_count - count, self.column_count)

    def rows(self, terms: Sequence[tuple], *, low=-math.inf, high=math.inf) -> None:
        """Adds one row for each position of the arrays in `terms`: low <= sum of factor * x[column] <= high.

        A term is (columns, factor); a factor is a number or an array. # columns: int [rows]
        """
        count = len(terms[0][0])
        numbers = np.arange(self.row_count, self.row_count + count)
        for columns, factor in terms:
            self._entries.append((numbers, np.asarray(columns), np.broadcast_to(factor, count)))
        self._bounds.append((np.broadcast_to(low, count), np.broadcast_to(high, count)))
        self.row_count += count

    def row(self, columns: Sequence[int], factors, *, low=-math.inf, high=math.inf) -> None:
        """Adds a single row over many columns."""
        self._entries.append((np.full(len(columns), self.row_count), np.asarray(columns),
                              np.broadcast_to(factors, len(columns))))
        self._bounds.append((np.array([low]), np.array([high])))
        self.row_count += 1

    def ragged_rows(self, numbers: np.ndarray, columns: np.ndarray, factors: np.ndarray, high: np.ndarray | float,
                    count: int) -> None:
        """Adds `count` rows at once, row by row of any columns: entry i adds factors[i] * x[columns[i]] to row numbers[i]."""
        self._entries.append((self.row_count + numbers, columns, factors))
        self._bounds.append((np.full(count, -math.inf), np.broadcast_to(high, count)))
        self.row_count += count

    def solve(self, engine: Engine, *, seconds: float, gap: float, seed: int,
              start: Mapping[int, float] | None = None, is_relaxed: bool = False,
              child: "Child | None" = None, grace_seconds: float = _GRACE_SECONDS) -> Outcome:
        """Runs the engine. `start` is a solution to begin with: values of columns, all integer ones at least.
        With `is_relaxed` no column need be integer.

        The seconds include starting the process and handing the model over; an engine that does not stop within the
        grace after them is ended, and with it what it knows. Everybody shares one process but who brings a `child`.
        Raises SolverError if OR-Tools refuses the model.
        """
        lower, upper, cost, integer = (np.concatenate(parts) for parts in zip(*self._columns))
        low, high = (np.concatenate(parts) for parts in zip(*self._bounds))
        rows, columns, factors = _summed(*(np.concatenate(parts) for parts in zip(*self._entries)))
        answer = (child or _CHILD).ask({"engine": engine.value, "gap": gap, "seed": seed, "lower": lower,
                             "upper": upper, "cost": cost, "integer": integer & (not is_relaxed), "low": low,
                             "high": high, "rows": rows, "columns": columns, "factors": factors,
                             "start": dict(start) if start is not None else None}, seconds, grace_seconds)
        if answer is None:
            return Outcome(End.LIMIT, None, -math.inf)
        if "refused" in answer:
            raise SolverError(f"OR-Tools' {engine.value} refused a model of {self.column_count} columns and "
                              f"{self.row_count} rows. Received: {answer['refused']}")
        return Outcome(End(answer["end"]), answer["values"], answer["bound"])


class ConstraintModel:
    """A constraint program in the making, all in integers: linear rows, each under a condition or not, and intervals
    under one capacity. Minimises a linear cost; solved by CP-SAT."""

    def __init__(self):
        self._domains: list[tuple[bool, tuple[int, ...]]] = []
        self._rows: list[tuple] = []
        self._intervals: list[tuple[int, int, int, int, int]] = []

    def column(self, low: int, high: int) -> int:
        """Adds a variable between these values, both included; its index."""
        self._domains.append((False, (low, high)))
        return len(self._domains) - 1

    def choice(self, values: Sequence[int]) -> int:
        """Adds a variable that has one of these values; its index."""
        self._domains.append((True, tuple(values)))
        return len(self._domains) - 1

    def row(self, terms: Sequence[tuple[int, int]], low: int, high: int, *, condition: int = -1) -> None:
        """low <= sum of factor * column over the terms (column, factor) <= high, if the condition's column is 1."""
        self._rows.append((tuple(terms), low, high, condition))

    def interval(self, start: int, presence: int, demand: int, *, end: int = -1, horizon: int = 0) -> None:
        """Bytes that are held from column `start` to before column `end`, or for 1 without an end, if present."""
        size = self.column(1, horizon) if end >= 0 else -1
        self._intervals.append((start, end, size, presence, demand))

    def solve(self, cost: Sequence[tuple[int, int]], capacity: int, *, seconds: float, gap: float, seed: int,
              workers: int, start: Mapping[int, int] | None = None) -> Outcome:
        """Runs CP-SAT with the terms of `cost` for an objective, the column `capacity` for a limit, and a hint."""
        answer = _CHILD.ask({"engine": "cp_sat", "domains": self._domains, "rows": self._rows, "cost": tuple(cost),
                             "intervals": self._intervals, "capacity": capacity, "gap": gap,
                             "seed": seed, "workers": workers, "start": dict(start or {})}, seconds)
        if answer is None:
            return Outcome(End.LIMIT, None, -math.inf)
        if "refused" in answer:
            raise SolverError(f"CP-SAT refused a model of {len(self._domains)} columns and {len(self._rows)} rows. "
                              f"Received: {answer['refused']}")
        return Outcome(End(answer["end"]), answer["values"], answer["bound"])


class Child:
    """The process that runs the engines, and the talk with it: one request at a time."""

    def __init__(self):
        self._lock = threading.Lock()
        self._process: subprocess.Popen | None = None
        self._is_ready = threading.Event()
        self._is_cancelled = False

    def ask(self, request: dict, seconds: float, grace_seconds: float = _GRACE_SECONDS) -> dict | None:
        """The child's answer, or None where it takes longer than both. Raises SolverError if the child dies."""
        until = time.time() + seconds  # a clock that the child can read, too
        with self._lock:
            if self._is_cancelled:
                raise SolverError("This process for OR-Tools was cancelled: it takes no more models.")
            if self._process is None or self._process.poll() is not None:
                # -P keeps this folder, whose names are generic, off the child's search path.
                self.stop()
                self._process = subprocess.Popen([sys.executable, "-P", str(_ENGINE)], stdin=subprocess.PIPE,
                                                 stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
                self._is_ready = threading.Event()
                threading.Thread(target=_greeted, args=(self._process.stdout, self._is_ready), daemon=True).start()
            if self._is_cancelled:
                self._process.kill()  # by who came in between
            if not self._is_ready.wait(seconds + grace_seconds):
                return None  # it goes on starting, for the next request
            until = max(until, time.time() + min(seconds, grace_seconds))  # a slow start is no reason not to try
            try:
                with concurrent.futures.ThreadPoolExecutor(1) as reader:
                    try:
                        left = until + grace_seconds - time.time()
                        return reader.submit(self._talk, request | {"until": until}).result(timeout=left)
                    except BaseException:
                        self._process.kill()  # and with it the reader's wait
                        raise
            except concurrent.futures.TimeoutError:
                return None
            except (EOFError, OSError, struct.error) as error:
                exit_code = self._process.wait()
                kind = EngineOutOfMemory if exit_code < 0 and not self._is_cancelled else SolverError
                raise kind("The process that runs OR-Tools ended unexpectedly, perhaps for want of memory; a smaller "
                           f"graph may do. Received: exit code {exit_code}") from error

    def stop(self) -> None:
        """Ends the child, if there is one."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def cancel(self) -> None:
        """From another thread: ends what is being solved and refuses what comes; both are a SolverError there."""
        self._is_cancelled = True
        process = self._process
        if process is not None:
            process.kill()
            process.wait()

    def _talk(self, request: dict) -> dict:
        message = pickle.dumps(request)
        self._process.stdin.write(_LENGTH.pack(len(message)) + message)
        self._process.stdin.flush()
        return pickle.loads(self._process.stdout.read(*_LENGTH.unpack(self._process.stdout.read(_LENGTH.size))))


_CHILD = Child()
atexit.register(_CHILD.stop)


def _greeted(answers: BinaryIO, is_ready: threading.Event) -> None:
    """Waits until the child says that it has started, or is gone."""
    answers.read(1)
    is_ready.set()


def _summed(rows: np.ndarray, columns: np.ndarray, factors: np.ndarray) -> tuple[np.ndarray, ...]:
    """The entries sorted by row and column, with those of one cell added up."""
    order = np.lexsort((columns, rows))
    rows, columns, factors = rows[order], columns[order], factors[order].astype(float)
    first = np.ones(len(rows), dtype=bool)
    first[1:] = (rows[1:] != rows[:-1]) | (columns[1:] != columns[:-1])
    sums = np.bincount(np.cumsum(first) - 1, weights=factors, minlength=int(first.sum()))
    kept = np.nonzero(first)[0][sums != 0]
    return rows[kept], columns[kept], sums[sums != 0]

