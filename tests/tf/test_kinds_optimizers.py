"""Optimizers, losses, metrics, precisions and ways to update: each trains as plain Keras does."""

import keras
import numpy as np
import pytest

from budgets import assert_same_training, train_on
from networks import layers

optimizers, losses = keras.optimizers, keras.losses
DRAWN = np.random.default_rng(3)
X = DRAWN.random((128, 16), np.float32)
LABELS = DRAWN.integers(0, 4, 128)
ONE_HOT = np.eye(4, dtype=np.float32)[LABELS]
NUMBERS = DRAWN.random((128, 4), np.float32)


def _network(optimizer, loss="mse", activation=None, **arguments):
    """Dense layers whose every gradient is far from zero, so that a rounding does not turn into a step."""
    keras.utils.set_random_seed(7)
    value = inputs = layers.Input((16,))
    for _ in range(4):
        value = layers.Dense(32, activation="swish", use_bias=False)(value)
        value = layers.Activation("tanh")(value + 0.5)
    model = keras.Model(inputs, layers.Dense(4, activation=activation)(value))
    model.compile(optimizer, loss, **arguments)
    return model


OPTIMIZERS = {
    "SGD": lambda **more: optimizers.SGD(0.05, **more),
    "SGD, Nesterov": lambda **more: optimizers.SGD(0.05, momentum=0.9, nesterov=True, **more),
    "Adam": lambda **more: optimizers.Adam(1e-2, **more),
    "Adam, AMSGrad": lambda **more: optimizers.Adam(1e-2, amsgrad=True, **more),
    "AdamW": lambda **more: optimizers.AdamW(1e-2, **more),
    "Adamax": lambda **more: optimizers.Adamax(1e-2, **more),
    "Nadam": lambda **more: optimizers.Nadam(1e-2, **more),
    "Adagrad": lambda **more: optimizers.Adagrad(1e-2, **more),
    "Adadelta": lambda **more: optimizers.Adadelta(1e-1, **more),
    "Adafactor": lambda **more: optimizers.Adafactor(1e-2, **more),
    "RMSprop": lambda **more: optimizers.RMSprop(1e-2, centered=True, momentum=0.5, **more),
    "Ftrl": lambda **more: optimizers.Ftrl(1e-2, **more),
    "Lion": lambda **more: optimizers.Lion(1e-3, **more),
    "Lamb": lambda **more: optimizers.Lamb(1e-2, **more),
    "Muon": lambda **more: optimizers.Muon(1e-2, **more),
}


@pytest.mark.kind("optimizers")
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_optimizers_update_as_plain_keras(kind):
    assert_same_training(lambda: _network(OPTIMIZERS[kind]()), train_on(X, NUMBERS), rtol=5e-5)


UPDATES = {
    "clipnorm": lambda: optimizers.Adam(1e-2, clipnorm=0.01),
    "global_clipnorm": lambda: optimizers.SGD(0.05, momentum=0.9, global_clipnorm=0.1),
    "clipvalue": lambda: optimizers.SGD(0.05, momentum=0.9, clipvalue=0.001),
    "weight_decay": lambda: optimizers.AdamW(1e-2, weight_decay=0.1),
    "use_ema": lambda: optimizers.SGD(0.05, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2),
    "gradient_accumulation_steps": lambda: optimizers.Adam(1e-2, gradient_accumulation_steps=2),
    "accumulation, EMA and clipping at once": lambda: optimizers.AdamW(
        1e-2, gradient_accumulation_steps=2, use_ema=True, ema_momentum=0.5, global_clipnorm=0.1),
    "LossScaleOptimizer": lambda: optimizers.LossScaleOptimizer(optimizers.SGD(0.05, momentum=0.9), dynamic_growth_steps=2),
    "ExponentialDecay": lambda: optimizers.SGD(optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)),
    "CosineDecay with warm-up": lambda: optimizers.Adam(
        optimizers.schedules.CosineDecay(1e-3, 4, warmup_target=1e-2, warmup_steps=2)),
    "PiecewiseConstantDecay": lambda: optimizers.SGD(optimizers.schedules.PiecewiseConstantDecay([2, 3], [0.1, 0.05, 0.01])),
}


