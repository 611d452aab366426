"""What the tests of the Keras level share: a budget that forces recomputation, and a comparison with plain Keras."""

import dataclasses
import subprocess
import sys
from collections.abc import Callable

import keras
import numpy as np

import checkmate_tf
from checkmate_tf import solvers
from checkmate_tf.bridge import measure
from checkmate_tf.ir.simulate import keep_all_timeline
from networks import values_of

@dataclasses.dataclass(frozen=True)
class Recomputes:
    """The greedy planner, held to a share of the way from what is resident to the keep-everything peak, whatever the
    budget.

    So a test that is not about budgets gets a plan that recomputes without asking first how much the step needs, and
    what else the process holds cannot make it replan. calls: the budgets it was called with.
    """

    share: float = 0.6
    calls: list[int] = dataclasses.field(default_factory=list)
    name: str = "recomputes"

    def search(self, graph, budget_bytes, limits, report):
        self.calls.append(budget_bytes)
        peak_bytes = keep_all_timeline(graph).peak_bytes
        own_bytes = int(graph.resident_bytes + self.share * (peak_bytes - graph.resident_bytes))
        return solvers.get("greedy").search(graph, min(budget_bytes, own_bytes), limits, report)


def recompute(model, share: float = 0.6, **settings):
    """Compiles the model for a plan that recomputes, priced without measuring anything; returns it."""
    return checkmate_tf.compile(model, **{"budget": "100GB", "solver": Recomputes(share), "profile": "cpu", "time_limit": 10,
                                          "verbose": 0} | settings)


def tight_budget(model, *batch, share: float = 0.6) -> int:
    """Bytes at this share of the way from what is resident to the keep-everything peak of a step on this batch."""
    needs = checkmate_tf.estimate(model, *batch, profile="cpu", verbose=0)
    return int(needs.resident_bytes + share * (needs.keep_all_peak_bytes - needs.resident_bytes))


def recomputations(model) -> int:
    """How many runs more than ops the plan has that the model trains under."""
    runs = model.checkmate.solution.timeline.runs
    return sum(runs) - len(runs)


def train_on(*batch, steps: int = 3) -> Callable:
    """A way to train: so many steps on one batch, by itself; gives what each returned."""
    return lambda model: [model.train_on_batch(*batch) for _ in range(steps)]


def assert_same_training(make: Callable, train: Callable, rtol: float = 2e-5, share: float = 0.6):
    """Trains one copy as plain Keras and one under a plan that recomputes, and compares what comes back and every
    variable.

    make() gives a compiled model, train(model) trains it; share: as in `Recomputes`. Returns the model that recomputed.
    """
    plain, ours = make(), recompute(make(), share)
    keras.utils.set_random_seed(11)
    expected = train(plain)
    keras.utils.set_random_seed(11)
    received = train(ours)
    assert recomputations(ours) > 0
    if isinstance(expected, keras.callbacks.History):
        assert received.epoch == expected.epoch and list(received.history) == list(expected.history)
        expected, received = expected.history, received.history
    keras.tree.map_structure(lambda a, b: np.testing.assert_allclose(a, b, rtol=max(rtol, 1e-5)), received, expected)
    assert_same_variables(ours, plain, rtol)
    return ours


def assert_trains_within(make: Callable, *batch, share: float = 0.6, steps: int = 6, rtol: float = 2e-5, **settings):
    """Trains one copy as plain Keras and one within a real budget, priced by measuring on this device, and compares every
    variable; once the first three steps have been judged, the allocator's peak is asked here, too.

    share: where the budget lies between what is resident and the peak of keeping everything. Returns the model.
    """
    plain, ours = make(), make()
    needs = checkmate_tf.estimate(ours, *batch, verbose=0)
    budget = int(needs.resident_bytes + share * (needs.keep_all_peak_bytes - needs.resident_bytes))
    checkmate_tf.compile(ours, budget, **{"time_limit": 4, "solver": "greedy", "verbose": 0} | settings)
    train_on(*batch, steps=steps)(ours)
    assert recomputations(ours) > 0
    assert 0 < ours.checkmate.measured_peak_bytes <= budget
    measure.reset_peak()
    train_on(*batch)(ours)
    assert measure.measured_memory()[1] <= budget
    train_on(*batch, steps=steps + 3)(plain)
    assert_same_variables(ours, plain, rtol)
    return ours


def assert_same_variables(model, reference, rtol: float = 2e-5) -> None:
    """Every variable of the two: weights, slots, seeds, metric states; relative to the largest entry of each
    variable."""
    found, expected = values_of(model), values_of(reference)
    assert len(found) == len(expected)
    for (name, value), reference_value in zip(found.items(), expected.values()):
        scale = float(np.max(np.abs(reference_value), initial=0)) if np.issubdtype(reference_value.dtype, np.floating) else 0
        np.testing.assert_allclose(value, reference_value, rtol=rtol, atol=rtol * scale, err_msg=name)


def in_a_process_of_its_own(module: str, function: str) -> None:
    """Calls a function of a test module where nothing has been allocated before."""
    script = f"import sys; sys.path[:0] = {sys.path!r}; import {module}; {module}.{function}()"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=300, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
