"""What hangs on a Keras model: when it plans, and what else may be done to the model meanwhile."""

import dataclasses
import pickle
import subprocess
import sys

import keras
import numpy as np
import pytest

import checkmate_tf
from budgets import Recomputes, assert_same_variables, recompute, recomputations, tight_budget
from checkmate_tf.solvers import Solution
from networks import conv_net, digits, momentum_net, plain_after, values_of

BATCH = 32
# Keras copies weights with NumPy's `copy=False`, which its variables do not take yet.
COPIES = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning")


@pytest.fixture(scope="module")
def batch():
    return digits(BATCH)


def test_estimating_and_planning_change_no_variable(batch):
    model = momentum_net(dropout=0.3)
    model.optimizer.build(model.trainable_variables)
    before = values_of(model)
    checkmate_tf.estimate(model, *batch, profile="cpu")
    checkmate_tf.plan(model, tight_budget(model, *batch), *batch, profile="cpu", time_limit=2, verbose=0)
    for (name, value), after in zip(before.items(), values_of(model).values()):
        np.testing.assert_array_equal(after, value, err_msg=name)


def test_a_larger_batch_is_planned_anew():
    x, y = digits(48)
    model, solver = momentum_net(), Recomputes()
    recompute(model, solver=solver)
    steps = []
    for size in (16, 48, 16):
        model.train_on_batch(x[:size], y[:size])
        needs = model.checkmate.estimate
        steps.append(needs.keep_all_peak_bytes - needs.resident_bytes)
    assert steps[1] == steps[2] > 2 * steps[0]
    assert len(model.checkmate._steps) == 2


@pytest.mark.kind("life cycle", "a larger batch: plans again")
def test_a_larger_batch_that_does_not_fit_the_old_plan_is_solved_again():
    x, y = digits(48)
    model, solver = momentum_net(), Recomputes(share=1.0)
    budget = tight_budget(model, x, y)
    recompute(model, solver=solver, budget=budget)
    model.train_on_batch(x[:16], y[:16])
    assert len(solver.calls) == 1 and recomputations(model) == 0
    for _ in range(4):
        model.train_on_batch(x, y)
    assert len(solver.calls) > 1 and recomputations(model) > 0
    assert model.checkmate.measured_peak_bytes <= budget


@pytest.mark.kind("life cycle", "compile of Keras again: plans afresh")
def test_compiling_the_model_again_keeps_the_budget_and_plans_afresh(batch):
    model, solver = momentum_net(), Recomputes()
    recompute(model, solver=solver)
    model.train_on_batch(*batch)
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    model.train_on_batch(*batch)
    assert len(solver.calls) == 2 and recomputations(model) > 0
    assert model.checkmate.estimate.resident["optimizer slots"] > 1.9 * model.checkmate.estimate.resident["weights"]
    model.compile("sgd", "sparse_categorical_crossentropy")
    model.train_on_batch(*batch)
    assert len(solver.calls) == 3 and model.checkmate.estimate.resident["optimizer slots"] < 100


@pytest.mark.kind("life cycle", "compile of ours again: another budget")
def test_another_budget_replaces_the_first(batch):
    model = momentum_net()
    recompute(model, share=0.6)
    model.train_on_batch(*batch)
    tighter = recomputations(model)
    checkmate_tf.compile(model, "100GB", profile="cpu", verbose=0)
    assert model.checkmate.solution is None
    model.train_on_batch(*batch)
    assert tighter > 0 == recomputations(model)
    assert_same_variables(model, plain_after(2, batch))


@pytest.mark.kind("life cycle", "restore")
def test_restoring_gives_plain_keras_back(batch):
    model = recompute(momentum_net())
    model.train_on_batch(*batch)
    assert checkmate_tf.restore(model) is model
    assert not hasattr(model, "checkmate") and "make_train_function" not in vars(model)
    model.train_on_batch(*batch)
    assert type(model.train_function).__module__ != "checkmate_tf.keras"
    assert_same_variables(model, plain_after(2, batch))


def test_restoring_a_model_without_a_budget_changes_nothing(batch):
    model = plain_after(1, batch)
    before = model.train_function
    assert checkmate_tf.restore(model) is model and model.train_function is before


def test_layers_frozen_in_between_stay_as_they_are(batch):
    model, plain = recompute(momentum_net()), momentum_net()
    for one in (model, plain):
        one.train_on_batch(*batch)
        one.layers[1].trainable = False
        one.compile(keras.optimizers.SGD(0.05), "sparse_categorical_crossentropy", metrics=["accuracy"])
        frozen = np.array(one.layers[1].kernel.numpy())
        one.train_on_batch(*batch)
        np.testing.assert_array_equal(one.layers[1].kernel.numpy(), frozen)
    assert recomputations(model) > 0
    assert_same_variables(model, plain)


@pytest.mark.kind("life cycle", "set_weights between steps")
@COPIES
def test_weights_set_between_steps_are_what_the_next_step_trains(batch):
    model, plain = recompute(momentum_net()), momentum_net()
    for one in (model, plain):
        one.train_on_batch(*batch)
        one.set_weights([np.asarray(value) * 0.9 for value in one.get_weights()])
        one.optimizer.learning_rate = 0.01
        one.train_on_batch(*batch)
    assert_same_variables(model, plain)


@pytest.mark.kind("life cycle", "several models in one process")
def test_two_models_train_within_their_own_budgets(batch):
    first, second = recompute(momentum_net(), share=0.5), recompute(momentum_net(dropout=0.3), share=0.9)
    for _ in range(2):
        first.train_on_batch(*batch)
        second.train_on_batch(*batch)
    assert first.checkmate.solution is not second.checkmate.solution
    assert recomputations(first) > recomputations(second)
    assert_same_variables(first, plain_after(2, batch))


