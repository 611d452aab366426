"""What hangs on a Keras model after `checkmate_tf.compile`: a train function that plans each new batch shape.

Keras asks the model for `make_train_function()` at the start of `fit`, and calls the result once per execution with an
iterator. Ours takes the batch from the iterator, looks at its concrete shapes, and runs the step planned for them;
the first batch of a shape is traced and planned there and then. `model.compile()` clears Keras's
train function, which tells us to plan afresh.

The allocator's peak is read after every run, and the step is planned again whenever it is above the budget: memory
may come to lie differently from run to run. In the first runs under each plan every variable can be put back, too.

If anything goes wrong before a planned step has run within its budget, the model is restored to plain Keras and the
error goes on.
"""

import abc
import contextlib
import dataclasses
import functools
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from checkmate_tf import device_profile, planning, rounds
from checkmate_tf.bridge import audit, measure, variables
from checkmate_tf.bridge.emit import Emitted, emit, is_plenty
from checkmate_tf.bridge.loops import LOOPS
from checkmate_tf.bridge.trace import batch_specs
from checkmate_tf.carried import carried
from checkmate_tf.collector import without_collecting
from checkmate_tf.ir.errors import CheckmateError, InfeasibleBudgetError
from checkmate_tf.ir.simulate import simulate
from checkmate_tf.ir.units import format_bytes
from checkmate_tf.ir.verify import verify_plan
from checkmate_tf.planning import Prepared
from checkmate_tf.report import MemoryEstimate, Narrator, plan_table, recomputed_kinds
from checkmate_tf.solvers import Limits, Solution, Solver, Status, ahead

_REPLANS = 4
_CHECKED_RUNS = 3
_EXHAUSTED_SHARE = 0.03         # of what is not resident, by which a step is planned for less after it ran out of memory,
_PIECES_SHARE = 0.01            # and where that would have happened: kernels differ in how they end then, some with the process
_SURPLUS_GROWTH = 1.25
_MOST_REMEMBERED = 0.1           # of what is not resident
_REPLAN_SHARE = 1 / 2            # of the time limit: training has begun and waits
_LEAST_SEARCH_SHARE = 1 / 2      # of the time limit, however long tracing and pricing take


@dataclasses.dataclass(frozen=True)
class Settings:
    """What `compile` was given."""

    budget: Any
    solver: Any
    time_limit: float
    profile: Any
    verbose: Any


@dataclasses.dataclass
class _Step:
    """A planned step for one set of batch shapes; `checked_runs` runs under its present plan had their peak read, which was
    `measured_bytes` at most, and `surplus_bytes` is left to the allocator beyond what placement says. A step is `settled`
    once a plan has passed its checks: its training is not ended any more for want of a better plan, only `watched` no longer."""

    prepared: Prepared
    solution: Solution
    run: Emitted
    replans: int = 0
    checked_runs: int = 0
    surplus_bytes: int = 0
    measured_bytes: int = 0
    settled: bool = False
    watched: bool = True