@pytest.mark.kind("updates")
@pytest.mark.parametrize("kind", UPDATES)
def test_ways_to_update_equal_plain_keras(kind):
    assert_same_training(lambda: _network(UPDATES[kind]()), train_on(X, NUMBERS, steps=4), rtol=5e-5)


LOSSES = {
    "sparse_categorical_crossentropy": ("sparse_categorical_crossentropy", LABELS, "softmax"),
    "SparseCategoricalCrossentropy, from logits, ignore_class": (
        losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=2), LABELS, None),
    "CategoricalCrossentropy, label smoothing": (losses.CategoricalCrossentropy(label_smoothing=0.1), ONE_HOT, "softmax"),
    "CategoricalFocalCrossentropy": (losses.CategoricalFocalCrossentropy(), ONE_HOT, "softmax"),
    "BinaryCrossentropy": ("binary_crossentropy", ONE_HOT, "sigmoid"),
    "BinaryFocalCrossentropy": (losses.BinaryFocalCrossentropy(from_logits=True), ONE_HOT, None),
    "Dice": (losses.Dice(), ONE_HOT, "sigmoid"),
    "Tversky": (losses.Tversky(), ONE_HOT, "sigmoid"),
    "Huber": (losses.Huber(0.3), NUMBERS, None),
    "LogCosh": ("log_cosh", NUMBERS, None),
    "MeanAbsoluteError": ("mae", NUMBERS, None),
    "MeanSquaredLogarithmicError": ("msle", NUMBERS, "softplus"),
    "KLDivergence": ("kl_divergence", NUMBERS, "softmax"),
    "Poisson": ("poisson", NUMBERS, "softplus"),
    "CosineSimilarity": ("cosine_similarity", NUMBERS, None),
    "Hinge": ("squared_hinge", 2 * ONE_HOT - 1, "tanh"),
    "a function": (lambda y, y_pred: keras.ops.mean(keras.ops.abs(y - y_pred) ** 1.5, axis=-1), NUMBERS, None),
}


@pytest.mark.kind("losses")
@pytest.mark.parametrize("kind", LOSSES)
def test_losses_train_as_plain_keras(kind):
    loss, y, activation = LOSSES[kind]
    weights = np.linspace(0.5, 1.5, 128, dtype=np.float32)
    assert_same_training(lambda: _network(optimizers.SGD(0.05, momentum=0.9), loss, activation), train_on(X, y, weights))


@pytest.mark.kind("losses", "CTC")
def test_the_loss_of_unaligned_labels_trains_as_plain_keras():
    def make():
        keras.utils.set_random_seed(7)
        inputs = layers.Input((12, 8))
        value = inputs
        for _ in range(3):
            value = layers.LayerNormalization()(layers.Dense(16, activation="swish")(value))
        model = keras.Model(inputs, layers.Dense(6)(value))
        model.compile(optimizers.SGD(0.05, momentum=0.9), losses.CTC())
        return model
    assert_same_training(make, train_on(DRAWN.random((8, 12, 8), np.float32), DRAWN.integers(1, 6, (8, 4))))


