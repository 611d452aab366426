"""Shapes of model: however layers are put together, a model trains as plain Keras trains it."""

import keras
import numpy as np
import pytest

from budgets import assert_same_training, train_on
from networks import layers

ops = keras.ops
DRAWN = np.random.default_rng(3)
IMAGES = DRAWN.random((16, 8, 8, 3), np.float32)
LABELS = DRAWN.integers(0, 4, 16)
TOKENS = DRAWN.integers(1, 30, (16, 12))
TOKENS[::2, 7:] = 0             # padding
SGD = keras.optimizers.SGD


def _conv(width=8, **arguments):
    return layers.Conv2D(width, 3, padding="same", activation="swish", **arguments)


def _compiled(model, loss="sparse_categorical_crossentropy", metrics=("accuracy",), **arguments):
    model.compile(SGD(0.05, momentum=0.9), loss, metrics=list(metrics), **arguments)
    return model


def _classifier(inputs, value):
    return _compiled(keras.Model(inputs, layers.Dense(4, activation="softmax")(value)))


def _sequential():
    return _compiled(keras.Sequential([layers.Input((8, 8, 3)), _conv(), layers.BatchNormalization(), _conv(), _conv(),
                                       layers.Flatten(), layers.Dense(4, activation="softmax")]))


def _deferred():
    """Sequential, not built before its first batch."""
    return _compiled(keras.Sequential([_conv(), layers.BatchNormalization(), _conv(), _conv(), layers.Flatten(),
                                       layers.Dense(4, activation="softmax")]))


def _long_skips():
    """A small U-Net."""
    inputs = layers.Input((8, 8, 3))
    fine = _conv()(inputs)
    middle = _conv()(layers.AveragePooling2D(2)(fine))
    coarse = _conv()(layers.AveragePooling2D(2)(middle))
    value = _conv()(layers.Concatenate()([layers.UpSampling2D()(coarse), middle]))
    value = _conv()(layers.Concatenate()([layers.UpSampling2D()(value), fine]))
    return _classifier(inputs, layers.GlobalAveragePooling2D()(value))


def _shared_layers():
    """One convolution and one normalization, used three times."""
    inputs, conv, norm = layers.Input((8, 8, 3)), _conv(), layers.BatchNormalization()
    value = layers.Conv2D(8, 1)(inputs)
    for _ in range(3):
        value = layers.Add()([value, norm(conv(value))])
    return _classifier(inputs, layers.GlobalAveragePooling2D()(value))


def _nested():
    """A functional model in a Sequential in a functional model."""
    inner_inputs = layers.Input((8, 8, 8))
    inner = keras.Model(inner_inputs, layers.Add()([inner_inputs, _conv()(layers.BatchNormalization()(inner_inputs))]))
    inputs = layers.Input((8, 8, 3))
    value = keras.Sequential([_conv(), inner, layers.Dropout(0.2), keras.Sequential([_conv(), _conv()])])(inputs)
    return _classifier(inputs, layers.GlobalAveragePooling2D()(inner(value)))


class Subclassed(keras.Model):
    """Layers in lists, a branch on `training`, sums of the same tensor."""

    def __init__(self):
        super().__init__()
        self.convs, self.norms = [_conv() for _ in range(3)], [layers.BatchNormalization() for _ in range(3)]
        self.head = layers.Dense(4, activation="softmax")

    def call(self, x, training=False):
        for conv, norm in zip(self.convs, self.norms):
            x = norm(conv(x), training=training)
            if training:
                x = x + 0.1 * ops.tanh(x)
        return self.head(ops.mean(x, axis=(1, 2)))


class Several(Subclassed):
    """A subclassed model with a dictionary of inputs and one of outputs."""

    def call(self, inputs, training=False):
        label = super().call(inputs["image"] * inputs["gain"][:, None, None], training)
        return {"label": label, "entropy": -ops.sum(label * ops.log(label + 1e-6), axis=-1, keepdims=True)}


def _the_same_tensor_twice():
    inputs = layers.Input((8, 8, 3))
    value = _conv()(inputs)
    value = layers.Add()([value, value, layers.Multiply()([value, value])])
    value = _conv()(layers.Concatenate()([value, value]))
    value = layers.Dot(axes=(1, 1))([layers.Reshape((64, 8))(value)] * 2)
    return _classifier(inputs, layers.Flatten()(_as_unit(value)))


def _as_unit(value):
    return layers.Activation("tanh")(layers.LayerNormalization()(value))


def _ops_between():
    inputs = layers.Input((8, 8, 3))
    value = ops.gelu(_conv()(inputs) * 2.0 - 1.0)
    value = ops.concatenate([value[:, ::2], ops.flip(value, axis=1)[:, 1::2]], axis=-1)
    value = ops.transpose(ops.softmax(ops.reshape(_conv()(value), (-1, 32, 8)), axis=-1), (0, 2, 1))
    value = ops.einsum("abc,adc->abd", value, ops.where(value > 0.1, value, ops.square(value)))
    return _classifier(inputs, ops.reshape(ops.sort(value, axis=-1), (-1, 64)))


def _embedding(**arguments):
    inputs = layers.Input((12,), dtype="int32")
    value = layers.Embedding(30, 16, **arguments)(inputs)
    for _ in range(2):
        value = layers.Dense(32, activation="swish")(_as_unit(value))
    return _classifier(inputs, layers.GlobalAveragePooling1D()(value))


