"""The peak that the allocator measures stays within a real budget, for one of each sort of network; and a loose budget
costs nothing."""

import keras
import numpy as np
import pytest

import checkmate_tf
from budgets import assert_same_variables, assert_trains_within, recomputations, train_on
from checkmate_tf.bridge import measure
from networks import conv_net, digits, layers

DRAWN = np.random.default_rng(3)


def _sgd():
    return keras.optimizers.SGD(0.05, momentum=0.9)


def _recurrent(unroll: bool):
    keras.utils.set_random_seed(7)
    value = inputs = layers.Input((24, 32))
    for _ in range(2):
        value = layers.Dense(96, activation="swish")(value)
        value = layers.LSTM(48, return_sequences=True, unroll=unroll)(value)
    model = keras.Model(inputs, layers.Dense(8)(layers.LayerNormalization()(value)))
    model.compile(_sgd(), "mse")
    return model


def _attention():
    keras.utils.set_random_seed(7)
    inputs = layers.Input((48,), dtype="int32")
    value = layers.Embedding(1000, 32)(inputs)
    for _ in range(2):
        value = layers.Add()([value, layers.MultiHeadAttention(4, 8, use_bias=False)(*[layers.LayerNormalization()(value)] * 2)])
        value = layers.Add()([value, layers.Dense(32)(layers.Dense(128, activation="gelu")(value))])
    model = keras.Model(inputs, layers.Dense(4, activation="softmax")(layers.GlobalAveragePooling1D()(value)))
    model.compile(_sgd(), "sparse_categorical_crossentropy")
    return model


SEQUENCES = DRAWN.random((64, 24, 32), np.float32), DRAWN.random((64, 24, 8), np.float32)
KINDS = {
    "unrolled loops": (lambda: _recurrent(unroll=True), SEQUENCES),
    "attention": (_attention, (DRAWN.integers(0, 1000, (32, 48)), DRAWN.integers(0, 4, 32))),
    "convolutions, dropout": (lambda: conv_net(optimizer=_sgd(), activation="swish", size=32, dropout=0.3), digits(32, size=32)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_measured_peak_is_within_the_budget(kind):
    make, batch = KINDS[kind]
    assert_trains_within(make, *batch)


def _peak_above_what_is_held(model, batch) -> int:
    """Bytes: the highest of some steps, all of them warm."""
    train_on(*batch, steps=4)(model)
    held_bytes = measure.measured_memory()[0]
    measure.reset_peak()
    train_on(*batch, steps=4)(model)
    return measure.measured_memory()[1] - held_bytes


@pytest.mark.parametrize("kind", KINDS)
def test_with_a_loose_budget_nothing_is_recomputed_and_no_more_memory_taken_than_by_plain_keras(kind):
    make, batch = KINDS[kind]
    plain_bytes = _peak_above_what_is_held(make(), batch)
    model = checkmate_tf.compile(make(), "100GB", verbose=0)
    assert _peak_above_what_is_held(model, batch) <= plain_bytes
    assert recomputations(model) == 0


def _classifier_of_words():
    keras.utils.set_random_seed(7)
    inputs = layers.Input((256,), dtype="int32")
    value = layers.Dense(16, activation="swish")(layers.Embedding(8192, 16)(inputs))
    model = keras.Model(inputs, layers.Dense(8192, use_bias=False, activation="softmax")(value))
    model.compile(_sgd(), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


@pytest.mark.slow
@pytest.mark.kind("losses", "cross-entropy over [16, 256, 8192]")
def test_the_temporaries_of_a_loss_that_dwarfs_the_model_are_counted_and_can_be_dropped():
    """Each is 16 * 256 * 8192 * 4 = 134 MB, and the model 2 MB."""
    words = DRAWN.integers(0, 8192, (16, 256))
    needs = checkmate_tf.estimate(_classifier_of_words(), words, words, verbose=0)
    assert needs.keep_all_peak_bytes > 3 * 134_217_728 > 3 * sum(needs.resident.values())
    ours = assert_trains_within(_classifier_of_words, words, words, share=0.8, steps=3)
    assert ours.checkmate.measured_peak_bytes < 3 * 134_217_728
