"""What else happens to a model over its life: interrupts, threads, loading, growing batches, callbacks; it trains as plain
Keras trains it through all of that."""

import signal
import threading
import time

import keras
import numpy as np
import pytest

import checkmate_tf
from budgets import Recomputes, assert_same_training, assert_same_variables, recompute, recomputations, tight_budget, train_on
from checkmate_tf.bridge.emit import Emitted
from checkmate_tf.solvers import Solution, StoppedBy
from networks import conv_net, digits

BATCH = 16
# Keras copies weights with NumPy's `copy=False`, which its variables do not take yet.
COPIES = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning")


@pytest.fixture(scope="module")
def data():
    return digits(3 * BATCH)


@pytest.fixture(scope="module")
def batch():
    return digits(BATCH)


def _sgd(**arguments):
    return conv_net(optimizer=keras.optimizers.SGD(0.05, momentum=0.9), activation="swish", width=8, **arguments)


def _assert_as_after(model, steps: int, batch) -> None:
    reference = _sgd()
    train_on(*batch, steps=steps)(reference)
    assert_same_variables(model, reference)


class _Interrupts(keras.callbacks.Callback):
    """Presses Ctrl-C, so to speak, at the end of a batch."""

    def __init__(self, at: int):
        super().__init__()
        self.at = at

    def on_train_batch_end(self, batch, logs=None):
        if batch == self.at:
            signal.raise_signal(signal.SIGINT)


@pytest.mark.kind("life cycle", "Ctrl-C while training")
def test_training_goes_on_after_an_interrupt(data):
    def train(model):
        for at in (0, 1):
            with pytest.raises(KeyboardInterrupt):
                model.fit(*data, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[_Interrupts(at)])
        return model.fit(*data, batch_size=BATCH, shuffle=False, verbose=0)
    assert_same_training(_sgd, train)


class _Signals:
    """The default solver, with an interrupt when it tells its first plan, while all its threads and processes work."""

    name = "signals"

    def search(self, graph, budget_bytes, limits, report):
        def told(progress):
            signal.raise_signal(signal.SIGINT)
        return checkmate_tf.solvers.get("auto").search(graph, budget_bytes, limits, told)


@pytest.mark.kind("life cycle", "Ctrl-C while planning: the best plan so far, else plain Keras again")
def test_an_interrupt_while_auto_is_solving_takes_the_best_plan_so_far(batch):
    model = _sgd()
    budget = tight_budget(model, *batch, share=0.8)
    checkmate_tf.compile(model, budget, solver=_Signals(), time_limit=60, profile="cpu", verbose=0)
    started = time.monotonic()
    train_on(*batch, steps=2)(model)
    assert time.monotonic() - started < 20
    assert model.checkmate.solution.stopped_by is StoppedBy.INTERRUPT and recomputations(model) > 0
    _assert_as_after(model, 2, batch)