def _words(encode):
    inputs = layers.Input((12,), dtype="string")
    value = encode(inputs)
    for _ in range(2):
        value = layers.Dense(32, activation="swish")(_as_unit(value))
    return _classifier(inputs, layers.GlobalAveragePooling1D()(value))


def _looked_up(inputs):
    return layers.Embedding(30, 16)(layers.StringLookup(vocabulary=[str(number) for number in range(1, 20)])(inputs))


def _hashed(inputs):
    return layers.CategoryEncoding(20, output_mode="one_hot")(layers.Hashing(20)(inputs))


def _tied_embedding():
    inputs = layers.Input((12,), dtype="int32")
    embedding = layers.ReversibleEmbedding(30, 16)
    value = embedding(inputs)
    for _ in range(2):
        value = layers.Dense(16, activation="swish")(_as_unit(value))
    model = keras.Model(inputs, embedding(value, reverse=True))
    return _compiled(model, keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0))


def _attention(attend, mask_zero):
    """Without biases: a key's has a true gradient of zero, so that what is computed for it is noise."""
    inputs = layers.Input((12,), dtype="int32")
    value = layers.Embedding(30, 16, mask_zero=mask_zero)(inputs)
    for _ in range(2):
        value = layers.Add()([value, attend(_as_unit(value))])
        value = layers.Add()([value, layers.Dense(16)(layers.Dense(32, activation="gelu")(value))])
    return _classifier(inputs, layers.GlobalAveragePooling1D()(value))


def _self_attention(mask_zero=True, causal=False, **arguments):
    def attend(value):
        return layers.MultiHeadAttention(2, 8, dropout=0.1, use_bias=False, **arguments)(value, value, use_causal_mask=causal)
    return lambda: _attention(attend, mask_zero)


def _explicit_mask():
    inputs = layers.Input((12,), dtype="int32")
    value = layers.Embedding(30, 16)(inputs)
    padding = ops.expand_dims(ops.not_equal(inputs, 0), 1)
    for _ in range(2):
        value = _as_unit(value + layers.MultiHeadAttention(2, 8, use_bias=False)(value, value, attention_mask=padding))
    return _classifier(inputs, layers.GlobalAveragePooling1D()(value))


def _masking():
    """Masked steps by value, told on through layers to the pooling."""
    inputs = layers.Input((12, 3))
    value = layers.Masking(0.0)(inputs)
    for _ in range(3):
        value = layers.Dense(16, activation="swish")(_as_unit(value))
    return _classifier(inputs, layers.GlobalAveragePooling1D()(value))


def _sequences():
    values = DRAWN.random((16, 12, 3), np.float32)
    values[::3, 5:] = 0
    return values


KINDS = {
    "Sequential": (_sequential, IMAGES, LABELS),
    "Sequential, not built": (_deferred, IMAGES, LABELS),
    "functional with long skips": (_long_skips, IMAGES, LABELS),
    "shared layers": (_shared_layers, IMAGES, LABELS),
    "nested models": (_nested, IMAGES, LABELS),
    "subclassed": (lambda: _compiled(Subclassed()), IMAGES, LABELS),
    "the same tensor used twice": (_the_same_tensor_twice, IMAGES, LABELS),
    "keras.ops between layers": (_ops_between, IMAGES, LABELS),
    "Embedding": (_embedding, TOKENS, LABELS),
    "StringLookup": (lambda: _words(_looked_up), TOKENS.astype(str), LABELS),
    "Hashing, CategoryEncoding": (lambda: _words(_hashed), TOKENS.astype(str), LABELS),
    "ReversibleEmbedding": (_tied_embedding, TOKENS, TOKENS),
    "MultiHeadAttention": (_self_attention(mask_zero=False), TOKENS, LABELS),
    "MultiHeadAttention, mask from an embedding": (_self_attention(), TOKENS, LABELS),
    "MultiHeadAttention, causal": (_self_attention(causal=True), TOKENS, LABELS),
    "MultiHeadAttention, explicit mask": (_explicit_mask, TOKENS, LABELS),
    "GroupedQueryAttention": (lambda: _attention(
        lambda value: layers.GroupQueryAttention(8, 4, 2, use_bias=False)(value, value), False), TOKENS, LABELS),
    "Attention and AdditiveAttention": (lambda: _attention(lambda value: layers.Add()([
        layers.Attention(use_scale=True)([value, value]), layers.AdditiveAttention()([value, value])]), True), TOKENS, LABELS),
    "Masking": (_masking, _sequences(), LABELS),
}


@pytest.mark.kind("models")
@pytest.mark.parametrize("kind", KINDS)
def test_models_train_as_plain_keras(kind):
    make, x, y = KINDS[kind]

    def fresh():
        keras.utils.set_random_seed(7)
        return make()
    assert_same_training(fresh, train_on(x, y))


@pytest.mark.kind("models", "inputs and outputs as dictionaries, subclassed")
def test_a_subclassed_model_of_dictionaries_trains_as_plain_keras():
    def make():
        keras.utils.set_random_seed(7)
        return _compiled(Several(), {"label": "sparse_categorical_crossentropy", "entropy": "mse"}, (),
                         loss_weights={"label": 1.0, "entropy": 0.3})
    x = {"image": IMAGES, "gain": np.linspace(0.5, 1.5, 16, dtype=np.float32)[:, None]}
    y = {"label": LABELS, "entropy": np.ones((16, 1), np.float32)}
    assert_same_training(make, train_on(x, y))


