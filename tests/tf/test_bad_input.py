"""What cannot be planned gets a clear error, and the model trains as it did before."""

import dataclasses
import json

import keras
import numpy as np
import pytest
import tensorflow as tf

import checkmate_tf
from budgets import assert_same_variables, recompute, recomputations, tight_budget
from checkmate_tf import (BudgetError, InfeasibleBudgetError, NotCompiledError, PlanError, ProfileError, SolverError,
                          UnsupportedError, rounds)
from checkmate_tf.bridge import measure
from checkmate_tf.ir.placement import Placement
from checkmate_tf.solvers import Solution
from networks import conv_net, digits, layers

BATCH = 16
QUIET = {"profile": "cpu", "time_limit": 3, "verbose": 0}


@pytest.fixture(scope="module")
def batch():
    return digits(BATCH)


def _sgd(**arguments):
    return conv_net(optimizer=keras.optimizers.SGD(0.05, momentum=0.9), activation="swish", **arguments)


def assert_plain(model, batch, steps_before: int = 0) -> None:
    """The model has no trace of this package and trains as a plain copy does that has run so many steps before."""
    assert not hasattr(model, "checkmate") and "make_train_function" not in vars(model)
    reference = _sgd()
    for _ in range(steps_before):
        reference.train_on_batch(*batch)
    for one in (model, reference):
        one.train_on_batch(*batch)
    assert_same_variables(model, reference)


@pytest.mark.kind("life cycle", "a model that is not compiled", refused="NotCompiledError")
def test_a_model_must_be_compiled():
    model = keras.Sequential([layers.Input((2,)), layers.Dense(1)])
    with pytest.raises(NotCompiledError, match=r"You must call `compile\(\)`"):
        checkmate_tf.compile(model, "1GB")
    with pytest.raises(NotCompiledError, match="Received: <Sequential"):
        checkmate_tf.estimate(model, np.zeros((1, 2)))
    assert not hasattr(model, "checkmate")


@pytest.mark.parametrize("budget", [0, -1, 0.0, -0.5, 1.5, float("nan"), float("inf"), True, None, "2 quux", "", "GB", "-1GB", "0GB",
                                    [1], np.zeros(2), {"budget": 1}])
def test_what_is_no_budget_is_refused_at_once(budget):
    model = _sgd()
    with pytest.raises(BudgetError, match="Received: "):
        checkmate_tf.compile(model, budget)
    with pytest.raises(BudgetError):
        checkmate_tf.plan(model, budget, *digits(2))
    assert not hasattr(model, "checkmate")


def test_a_refused_budget_leaves_the_budget_there_was(batch):
    model = recompute(_sgd())
    before = model.checkmate
    with pytest.raises(BudgetError):
        checkmate_tf.compile(model, -1)
    assert model.checkmate is before
    model.train_on_batch(*batch)
    assert recomputations(model) > 0


def test_numbers_of_numpy_are_budgets():
    model = _sgd()
    checkmate_tf.compile(model, np.int64(10 ** 9))
    checkmate_tf.compile(model, np.float64(0.5))


@pytest.mark.parametrize("arguments, error, text", [
    ({"solver": "magic"}, SolverError, "Known solvers are auto"),
    ({"solver": 3}, SolverError, "search"),
    ({"profile": "gtx9000"}, ProfileError, "a100"),
    ({"profile": 3}, ProfileError, "Received: 3"),
    ({"time_limit": 0}, SolverError, "positive number of seconds"),
    ({"time_limit": float("nan")}, SolverError, "nan"),
    ({"time_limit": "1"}, SolverError, "'1'"),
    ({"verbose": 7}, UnsupportedError, "verbose=7"),
])
def test_unknown_settings_are_refused_at_once(arguments, error, text):
    model = _sgd()
    with pytest.raises(error, match=text):
        checkmate_tf.compile(model, "1GB", **arguments)
    assert not hasattr(model, "checkmate")


