"""Training steps of well-known networks as instances: what planners are measured with where graphs are large.

    python -m checkmate_tf.steps DIRECTORY [NAME...] --profile v100

writes one file for each network: its whole training step under Adam as this package extracts it, priced by a named
profile. The step is traced but never run, so neither the device of the profile nor its memory is needed; but the weights
are there, up to 2 GB.
"""

import argparse
import json
import os
import pathlib
import sys
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from checkmate_tf import planning, profiles
from checkmate_tf.ir.graph import Graph, instance_from_graph

_CLASSES = 1000


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.names if name not in STEPS]:
        parser.error(f"known networks are {', '.join(STEPS)}. Received: {unknown[0]}")
    options.directory.mkdir(parents=True, exist_ok=True)
    for name in options.names or STEPS:
        model, x, y = STEPS[name]()
        graph = step_graph(model, x, y, options.profile)
        path = options.directory / f"{name.lower()}.json"
        source = f"checkmate_tf.steps: {name}, profile {options.profile}, TensorFlow {tf.__version__}, Keras {keras.__version__}"
        path.write_text(json.dumps(instance_from_graph(graph, path.stem, source)))
        print(f"{path}: {len(graph.ops)} ops")
        keras.backend.clear_session()
    return 0


def step_graph(model, x, y, profile: str) -> Graph:
    """The training step of a compiled model on a batch of these specs, priced by a named profile."""
    specs = (x, y)
    planning.build(model, specs)
    return planning.prepare(model, specs, profile, lambda stage: None, batch_is_there=False).graph


def transformer(*, is_causal: bool, vocabulary: int, length: int, blocks: int = 12, width: int = 768, heads: int = 12,
                dropout: float = 0.1) -> keras.Model:
    """A stack of transformer blocks over token indices, with scores for every token of the vocabulary at every place.

    is_causal: normalized before each part and blind to what comes later, as GPT-2; otherwise normalized after each, as BERT
    """
    layers = keras.layers
    tokens = layers.Input((length,), dtype="int32")
    value = layers.Embedding(vocabulary, width)(tokens) + layers.Embedding(length, width)(tf.range(length))
    value = layers.Dropout(dropout)(value if is_causal else layers.LayerNormalization()(value))
    for _ in range(blocks):
        for part in (_attention(heads, width // heads, dropout, is_causal), _feed_forward(width, dropout)):
            if is_causal:
                value = value + part(layers.LayerNormalization()(value))
            else:
                value = layers.LayerNormalization()(value + part(value))
    if is_causal:
        value = layers.LayerNormalization()(value)
    return keras.Model(tokens, layers.Dense(vocabulary)(value))


def _attention(heads, width, dropout, is_causal) -> Callable:
    attention = keras.layers.MultiHeadAttention(heads, width, dropout=dropout)
    after = keras.layers.Dropout(dropout)
    return lambda value: after(attention(value, value, use_causal_mask=is_causal))


def _feed_forward(width, dropout) -> Callable:
    wide, narrow = keras.layers.Dense(4 * width, activation="gelu"), keras.layers.Dense(width)
    after = keras.layers.Dropout(dropout)
    return lambda value: after(narrow(wide(value)))


def _pictures(name: str, batch_size: int, size: int = 224) -> Callable:
    def make():
        model = getattr(keras.applications, name)(weights=None, input_shape=(size, size, 3), classes=_CLASSES)
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
        return model, tf.TensorSpec([batch_size, size, size, 3], tf.float32), tf.TensorSpec([batch_size], tf.int64)
    return make


def _tokens(batch_size: int, length: int, **options) -> Callable:
    def make():
        model = transformer(length=length, **options)
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        spec = tf.TensorSpec([batch_size, length], tf.int32)
        return model, spec, spec
    return make


STEPS = {"ResNet152V2": _pictures("ResNet152V2", 64), "DenseNet121": _pictures("DenseNet121", 64),
         "EfficientNetB0": _pictures("EfficientNetB0", 128),
         "BERT-base": _tokens(32, 256, is_causal=False, vocabulary=30_522),
         "GPT-2-small": _tokens(8, 1024, is_causal=True, vocabulary=50_257)}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m checkmate_tf.steps",
                                     description="Writes the training steps of well-known networks as instances.")
    parser.add_argument("directory", type=pathlib.Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(STEPS))
    parser.add_argument("--profile", choices=profiles.names(), default="v100")
    return parser


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    sys.exit(main())
