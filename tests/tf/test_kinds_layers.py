"""Layers with state, randomness or losses of their own, each twice within one network: trained as plain Keras trains them."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from budgets import assert_same_training, train_on
from networks import layers

SHAPE = 8, 8, 8
BATCH = np.random.default_rng(3).random((16, *SHAPE), np.float32), np.random.default_rng(4).integers(0, 4, 16)


class StochasticDepth(layers.Layer):
    """Drops a whole sample's branch."""

    def __init__(self):
        super().__init__()
        self.seeds = keras.random.SeedGenerator(17)

    def call(self, x, training=False):
        if not training:
            return x
        kept = keras.random.uniform((keras.ops.shape(x)[0], 1, 1, 1), seed=self.seeds) < 0.7
        return x * keras.ops.cast(kept, x.dtype) / 0.7


class Penalized(layers.Layer):
    """Adds losses of its own: of what it sees and of its weight."""

    def build(self, shape):
        self.scale = self.add_weight(shape=shape[-1:], initializer="ones", regularizer=keras.regularizers.L2(0.1))

    def call(self, x):
        self.add_loss(0.01 * keras.ops.mean(keras.ops.abs(x)))
        return x * self.scale


class Counts(layers.Layer):
    """Counts its calls and remembers the largest value seen, in variables that are not trained."""

    def build(self, shape):
        self.calls = self.add_weight(shape=(), initializer="zeros", dtype="int32", trainable=False)
        self.largest = self.add_weight(shape=shape[-1:], initializer="zeros", trainable=False)

    def call(self, x):
        self.calls.assign_add(1)
        self.largest.assign(keras.ops.maximum(self.largest, keras.ops.max(x, axis=(0, 1, 2))))
        return x - 0.1 * self.largest


class Tracks(layers.Layer):
    """Keeps a metric of what it sees."""

    def __init__(self):
        super().__init__()
        self.seen = keras.metrics.Mean(name="seen")

    def call(self, x):
        self.seen.update_state(keras.ops.mean(x))
        return keras.ops.silu(x)


class DrawsWithTensorFlow(layers.Layer):
    """Draws from TensorFlow's own generator, whose state is a variable."""

    def __init__(self):
        super().__init__()
        self.generator = tf.random.Generator.from_seed(5)

    def call(self, x, training=False):
        return x + 0.1 * self.generator.normal(tf.shape(x)) if training else x


def _frozen():
    layer = layers.BatchNormalization()
    layer.trainable = False
    return layer


def _nested():
    inputs = layers.Input(SHAPE)
    value = layers.Activation("swish")(layers.BatchNormalization(synchronized=False)(inputs))
    value = layers.BatchNormalization()(layers.Conv2D(SHAPE[-1], 1, use_bias=False)(value))
    return keras.Model(inputs, value)


class Picks(layers.Layer):
    """A branch that depends on the values."""

    def call(self, x):
        return keras.ops.cond(keras.ops.mean(x) > 0.1, lambda: keras.ops.sin(x), lambda: 2.0 * x)


class OwnGradient(layers.Layer):
    """A gradient other than TensorFlow's."""

    def call(self, x):
        return tf.custom_gradient(lambda value: (tf.exp(-value), lambda upstream: -0.3 * upstream))(x)


class Recomputes(layers.Layer):
    """Recomputed by TensorFlow's own means already."""

    def build(self, shape):
        self.conv = layers.Conv2D(SHAPE[-1], 3, padding="same")
        self.conv.build(shape)

    def call(self, x):
        return tf.recompute_grad(lambda value: tf.sin(self.conv(value)))(x)


class DoublesInNumPy(layers.Layer):
    """Leaves TensorFlow, and says which shape comes back."""

    def call(self, x):
        doubled = tf.numpy_function(lambda value: 2 * value, [tf.stop_gradient(x)], tf.float32)
        doubled.set_shape(x.shape)
        return keras.ops.tanh(doubled) + x


class Asserts(layers.Layer):
    """Checks what it sees while it runs."""

    def call(self, x):
        tf.debugging.assert_less(tf.reduce_max(x), 1e9)
        return 2.0 * x


