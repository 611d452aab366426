"""The public functions, each a few lines over the floors below."""

import functools
import pathlib
from collections.abc import Sequence
from typing import Any

from checkmate_tf import batches, device_profile, planning, rounds, sweep
from checkmate_tf import keras as hooks
from checkmate_tf.batches import BatchSearch
from checkmate_tf.bridge.rehearse import claim
from checkmate_tf.bridge.trace import batch_specs
from checkmate_tf.ir.errors import BudgetError, InfeasibleBudgetError, SolverError, UnsupportedError
from checkmate_tf.ir.simulate import structural_floor
from checkmate_tf.report import MemoryEstimate, Narrator
from checkmate_tf.solvers import Limits, Solution, Solver, ahead


def compile(model, budget: int | float | str | Solution, *, solver: str | Solver = "auto", time_limit: float = 60.0,
            profile: Any = "auto", verbose: Any = "auto"):
    """Makes `model.fit` train within a memory budget. Call it after the model's own `compile`.

    budget: what the whole training step may hold on the device at its worst moment, weights, optimizer slots and batch
        included. An int is bytes; a text has a unit ("2GB" = 2e9, "2GiB" = 2**30); a float in (0, 1] is a fraction of
        the peak when nothing is recomputed; "auto" is the device's limit less 10 %; a saved Solution is that plan.
    solver: a name from `checkmate_tf.solvers.names()` or a solver object
    time_limit: seconds for planning; the solver gets what tracing and pricing the step leave of it, and at least half
    profile: "auto" measures this device and caches the result; a name from `checkmate_tf.profiles.names()`, or a
        Profile
    verbose: 0 silent, 1 progress and the table, 2 a line a stage, "auto" as 1

    Returns the same model, configured in place. The plan is made when the first batch arrives, once per set of batch
    shapes. Raises NotCompiledError, BudgetError, UnsupportedError, SolverError or ProfileError before anything changes;
    `fit` raises InfeasibleBudgetError when no plan fits its first batch, and the model is plain Keras again.
    """
    _check(model, solver, profile, time_limit, verbose)
    planning.check_budget(budget)
    if model.built:
        claim()             # before the optimizer's slots and the pipeline's batches come
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
        ahead.start()
        prepared = _prepare(model, x, y, sample_weight, profile, narrator)
        narrator.stage("solving")
        return rounds.solve_within(prepared, planning.budget_in_bytes(budget, prepared.base),
                                   planning.get_solver(solver), planning.limits_for(solver, float(time_limit)),
                                   functools.partial(narrator.solving, prepared.base.seconds))


def rematerialize(function, budget: int | float | str | Solution, *specs, solver: str | Solver = "auto", time_limit: float = 60.0,
                  profile: Any = "auto", verbose: Any = "auto") -> hooks.Rematerialized:
    """The same as `compile` for any function, such as the training step of a custom loop: returns what to call instead.

    function: a `tf.function`, or what could be one; it takes tensors, and every variable it uses exists (an optimizer is built).
        What it does besides TensorFlow ops happens once, as in any `tf.function`.
    budget, solver, time_limit, profile, verbose: as in `compile`
    specs: a `tf.TensorSpec` (or a nest of them) for each argument. The plan for these shapes is made now, others when they come;
        without any, all are made at the first call.

    What it returns has `.solution`, `.estimate`, `.measured_peak_bytes` and `.summary()`, as `model.checkmate` has. Raises
    BudgetError, SolverError, ProfileError, UnsupportedError (also for what cannot be traced), and InfeasibleBudgetError.
    """
    if not callable(function):
        raise UnsupportedError(f"A function of tensors is needed, such as a tf.function. Received: {function!r}")
    _check_settings(solver, profile, time_limit, verbose)
    planning.check_budget(budget)
    planned = hooks.Rematerialized(function, hooks.Settings(budget, solver, float(time_limit), profile, verbose))
    if specs:
        planned.plan(specs)
    return planned


