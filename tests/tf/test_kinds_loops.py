"""Recurrent layers, as loops (one op each) and unrolled, and loops of the user's own."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import checkmate_tf
from budgets import Recomputes, assert_same_training, recomputations, train_on
from networks import layers

DRAWN = np.random.default_rng(3)
TARGETS = DRAWN.random((16, 10, 4), np.float32)


def _sequences(*shape):
    values = DRAWN.random((16, 10, *shape), np.float32)
    values[::3, 6:] = 0             # padding, where it is masked
    return values


SHARE = 0.85            # what loops leave for their gradients stays, and is much of the peak
VECTORS, PICTURES = _sequences(8), _sequences(6, 6, 2)


def _network(recurrent, masked=False, batch_size=None, length=10):
    keras.utils.set_random_seed(7)
    inputs = layers.Input((length, 8), batch_size=batch_size)
    value = layers.Masking(0.0)(inputs) if masked else inputs
    value = layers.Dense(16, activation="swish")(value)
    for _ in range(2):
        value = layers.LayerNormalization()(recurrent(value))
        value = layers.Dense(128, activation="swish")(layers.Dense(64, activation="swish")(value))
    model = keras.Model(inputs, layers.Dense(4)(value))
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
    return model


def _recurrent(kind, **arguments):
    return lambda **others: _network(lambda value: kind(12, return_sequences=True, **arguments)(value), **others)


def _bidirectional(**arguments):
    return lambda: _network(lambda value: layers.Bidirectional(layers.LSTM(6, return_sequences=True, **arguments))(value))


class Along(layers.Layer):
    """A loop of Keras or TensorFlow over the steps of each sequence."""

    def __init__(self, loop):
        super().__init__()
        self.loop = loop

    def call(self, x):
        return keras.ops.moveaxis(self.loop(keras.ops.moveaxis(x, 1, 0)), 0, 1)


def _scanned(steps):
    def step(carried, value):
        carried = 0.5 * carried + keras.ops.tanh(value)
        return carried, carried
    return keras.ops.scan(step, keras.ops.zeros_like(steps[0]), steps)[1]


def _repeated(steps):
    return keras.ops.fori_loop(0, 4, lambda number, value: keras.ops.sin(value) + 0.5 * value, steps)


def _distributed():
    return _network(lambda value: layers.TimeDistributed(layers.Dense(12, activation="tanh"))(value))


KINDS = {
    "LSTM": _recurrent(layers.LSTM),
    "LSTM, unrolled": _recurrent(layers.LSTM, unroll=True),
    "LSTM, masked": lambda: _recurrent(layers.LSTM)(masked=True),
    "LSTM, masked and unrolled": lambda: _recurrent(layers.LSTM, unroll=True)(masked=True),
    "LSTM, dropout": _recurrent(layers.LSTM, dropout=0.2),
    "LSTM, recurrent dropout": _recurrent(layers.LSTM, recurrent_dropout=0.2),
    "GRU": _recurrent(layers.GRU),
    "GRU, unrolled": _recurrent(layers.GRU, unroll=True),
    "GRU, backwards": _recurrent(layers.GRU, go_backwards=True),
    "SimpleRNN": _recurrent(layers.SimpleRNN),
    "Bidirectional": _bidirectional(),
    "Bidirectional, unrolled": _bidirectional(unroll=True),
    "stacked cells": lambda: _network(
        lambda value: layers.RNN([layers.LSTMCell(12), layers.GRUCell(12)], return_sequences=True)(value)),
    "TimeDistributed": _distributed,
    "keras.ops.scan": lambda: _network(Along(_scanned)),
    "keras.ops.fori_loop": lambda: _network(Along(_repeated)),
    "tf.map_fn": lambda: _network(Along(lambda steps: tf.map_fn(lambda value: tf.sin(2.0 * value), steps))),
}


@pytest.mark.kind("loops")
@pytest.mark.parametrize("kind", KINDS)
def test_recurrent_layers_train_as_plain_keras(kind):
    assert_same_training(KINDS[kind], train_on(VECTORS, TARGETS), share=SHARE)


@pytest.mark.kind("loops", "ConvLSTM2D")
@pytest.mark.parametrize("unroll", [False, True], ids=["loop", "unrolled"])
def test_convolutional_recurrence_trains_as_plain_keras(unroll):
    def make():
        keras.utils.set_random_seed(7)
        inputs = layers.Input((10, 6, 6, 2))
        value = layers.TimeDistributed(layers.Conv2D(8, 3, padding="same", activation="swish"))(inputs)
        value = layers.ConvLSTM2D(6, 3, padding="same", return_sequences=True, unroll=unroll)(value)
        value = layers.LayerNormalization()(layers.Activation("swish")(value))
        model = keras.Model(inputs, layers.Dense(4)(layers.GlobalAveragePooling3D()(value)))
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
        return model
    assert_same_training(make, train_on(PICTURES, TARGETS[:, 0]), share=SHARE)


def test_what_is_computed_in_turns_is_priced_by_running_it():
    """Some of it names an op beside which it wants to run, and which is not there when it is measured alone."""
    model = checkmate_tf.compile(KINDS["keras.ops.fori_loop"](), "10GB", verbose=0)
    assert np.isfinite(model.train_on_batch(VECTORS, TARGETS)).all() and model.checkmate.solution is not None


@pytest.mark.kind("loops", "stateful LSTM, reset between epochs")
@pytest.mark.parametrize("unroll", [False, True], ids=["loop", "unrolled"])
def test_a_stateful_layer_carries_its_state_from_step_to_step(unroll):
    def train(model):
        told = train_on(VECTORS, TARGETS)(model)
        for layer in model.layers:
            if isinstance(layer, layers.LSTM):
                layer.reset_state()
        return told + train_on(VECTORS, TARGETS, steps=2)(model)
    ours = assert_same_training(lambda: _recurrent(layers.LSTM, stateful=True, unroll=unroll)(batch_size=16), train, share=SHARE)
    assert np.abs(ours.layers[2].states[0].numpy()).max() > 0


@pytest.mark.kind("loops", "tf.while_loop in a function")
def test_a_loop_of_the_users_own_trains_the_same():
    """A loop without variables inside: it may be recomputed, and gives the same."""
    def make():
        weights = [tf.Variable(tf.random.stateless_normal([16, 16], [3, number]) / 4) for number in range(4)]

        def repeated(count, value):
            return count + 1, tf.sin(value) + 0.5 * value

        @tf.function
        def step(x):
            with tf.GradientTape() as tape:
                value = x
                for weight in weights:
                    value = tf.nn.swish(value @ weight)
                    value = tf.while_loop(lambda count, _: count < 5, repeated, [0, value])[1]
                    value = tf.nn.softplus(value)
                loss = tf.reduce_mean(value ** 2)
            for weight, gradient in zip(weights, tape.gradient(loss, weights)):
                weight.assign_sub(0.1 * gradient)
            return loss
        return step, weights
    x = tf.random.stateless_normal([64, 16], [1, 2])
    (step, weights), (reference, expected) = make(), make()
    planned = checkmate_tf.rematerialize(step, "100GB", tf.TensorSpec([64, 16]), solver=Recomputes(0.7), profile="cpu", verbose=0)
    assert sum(planned.solution.timeline.runs) > len(planned.solution.timeline.runs)
    for _ in range(3):
        np.testing.assert_allclose(planned(x), reference(x), rtol=1e-5)
    for weight, other in zip(weights, expected):
        np.testing.assert_allclose(weight, other, rtol=1e-5, atol=1e-7)


@pytest.mark.kind("loops", "batches of several lengths")
def test_each_length_of_a_batch_is_planned_when_it_comes():
    def make():
        return _network(lambda value: layers.GRU(12, return_sequences=True)(value), length=None)

    def train(model):
        return [model.train_on_batch(VECTORS[:, :length], TARGETS[:, :length]) for length in (10, 6, 10, 8, 6)]
    ours = assert_same_training(make, train, share=SHARE)
    assert len(ours.checkmate._steps) == 3 and recomputations(ours) > 0
