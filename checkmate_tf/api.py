"""The public functions, each a few lines over the floors below."""

import functools
from typing import Any

from checkmate_tf import keras as hooks
from checkmate_tf import planning
from checkmate_tf.bridge.trace import batch_specs
from checkmate_tf.ir.errors import SolverError, UnsupportedError
from checkmate_tf.report import MemoryEstimate, Narrator
from checkmate_tf.solvers import Limits, Solution, Solver


def compile(model, budget: int | float | str | Solution, *, solver: str | Solver = "auto", time_limit: float = 60.0,
            profile: Any = "auto", verbose: Any = "auto"):
    """Makes `model.fit` train within a memory budget. Call it after the model's own `compile`.

    budget: what the whole training step may hold on the device at its worst moment, weights, optimizer slots and batch
        included. An int is bytes; a text has a unit ("2GB" = 2e9, "2GiB" = 2**30); a float in (0, 1] is a fraction of
        the peak when nothing is recomputed; "auto" is the device's limit less 10 %; a saved Solution is that plan.
    solver: a name from `checkmate_tf.solvers.names()` or a solver object; time_limit: its seconds
    profile: "auto" measures this device and caches the result; a name from `checkmate_tf.profiles.names()`, or a
        Profile
    verbose: 0 silent, 1 progress and the table, 2 a line a stage, "auto" as 1

    Returns the same model, configured in place. The plan is made when the first batch arrives, once per set of batch
    shapes. Raises NotCompiledError, BudgetError, UnsupportedError, SolverError or ProfileError before anything changes;
    `fit` raises InfeasibleBudgetError when no plan fits its first batch, and the model is plain Keras again.
    """
    _check(model, solver, profile, time_limit, verbose)
    planning.check_budget(budget)
    hooks.install(model, hooks.Settings(budget, solver, float(time_limit), profile, verbose))
    return model


def restore(model):
    """Undoes `compile`: the model trains as plain Keras does. Returns the model."""
    hooks.restore(model)
    return model


def estimate(model, x, y=None, sample_weight=None, *, profile: Any = "auto", verbose: Any = "auto") -> MemoryEstimate:
    """What one training step needs, without solving: residents, the keep-everything peak and where, the floor.

    x, y, sample_weight: one batch, as arrays, tensors, or tf.TensorSpecs with the batch dimension, nested as the model
        takes it
    """
    with Narrator(verbose) as narrator:
        return MemoryEstimate.of(_prepare(model, x, y, sample_weight, profile, narrator))


def plan(model, budget: int | float | str, x, y=None, sample_weight=None, *, solver: str | Solver = "auto",
         time_limit: float = 60.0, profile: Any = "auto", verbose: Any = "auto") -> Solution:
    """The plan for a batch of these shapes, without training. Arguments as in `compile` and `estimate`."""
    _check(model, solver, profile, time_limit, verbose)
    planning.check_budget(budget)
    with Narrator(verbose) as narrator:
        prepared = _prepare(model, x, y, sample_weight, profile, narrator)
        narrator.stage("solving")
        return planning.solve_within(prepared, planning.budget_in_bytes(budget, prepared.base),
                                     planning.get_solver(solver), Limits(seconds=float(time_limit)),
                                     functools.partial(narrator.solving, prepared.base.seconds))


def _prepare(model, x, y, sample_weight, profile, narrator):
    _check(model, "auto", profile, 1.0, 0)
    data = (x,) if y is None and sample_weight is None else (x, y) if sample_weight is None else (x, y, sample_weight)
    specs = batch_specs(data)
    planning.build(model, specs)
    return planning.prepare(model, specs, profile, narrator.stage, batch_is_there=False)


def _check(model, solver, profile, time_limit, verbose) -> None:
    planning.check_model(model)
    planning.get_solver(solver)
    planning.check_profile(profile)
    if isinstance(time_limit, bool) or not isinstance(time_limit, (int, float)) or not time_limit > 0:
        raise SolverError(f"A time limit is a positive number of seconds. Received: time_limit={time_limit!r}")
    if verbose not in ("auto", 0, 1, 2):
        raise UnsupportedError(f'verbose is "auto", 0, 1 or 2, as in fit. Received: verbose={verbose!r}')
