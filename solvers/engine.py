"""OR-Tools, in a process of its own: reads integer programs from standard input, writes what was found to standard output.

OR-Tools and TensorFlow cannot be trusted with one process: imported first, MathOpt keeps TensorFlow from importing;
imported second, it refuses every model, and the older interfaces crash in their engines. So this file is run as a
script by `backend`, which alone knows it, and imports nothing of this package.

Everything runs through MathOpt, which drives SCIP and HiGHS with the same model, start, limits and results. The model
is handed over as a protocol buffer filled from NumPy arrays: building it from expression objects takes longer than
solving it for the larger graphs. Both engines run in one thread.

Constraint models go to CP-SAT by a door of their own. It is not offered for integer programs: it works in integers, and
by MathOpt's door it refused models with fractional constants, and cut off columns beyond 1e7, after which its bound was
above the cost of a plan.

One byte says that the process has started, which takes a second or more. A request is a pickled dictionary of arrays and
numbers, an answer a pickled dictionary, each behind its length.
"""

import datetime
import os
import pickle
import struct
import sys
import time

import numpy as np
from ortools.math_opt import model_pb2
from ortools.math_opt.python import mathopt
from ortools.sat.python import cp_model

_SOLVER_TYPES = {"scip": mathopt.SolverType.GSCIP, "highs": mathopt.SolverType.HIGHS}

# Why a search ended is a fact apart from what it found; this is the one table from MathOpt's reasons to `backend.End`.
_ENDS = {
    mathopt.TerminationReason.OPTIMAL: "optimal",
    mathopt.TerminationReason.INFEASIBLE: "infeasible",
    mathopt.TerminationReason.INFEASIBLE_OR_UNBOUNDED: "infeasible",  # costs are not negative: never unbounded
    mathopt.TerminationReason.FEASIBLE: "limit",
    mathopt.TerminationReason.NO_SOLUTION_FOUND: "limit",
}


def main() -> None:
    """Answers requests until standard input ends."""
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # engines print greetings, which must not get into the answers
    answers.write(b"\n")  # started
    answers.flush()
    while header := requests.read(_LENGTH.size):
        answer = pickle.dumps(_answer(pickle.loads(requests.read(*_LENGTH.unpack(header)))))
        answers.write(_LENGTH.pack(len(answer)) + answer)
        answers.flush()


_LENGTH = struct.Struct("<Q")


_CP_ENDS = {cp_model.OPTIMAL: "optimal", cp_model.INFEASIBLE: "infeasible", cp_model.FEASIBLE: "limit",
            cp_model.UNKNOWN: "limit"}


def _answer(request: dict) -> dict:
    return _constraint_answer(request) if request["engine"] == "cp_sat" else _linear_answer(request)


def _constraint_answer(request: dict) -> dict:
    model = cp_model.CpModel()
    columns = []
    for is_list, values in request["domains"]:
        domain = cp_model.Domain.from_values(values) if is_list else cp_model.Domain(*values)
        columns.append(model.new_int_var_from_domain(domain, ""))

    def total(terms):
        return cp_model.LinearExpr.weighted_sum([columns[column] for column, _ in terms], [factor for _, factor in terms])

    for terms, low, high, condition in request["rows"]:
        row = model.add_linear_expression_in_domain(total(terms), cp_model.Domain(low, high))
        if condition >= 0:
            row.only_enforce_if(columns[condition])
    intervals, demands = [], []
    for start, end, size, presence, demand in request["intervals"]:
        fixed = end < 0
        intervals.append(model.new_optional_interval_var(
            columns[start], 1 if fixed else columns[size], columns[start] + 1 if fixed else columns[end],
            columns[presence], ""))
        demands.append(demand)
    model.add_cumulative(intervals, demands, columns[request["capacity"]])
    model.minimize(total(request["cost"]))
    for column, value in request["start"].items():
        model.add_hint(columns[column], value)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = max(request["until"] - time.time(), 0.01)
    solver.parameters.random_seed = request["seed"]
    solver.parameters.num_workers = request["workers"]
    solver.parameters.interleave_search = request["workers"] > 1  # they take turns: the same result each time
    solver.parameters.relative_gap_limit = request["gap"]
    status = solver.solve(model)
    if status == cp_model.MODEL_INVALID:
        return {"refused": model.validate()}
    found = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    values = np.array([solver.value(column) for column in columns]) if found else None
    return {"end": _CP_ENDS[status], "values": values, "bound": solver.best_objective_bound}


def _linear_answer(request: dict) -> dict:
    model_parameters = mathopt.ModelSolveParameters()
    try:
        model = mathopt.Model.from_model_proto(_proto(request))
        if request["start"] is not None:
            values = {model.get_variable(column): value for column, value in request["start"].items()}
            model_parameters.solution_hints.append(mathopt.SolutionHint(variable_values=values))
        left = datetime.timedelta(seconds=max(request["until"] - time.time(), 0.01))
        parameters = mathopt.SolveParameters(time_limit=left, relative_gap_tolerance=request["gap"],
                                             random_seed=request["seed"])
        result = mathopt.solve(model, _SOLVER_TYPES[request["engine"]], params=parameters, model_params=model_parameters)
    except (ValueError, RuntimeError, AttributeError) as error:  # the last by a slip in MathOpt's own translation
        return {"refused": str(error)}
    values = None
    if result.has_primal_feasible_solution():
        values = np.array(result.variable_values(list(model.variables())))
    return {"end": _ENDS.get(result.termination.reason, "failed"), "values": values,
            "bound": result.termination.objective_bounds.dual_bound}


def _proto(request: dict) -> model_pb2.ModelProto:
    proto = model_pb2.ModelProto()
    variables = proto.variables
    variables.ids.extend(range(len(request["lower"])))
    variables.lower_bounds.extend(request["lower"].tolist())
    variables.upper_bounds.extend(request["upper"].tolist())
    variables.integers.extend(request["integer"].tolist())
    paid = np.nonzero(request["cost"])[0]
    proto.objective.linear_coefficients.ids.extend(paid.tolist())
    proto.objective.linear_coefficients.values.extend(request["cost"][paid].tolist())
    proto.linear_constraints.ids.extend(range(len(request["low"])))
    proto.linear_constraints.lower_bounds.extend(request["low"].tolist())
    proto.linear_constraints.upper_bounds.extend(request["high"].tolist())
    matrix = proto.linear_constraint_matrix
    matrix.row_ids.extend(request["rows"].tolist())
    matrix.column_ids.extend(request["columns"].tolist())
    matrix.coefficients.extend(request["factors"].tolist())
    return proto


if __name__ == "__main__":
    main()
