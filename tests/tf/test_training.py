"""Training within a budget gives what plain Keras gives, whichever way the data come: every variable and every
number."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from budgets import Recomputes, assert_same_training, recompute, recomputations
from checkmate_tf import planning, rounds
from checkmate_tf.bridge import measure, variables
from checkmate_tf.bridge.emit import emit
from checkmate_tf.ir.plan import plan_from_order
from checkmate_tf.solvers import Limits
from networks import conv_net, digits, layers

BATCH = 32
COUNT = 4 * BATCH + 5


@pytest.fixture(scope="module")
def data():
    return digits(COUNT)


def _sgd(**arguments):
    """With a smooth activation: where a rounding flips a ReLU, its gradient jumps, and two equal trainings part."""
    return conv_net(optimizer=keras.optimizers.SGD(0.05, momentum=0.9), activation="swish", **arguments)


def _batch(x, y):
    return x[:BATCH], y[:BATCH]


def _dataset(x, y, drop_remainder=False):
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH, drop_remainder=drop_remainder)


class _Sequence(keras.utils.PyDataset):
    def __init__(self, x, y):
        super().__init__()
        self.x, self.y = x, y

    def __len__(self):
        return -(-len(self.x) // BATCH)

    def __getitem__(self, index):
        return self.x[index * BATCH:(index + 1) * BATCH], self.y[index * BATCH:(index + 1) * BATCH]


def _generator(x, y):
    while True:
        for start in range(0, 4 * BATCH, BATCH):
            yield x[start:start + BATCH], y[start:start + BATCH]


QUIET = {"verbose": 0, "shuffle": False, "batch_size": BATCH}
WAYS = {
    "arrays": lambda model, x, y: model.fit(x, y, epochs=2, **QUIET),
    "shuffled": lambda model, x, y: model.fit(x, y, epochs=2, **QUIET | {"shuffle": True}),
    "validation": lambda model, x, y: model.fit(x, y, epochs=2, validation_data=(x[:40], y[:40]), **QUIET),
    "validation_split": lambda model, x, y: model.fit(x, y, validation_split=0.2, **QUIET),
    "class_weight": lambda model, x, y: model.fit(x, y, class_weight={k: 0.5 + 0.1 * k for k in range(10)}, **QUIET),
    "sample_weight": lambda model, x, y: model.fit(x, y, sample_weight=np.linspace(0.1, 2, len(x)), **QUIET),
    "initial_epoch": lambda model, x, y: model.fit(x, y, epochs=3, initial_epoch=2, **QUIET),
    "steps_per_epoch": lambda model, x, y: model.fit(_dataset(x, y).repeat(), epochs=2, steps_per_epoch=3, verbose=0, shuffle=False),
    "dataset": lambda model, x, y: model.fit(_dataset(x, y), verbose=0, shuffle=False),
    "whole_batches": lambda model, x, y: model.fit(_dataset(x, y, drop_remainder=True), epochs=2, verbose=0, shuffle=False),
    "generator": lambda model, x, y: model.fit(_generator(x, y), steps_per_epoch=4, epochs=2, verbose=0, shuffle=False),
    "py_dataset": lambda model, x, y: model.fit(_Sequence(x, y), verbose=0, shuffle=False),
    "train_on_batch": lambda model, x, y: [model.train_on_batch(*_batch(x, y)) for _ in range(3)],
    "train_on_batch_dict": lambda model, x, y: model.train_on_batch(*_batch(x, y), return_dict=True),
    "train_on_batch_weights": lambda model, x, y: model.train_on_batch(*_batch(x, y), sample_weight=np.linspace(0, 1, BATCH)),
    "train_on_batch_classes": lambda model, x, y: model.train_on_batch(*_batch(x, y), class_weight={k: 1.0 + k for k in range(10)}),
}


@pytest.mark.kind("data and fit")
@pytest.mark.parametrize("way", WAYS)
def test_training_equals_plain_keras(way, data):
    x, y = data
    assert_same_training(_sgd, lambda model: WAYS[way](model, x, y))


@pytest.mark.kind("data and fit", "steps_per_execution")
def test_several_steps_per_execution_with_a_remainder_equal_plain_keras(data):
    x, y = data
    calls = []

    class Ends(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            calls.append(batch)
    assert_same_training(lambda: _sgd(steps_per_execution=4),
                         lambda model: model.fit(x, y, epochs=2, callbacks=[Ends()], **QUIET))
    assert calls[:len(calls) // 2] == calls[len(calls) // 2:]


def test_several_steps_per_execution_over_a_generator_equal_plain_keras(data):
    x, y = data
    assert_same_training(lambda: _sgd(steps_per_execution=2), lambda model: WAYS["generator"](model, x, y))


def test_dropout_draws_the_masks_that_plain_keras_draws(data):
    x, y = data
    assert_same_training(lambda: _sgd(dropout=0.4), lambda model: WAYS["arrays"](model, x, y))


@pytest.mark.kind("data and fit", "a smaller last batch")
def test_a_smaller_last_batch_runs_under_the_same_plan_without_solving(data):
    x, y = data
    model, solver = _sgd(), Recomputes()
    recompute(model, solver=solver)
    model.fit(x, y, epochs=2, **QUIET)
    assert len(solver.calls) == 1 and recomputations(model) > 0
    small, large = sorted(model.checkmate._steps.values(), key=lambda step: step.prepared.base.peak_bytes)
    assert [small.prepared.graph.ops[op].name for op in small.solution.plan.order] == [
        large.prepared.graph.ops[op].name for op in large.solution.plan.order]
    # And what is told of it is of this batch.
    assert small.solution.placed_peak_bytes < large.solution.placed_peak_bytes
    assert max(size for _, size in small.solution.stats["held_at_peak"]) < max(size for _, size in large.solution.stats["held_at_peak"])


def test_a_fraction_is_of_the_full_batch_and_holds_for_smaller_ones(data, monkeypatch):
    # No peaks are read: with much else in the process, a few per cent of all of it are more than this model takes.
    monkeypatch.setattr(measure, "measured_memory", lambda: None)
    x, y = data
    model, solver = _sgd(), Recomputes()
    recompute(model, budget=0.97, solver=solver)
    for size in (BATCH, 5, BATCH, 7):
        model.train_on_batch(x[:size], y[:size])
    assert len(solver.calls) == 1 and recomputations(model) > 0


# Keras copies weights with NumPy's `copy=False`, which its variables do not take yet.
@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning")
def test_early_stopping_and_checkpoints_and_csv_logs_work(data, tmp_path):
    x, y = data

    def train(model):
        folder = tmp_path / model.name
        folder.mkdir(exist_ok=True)
        return model.fit(x, y, epochs=5, validation_data=(x[:40], y[:40]), **QUIET, callbacks=[
            keras.callbacks.EarlyStopping("val_loss", min_delta=10, patience=1),
            keras.callbacks.ModelCheckpoint(str(folder / "model.weights.h5"), save_weights_only=True),
            keras.callbacks.CSVLogger(str(folder / "log.csv")),
            keras.callbacks.LearningRateScheduler(lambda epoch: 0.05 / (1 + epoch))])
    ours = assert_same_training(_sgd, train)
    written = tmp_path / ours.name
    assert len((written / "log.csv").read_text().splitlines()) == 3
    reference = _sgd()
    reference.optimizer.build(reference.trainable_variables)
    reference.load_weights(written / "model.weights.h5")
    np.testing.assert_array_equal(reference.predict(x, verbose=0), ours.predict(x, verbose=0))


def _two_ended(join):
    """Two inputs and two outputs; join(inputs, outputs) says how they are nested."""
    keras.utils.set_random_seed(5)
    left, right = layers.Input((16, 16, 3), name="left"), layers.Input((16, 16, 3), name="right")
    both = layers.Concatenate()([left, right])
    for _ in range(3):
        both = layers.Activation("swish")(layers.BatchNormalization()(layers.Conv2D(12, 3, padding="same", use_bias=False)(both)))
    pooled = layers.GlobalAveragePooling2D()(both)
    label, mean = layers.Dense(10, activation="softmax", name="label")(pooled), layers.Dense(1, name="mean")(pooled)
    model = keras.Model(join("left", left, "right", right), join("label", label, "mean", mean))
    model.compile(keras.optimizers.SGD(0.02, momentum=0.9), join("label", "sparse_categorical_crossentropy", "mean", "mse"),
                  metrics=join("label", ["accuracy"], "mean", ["mae"]), loss_weights=join("label", 1.0, "mean", 0.5))
    return model


@pytest.mark.kind("models", "inputs and outputs as dictionaries or lists")
@pytest.mark.parametrize("join", [lambda one, a, other, b: {one: a, other: b}, lambda one, a, other, b: [a, b]],
                         ids=["dictionaries", "lists"])
def test_nested_inputs_and_outputs_equal_plain_keras(join, data):
    x, y = data
    # Keras weights the losses of single outputs by the batch size only where it is static, as in whole batches.
    whole = slice(4 * BATCH)
    nested = (join("left", x[whole], "right", x[whole, ::-1]),
              join("label", y[whole], "mean", x[whole].mean(axis=(1, 2, 3))[:, None]))
    if isinstance(nested[0], list):
        nested = tuple(tuple(part) for part in nested)
    batches = tf.data.Dataset.from_tensor_slices(nested).batch(BATCH, drop_remainder=True)
    assert_same_training(lambda: _two_ended(join), lambda model: model.fit(batches, epochs=2, verbose=0, shuffle=False))


class AddsItsOwnLoss(keras.Model):
    """A subclassed model, not built before its first batch, without targets."""

    def __init__(self):
        super().__init__()
        self.blocks = [layers.Conv2D(12, 3, padding="same", use_bias=False) for _ in range(3)]
        self.norms = [layers.BatchNormalization() for _ in range(3)]
        self.back = layers.Conv2D(3, 1)

    def call(self, x, training=False):
        value = x
        for block, norm in zip(self.blocks, self.norms):
            value = keras.ops.silu(norm(block(value), training=training))
        value = self.back(value)
        self.add_loss(keras.ops.mean(keras.ops.square(value - x)))
        return value


def _own_loss():
    keras.utils.set_random_seed(9)
    model = AddsItsOwnLoss()
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9))
    return model


@pytest.mark.kind("models", "subclassed, not built, without targets")
@pytest.mark.parametrize("train", [lambda model, x: model.fit(x, epochs=2, **QUIET),
                                   lambda model, x: [model.train_on_batch(x[:BATCH]) for _ in range(3)]],
                         ids=["fit", "train_on_batch"])
def test_a_subclassed_model_that_is_not_built_trains_without_targets(train, data):
    x, _ = data
    assert_same_training(_own_loss, lambda model: train(model, x))


class OwnStep(keras.Model):
    """A step written by the user: two losses, clipped gradients, its own tracker."""

    def __init__(self, *arguments, **keywords):
        super().__init__(*arguments, **keywords)
        self.seen = keras.metrics.Mean(name="seen")

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=predicted) + 0.01 * tf.reduce_mean(tf.square(predicted))
        gradients = tape.gradient(loss, self.trainable_variables)
        gradients, norm = tf.clip_by_global_norm(gradients, 1.0)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        self.seen.update_state(norm)
        return {"loss": loss, "norm": self.seen.result()}


@pytest.mark.kind("own training steps", "clipped gradients, a tracker")
def test_a_train_step_of_the_users_own_equals_plain_keras(data):
    x, y = data

    def make():
        base = _sgd()
        model = OwnStep(base.input, base.output)
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "sparse_categorical_crossentropy")
        return model
    assert_same_training(make, lambda model: model.fit(x, y, epochs=2, **QUIET))


OPTIMIZERS = {
    "SGD": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "Adam": lambda: keras.optimizers.Adam(1e-3),
    "AdamW": lambda: keras.optimizers.AdamW(1e-3, global_clipnorm=1.0),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_variable_has_the_same_bits_as_without_recomputation(optimizer, data):
    x, y = data
    model = conv_net(dropout=0.4, optimizer=OPTIMIZERS[optimizer]())
    batch = tuple(tf.constant(part) for part in _batch(x, y))
    planning.build(model, batch)
    prepared = planning.prepare(model, batch, "cpu", lambda text: None, batch_is_there=True)
    budget = int(prepared.residents.total + 0.5 * (prepared.base.peak_bytes - prepared.residents.total))
    solution = rounds.solve_within(prepared, budget, planning.get_solver("auto"), Limits(seconds=3),
                                   lambda progress: None)
    assert sum(solution.timeline.runs) > len(solution.timeline.runs)
    start, ends = variables.snapshot(prepared.traced), []
    for plan in (plan_from_order(prepared.graph, prepared.graph.order), solution.plan):
        step = emit(prepared.traced, prepared.graph, plan)
        variables.put_back(prepared.traced, start)
        for _ in range(5):
            step(batch)
        ends.append(variables.snapshot(prepared.traced))
    kept, planned = ends
    assert set(kept) == set(start) and any(not np.array_equal(kept[name], start[name]) for name in start)
    for name, value in kept.items():
        np.testing.assert_array_equal(planned[name], value, err_msg=name)


@pytest.mark.kind("data and fit", "150 steps on end")
def test_the_loss_follows_plain_keras_over_150_steps(data):
    x, y = data
    losses = []

    class Losses(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            losses.append([])

        def on_train_batch_end(self, batch, logs=None):
            losses[-1].append(float(logs["loss"]))
    assert_same_training(lambda: _sgd(dropout=0.3),
                         lambda model: model.fit(x, y, epochs=30, callbacks=[Losses()], **QUIET), rtol=1e-3)
    plain, ours = np.array(losses)
    assert len(plain) == 150 and plain[-1] < 0.8 * plain[0]
    np.testing.assert_allclose(ours, plain, rtol=1e-3)
