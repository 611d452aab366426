"""Solvers: from a graph and a budget to an order of computations. TensorFlow is never imported here.

    from checkmate_tf import solvers
    solvers.names()                                  # what there is
    solvers.solve(graph, budget_bytes, solvers.get("greedy"), solvers.Limits(seconds=10))

`auto` is what users get. Beside it and its parts (greedy, rebuild, anneal) every planner of the literature has a place,
one file an idea; `python -m checkmate_tf.solvers.compare` makes the table of them all.
"""

if __name__ != "checkmate_tf.solvers":
    raise ImportError("Import this package as checkmate_tf.solvers, not by its folder's name. "
                      f"Received: import {__name__}")

from checkmate_tf.ir.errors import SolverError
from checkmate_tf.solvers.anneal import Anneal
from checkmate_tf.solvers.auto import Auto
from checkmate_tf.solvers.base import (Answer, Limits, Progress, Solution, Solver, Status, StoppedBy, ignore_progress,
                                       solve)
from checkmate_tf.solvers.chen import Greedy as ChenGreedy, SquareRoot, articulation_points, forward_ops
from checkmate_tf.solvers.dtr import Dtr
from checkmate_tf.solvers.fastsa import FastSA
from checkmate_tf.solvers.greedy import Greedy
from checkmate_tf.solvers.griewank import Griewank
from checkmate_tf.solvers.hiremate import HiRemate
from checkmate_tf.solvers.ilp import Ilp
from checkmate_tf.solvers.intervals import Intervals
from checkmate_tf.solvers.keep_all import KeepAll
from checkmate_tf.solvers.lower_sets import LowerSets
from checkmate_tf.solvers.rebuild import Rebuild
from checkmate_tf.solvers.rockmate import Rockmate
from checkmate_tf.solvers.rotor import Rotor
from checkmate_tf.solvers.rounding import Rounding
from checkmate_tf.solvers.treewidth import Treewidth

__all__ = ["Answer", "Limits", "Progress", "Solution", "Solver", "Status", "StoppedBy", "get", "ignore_progress",
           "names", "solve"]

_SOLVERS = {solver.name: solver for solver in (
    Auto(),
    KeepAll(),
    Greedy(),
    Rebuild(),
    Anneal(),
    Ilp(),
    Rounding(),
    Intervals(),
    SquareRoot("chen_sqrt", articulation_points),
    ChenGreedy("chen_greedy", articulation_points),
    SquareRoot("linearized_sqrt", forward_ops),
    ChenGreedy("linearized_greedy", forward_ops),
    Griewank("griewank", articulation_points),
    Griewank("griewank_linearized", forward_ops),
    LowerSets(),
    Rotor(),
    Rockmate(),
    HiRemate(),
    Treewidth(),
    Dtr(),
    FastSA(),
)}


def names() -> tuple[str, ...]:
    """The names that `get` and `compile(..., solver=)` take."""
    return tuple(_SOLVERS)


def get(name: str) -> Solver:
    """The solver of this name with its default options. Raises SolverError for an unknown name."""
    if name not in _SOLVERS:
        raise SolverError(f"Known solvers are {', '.join(names())}. Received: {name!r}")
    return _SOLVERS[name]