def tradeoff(model, x, y=None, *, sample_weight=None, budgets: Sequence[int | float | str] | None = None,
             solvers: Sequence[str | Solver] = ("auto",), time_limit: float = 20.0, profile: Any = "auto",
             workers: int | None = None, cache: str | pathlib.Path | None = "auto", verbose: Any = "auto"):
    """What less memory costs: a pandas.DataFrame with a row for each solver and budget, for `plot_tradeoff`.

    x, y, sample_weight: one batch, as in `estimate`
    budgets: as in `compile`; by default ten from the floor of any plan to the peak of keeping everything
    solvers: names or solver objects; time_limit: the seconds each has for a budget
    workers: how many processes solve side by side; by default one for each core
    cache: the folder where rows are kept, so that an interrupted call goes on where it was: "auto" is the user's cache folder,
        None keeps nothing. A row for another graph, profile, solver or time limit is never taken.

    Columns: solver, budget_bytes, peak_bytes, seconds (of a step, predicted), overhead (seconds over those of keeping everything,
    minus 1), bound (no plan within the budget takes less seconds), gap (seconds over bound, minus 1), status, solve_seconds,
    stopped_by, floor_bytes, keep_all_bytes. Peaks are of live bytes; `plan` and `compile` leave room for what the allocator takes
    beyond that. A plan for a tighter budget is one for a wider, so a row of `auto` takes it from another one where it is cheaper,
    and the bound likewise the other way; other solvers are judged at each budget alone. A budget that no plan fits is a row
    without peak and time, not an error.
    """
    chosen = (solvers,) if isinstance(solvers, str) or callable(getattr(solvers, "search", None)) else tuple(solvers)
    for solver in chosen:
        _check(model, solver, profile, time_limit, verbose)
    for budget in budgets if budgets is not None else ():
        planning.check_budget(budget)
    if workers is not None and (isinstance(workers, bool) or not isinstance(workers, int) or workers < 1):
        raise SolverError(f"The number of processes is a positive whole number. Received: workers={workers!r}")
    folder = device_profile.cache_path("").parent / "tradeoff" if cache == "auto" else cache
    with Narrator(verbose) as narrator:
        prepared = _prepare(model, x, y, sample_weight, profile, narrator)
        sizes = ([planning.budget_in_bytes(budget, prepared.base) for budget in budgets] if budgets is not None else
                 sweep.default_budgets(prepared.base, structural_floor(prepared.graph)[0]))
        return sweep.sweep(prepared.graph, sizes, [planning.get_solver(solver) for solver in chosen],
                           Limits(seconds=float(time_limit)), workers=workers, cache=folder,
                           tell=lambda done, total, text: narrator.stage(f"solving: {done} of {total} done, {text}"))


def max_batch_size(model, budget: int | float | str, x, y=None, *, sample_weight=None,
                   max_overhead: float | str | None = None, solver: str | Solver = "auto", time_limit: float = 20.0,
                   profile: Any = "auto", verbose: Any = "auto") -> BatchSearch:
    """The largest batch that trains within the budget, with its plan.

    x, y, sample_weight: one batch of any size, as in `estimate`; only shapes matter
    budget: as in `compile`; a fraction is of the keep-everything peak for the batch given
    max_overhead: what recomputation may cost: 0.1 is 10 % of a step's time, "forward" as much as one more forward pass
    time_limit: the solver's seconds for each batch size that is tried

    A plan for `batch_size` fits and one for `batch_size + 1` does not: proved where `is_proven`, otherwise none was found. Peaks are
    those of values placed in whole chunks, as `compile` judges them. Raises InfeasibleBudgetError if a batch of one does not fit.
    """
    _check(model, solver, profile, time_limit, verbose)
    planning.check_budget(budget)
    if isinstance(budget, Solution):
        raise BudgetError("The largest batch is searched within bytes, not for a plan that is made already. Received: a Solution")
    if not (max_overhead is None or max_overhead == "forward"
            or isinstance(max_overhead, (int, float)) and not isinstance(max_overhead, bool) and max_overhead >= 0):
        raise BudgetError('The overhead allowed is a share of a step\'s time such as 0.1, "forward", or None for any. '
                          f"Received: max_overhead={max_overhead!r}")
    chosen = planning.get_solver(solver)
    # What a plan may cost is compared to the digit.
    limits = planning.limits_for(solver, float(time_limit)) if max_overhead is None else Limits(seconds=float(time_limit))
    specs, batch_size = batches.resized(batch_specs(_data(x, y, sample_weight)))
    with Narrator(verbose) as narrator:
        planning.build(model, specs)

        def prepare(size: int):
            return planning.prepare(model, batches.resized(specs, size)[0], profile, narrator.stage, batch_is_there=False)

        given = prepare(batch_size)
        budget_bytes = planning.budget_in_bytes(budget, given.base)
        family = batches.Steps(prepare, batch_size, chosen, limits)
        try:
            found = batches.largest_batch(family, budget_bytes, max_overhead, narrator.stage)
            narrator.stage("confirming the batch size")
            return family.confirmed(found, max_overhead)
        except InfeasibleBudgetError:
            raise rounds.infeasible(prepare(1), budget_bytes, chosen, limits) from None


def _data(x, y, sample_weight):
    return (x,) if y is None and sample_weight is None else (x, y) if sample_weight is None else (x, y, sample_weight)


def _prepare(model, x, y, sample_weight, profile, narrator):
    _check(model, "auto", profile, 1.0, 0)
    specs = batch_specs(_data(x, y, sample_weight))
    planning.build(model, specs)
    return planning.prepare(model, specs, profile, narrator.stage, batch_is_there=False)


def _check(model, solver, profile, time_limit, verbose) -> None:
    planning.check_model(model)
    _check_settings(solver, profile, time_limit, verbose)


def _check_settings(solver, profile, time_limit, verbose) -> None:
    planning.get_solver(solver)
    device_profile.check(profile)
    if isinstance(time_limit, bool) or not isinstance(time_limit, (int, float)) or not time_limit > 0:
        raise SolverError(f"A time limit is a positive number of seconds. Received: time_limit={time_limit!r}")
    if verbose not in ("auto", 0, 1, 2):
        raise UnsupportedError(f'verbose is "auto", 0, 1 or 2, as in fit. Received: verbose={verbose!r}')