@pytest.mark.kind("life cycle", "a budget below the floor", refused="InfeasibleBudgetError")
def test_a_budget_below_the_floor_names_the_floor_and_a_budget_that_works(batch):
    model = _sgd()
    needs = checkmate_tf.estimate(model, *batch, profile="cpu", verbose=0)
    budget = (needs.resident_bytes + needs.floor_bytes) // 2
    checkmate_tf.compile(model, budget, **QUIET)
    with pytest.raises(InfeasibleBudgetError) as caught:
        model.train_on_batch(*batch)
    error, text = caught.value, str(caught.value)
    assert error.budget_bytes == budget < error.minimum_bytes < needs.keep_all_peak_bytes * 1.1
    assert {"weights", "optimizer slots", "batch"} <= set(error.breakdown)
    assert error.breakdown["weights"] == needs.resident["weights"]
    assert "which no recomputation can go below" in text and "smaller batch" in text
    assert all(label in text for label in error.breakdown) and f"{error.minimum_bytes} bytes" in text
    assert text.endswith(f"Received: budget of {budget} bytes")
    assert_plain(model, batch)


@pytest.mark.slow
def test_the_budget_that_an_error_calls_the_smallest_works(batch):
    model = _sgd(size=32)
    x, y = digits(BATCH, size=32)
    checkmate_tf.compile(model, 1000, **QUIET)
    with pytest.raises(InfeasibleBudgetError) as caught:
        model.train_on_batch(x, y)
    checkmate_tf.compile(model, caught.value.minimum_bytes, **QUIET | {"time_limit": 30})
    for _ in range(4):
        model.train_on_batch(x, y)
    while model.checkmate.measured_peak_bytes is None:      # planned again in the last step, which happens four times at most
        model.train_on_batch(x, y)
    assert recomputations(model) > 0
    assert model.checkmate.measured_peak_bytes <= caught.value.minimum_bytes


def test_a_budget_is_called_the_smallest_only_if_it_holds_where_nothing_has_been_before(batch, monkeypatch):
    model = _sgd()
    needs = checkmate_tf.estimate(model, *batch, profile="cpu", verbose=0)
    monkeypatch.setattr(rounds, "place", lambda *arguments: Placement(1 << 40, 1 << 40))
    checkmate_tf.compile(model, 1000, **QUIET)
    with pytest.raises(InfeasibleBudgetError) as caught:
        model.train_on_batch(*batch)
    assert caught.value.minimum_bytes >= needs.keep_all_peak_bytes          # no plan is as small there


def test_a_solver_that_finds_nothing_is_told_apart_from_a_proof(batch):
    model = _sgd()
    budget = tight_budget(model, *batch, share=0.8)
    checkmate_tf.compile(model, budget, solver="keep_all", **QUIET)
    with pytest.raises(InfeasibleBudgetError, match="none was found; the proven floor is") as caught:
        model.train_on_batch(*batch)
    assert not caught.value.minimum_is_proven
    checkmate_tf.compile(model, caught.value.minimum_bytes, solver="keep_all", **QUIET)
    model.train_on_batch(*batch)
    assert recomputations(model) == 0


def test_where_weights_alone_exceed_the_budget_the_error_says_that_recomputation_cannot_help():
    model = keras.Sequential([layers.Input((512,)), layers.Dense(512), layers.Dense(1)])
    model.compile("adam", "mse")
    checkmate_tf.compile(model, "1MB", **QUIET)
    with pytest.raises(InfeasibleBudgetError, match="an optimizer with fewer slots") as caught:
        model.train_on_batch(np.zeros((4, 512)), np.zeros((4, 1)))
    assert caught.value.breakdown["weights"] == 4 * (512 * 512 + 512 + 512 + 1)
    assert caught.value.breakdown["optimizer slots"] >= 2 * caught.value.breakdown["weights"]


def test_other_tensors_on_the_device_count_and_are_named(batch):
    model = _sgd()
    budget = tight_budget(model, *batch, share=1.2)
    held = tf.zeros([5_000_000])
    checkmate_tf.compile(model, budget, **QUIET)
    with pytest.raises(InfeasibleBudgetError, match="drop other tensors and models") as caught:
        model.train_on_batch(*batch)
    assert caught.value.breakdown["other tensors on the device"] >= 20_000_000
    del held