class PlannedSteps(abc.ABC):
    """A step that is planned for each set of batch shapes it is called with, and what was measured.

    solution: the plan for the largest batch so far, None before there is one
    estimate: what the step needs without any plan, None before the first plan
    measured_peak_bytes: the allocator's peak over the runs under that plan; None before, and on devices without
        allocator statistics
    """

    def __init__(self, settings: Settings):
        self.settings = settings
        self.solution: Solution | None = None
        self.estimate: MemoryEstimate | None = None
        self.measured_peak_bytes: int | None = None
        self._steps: dict[tuple, _Step] = {}
        self._lock = threading.RLock()

    def summary(self) -> None:
        """Prints the plan: budget, residents, peaks, what is recomputed, and how good the plan is."""
        Narrator(1).show(self._table())

    @abc.abstractmethod
    def _prepared(self, data: Any, narrate: Callable[[str], None]) -> Prepared:
        """The step for this batch, ready to be planned."""

    def _undo(self) -> None:
        """What is to happen when no step can be run within the budget."""

    @contextlib.contextmanager
    def _undone_on_failure(self, unless: bool, errors: type[BaseException] = BaseException):
        try:
            yield
        except errors:
            if not unless:
                self._undo()
            raise

    def _run(self, data: Any) -> Any:
        """One step. Steps that come from several threads run one after another: two at once would hold twice the memory."""
        specs = batch_specs(data)
        key = _key(specs)
        with self._lock:
            step = self._steps.get(key) or self._plan(key, data, specs)
            return (self._run_and_watch if step.checked_runs >= _CHECKED_RUNS else self._run_and_check)(step, data)

    def _plan(self, key: tuple, data: Any, specs: Any) -> _Step:
        with self._undone_on_failure(unless=self._is_training):
            narrator = Narrator(self.settings.verbose)
            with narrator:
                ahead.start()
                started = time.monotonic()
                prepared = self._prepared(data, narrator.stage)
                left = self.settings.time_limit - (time.monotonic() - started)
                limits = planning.limits_for(self.settings.solver, max(_LEAST_SEARCH_SHARE * self.settings.time_limit, left))
                surplus_bytes = prepared.profile.surplus.get(prepared.graph.key, 0)
                solution = self._first_solution(prepared, narrator, limits, surplus_bytes)
                narrator.stage("writing the step")
                with without_collecting():
                    run = _emitted(prepared, solution)
                step = _Step(prepared, solution, run)
            is_main = self.solution is None or prepared.base.peak_bytes >= self.estimate.keep_all_peak_bytes
            self._steps[key] = step
            if is_main:
                self.solution, self.measured_peak_bytes = solution, None
                self.estimate = MemoryEstimate.of(prepared)
                narrator.show(self._table())
        return step

    @property
    def _is_training(self) -> bool:
        return any(step.checked_runs for step in self._steps.values())

    def _first_solution(self, prepared: Prepared, narrator: Narrator, limits: Limits, surplus_bytes: int) -> Solution:
        budget, solver = self.settings.budget, planning.get_solver(self.settings.solver)
        if isinstance(budget, Solution) and not self._steps:
            return _given(budget, prepared, solver, limits)
        return self._same_plan(prepared) or self._solve(
            prepared, planning.budget_in_bytes(budget, prepared.base), narrator, limits, surplus_bytes)

    def _solve(self, prepared: Prepared, budget_bytes: int, narrator: Narrator, limits: Limits,
               surplus_bytes: int = 0, before: Solution | None = None) -> Solution:
        narrator.stage("solving")
        return rounds.solve_within(prepared, budget_bytes, planning.get_solver(self.settings.solver), limits,
                                   functools.partial(narrator.solving, prepared.base.seconds), surplus_bytes, before)

    def _same_plan(self, prepared: Prepared) -> Solution | None:
        """The plan of an earlier shape, where this graph has the same ops and the plan fits its budget.

        A budget that is a fraction was taken of the earlier shape's peak, and stands for smaller ones only.
        """
        for step in self._steps.values():
            if isinstance(self.settings.budget, float) and prepared.base.peak_bytes > step.prepared.base.peak_bytes:
                continue
            found = carried(step.solution, step.prepared.graph, prepared, step.solution.budget_bytes)
            if found is not None:
                return dataclasses.replace(found, bound_seconds=prepared.base.seconds, status=Status.FEASIBLE)
        return None

    def _run_and_check(self, step: _Step, data: Any) -> Any:
        """Runs a step whose peak is not certain yet, reads the peak, and plans again if it is above the budget.

        Where the device's limit is in the way after all (memory in pieces too small), every variable gets back the
        value it had before the step, and the step is planned again for less.
        """
        if step.watched and not step.prepared.places.fits_now(step.solution.plan):
            self._plan_after_exhaustion(step, _PIECES_SHARE, "The device has no room for the plan any more: what is free lies in "
                                        "pieces too small.")
            return self._run_and_check(step, data)
        before = variables.snapshot(step.prepared.traced)
        measure.reset_peak()
        try:
            outputs = self._first_run(step, data) if step.checked_runs == 0 else step.run(data)
        except tf.errors.ResourceExhaustedError:
            variables.put_back(step.prepared.traced, before)
            if not step.watched:                # no other plan was found before
                raise
            self._plan_after_exhaustion(step, _EXHAUSTED_SHARE, "The device ran out of memory under a plan that fits: what is free "
                                        "lies in pieces too small. Every variable has been put back.")
            return self._run_and_check(step, data)
        memory = measure.measured_memory()
        if memory is None:
            step.checked_runs = _CHECKED_RUNS
            return outputs
        step.checked_runs += 1
        step.settled = step.settled or step.checked_runs >= _CHECKED_RUNS
        peak_bytes = memory[1]
        step.measured_bytes = max(step.measured_bytes, peak_bytes)
        if step.checked_runs == _CHECKED_RUNS and self.settings.profile == "auto":
            self._remember(step)
        if step.solution is self.solution:
            self.measured_peak_bytes = max(peak_bytes, self.measured_peak_bytes or 0)
        if peak_bytes > step.solution.budget_bytes:
            self._plan_again(step, peak_bytes)
        return outputs

    def _remember(self, step: _Step) -> None:
        """Keeps what the step took beyond its plan, unless that is so much that something else must have been the reason.

        What runs at once is allowed the whole budget: turns of loops, and computations where memory is plenty.
        """
        graph, solution = step.prepared.graph, step.solution
        at_once = any(op.kind in LOOPS for op in graph.ops) or is_plenty(graph, solution.timeline, solution.spare_bytes)
        planned_bytes = solution.budget_bytes if at_once else solution.placed_peak_bytes
        surplus_bytes = max(0, step.measured_bytes - planned_bytes)
        if surplus_bytes <= _MOST_REMEMBERED * (planned_bytes - step.prepared.residents.total):
            device_profile.remember_surplus(step.prepared.profile, graph.key, surplus_bytes)

    def _run_and_watch(self, step: _Step, data: Any) -> Any:
        """Runs a step whose plan has passed its checks, and plans again if its peak comes out above the budget after all.

        What else happens between steps (validation, callbacks) may well go above it; only then is the peak reset.
        """
        before = measure.measured_memory()
        if before is None or not step.watched:
            return step.run(data)
        if before[1] > step.solution.budget_bytes:
            measure.reset_peak()
        outputs = step.run(data)
        peak_bytes = measure.measured_memory()[1]
        if peak_bytes > before[1] and step.solution is self.solution:
            self.measured_peak_bytes = max(peak_bytes, self.measured_peak_bytes or 0)
        if peak_bytes > step.solution.budget_bytes:
            self._plan_again(step, peak_bytes)
        return outputs

    def _first_run(self, step: _Step, data: Any) -> Any:
        step.prepared.places.give_way()
        with self._undone_on_failure(unless=self._is_training, errors=CheckmateError), without_collecting():
            return audit.first_call(step.run, data)[0]

    def _plan_again(self, step: _Step, peak_bytes: int) -> None:
        over_bytes = peak_bytes - step.solution.budget_bytes
        places = step.prepared.places
        places.look_again(step.solution.plan)
        # What free memory does not explain differs from plan to plan, so a little more than this one's is left free.
        unexplained_bytes = max(0, peak_bytes - places.placed_bytes(step.solution.plan, 0))
        surplus_bytes = int(_SURPLUS_GROWTH * unexplained_bytes)
        self._plan_for_less(step, surplus_bytes, f"The step's peak was {format_bytes(peak_bytes)}, {format_bytes(over_bytes)} "
                            "above the budget: the allocator took more than simulated.")

    def _plan_after_exhaustion(self, step: _Step, share: float, reason: str) -> None:
        step.prepared.places.look_again(step.solution.plan)
        spread = step.solution.peak_bytes - step.prepared.residents.total
        self._plan_for_less(step, step.surplus_bytes + int(share * spread), reason)

    def _plan_for_less(self, step: _Step, surplus_bytes: int, reason: str) -> None:
        old, narrator = step.solution, Narrator(self.settings.verbose)
        step.surplus_bytes = max(surplus_bytes, step.surplus_bytes)
        step.replans, step.checked_runs, step.measured_bytes = step.replans + 1, 0, 0
        narrator.say(f"{reason} Planning again for {format_bytes(old.budget_bytes - step.surplus_bytes)}.")
        with self._undone_on_failure(unless=self._is_training), narrator:
            try:
                limits = planning.limits_for(self.settings.solver, _REPLAN_SHARE * self.settings.time_limit)
                if step.replans > _REPLANS:
                    raise rounds.infeasible(step.prepared, old.budget_bytes, planning.get_solver(self.settings.solver),
                                            limits, step.surplus_bytes)
                step.solution = self._solve(step.prepared, old.budget_bytes, narrator, limits, step.surplus_bytes, old)
            except InfeasibleBudgetError as error:
                if not step.settled:
                    raise
                step.watched, step.checked_runs = False, _CHECKED_RUNS
                warnings.warn(f"{reason} No plan that takes less was found, and training goes on under the present one. {error}",
                              stacklevel=2)
                return
            step.run = _emitted(step.prepared, step.solution, step.surplus_bytes)
        if old is self.solution:
            self.solution, self.measured_peak_bytes = step.solution, None

    def _table(self):
        graph = next((step.prepared.graph for step in self._steps.values() if step.solution is self.solution), None)
        recomputed = recomputed_kinds(graph, self.solution) if graph is not None else ()
        return plan_table(self.settings.budget, self.solution, self.estimate, self.measured_peak_bytes, recomputed)


