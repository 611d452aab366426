"""From a model and one batch to a scheduling problem and a budget: what `compile`, `plan` and `estimate` share.

    build(model, data)            variables, slots and metric states exist
    prepare(model, data, ...)     Prepared: the traced step and its priced graph, with what is resident
    budget_in_bytes(budget, ...)  "2GB", 0.6, "auto" -> bytes
    limits_for(solver, ...)       how long to look for a plan, and how near to its bound
"""

import dataclasses
import gc
import numbers
from collections.abc import Callable
from typing import Any

import keras
from absl import logging

from checkmate_tf import device_profile, solvers
from checkmate_tf.bridge import measure
from checkmate_tf.bridge.compact import compact
from checkmate_tf.bridge.extract import extract
from checkmate_tf.bridge.price import price
from checkmate_tf.bridge.rehearse import Places, claim
from checkmate_tf.bridge.trace import Traced, batch_specs, flatten_batch, trace
from checkmate_tf.bridge.writes import settle
from checkmate_tf.collector import without_collecting
from checkmate_tf.ir.errors import BudgetError, NotCompiledError, SolverError, UnsupportedError
from checkmate_tf.ir.graph import Graph
from checkmate_tf.ir.simulate import Timeline, keep_all_timeline
from checkmate_tf.ir.units import parse_bytes
from checkmate_tf.profiles import Profile
from checkmate_tf.solvers import Limits, Solution, Solver, ahead

DEVICE_MARGIN = 0.1
ENOUGH = 0.003                  # of a step's time above the bound: less than anybody can measure