@pytest.mark.kind("data and fit", "run_eagerly", refused="UnsupportedError")
def test_eager_models_are_refused_before_and_after(batch):
    eager = _sgd(run_eagerly=True)
    with pytest.raises(UnsupportedError, match="run_eagerly=True"):
        checkmate_tf.compile(eager, "1GB")
    model = recompute(_sgd())
    model.train_on_batch(*batch)
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "sparse_categorical_crossentropy", run_eagerly=True)
    with pytest.raises(UnsupportedError, match="run_eagerly=True"):
        model.train_on_batch(*batch)
    assert not hasattr(model, "checkmate")
    model.train_on_batch(*batch)


@pytest.mark.kind("data and fit", "distribution strategies", refused="UnsupportedError")
@pytest.mark.parametrize("strategy", [lambda: tf.distribute.MirroredStrategy(["CPU:0"]), lambda: tf.distribute.OneDeviceStrategy("CPU:0")],
                         ids=["mirrored", "one_device"])
def test_other_strategies_are_refused(strategy):
    with strategy().scope():
        model = _sgd()
    with pytest.raises(UnsupportedError, match="default strategy .* Received: .*Strategy"):
        checkmate_tf.compile(model, "1GB")
    assert not hasattr(model, "checkmate")


def test_a_value_of_unknown_shape_is_named_and_the_model_left_as_it_was():
    class Masks(layers.Layer):
        def call(self, x):
            return tf.reduce_sum(tf.boolean_mask(x, x > 0), keepdims=True)[None] + tf.reduce_sum(x, axis=1, keepdims=True)

        def compute_output_shape(self, shape):
            return (shape[0], 1)
    inputs = layers.Input((4,))
    model = keras.Model(inputs, layers.Dense(1)(Masks()(inputs)))
    model.compile("sgd", "mse")
    checkmate_tf.compile(model, "1GB", **QUIET)
    with pytest.raises(UnsupportedError, match="dimension"):
        model.fit(np.ones((8, 4)), np.ones((8, 1)), verbose=0)
    assert not hasattr(model, "checkmate")
    model.fit(np.ones((8, 4)), np.ones((8, 1)), verbose=0)


def test_a_batch_without_its_size_is_refused():
    with pytest.raises(UnsupportedError, match="batch dimension included"):
        checkmate_tf.estimate(_sgd(), tf.TensorSpec([None, 16, 16, 3]), tf.TensorSpec([None], tf.int64), profile="cpu")


@pytest.mark.kind("own training steps", "make_train_function overridden", refused="UnsupportedError")
def test_a_class_that_makes_its_own_train_function_is_refused():
    class Own(keras.Model):
        def make_train_function(self, force=False):
            return super().make_train_function(force)
    base = _sgd()
    model = Own(base.input, base.output)
    model.compile("sgd", "sparse_categorical_crossentropy")
    with pytest.raises(UnsupportedError, match="override train_step instead"):
        checkmate_tf.compile(model, "1GB")


def test_what_is_no_model_is_refused():
    with pytest.raises(UnsupportedError, match="keras.Model is needed. Received: int"):
        checkmate_tf.compile(3, "1GB")


@dataclasses.dataclass(frozen=True)
class Raises:
    """A solver that ends in an exception."""

    error: BaseException
    name: str = "raises"

    def search(self, graph, budget_bytes, limits, report):
        raise self.error


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("out of ideas")], ids=lambda error: type(error).__name__)
def test_whatever_ends_planning_goes_on_and_the_model_is_plain_again(error, batch):
    model = _sgd()
    checkmate_tf.compile(model, "1GB", solver=Raises(error), **QUIET)
    with pytest.raises(type(error)):
        model.fit(*batch, verbose=0)
    assert_plain(model, batch)


def test_a_solver_that_runs_out_of_memory_is_an_error_only_where_not_everything_fits(batch):
    model = _sgd()
    checkmate_tf.compile(model, "1GB", solver=Raises(MemoryError()), **QUIET)
    model.fit(*batch, verbose=0)
    assert recomputations(model) == 0
    other = _sgd()
    checkmate_tf.compile(other, tight_budget(other, *batch), solver=Raises(MemoryError()), **QUIET)
    with pytest.raises(checkmate_tf.InfeasibleBudgetError, match="none was found"):
        other.fit(*batch, verbose=0)
    assert_plain(other, batch)