METRICS = {
    "accuracy, top-k, AUC, precision, recall": (ONE_HOT, "softmax", "categorical_crossentropy", [
        "accuracy", lambda: keras.metrics.TopKCategoricalAccuracy(2), lambda: keras.metrics.AUC(multi_label=True, num_labels=4),
        lambda: keras.metrics.Precision(), lambda: keras.metrics.Recall(class_id=1)]),
    "F-scores, intersection over union": (ONE_HOT, "softmax", "categorical_crossentropy", [
        lambda: keras.metrics.F1Score(), lambda: keras.metrics.FBetaScore(), lambda: keras.metrics.OneHotMeanIoU(4)]),
    "errors, R2, cosine similarity": (NUMBERS, None, "mse", [
        "mae", "mape", lambda: keras.metrics.RootMeanSquaredError(), lambda: keras.metrics.R2Score(),
        lambda: keras.metrics.CosineSimilarity()]),
    "sensitivity at specificity": (ONE_HOT, "sigmoid", "binary_crossentropy", [
        "binary_accuracy", lambda: keras.metrics.SensitivityAtSpecificity(0.5), lambda: keras.metrics.BinaryIoU()]),
}


@pytest.mark.kind("metrics")
@pytest.mark.parametrize("kind", METRICS)
def test_metrics_and_weighted_metrics_count_as_plain_keras(kind):
    y, activation, loss, metrics = METRICS[kind]

    def fresh():
        return [metric() if callable(metric) else metric for metric in metrics]
    def make():
        return _network(optimizers.SGD(0.05, momentum=0.9), loss, activation, metrics=fresh(), weighted_metrics=["mse"])
    assert_same_training(make, train_on(X, y, np.linspace(0.5, 1.5, 128, dtype=np.float32)))


@pytest.fixture
def precision(request):
    keras.config.set_dtype_policy(request.param)
    yield request.param
    keras.config.set_dtype_policy("float32")


@pytest.mark.kind("precisions")
@pytest.mark.parametrize("precision", ["mixed_bfloat16", "mixed_float16", "float64"], indirect=True)
def test_precisions_train_as_plain_keras(precision):
    """Half precision's last bit is 1e-3, bfloat16's 8e-3, and a sum in another order differs in some."""
    tolerance = {"mixed_bfloat16": 4e-2, "mixed_float16": 5e-3, "float64": 1e-9}[precision]
    ours = assert_same_training(lambda: _network(optimizers.SGD(0.05, momentum=0.9)), train_on(X, NUMBERS), tolerance, share=0.75)
    assert isinstance(ours.optimizer, optimizers.LossScaleOptimizer) == (precision == "mixed_float16")


@pytest.mark.kind("updates", "loss scaling that meets infinity")
def test_a_step_whose_gradients_overflow_changes_no_weight():
    """A scale that overflows is halved, and the weights stay."""
    def make():
        return _network(optimizers.LossScaleOptimizer(optimizers.SGD(0.05), initial_scale=1e38))
    ours = assert_same_training(make, lambda model: model.fit(1e3 * X, 1e3 * NUMBERS, batch_size=128, verbose=0) and [])
    np.testing.assert_allclose(float(ours.optimizer.dynamic_scale), 0.5e38, rtol=1e-6)
    for variable, other in zip(ours.trainable_variables, make().trainable_variables):
        np.testing.assert_array_equal(variable.numpy(), other.numpy())


@pytest.mark.kind("updates", "frozen layers")
def test_frozen_layers_stay_as_they_are():
    def make():
        model = _network("sgd")
        for layer in model.layers[:3]:
            layer.trainable = False
        model.compile(optimizers.SGD(0.05, momentum=0.9), "mse")
        return model
    before = [variable.numpy() for variable in make().non_trainable_variables]
    ours = assert_same_training(make, train_on(X, NUMBERS))
    for variable, value in zip(ours.non_trainable_variables, before):
        np.testing.assert_array_equal(variable.numpy(), value)


@pytest.mark.kind("updates", "LoRA")
def test_low_rank_adapters_train_as_plain_keras():
    def make():
        model = _network("sgd")
        for layer in model.layers:
            if isinstance(layer, layers.Dense):
                layer.enable_lora(2)
        model.compile(optimizers.Adam(1e-2), "mse")
        return model
    assert_same_training(make, train_on(X, NUMBERS), rtol=5e-5)