@dataclasses.dataclass(frozen=True)
class Residents:
    """Bytes that are held during the whole step, whatever the plan."""

    weights: int
    optimizer: int
    other_variables: int
    batch: int
    elsewhere: int

    @property
    def total(self) -> int:
        return self.weights + self.optimizer + self.other_variables + self.batch + self.elsewhere

    def rows(self) -> dict[str, int]:
        """Label -> bytes, for tables and error texts; rows that are always there first."""
        rows = {"weights": self.weights, "optimizer slots": self.optimizer, "other variables and constants": self.other_variables,
                "batch": self.batch}
        return rows | ({"other tensors on the device": self.elsewhere} if self.elsewhere else {})


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A step ready to be planned: what TensorFlow will run, the scheduling problem, and what is resident."""

    traced: Traced
    graph: Graph
    residents: Residents
    base: Timeline
    profile: Profile
    places: Places


def build(model, data: Any) -> None:
    """Creates whatever variables the model, its optimizer, metrics and losses still lack, where its step is Keras's own.

    A step of the user's own may train other variables, by other optimizers: what it needs is created while it is traced, as
    in plain Keras, and so is what Keras cannot build without running the step.
    """
    if type(model).train_step is not keras.Model.train_step:
        return
    try:
        model._symbolic_build(data_batch=batch_specs(data))
    except (RuntimeError, ValueError) as error:
        logging.debug("checkmate_tf: left to tracing: %s", error)
    if model.optimizer is not None and not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)


def prepare(model, data: Any, profile: Profile | str, narrate: Callable[[str], None], batch_is_there: bool) -> Prepared:
    """Traces the model's training step on this batch, or on specs of one, and prices its graph.

    batch_is_there: whether the batch is among the bytes that the allocator already counts
    """
    planned = getattr(model, "checkmate", None)
    may_move = planned is None or planned.solution is None
    return prepare_function(model.train_step, data, profile, narrate, batch_is_there, may_move, model)


@without_collecting()
def prepare_function(function: Callable, data: Any, profile: Profile | str, narrate: Callable[[str], None],
                     batch_is_there: bool, may_move: bool, model=None, autograph: bool = False) -> Prepared:
    """The same for any function of one argument, the batch. The model, if there is one, tells weights from slots.

    may_move: whether variables may be moved together, which would change where the values of steps planned before come to lie
    """
    narrate("tracing the training step")
    traced = trace(function, batch_specs(data), autograph)
    graph = extract(traced)
    claim()
    ahead.wait(narrate)          # what is compiled beside would be measured, too
    profile = device_profile.known(profile, traced, graph, narrate, may_move)
    graph = price(traced, graph, profile)
    here = batch_is_there or (profile.device, profile.software) == (measure.device_description(), measure.software())
    if here:
        handles = [handle for _, handle in traced.captures]
        settle(handles)
        if may_move:
            narrate("moving variables together")
            compact(graph, handles, traced.argument_bytes if batch_is_there else 0)
    residents = _residents(model, traced, graph, batch_is_there)
    graph = dataclasses.replace(graph, resident_bytes=residents.total)
    narrate("looking at where memory is free")
    places = Places(traced, graph, here, flatten_batch(data) if batch_is_there else ())
    return Prepared(traced, graph, residents, keep_all_timeline(graph), profile, places)


def limits_for(solver: Solver | str, seconds: float) -> Limits:
    """The time, and where to stop before it: the default planner near enough to its bound, since the plan has yet to fit when
    placed; a solver that was asked for by name where it always does."""
    return Limits(seconds, gap=ENOUGH) if solver == "auto" else Limits(seconds)


def check_budget(budget: Any) -> None:
    """Raises BudgetError for what cannot be a budget, without knowing the model."""
    if isinstance(budget, Solution):
        return
    if isinstance(budget, str):
        if budget != "auto":
            parse_bytes(budget)
        return
    if isinstance(budget, bool) or not isinstance(budget, (numbers.Integral, float)):
        raise BudgetError('A budget is bytes (an int), a text with a unit ("2GB"), a fraction of the keep-everything peak '
                          f'(a float in (0, 1]), "auto", or a Solution. Received: {budget!r}')
    if isinstance(budget, float) and not 0 < budget <= 1:
        raise BudgetError("A budget given as a float is a fraction of the keep-everything peak, in (0, 1]; give bytes as an int "
                          f'or with a unit ("2GB"). Received: {budget!r}')
    if budget <= 0:
        raise BudgetError(f"A budget must be positive. Received: {budget!r}")


def budget_in_bytes(budget: Any, base: Timeline) -> int:
    """The budget in bytes; fractions are of the keep-everything peak."""
    check_budget(budget)
    if isinstance(budget, Solution):
        return budget.budget_bytes
    if budget == "auto":
        limit = measure.memory_limit()
        if limit is None:
            raise BudgetError('This device tells no memory limit, so "auto" has nothing to go by; give the budget in bytes, '
                              f'such as "2GB". Received: {budget!r}')
        return int(limit * (1 - DEVICE_MARGIN))
    if isinstance(budget, str):
        return parse_bytes(budget)
    return int(budget * base.peak_bytes) if isinstance(budget, float) else int(budget)


def get_solver(solver: Solver | str) -> Solver:
    """The solver of this name, or the solver itself. Raises SolverError for what is neither."""
    if isinstance(solver, str):
        return solvers.get(solver)
    if not callable(getattr(solver, "search", None)):
        raise SolverError(f"A solver is one of {', '.join(solvers.names())}, or an object with a name and a search method. "
                          f"Received: {solver!r}")
    return solver


def _residents(model, traced: Traced, graph: Graph, batch_is_there: bool) -> Residents:
    def size(variables) -> int:
        return sum(variable.value.shape.num_elements() * variable.value.dtype.size for variable in variables)
    weights = size(model.weights) if model is not None else 0
    optimizer = size(model.optimizer.variables) if model is not None and model.optimizer is not None else 0
    others = max(0, graph.resident_bytes - traced.argument_bytes - weights - optimizer)
    gc.collect()
    held = measure.measured_memory()
    # Constants come with the function to be made.
    there = (traced.argument_bytes if batch_is_there else 0) + traced.capture_bytes
    elsewhere = max(0, held[0] - there) if held is not None else 0
    return Residents(weights, optimizer, others, traced.argument_bytes, elsewhere)


def check_model(model) -> None:
    """Raises a typed error for a model whose training step cannot be planned; changes nothing."""
    if not isinstance(model, keras.Model):
        raise UnsupportedError(f"A keras.Model is needed. Received: {type(model).__name__}")
    if not model.compiled:
        raise NotCompiledError("You must call `compile()` before planning memory: the optimizer, the loss and the metrics are "
                               f"part of the step. Received: {model!r}")
    if model.run_eagerly:
        raise UnsupportedError("With run_eagerly=True there is no graph to plan; compile the model without it. "
                               "Received: run_eagerly=True")
    strategy = model.distribute_strategy
    if type(strategy).__name__ != "_DefaultDistributionStrategy":
        raise UnsupportedError("Only the default strategy (one device) is supported; create and compile the model outside of a "
                               f"strategy's scope. Received: {type(strategy).__name__}")
    if "make_train_function" in {name for cls in type(model).__mro__ if not cls.__module__.startswith("keras.")
                                 for name in vars(cls)}:
        raise UnsupportedError("The model's class overrides make_train_function, which this package takes the place of; override "
                               f"train_step instead. Received: {type(model).__name__}")
