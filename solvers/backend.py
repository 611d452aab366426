"""OR-Tools: the one door to it. An integer program goes in as plain arrays, what was found and why it ended comes out.

Everything runs through MathOpt, which drives SCIP and HiGHS with the same model, start, limits and results. The model
is handed over as a protocol buffer filled from NumPy arrays: building it from expression objects takes longer than
solving it for the larger graphs. Both engines run in one thread.

CP-SAT is not offered: it works in integers, and by the same door it refused models with fractional constants, and cut
off columns beyond 1e7, after which its bound was above the cost of a plan.

Why a search ended is a fact apart from what it found. `_ENDS` is the one table from MathOpt's reasons to ours.
"""

import dataclasses
import datetime
import enum
import math
import time
from collections.abc import Mapping, Sequence

import numpy as np
from ortools.math_opt import model_pb2
from ortools.math_opt.python import mathopt

from checkmate_tf.ir.errors import SolverError


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

    def solve(self, engine: Engine, *, seconds: float, gap: float, seed: int,
              start: Mapping[int, float] | None = None) -> Outcome:
        """Runs the engine. `start` is a solution to begin with: values of columns, all integer ones at least.

        The seconds include handing the model over. Raises SolverError if OR-Tools refuses the model.
        """
        started = time.monotonic()
        model_parameters = mathopt.ModelSolveParameters()
        try:
            model = mathopt.Model.from_model_proto(self._proto())
            if start is not None:
                values = {model.get_variable(column): value for column, value in start.items()}
                model_parameters.solution_hints.append(mathopt.SolutionHint(variable_values=values))
            left = datetime.timedelta(seconds=max(seconds - (time.monotonic() - started), 0.01))
            parameters = mathopt.SolveParameters(time_limit=left, relative_gap_tolerance=gap, random_seed=seed)
            result = mathopt.solve(model, _SOLVER_TYPES[engine], params=parameters, model_params=model_parameters)
        except (ValueError, RuntimeError, AttributeError) as error:  # the last by a slip in MathOpt's own translation
            raise SolverError(f"OR-Tools' {engine.value} refused a model of {self.column_count} columns and "
                              f"{self.row_count} rows. Received: {error}") from error
        values = None
        if result.has_primal_feasible_solution():
            values = np.array(result.variable_values(list(model.variables())))
        return Outcome(_ENDS.get(result.termination.reason, End.FAILED), values,
                       result.termination.objective_bounds.dual_bound)

    def _proto(self) -> model_pb2.ModelProto:
        proto = model_pb2.ModelProto()
        lower, upper, cost, integer = (np.concatenate(parts) for parts in zip(*self._columns))
        variables = proto.variables
        variables.ids.extend(range(self.column_count))
        variables.lower_bounds.extend(lower.tolist())
        variables.upper_bounds.extend(upper.tolist())
        variables.integers.extend(integer.tolist())
        paid = np.nonzero(cost)[0]
        proto.objective.linear_coefficients.ids.extend(paid.tolist())
        proto.objective.linear_coefficients.values.extend(cost[paid].tolist())
        low, high = (np.concatenate(parts) for parts in zip(*self._bounds))
        proto.linear_constraints.ids.extend(range(self.row_count))
        proto.linear_constraints.lower_bounds.extend(low.tolist())
        proto.linear_constraints.upper_bounds.extend(high.tolist())
        rows, columns, factors = _summed(*(np.concatenate(parts) for parts in zip(*self._entries)))
        matrix = proto.linear_constraint_matrix
        matrix.row_ids.extend(rows.tolist())
        matrix.column_ids.extend(columns.tolist())
        matrix.coefficients.extend(factors.tolist())
        return proto


def _summed(rows: np.ndarray, columns: np.ndarray, factors: np.ndarray) -> tuple[np.ndarray, ...]:
    """The entries sorted by row and column, with those of one cell added up."""
    order = np.lexsort((columns, rows))
    rows, columns, factors = rows[order], columns[order], factors[order].astype(float)
    first = np.ones(len(rows), dtype=bool)
    first[1:] = (rows[1:] != rows[:-1]) | (columns[1:] != columns[:-1])
    sums = np.bincount(np.cumsum(first) - 1, weights=factors, minlength=int(first.sum()))
    kept = np.nonzero(first)[0][sums != 0]
    return rows[kept], columns[kept], sums[sums != 0]


_SOLVER_TYPES = {Engine.SCIP: mathopt.SolverType.GSCIP, Engine.HIGHS: mathopt.SolverType.HIGHS}

_ENDS = {
    mathopt.TerminationReason.OPTIMAL: End.OPTIMAL,
    mathopt.TerminationReason.INFEASIBLE: End.INFEASIBLE,
    mathopt.TerminationReason.INFEASIBLE_OR_UNBOUNDED: End.INFEASIBLE,  # costs are not negative: never unbounded
    mathopt.TerminationReason.FEASIBLE: End.LIMIT,
    mathopt.TerminationReason.NO_SOLUTION_FOUND: End.LIMIT,
}