class Checkmate(PlannedSteps):
    """`model.checkmate`: the plan that the model trains under, and what was measured; see PlannedSteps."""

    def __init__(self, model, settings: Settings):
        super().__init__(settings)
        self._model = model

    def make_train_function(self, force: bool = False) -> None:
        """Takes the place of the model's own method of this name."""
        if self._model.train_function is not None and not force:
            return
        with self._undone_on_failure(unless=False):
            planning.check_model(self._model)
        self._steps.clear()
        self.solution = self.estimate = self.measured_peak_bytes = None
        if self._model.jit_compile:
            Narrator(self.settings.verbose).say(
                "jit_compile=True is ignored: XLA merges recomputed values and reorders the step, so a planned step "
                "runs without it.")
        self._model.train_function = self._train_function

    def _train_function(self, iterator) -> Any:
        outputs = None
        for _ in range(self._model.steps_per_execution):
            try:
                data = next(iterator)
            except (StopIteration, tf.errors.OutOfRangeError):
                if outputs is None:
                    raise StopIteration from None
                break
            outputs = self._run(_without_optionals(data))
        return outputs

    def _prepared(self, data: Any, narrate: Callable[[str], None]) -> Prepared:
        planning.build(self._model, data)
        return planning.prepare(self._model, data, self.settings.profile, narrate, batch_is_there=True)

    def _undo(self) -> None:
        restore(self._model)