KINDS = {
    "BatchNormalization": lambda: layers.BatchNormalization(),
    "BatchNormalization, frozen": _frozen,
    "BatchNormalization in nested models": _nested,
    "LayerNormalization": lambda: layers.LayerNormalization(),
    "GroupNormalization": lambda: layers.GroupNormalization(4),
    "UnitNormalization": lambda: layers.UnitNormalization(),
    "RMSNormalization": lambda: layers.RMSNormalization(),
    "SpectralNormalization": lambda: layers.SpectralNormalization(layers.Conv2D(SHAPE[-1], 3, padding="same")),
    "Dropout": lambda: layers.Dropout(0.3),
    "SpatialDropout2D": lambda: layers.SpatialDropout2D(0.3),
    "GaussianDropout": lambda: layers.GaussianDropout(0.3),
    "AlphaDropout": lambda: layers.AlphaDropout(0.3),
    "GaussianNoise": lambda: layers.GaussianNoise(0.2),
    "stochastic depth": StochasticDepth,
    "tf.random.Generator": DrawsWithTensorFlow,
    "RandomFlip": lambda: layers.RandomFlip(),
    "RandomTranslation": lambda: layers.RandomTranslation(0.2, 0.2),
    "RandomRotation": lambda: layers.RandomRotation(0.2),
    "RandomZoom": lambda: layers.RandomZoom(0.2),
    "RandomContrast": lambda: layers.RandomContrast(0.2, value_range=(0, 1)),
    "RandomBrightness": lambda: layers.RandomBrightness(0.2, value_range=(0, 1)),
    "Lambda with raw TensorFlow": lambda: layers.Lambda(lambda x: tf.nn.lrn(x) + tf.cumsum(x, axis=1)),
    "add_loss": Penalized,
    "activity_regularizer": lambda: layers.Conv2D(SHAPE[-1], 3, padding="same", activity_regularizer="l2"),
    "non-trainable counters": Counts,
    "metrics inside layers": Tracks,
    "branches on values (tf.cond)": Picks,
    "tf.custom_gradient": OwnGradient,
    "tf.recompute_grad": Recomputes,
    "tf.numpy_function with set_shape": DoublesInNumPy,
    "assertions": Asserts,
}


def _network(make_layer) -> keras.Model:
    keras.utils.set_random_seed(7)
    value = inputs = layers.Input(SHAPE)
    for _ in range(2):
        value = layers.Activation("swish")(layers.Conv2D(SHAPE[-1], 3, padding="same", use_bias=False)(value))
        value = layers.Activation("swish")(make_layer()(value))
    value = layers.GlobalAveragePooling2D()(layers.Activation("tanh")(value))
    model = keras.Model(inputs, layers.Dense(4, activation="softmax")(value))
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


@pytest.mark.kind("layers")
@pytest.mark.parametrize("kind", KINDS)
def test_layers_train_as_plain_keras(kind):
    assert_same_training(lambda: _network(KINDS[kind]), train_on(*BATCH))


CONVOLUTIONS = {
    "Conv2D, dilated": lambda: [layers.Conv2D(8, 3, dilation_rate=2, padding="same")],
    "Conv2D, groups": lambda: [layers.Conv2D(8, 3, groups=2, padding="same")],
    "Conv2DTranspose": lambda: [layers.Conv2D(8, 3, strides=2, padding="same"),
                                layers.Conv2DTranspose(8, 3, strides=2, padding="same")],
    "SeparableConv2D": lambda: [layers.SeparableConv2D(8, 3, padding="same")],
    "DepthwiseConv2D": lambda: [layers.DepthwiseConv2D(3, padding="same", depth_multiplier=2), layers.Conv2D(8, 1)],
    "Conv1D": lambda: [layers.Reshape((64, 8)), layers.Conv1D(8, 5, padding="causal"), layers.Reshape(SHAPE)],
    "Conv3D": lambda: [layers.Reshape((4, 4, 4, 8)), layers.Conv3D(8, 3, padding="same"), layers.Reshape(SHAPE)],
    "MaxPooling2D": lambda: [layers.MaxPooling2D(), layers.UpSampling2D()],
    "MaxPooling3D": lambda: [layers.Reshape((4, 4, 4, 8)), layers.MaxPooling3D(), layers.UpSampling3D(), layers.Reshape(SHAPE)],
    "AveragePooling2D": lambda: [layers.AveragePooling2D(2), layers.UpSampling2D(interpolation="bilinear")],
    "EinsumDense": lambda: [layers.EinsumDense("abcd,de->abce", output_shape=(None, None, 8), bias_axes="e")],
}


@pytest.mark.kind("layers")
@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_convolutions_and_poolings_train_as_plain_keras(kind):
    assert_same_training(lambda: _network(lambda: keras.Sequential(CONVOLUTIONS[kind]())), train_on(*BATCH))