@pytest.mark.kind("life cycle", "one model in several threads, a step at a time")
def test_steps_of_one_model_run_one_after_another_whatever_thread_they_come_from(batch, monkeypatch):
    model, solver = _sgd(), Recomputes()
    recompute(model, solver=solver)
    inside, most = [], []
    real = Emitted.__call__

    def counted(self, data):
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.02)
        try:
            return real(self, data)
        finally:
            inside.pop()
    monkeypatch.setattr(Emitted, "__call__", counted)
    threads = [threading.Thread(target=train_on(*batch, steps=4), args=(model,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(most) == 12 and max(most) == 1 and len(solver.calls) == 1
    reference = _sgd()
    train_on(*batch, steps=12)(reference)
    # Keras resets the metrics at the start of each call, also while another thread's is under way.
    ours, theirs = ((*one.variables, *one.optimizer.variables) for one in (model, reference))
    for variable, other in zip(ours, theirs):
        np.testing.assert_allclose(variable.numpy(), other.numpy(), rtol=2e-5, atol=1e-6, err_msg=variable.path)


@pytest.mark.kind("life cycle", "a larger batch above the budget (smaller ones train on)", refused="InfeasibleBudgetError")
def test_a_batch_too_large_for_the_budget_is_an_error_and_the_others_train_on(data, batch):
    model = _sgd()
    recompute(model, budget=tight_budget(model, *batch, share=0.8), solver="greedy")
    train_on(*batch, steps=2)(model)
    with pytest.raises(checkmate_tf.InfeasibleBudgetError, match="smaller batch"):
        model.train_on_batch(*(np.concatenate([part] * 20) for part in batch))
    train_on(*batch, steps=2)(model)
    assert recomputations(model) > 0
    _assert_as_after(model, 4, batch)


@COPIES
@pytest.mark.kind("life cycle", "save, load, compile again with the optimizer's state")
def test_a_loaded_model_goes_on_training_within_a_budget(batch, tmp_path):
    model = recompute(_sgd())
    train_on(*batch, steps=2)(model)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert not hasattr(loaded, "checkmate")
    recompute(loaded)
    train_on(*batch, steps=2)(loaded)
    assert recomputations(loaded) > 0
    reference = _sgd()
    train_on(*batch, steps=4)(reference)
    ours, theirs = ((*one.weights, *one.optimizer.variables) for one in (loaded, reference))
    for variable, other in zip(ours, theirs):
        np.testing.assert_allclose(variable.numpy(), other.numpy(), rtol=2e-5, atol=1e-6, err_msg=variable.path)


@COPIES
@pytest.mark.kind("life cycle", "callbacks: backup, checkpoint, CSV, plateau, early stopping")
def test_the_usual_callbacks_see_what_they_see_in_plain_keras(data, tmp_path):
    def train(model):
        folder = tmp_path / model.name
        return model.fit(*data, batch_size=BATCH, epochs=4, shuffle=False, verbose=0, validation_split=1 / 3, callbacks=[
            keras.callbacks.BackupAndRestore(_made(folder) / "backup"), keras.callbacks.CSVLogger(folder / "log.csv"),
            keras.callbacks.ModelCheckpoint(folder / "best.keras", monitor="val_loss", save_best_only=True),
            keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=0, min_delta=10.0),
            keras.callbacks.TerminateOnNaN(), keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: None),
            keras.callbacks.EarlyStopping("loss", min_delta=10.0, patience=2, restore_best_weights=True)])
    ours = assert_same_training(_sgd, train)
    assert len((tmp_path / ours.name / "log.csv").read_text().splitlines()) == 4
    best = keras.saving.load_model(tmp_path / ours.name / "best.keras")
    best.train_on_batch(*digits(BATCH))


def _made(folder):
    folder.mkdir(exist_ok=True)
    return folder


@pytest.mark.kind("life cycle", "TensorBoard")
def test_tensorboard_writes_its_logs(data, tmp_path):
    pytest.importorskip("tensorboard", reason="Keras's TensorBoard callback needs that package")

    def train(model):
        board = keras.callbacks.TensorBoard(tmp_path / model.name, update_freq=1)
        return model.fit(*data, batch_size=BATCH, verbose=0, shuffle=False, callbacks=[board])
    assert_same_training(_sgd, train)
    assert len(list(tmp_path.rglob("events*"))) >= 2


@pytest.mark.kind("life cycle", "evaluate and predict between steps")
def test_evaluating_and_predicting_between_steps_change_nothing(batch):
    def train(model):
        told = []
        for _ in range(3):
            told += [model.train_on_batch(*batch), model.evaluate(*batch, verbose=0), model.test_on_batch(*batch),
                     float(np.sum(np.square(model.predict(batch[0], verbose=0))))]
        return told
    assert_same_training(_sgd, train)


@pytest.mark.kind("life cycle", "trainable changed between fits")
def test_layers_thawed_between_fits_train_from_then_on(batch):
    def train(model):
        told = []
        for trainable in (False, True):
            for layer in model.layers[:4]:
                layer.trainable = trainable
            model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "sparse_categorical_crossentropy")
            told += train_on(*batch)(model)
        return told
    assert_same_training(_sgd, train)


@pytest.mark.kind("life cycle", "weights assigned by hand, metrics reset between steps")
def test_what_is_assigned_by_hand_is_what_the_next_step_reads(batch):
    def train(model):
        told = train_on(*batch)(model)
        model.layers[1].kernel.assign(0.5 * model.layers[1].kernel)
        model.optimizer.learning_rate.assign(0.001)
        model.reset_metrics()
        return told + train_on(*batch)(model)
    assert_same_training(_sgd, train)


@pytest.mark.kind("life cycle", "a saved plan of another model or batch size", refused="PlanError")
def test_a_plan_for_another_batch_size_is_refused_before_anything_is_trained(batch, tmp_path):
    model = _sgd()
    solution = checkmate_tf.plan(model, tight_budget(model, *batch), *batch, profile="cpu", solver="greedy", verbose=0)
    solution.save(tmp_path / "plan.json")
    checkmate_tf.compile(model, Solution.load(tmp_path / "plan.json"), profile="cpu", verbose=0)
    with pytest.raises(checkmate_tf.PlanError, match="another graph"):
        model.train_on_batch(batch[0][:7], batch[1][:7])
    train_on(*batch, steps=2)(model)
    _assert_as_after(model, 2, batch)