class Rematerialized(PlannedSteps):
    """What `rematerialize` returns: called as the function is, with tensors or arrays; see PlannedSteps."""

    def __init__(self, function: Callable, settings: Settings):
        super().__init__(settings)
        self._function = getattr(function, "python_function", function)

    def plan(self, specs: Sequence[tf.TypeSpec]) -> None:
        """Plans for arguments of these shapes, before any call."""
        specs = tf.nest.map_structure(lambda spec: tf.TensorSpec(spec.shape, spec.dtype), tuple(specs))
        self._plan(_key(specs), specs, specs)

    def __call__(self, *arguments: Any) -> Any:
        return self._run(tf.nest.map_structure(tf.convert_to_tensor, arguments))

    def _prepared(self, data: Any, narrate: Callable[[str], None]) -> Prepared:
        function = self._function

        def call(arguments):
            return function(*arguments)
        is_there = all(tf.is_tensor(leaf) for leaf in tf.nest.flatten(data))
        return planning.prepare_function(call, data, self.settings.profile, narrate, is_there, self.solution is None,
                                         autograph=True)


def install(model, settings: Settings) -> None:
    """Hangs a Checkmate with these settings on the model; plans are made at the first batch."""
    model.checkmate = Checkmate(model, settings)
    model.make_train_function = model.checkmate.make_train_function
    model.train_function = None


def restore(model) -> None:
    """Takes it off again: the model trains as plain Keras does."""
    if "checkmate" in vars(model):
        del model.checkmate, model.make_train_function
        model.train_function = None


def _emitted(prepared: Prepared, solution: Solution, surplus_bytes: int = 0) -> Emitted:
    """What runs the plan, with what its budget has to spare."""
    kept_bytes = surplus_bytes + rounds.loops_reserve_bytes(prepared, solution.budget_bytes)
    return emit(prepared.traced, prepared.graph, solution.plan, max(0, solution.spare_bytes - kept_bytes))


def _given(solution: Solution, prepared: Prepared, solver: Solver, limits: Limits) -> Solution:
    """A saved solution for this very step, judged anew against what is resident now."""
    verify_plan(prepared.graph, solution.plan)
    timeline = simulate(prepared.graph, solution.plan)
    if timeline.peak_bytes > solution.budget_bytes:
        raise rounds.infeasible(prepared, solution.budget_bytes, solver, limits)
    return dataclasses.replace(solution, timeline=timeline, base=prepared.base,
                               bound_seconds=min(max(solution.bound_seconds, prepared.base.seconds), timeline.seconds))


def _key(specs: Any) -> tuple:
    return _structure(specs), tuple(tf.nest.flatten(specs, expand_composites=True))


def _structure(specs: Any) -> str:
    return str(tf.nest.map_structure(lambda spec: 0, specs))


def _without_optionals(data: Any) -> Any:
    """Keras hands out an empty Optional for a part of the batch that is missing."""
    return tf.nest.map_structure(lambda leaf: None if isinstance(leaf, tf.experimental.Optional) else leaf, data)
