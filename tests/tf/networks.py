"""Small networks that have everything that can go wrong: batch normalization, dropout, skips, several outputs."""

import keras
import numpy as np

layers = keras.layers


def conv_net(dropout: float = 0.0, optimizer="adam", size: int = 16, width: int = 16, activation: str = "relu",
             **compile_arguments) -> keras.Model:
    """Three convolutions with batch normalization and a skip; compiled."""
    keras.utils.set_random_seed(7)
    inputs = layers.Input((size, size, 3))
    value = layers.Conv2D(width, 3, padding="same", use_bias=False)(inputs)
    value = skip = layers.Activation(activation)(layers.BatchNormalization()(value))
    value = layers.Conv2D(width, 3, padding="same", use_bias=False)(value)
    value = layers.Activation(activation)(layers.BatchNormalization()(value))
    if dropout:
        value = layers.Dropout(dropout, seed=3)(value)
    value = layers.Conv2D(width, 3, padding="same", use_bias=False)(value)
    value = layers.Add()([layers.BatchNormalization()(value), skip])
    value = layers.GlobalAveragePooling2D()(layers.Activation(activation)(value))
    model = keras.Model(inputs, layers.Dense(10, activation="softmax")(value))
    model.compile(optimizer, "sparse_categorical_crossentropy", **{"metrics": ["accuracy"], **compile_arguments})
    return model


def momentum_net(**arguments) -> keras.Model:
    """The same with much to recompute, under SGD with momentum."""
    return conv_net(optimizer=keras.optimizers.SGD(0.05, momentum=0.9), activation="swish", **arguments)


def plain_after(steps: int, batch) -> keras.Model:
    """One that plain Keras has trained for so many steps."""
    model = momentum_net()
    for _ in range(steps):
        model.train_on_batch(*batch)
    return model


def digits(count: int, size: int = 16) -> tuple[np.ndarray, np.ndarray]:
    """scikit-learn's handwritten digits, scaled up to [count, size, size, 3] float32 in [0, 1], and their labels."""
    from sklearn.datasets import load_digits
    data = load_digits()
    images = np.repeat(np.repeat(data.images[:count], size // 8, axis=1), size // 8, axis=2)
    return np.repeat(images[..., None], 3, axis=-1).astype(np.float32) / 16, data.target[:count].astype(np.int64)


def values_of(model: keras.Model) -> dict[str, np.ndarray]:
    """A copy of every variable: weights, slots of every optimizer, metric and seed states."""
    optimizers = [held for held in vars(model).values() if isinstance(held, keras.optimizers.Optimizer)]
    variables = [*model.variables, *(variable for holder in (*optimizers, *model.metrics) for variable in holder.variables)]
    return {f"{position} {variable.path}": np.array(variable.numpy()) for position, variable in enumerate(variables)}
