"""Networks and real pictures that need no download: what the demo, the benchmark and the tests train, and the networks of
Checkmate's evaluation at their full sizes, which are planned and not trained here.

Pictures are crops of the sample photograph that comes with Matplotlib. Classifiers learn from which part of the
photograph a crop is; the U-Net learns to remove noise from it. Texts are passages of Python's own documentation.
"""

import dataclasses
from collections.abc import Callable

import keras
import numpy as np

from checkmate_tf.ir.errors import UnsupportedError

CLASSES = 10


@dataclasses.dataclass(frozen=True)
class Workload:
    """A compiled model's maker, its batch size, and training data of at least `count` pictures."""

    name: str
    batch_size: int
    model: Callable[[], keras.Model]
    data: Callable[[int], tuple[np.ndarray, np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Network:
    """A network of Checkmate's evaluation, uncompiled, and the batch size of its budget sweep."""

    name: str
    model: Callable[[], keras.Model]
    batch_size: int


def unet(size: int = 128, levels: int = 4, width: int = 32) -> keras.Model:
    """A U-Net with batch normalization: `levels` times down and up again, `width` channels at full size."""
    layers = keras.layers

    def block(value, channels):
        for _ in range(2):
            value = layers.Conv2D(channels, 3, padding="same", use_bias=False)(value)
            value = layers.ReLU()(layers.BatchNormalization()(value))
        return value

    inputs = value = layers.Input((size, size, 3))
    skips = []
    for level in range(levels):
        skips.append(block(value, width << level))
        value = layers.MaxPooling2D()(skips[-1])
    value = block(value, width << levels)
    for level in reversed(range(levels)):
        value = layers.Conv2DTranspose(width << level, 2, strides=2, padding="same")(value)
        value = block(layers.Concatenate()([skips[level], value]), width << level)
    return keras.Model(inputs, layers.Conv2D(3, 1)(value), name="unet")


def vgg_unet(size: tuple[int, int] = (416, 608), classes: int = 19, encoder=keras.applications.VGG16) -> keras.Model:
    """The U-Net of Checkmate's evaluation: a VGG encoder, and skips from its pools to a decoder up to half the size."""
    layers = keras.layers
    inputs, (pool1, pool2, pool3, pool4, _) = _vgg_pools(size, encoder)
    value = _padded(layers, pool4, 512)
    for skip, channels in ((pool3, 256), (pool2, 128), (pool1, 64)):
        value = layers.Concatenate()([layers.UpSampling2D()(value), skip])
        value = _padded(layers, value, channels)
    return keras.Model(inputs, _pixels(layers, layers.Conv2D(classes, 3, padding="same")(value)), name="vgg_unet")


def segnet(size: tuple[int, int] = (416, 608), classes: int = 19, encoder=keras.applications.VGG16) -> keras.Model:
    """The SegNet of Checkmate's evaluation: a VGG encoder and a decoder up to half the size, without skips."""
    layers = keras.layers
    inputs, (_, _, _, value, _) = _vgg_pools(size, encoder)
    value = _padded(layers, value, 512)
    for channels in (256, 128, 64):
        value = _padded(layers, layers.UpSampling2D()(value), channels)
    return keras.Model(inputs, _pixels(layers, layers.Conv2D(classes, 3, padding="same")(value)), name="vgg_segnet")


def fcn8(size: tuple[int, int] = (416, 608), classes: int = 19, encoder=keras.applications.VGG16, width: int = 4096) -> keras.Model:
    """The FCN8 of Checkmate's evaluation: a VGG encoder, fully convolutional, scores of three scales added up."""
    layers = keras.layers
    inputs, (_, _, pool3, pool4, value) = _vgg_pools(size, encoder)
    for kernel in (7, 1):
        value = layers.Conv2D(width, kernel, padding="same", activation="relu")(value)
        value = layers.Dropout(0.5)(value)
    value = layers.Conv2D(classes, 1)(value)
    for pool in (pool4, pool3):
        value = layers.Conv2DTranspose(classes, 4, strides=2, use_bias=False)(value)
        value = layers.Cropping2D(((0, 0), (0, value.shape[2] - pool.shape[2])))(value)
        value = layers.Cropping2D(((0, value.shape[1] - pool.shape[1]), (0, 0)))(value)
        value = layers.Add()([layers.Conv2D(classes, 1)(pool), value])
    value = layers.Conv2DTranspose(classes, 16, strides=8, use_bias=False)(value)
    return keras.Model(inputs, _pixels(layers, value), name="fcn8_vgg")


def bert_base(length: int = 512) -> keras.Model:
    """BERT-base with a head of two classes, from keras-hub's parts, untrained. Raises UnsupportedError where that is missing."""
    backbone = _keras_hub().models.BertBackbone(vocabulary_size=30522, num_layers=12, num_heads=12, hidden_dim=768,
                                                intermediate_dim=3072, max_sequence_length=length)
    return keras.Model(backbone.inputs, keras.layers.Dense(2)(backbone.output["pooled_output"]), name="bert_base")


def gpt2_small(length: int = 1024) -> keras.Model:
    """GPT-2 small with scores of the next token, from keras-hub's parts, untrained. Raises UnsupportedError where that is
    missing."""
    backbone = _keras_hub().models.GPT2Backbone(vocabulary_size=50257, num_layers=12, num_heads=12, hidden_dim=768,
                                                intermediate_dim=3072, max_sequence_length=length)
    return keras.Model(backbone.inputs, backbone.token_embedding(backbone.output, reverse=True), name="gpt2_small")


def vit_base(size: int = 224) -> keras.Model:
    """ViT-B/16 with a head of 1,000 classes, from keras-hub's parts, untrained. Raises UnsupportedError where that is missing."""
    backbone = _keras_hub().models.ViTBackbone(image_shape=(size, size, 3), patch_size=16, num_layers=12, num_heads=12,
                                               hidden_dim=768, mlp_dim=3072)
    return keras.Model(backbone.inputs, keras.layers.Dense(1000)(backbone.output[:, 0]), name="vit_base")


def unet_3d(size: int = 32, levels: int = 2, width: int = 16) -> keras.Model:
    """A U-Net on volumes of one channel, with batch normalization."""
    layers = keras.layers

    def block(value, channels):
        value = layers.Conv3D(channels, 3, padding="same", use_bias=False)(value)
        return layers.ReLU()(layers.BatchNormalization()(value))

    inputs = value = layers.Input((size, size, size, 1))
    skips = []
    for level in range(levels):
        skips.append(block(value, width << level))
        value = layers.MaxPooling3D()(skips[-1])
    value = block(value, width << levels)
    for level in reversed(range(levels)):
        value = layers.Conv3DTranspose(width << level, 2, strides=2)(value)
        value = block(layers.Concatenate()([skips[level], value]), width << level)
    return keras.Model(inputs, layers.Conv3D(1, 1)(value), name="unet_3d")


def transformer(vocabulary: int, causal: bool, length: int = 128, depth: int = 4, width: int = 256, heads: int = 4) -> keras.Model:
    """Scores of each token of a text of this length: a small GPT-2 if causal, else a small BERT with its masked-token head."""
    layers = keras.layers
    inputs = layers.Input((length,), dtype="int32")
    value = _transformed(Positions()(layers.Embedding(vocabulary, width)(inputs)), depth, width, heads, causal)
    return keras.Model(inputs, layers.Dense(vocabulary)(value), name="gpt2" if causal else "bert")


def vit(size: int = 64, patch: int = 8, depth: int = 4, width: int = 192, heads: int = 3) -> keras.Model:
    """A small vision transformer with a head of ten classes."""
    layers = keras.layers
    inputs = layers.Input((size, size, 3))
    value = layers.Reshape((-1, width))(layers.Conv2D(width, patch, strides=patch)(inputs))
    value = _transformed(Positions()(value), depth, width, heads, causal=False)
    value = layers.GlobalAveragePooling1D()(value)
    return keras.Model(inputs, layers.Dense(CLASSES, activation="softmax")(value), name="vit")


def lstm(steps: int = 64, features: int = 32, width: int = 128) -> keras.Model:
    """Two LSTMs, one on the other, and a head of ten classes."""
    layers = keras.layers
    inputs = layers.Input((steps, features))
    value = layers.LSTM(width)(layers.LSTM(width, return_sequences=True)(inputs))
    return keras.Model(inputs, layers.Dense(CLASSES, activation="softmax")(value), name="lstm")


class Positions(keras.layers.Layer):
    """Adds a learned vector to each position of [batch, length, width]."""

    def build(self, shape):
        self.vectors = self.add_weight(shape=shape[1:], initializer="random_normal", name="vectors")

    def call(self, value):
        return value + self.vectors


def passages(count: int, length: int, vocabulary: int) -> np.ndarray:
    """Texts as tokens, int32 [count, length] below `vocabulary`: pairs of letters of Python's own documentation."""
    import pydoc_data.topics
    text = np.frombuffer("".join(pydoc_data.topics.topics.values()).encode("ascii", "ignore"), np.uint8).astype(np.int64)
    tokens = ((text[:-1] * 256 + text[1:]) % vocabulary).astype(np.int32)
    starts = np.random.default_rng(0).integers(0, len(tokens) - length, count)
    return np.stack([tokens[start:start + length] for start in starts])


def photo_crops(count: int, size: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Crops of a photograph as float32 in [0, 1] [count, size, size, 3], and from which of ten bands each is, int
    [count]."""
    import matplotlib.cbook
    import matplotlib.image
    with matplotlib.cbook.get_sample_data("grace_hopper.jpg") as file:
        photo = np.asarray(matplotlib.image.imread(file, format="jpg"), np.float32) / 255
    generator = np.random.default_rng(seed)
    tops = generator.integers(0, photo.shape[0] - size + 1, count)
    lefts = generator.integers(0, photo.shape[1] - size + 1, count)
    crops = np.stack([photo[top:top + size, left:left + size] for top, left in zip(tops, lefts)])
    return crops, tops * CLASSES // (photo.shape[0] - size + 1)


def _classifier(name: str, size: int = 96) -> Workload:
    def model():
        net = getattr(keras.applications, name)(weights=None, input_shape=(size, size, 3), classes=CLASSES)
        net.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
        return net
    return Workload(name, 32, model, lambda count: photo_crops(count, size))


def _denoiser() -> Workload:
    def model():
        net = unet()
        net.compile("adam", "mse", metrics=["mae"])
        return net

    def data(count):
        clean, _ = photo_crops(count, 128)
        noise = np.random.default_rng(1).normal(0, 0.1, clean.shape)
        return (clean + noise).astype(np.float32), clean
    return Workload("UNet", 8, model, data)


WORKLOADS = {workload.name: workload for workload in (
    _classifier("VGG16"), _classifier("ResNet50"), _classifier("MobileNetV2"), _classifier("DenseNet121"), _denoiser())}


def _transformed(value, depth: int, width: int, heads: int, causal: bool):
    layers = keras.layers
    for _ in range(depth):
        normed = layers.LayerNormalization()(value)
        value = layers.Add()([value, layers.MultiHeadAttention(heads, width // heads)(normed, normed, use_causal_mask=causal)])
        inner = layers.Dense(4 * width, activation="gelu")(layers.LayerNormalization()(value))
        value = layers.Add()([value, layers.Dropout(0.1)(layers.Dense(width)(inner))])
    return layers.LayerNormalization()(value)


def _keras_hub():
    try:
        import keras_hub
    except ImportError as error:
        raise UnsupportedError("This network is built from keras-hub's parts: pip install keras-hub. "
                               f"Received: {error}") from error
    return keras_hub


def _vgg_pools(size: tuple[int, int], encoder):
    inputs = keras.Input((*size, 3))
    network = encoder(weights=None, include_top=False, input_tensor=inputs)
    return inputs, [network.get_layer(f"block{block}_pool").output for block in range(1, 6)]


def _padded(layers, value, channels: int):
    value = layers.Conv2D(channels, 3)(layers.ZeroPadding2D(1)(value))
    return layers.BatchNormalization()(value)


def _pixels(layers, value):
    """Class probabilities of each pixel, [batch, pixels, classes]."""
    height, width, classes = value.shape[1:]
    return layers.Activation("softmax")(layers.Reshape((height * width, classes))(value))


def _application(name: str) -> Callable[[], keras.Model]:
    return lambda: getattr(keras.applications, name)(weights=None, input_shape=(224, 224, 3))


NETWORKS = {network.name: network for network in (
    Network("VGG16", _application("VGG16"), 256), Network("VGG19", _application("VGG19"), 256),
    Network("MobileNet", _application("MobileNet"), 512), Network("ResNet50", _application("ResNet50"), 256),
    Network("U-Net", vgg_unet, 32), Network("FCN8", fcn8, 32), Network("SegNet", segnet, 32))}
