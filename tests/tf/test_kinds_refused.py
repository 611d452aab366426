"""What cannot be planned: a typed error that says what to do, before any variable changes; then the model trains as plain
Keras does."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from budgets import assert_same_variables, recompute
from checkmate_tf import UnsupportedError
from networks import layers

DRAWN = np.random.default_rng(3)
X, LABELS = DRAWN.random((16, 8, 8, 3), np.float32), DRAWN.integers(0, 4, 16)
WORDS = DRAWN.integers(1, 30, (16, 12))


class MeanOfPositive(layers.Layer):
    """Picks entries by a boolean mask: how many is known at run time only."""

    def call(self, x):
        return x * tf.reduce_mean(tf.boolean_mask(x, x > 0))


class DoublesInNumPy(layers.Layer):
    """Leaves TensorFlow without a word on the shape that comes back."""

    def call(self, x):
        return x + tf.ensure_shape(tf.numpy_function(lambda value: 2 * value, [tf.stop_gradient(x)], tf.float32), x.shape)


def _compiled(model, optimizer="sgd"):
    model.compile(optimizer, "sparse_categorical_crossentropy")
    return model


def _with(make_layer):
    return lambda: _compiled(keras.Sequential([layers.Input((8, 8, 3)), make_layer(), layers.Flatten(),
                                               layers.Dense(4, activation="softmax")]))


def _embedding(optimizer):
    return lambda: _compiled(keras.Sequential([layers.Input((12,), dtype="int32"), layers.Embedding(30, 8), layers.Flatten(),
                                               layers.Dense(4, activation="softmax")]), optimizer)


def _sparse():
    inputs = layers.Input((12,), sparse=True)
    return _compiled(keras.Model(inputs, layers.Dense(4, activation="softmax")(layers.Dense(8)(inputs))))


def _ragged():
    inputs = layers.Input((None,), dtype="int32", ragged=True)
    value = layers.Lambda(lambda rows: tf.reduce_mean(rows, axis=1), output_shape=(8,))(layers.Embedding(30, 8)(inputs))
    return _compiled(keras.Model(inputs, layers.Dense(4, activation="softmax")(value)))


ROWS = tf.RaggedTensor.from_row_lengths(tf.constant(WORDS.flatten()[:16 * 6], tf.int32), [5, 7] * 8)
KINDS = {
    "boolean masks": (_with(MeanOfPositive), X, "replace boolean masks"),
    "RandomCrop inside the model": (_with(lambda: layers.RandomCrop(6, 6)), X, "random crops .* input pipeline"),
    "numpy_function without set_shape": (_with(DoublesInNumPy), X, "its rank open"),
    "sparse batches": (_sparse, tf.sparse.from_dense(np.float32(WORDS > 20)), "to_dense"),
    "ragged batches": (_ragged, ROWS, "to_tensor"),
    **{f"{optimizer} on an Embedding": (_embedding(optimizer), WORDS, "SGD, Adam, AdamW or Lion")
       for optimizer in ("Adagrad", "Adadelta", "RMSprop", "Adafactor")},
}


@pytest.mark.kind("refused", refused="UnsupportedError")
@pytest.mark.parametrize("kind", KINDS)
def test_what_has_no_fixed_shapes_is_refused_before_anything_changes(kind):
    make, x, text = KINDS[kind]

    def fresh():
        keras.utils.set_random_seed(7)
        return make()
    model, reference = recompute(fresh()), fresh()
    before = [(variable, variable.numpy()) for variable in (*model.variables, *model.optimizer.variables)]
    with pytest.raises(UnsupportedError, match=text):
        model.train_on_batch(x, LABELS)
    for variable, value in before:
        np.testing.assert_array_equal(variable.numpy(), value, err_msg=variable.path)
    assert not hasattr(model, "checkmate") and "make_train_function" not in vars(model)
    for one in (model, reference):
        one.train_on_batch(x, LABELS)
    assert_same_variables(model, reference)