def test_an_interrupt_while_another_shape_is_planned_leaves_the_budget_in_force(batch):
    x, y = digits(2 * BATCH)
    model = recompute(_sgd())
    model.train_on_batch(*batch)
    model.checkmate.settings = dataclasses.replace(model.checkmate.settings, solver=Raises(KeyboardInterrupt()), budget=0.5)
    with pytest.raises(KeyboardInterrupt):
        model.train_on_batch(x, y)
    model.train_on_batch(*batch)
    assert recomputations(model) > 0


def test_a_solver_whose_answer_breaks_the_budget_is_an_error_of_its_own(batch):
    @dataclasses.dataclass(frozen=True)
    class Lies:
        name: str = "lies"

        def search(self, graph, budget_bytes, limits, report):
            return checkmate_tf.solvers.Answer(graph.order, checkmate_tf.solvers.StoppedBy.DONE)
    model = _sgd()
    checkmate_tf.compile(model, tight_budget(model, *batch), solver=Lies(), **QUIET)
    with pytest.raises(SolverError, match="'lies' returned a plan of"):
        model.train_on_batch(*batch)
    assert_plain(model, batch)


def test_data_that_keras_refuses_keep_the_budget(batch):
    x, y = batch
    model = recompute(_sgd())
    with pytest.raises(tf.errors.InvalidArgumentError):
        model.train_on_batch(x, np.full_like(y, 77))
    model.train_on_batch(x, y)
    assert recomputations(model) > 0


@pytest.fixture
def saved(batch, tmp_path):
    model = _sgd()
    path = tmp_path / "plan.json"
    checkmate_tf.plan(model, tight_budget(model, *batch), *batch, **QUIET).save(path)
    return path



@pytest.mark.parametrize("spoil", [
    lambda text: "", lambda text: "{}", lambda text: "[]", lambda text: text[:200], lambda text: text.replace("plan 1", "plan 99"),
    lambda text: json.dumps(json.loads(text) | {"steps": "none"}), lambda text: json.dumps(json.loads(text) | {"status": "great"})],
    ids=["empty", "object", "list", "cut", "format", "steps", "status"])
def test_a_spoilt_plan_file_is_refused_when_it_is_read(spoil, saved):
    saved.write_text(spoil(saved.read_text()))
    with pytest.raises(PlanError, match="Solution.save wrote. Received: .*plan.json"):
        Solution.load(saved)


def test_a_plan_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(PlanError, match="nowhere.json"):
        Solution.load(tmp_path / "nowhere.json")


@pytest.mark.parametrize("change", [
    lambda fields: {"steps": fields["steps"][:-1]}, lambda fields: {"steps": [10 ** 6, *fields["steps"]]},
    lambda fields: {"steps": fields["steps"][::-1]}, lambda fields: {"graph_key": "0" * 32}], ids=["short", "unknown", "reversed", "key"])
def test_a_plan_that_was_tampered_with_is_refused_and_the_model_left_as_it_was(change, saved, batch):
    fields = json.loads(saved.read_text())
    saved.write_text(json.dumps(fields | change(fields)))
    model = _sgd()
    checkmate_tf.compile(model, Solution.load(saved), **QUIET)
    with pytest.raises(PlanError):
        model.train_on_batch(*batch)
    assert_plain(model, batch)


@pytest.mark.kind("life cycle", "a saved plan of another model or batch size", refused="PlanError")
def test_the_plan_of_another_model_is_refused_and_the_model_left_as_it_was(saved, batch):
    model = _sgd(width=8)
    checkmate_tf.compile(model, Solution.load(saved), **QUIET)
    with pytest.raises(PlanError, match="another graph"):
        model.train_on_batch(*batch)
    assert not hasattr(model, "checkmate")
    model.train_on_batch(*batch)


def test_auto_needs_a_device_that_tells_its_limit(batch, monkeypatch):
    monkeypatch.setattr(measure, "memory_limit", lambda: None)
    model = _sgd()
    checkmate_tf.compile(model, "auto", **QUIET)
    with pytest.raises(BudgetError, match="tells no memory limit"):
        model.train_on_batch(*batch)
    assert_plain(model, batch)
