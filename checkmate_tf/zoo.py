"""Networks and real pictures that need no download: what the demo, the benchmark and the tests train.

Pictures are crops of the sample photograph that comes with Matplotlib. Classifiers learn from which part of the
photograph a crop is; the U-Net learns to remove noise from it.
"""

import dataclasses
from collections.abc import Callable

import keras
import numpy as np

CLASSES = 10


@dataclasses.dataclass(frozen=True)
class Workload:
    """A compiled model's maker, its batch size, and training data of at least `count` pictures."""

    name: str
    batch_size: int
    model: Callable[[], keras.Model]
    data: Callable[[int], tuple[np.ndarray, np.ndarray]]


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