@pytest.mark.kind("life cycle", "clone_model: a plain model")
def test_a_clone_is_a_plain_model(batch):
    model = recompute(momentum_net())
    model.train_on_batch(*batch)
    clone = keras.models.clone_model(model)
    assert not hasattr(clone, "checkmate") and "make_train_function" not in vars(clone)
    clone.compile("sgd", "sparse_categorical_crossentropy")
    clone.train_on_batch(*batch)


@pytest.mark.kind("life cycle", "pickling: comes back plain")
@COPIES
def test_a_pickled_model_comes_back_plain_and_trains(batch):
    model = recompute(momentum_net())
    model.train_on_batch(*batch)
    again = pickle.loads(pickle.dumps(model))
    assert not hasattr(again, "checkmate")
    np.testing.assert_array_equal(again.predict(batch[0], verbose=0), model.predict(batch[0], verbose=0))
    again.train_on_batch(*batch)
    model.train_on_batch(*batch)
    assert_same_variables(model, again)


@pytest.mark.kind("life cycle", "save, load without this package")
@COPIES
def test_a_saved_model_loads_and_trains_where_this_package_is_not(batch, tmp_path):
    model = recompute(momentum_net())
    model.train_on_batch(*batch)
    model.save(tmp_path / "model.keras")
    np.savez(tmp_path / "batch.npz", x=batch[0], y=batch[1])
    script = """
import sys, keras, numpy as np
model, data = keras.saving.load_model("model.keras"), np.load("batch.npz")
model.train_on_batch(data["x"], data["y"])
assert not [name for name in sys.modules if name.startswith("checkmate_tf")], sys.path
np.savez("after.npz", *[variable.numpy() for variable in model.trainable_variables])
"""
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True, capture_output=True, timeout=120)
    model.train_on_batch(*batch)
    after = np.load(tmp_path / "after.npz")
    for position, variable in enumerate(model.trainable_variables):
        np.testing.assert_allclose(variable.numpy(), after[f"arr_{position}"], rtol=2e-5, atol=1e-6, err_msg=variable.path)


@pytest.mark.kind("life cycle", "jit_compile: ignored with a message")
def test_jit_compile_is_switched_off_with_a_message(batch, capsys):
    model = momentum_net(jit_compile=True)
    recompute(model, verbose=1)
    model.train_on_batch(*batch)
    model.train_on_batch(*batch)
    assert capsys.readouterr().out.count("jit_compile=True is ignored") == 1
    assert recomputations(model) > 0
    assert_same_variables(model, plain_after(2, batch))


def test_mixed_precision_with_loss_scaling_trains_within_a_budget(batch):
    keras.config.set_dtype_policy("mixed_float16")
    try:
        plain, model = momentum_net(), momentum_net()
        recompute(model)
        for one in (plain, model):
            for _ in range(2):
                one.train_on_batch(*batch)
    finally:
        keras.config.set_dtype_policy("float32")
    assert recomputations(model) > 0
    # Half-precision sums in another order differ in their last bit, 1e-3.
    assert_same_variables(model, plain, rtol=5e-3)


def test_gradient_accumulation_and_averaged_weights_equal_plain_keras(batch):
    def make():
        return conv_net(optimizer=keras.optimizers.SGD(0.05, momentum=0.9, use_ema=True, gradient_accumulation_steps=2),
                        activation="swish")
    plain, model = make(), recompute(make())
    for one in (plain, model):
        for _ in range(4):
            one.train_on_batch(*batch)
    assert recomputations(model) > 0
    assert_same_variables(model, plain)


def test_a_saved_plan_takes_the_place_of_a_budget(batch, tmp_path):
    model = momentum_net()
    solution = checkmate_tf.plan(model, tight_budget(model, *batch), *batch, profile="cpu", time_limit=2, verbose=0)
    # Some room, so that what other tests have left in the process is no reason to plan again.
    dataclasses.replace(solution, budget_bytes=solution.budget_bytes + 2_000_000).save(tmp_path / "plan.json")
    solver = Recomputes()
    checkmate_tf.compile(model, Solution.load(tmp_path / "plan.json"), solver=solver, profile="cpu", verbose=0)
    x, y = digits(BATCH + 5)
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    assert not solver.calls and recomputations(model) > 0


_SAVE_PLAN = """
import sys
sys.path[:0] = {paths!r}
import checkmate_tf, networks, keras
model = networks.conv_net(optimizer=keras.optimizers.SGD(0.05, momentum=0.9), activation="swish")
x, y = networks.digits({size})
checkmate_tf.plan(model, 0.7, x, y, profile="cpu", time_limit=2, verbose=0).save({path!r})
"""


@pytest.mark.kind("life cycle", "a plan saved by another process")
def test_a_plan_saved_by_another_process_is_taken(batch, tmp_path):
    path = str(tmp_path / "plan.json")
    script = _SAVE_PLAN.format(paths=[name for name in sys.path if name], size=BATCH, path=path)
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, timeout=120)
    # Names count from the start in a new process, and so do they here.
    keras.backend.clear_session()
    model, solver = momentum_net(), Recomputes()
    loaded = dataclasses.replace(Solution.load(path), budget_bytes=100 * 10 ** 9)
    checkmate_tf.compile(model, loaded, solver=solver, profile="cpu", verbose=0)
    model.train_on_batch(*batch)
    assert not solver.calls and recomputations(model) > 0
    assert_same_variables(model, plain_after(1, batch))
