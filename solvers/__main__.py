"""Solves a bare rematerialization instance from the command line; TensorFlow is never imported.

    python -m checkmate_tf.solvers INSTANCE.json --budget 0.8 --solver ilp --output plan.json

Prints one JSON line. Numbers that do not exist (the cost of a plan that was not found) are null. Costs and bytes are
in the instance's own units. Exit code 0 when the question was answered, be it by "infeasible" or "unknown"; 2 when it
could not be asked.
"""

import argparse
import dataclasses
import fractions
import json
import math
import pathlib
import sys
from collections.abc import Sequence

from checkmate_tf.ir.errors import BudgetError, CheckmateError, PlanError
from checkmate_tf.ir.graph import load_instance
from checkmate_tf.ir.simulate import keep_all_timeline
from checkmate_tf.ir.verify import verify_graph
from checkmate_tf.solvers import Limits, Solution, Solver, Status, get, names, solve
from checkmate_tf.solvers.base import Scope


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; the exit code."""
    options = _parser().parse_args(arguments)
    try:
        line = _answer(options)
    except CheckmateError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    print(json.dumps(line, allow_nan=False))
    return 0


def budget_from_text(text: str, base_peak_bytes: int) -> int:
    """The budget in bytes: "0.8" is a fraction of the keep-everything peak, "4000" is absolute, "1" is the whole peak.

    Exact: "0.29" of 100 is 29, although 0.29 * 100 is a little less in floating point.
    """
    try:
        # The float first: a fraction of 10 to the billion would be worked out digit by digit.
        number = fractions.Fraction(text) if math.isfinite(float(text)) else None
    except ValueError:
        number = None
    if number is None or number <= 0:
        raise BudgetError("A budget must be a positive number: up to 1 a fraction of the keep-everything peak, above 1 "
                          f"absolute. Received: {text!r}")
    return math.floor(number * base_peak_bytes if number <= 1 else number)


def solver_in_order(name: str, order: str | None) -> Solver:
    """The solver of this name, in this order where it leaves the choice and one was made."""
    solver = get(name)
    has_choice = any(field.name == "order" for field in dataclasses.fields(solver))
    return dataclasses.replace(solver, order=order) if has_choice and order else solver


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m checkmate_tf.solvers",
                                     description="Solves a bare rematerialization instance.")
    parser.add_argument("instance", type=pathlib.Path, help='JSON file with "ops" and "edges"')
    parser.add_argument("--budget", required=True,
                        help="fraction of the keep-everything peak (0.8), or absolute (4000)")
    parser.add_argument("--solver", default="auto", help=f"one of {', '.join(names())}")
    parser.add_argument("--time-limit", type=_positive(float), default=Limits().seconds, metavar="SECONDS")
    parser.add_argument("--threads", type=_positive(int), default=Limits().threads)
    parser.add_argument("--seed", type=int, default=Limits().seed)
    parser.add_argument("--order", choices=("fixed", "free"),
                        help="whether first runs keep to the given order; solvers that know only that order always do")
    parser.add_argument("--output", type=pathlib.Path, help="file for the computations in order")
    return parser


def _positive(kind):
    def convert(text: str):
        number = kind(text)
        if not (number > 0 and math.isfinite(number)):
            raise ValueError
        return number
    convert.__name__ = f"positive {kind.__name__}"
    return convert


def _answer(options: argparse.Namespace) -> dict:
    graph = verify_graph(load_instance(options.instance))
    base_peak_bytes = keep_all_timeline(graph).peak_bytes
    budget_bytes = budget_from_text(options.budget, base_peak_bytes)
    limits = Limits(seconds=options.time_limit, threads=options.threads, seed=options.seed)
    solution = solve(graph, budget_bytes, solver_in_order(options.solver, options.order), limits)
    if options.order == "free" and solution.stats.get("bound_scope", Scope.ANY) != Scope.ANY:
        solution = _without_bound(solution)
    name = json.loads(options.instance.read_text()).get("name", options.instance.stem)
    if options.output is not None:
        _write_order(options.output, name, solution)
    return _line(name, solution)


def _without_bound(solution: Solution) -> Solution:
    """The solution less its bound and what followed from it: they hold for the given order, but any was asked for."""
    status = solution.status
    if status is Status.OPTIMAL and solution.seconds > solution.base_seconds:
        status = Status.FEASIBLE
    return dataclasses.replace(solution, status=status, bound_seconds=solution.base_seconds)


def _line(name: str, solution: Solution) -> dict:
    has_plan = solution.plan is not None
    return {"instance": name, "solver": solution.solver, "status": solution.status.value,
            "budget": solution.budget_bytes, "peak": solution.peak_bytes, "base_peak": solution.base_peak_bytes,
            "cost": solution.seconds if has_plan else None, "base_cost": solution.base_seconds,
            "overhead": solution.overhead if has_plan else None, "bound": solution.bound_seconds,
            "gap": solution.gap if has_plan else None, "seconds": solution.stats["solve_seconds"]}


def _write_order(path: pathlib.Path, name: str, solution: Solution) -> None:
    if solution.plan is None:
        print(f"No plan was found, so {path} is not written.", file=sys.stderr)
        return
    try:
        path.write_text(json.dumps({"instance": name, "steps": solution.plan.order}) + "\n")
    except OSError as error:
        raise PlanError(f"--output must be a file that can be written. Received: {path} ({error})") from error


if __name__ == "__main__":
    sys.exit(main())
