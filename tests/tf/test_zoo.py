"""Checkmate's networks as graphs of layers, and coarse plans of traced steps; nothing of their size is executed."""

import subprocess
import sys

import keras
import pytest
import tensorflow as tf

import checkmate_tf
from checkmate_tf import profiles, zoo
from checkmate_tf.bridge.layers import layer_graph, multiply_adds
from checkmate_tf.ir.errors import UnsupportedError
from checkmate_tf.ir.simulate import structural_floor
from networks import conv_net, layers

# (16e9 bytes - twice the weights) / the most that an op holds for an item: no schedule has a larger batch with this accounting.
BOUNDS = {"VGG19": 289.03, "MobileNet": 1231.92, "ResNet50": 1093.02, "U-Net": 61.40}


@pytest.mark.parametrize("name", BOUNDS)
def test_no_batch_is_larger_than_the_published_accounting_allows(name):
    graph = layer_graph(zoo.NETWORKS[name].model(), 1)
    item_bytes = structural_floor(graph)[0] - graph.resident_bytes
    assert (16e9 - graph.resident_bytes) / item_bytes == pytest.approx(BOUNDS[name], abs=0.01)


def test_vgg19_costs_what_was_published_for_it():
    # 58.896 G multiply-adds for an item and step, a third of them forward.
    graph = layer_graph(zoo.NETWORKS["VGG19"].model(), 1)
    assert graph.seconds / 1e9 == pytest.approx(58.896, abs=0.001)
    assert sum(op.seconds for op in graph.ops if op.backward) == pytest.approx(2 / 3 * graph.seconds)


def test_a_graph_of_layers_by_hand():
    inputs = keras.Input((4,))
    wide = layers.Dense(8, name="wide")(inputs)
    both = layers.Add(name="both")([wide, layers.ReLU(name="relu")(wide)])
    graph = layer_graph(keras.Model(inputs, both), 3)
    assert [op.name for op in graph.ops] == ["wide", "relu", "both", "loss", "both_backward", "relu_backward", "wide_backward"]
    assert graph.resident_bytes == 2 * 4 * (4 * 8 + 8)
    assert [value.bytes for value in graph.values] == [96, 96, 96, 12, 96, 96, 96]
    assert [op.seconds for op in graph.ops] == [96, 24, 24, 0, 48, 48, 192]
    assert [sorted(op.inputs) for op in graph.ops] == [[], [0], [0, 1], [2], [2, 3], [1, 2, 4], [0, 1, 2, 4, 5]]


def test_a_profile_gives_seconds_by_its_roofline():
    profile = profiles.Profile("test", flops_per_second=2.0, bytes_per_second=1e9, launch_seconds=1.0)
    graph = layer_graph(keras.Sequential([keras.Input((4,)), layers.Dense(8)]), 3, profile)
    assert graph.ops[0].seconds == pytest.approx(1 + 3 * 4 * 8)


def test_what_cannot_be_a_graph_of_layers_is_refused():
    shared = layers.Dense(4)
    inputs = keras.Input((4,))
    with pytest.raises(UnsupportedError, match="called once"):
        layer_graph(keras.Model(inputs, shared(shared(inputs))), 2)
    with pytest.raises(UnsupportedError, match="arithmetic.*LSTM"):
        layer_graph(keras.Sequential([keras.Input((4, 4)), layers.LSTM(4)]), 2)
    with pytest.raises(UnsupportedError, match="Every dimension"):
        layer_graph(keras.Sequential([keras.Input((None, None, 3)), layers.Conv2D(2, 3)]), 2)
    with pytest.raises(UnsupportedError, match="functional"):
        layer_graph(keras.Model(), 2)


@pytest.mark.parametrize("layer, shape, count", [
    (layers.Conv2D(5, 3, padding="same"), (8, 8, 2), 64 * 9 * 2 * 5), (layers.DepthwiseConv2D(3, padding="same"), (8, 8, 2), 64 * 9 * 2),
    (layers.Conv2DTranspose(5, 4, strides=2), (3, 3, 2), 9 * 16 * 2 * 5), (layers.Dense(5), (7, 2), 7 * 2 * 5),
    (layers.BatchNormalization(), (8, 8, 2), 128), (layers.MaxPooling2D(), (8, 8, 2), 0)])
def test_multiply_adds_by_hand(layer, shape, count):
    layer(keras.Input(shape))
    assert multiply_adds(layer) == count


IN_A_PROCESS = """
import tensorflow as tf
import checkmate_tf
from checkmate_tf import zoo
from checkmate_tf.bridge import measure

for maker, options in ((zoo.vgg_unet, {}), (zoo.segnet, {}), (zoo.fcn8, {"width": 8})):
    model = maker(size=(32, 64), classes=3, **options)
    model.compile("sgd", "sparse_categorical_crossentropy")
    images, targets = tf.random.stateless_uniform([2, 32, 64, 3], [1, 2]), tf.zeros([2, model.output_shape[1]], tf.int64)
    assert 0 < float(model.train_on_batch(images, targets)) < 100

model = zoo.vgg_unet()
model.compile("sgd", "sparse_categorical_crossentropy")
batch = tf.TensorSpec([32, 416, 608, 3]), tf.TensorSpec([32, model.output_shape[1]], tf.int64)
measure.reset_peak()
needs = checkmate_tf.estimate(model, *batch, profile="v100", verbose=0)
assert needs.keep_all_peak_bytes > 15e9 and measure.measured_memory()[1] < 1e9
"""


@pytest.mark.slow
def test_the_segmentation_networks_train_in_small_and_planning_at_full_size_needs_no_memory_of_that_size():
    # What Keras traces stays in memory, and these have many weights: a process of their own.
    subprocess.run([sys.executable, "-c", IN_A_PROCESS], check=True, capture_output=True, timeout=300)


def test_plans_by_layer_are_coarser_and_judged_on_the_same_graph():
    model = conv_net(optimizer="sgd")
    coarse = checkmate_tf.by_layer(model, "greedy")
    batch = tf.TensorSpec([16, 16, 16, 3]), tf.TensorSpec([16], tf.int64)
    frame = checkmate_tf.tradeoff(model, *batch, budgets=[0.9], solvers=("greedy", coarse), profile="cpu", time_limit=2, cache=None,
                                  verbose=0)
    assert list(frame["solver"]) == ["greedy", "greedy by layer"] and frame["keep_all_bytes"].nunique() == 1
    assert (frame["peak_bytes"] <= frame["budget_bytes"]).all()


@pytest.mark.parametrize("maker", [zoo.bert_base, zoo.gpt2_small, zoo.vit_base])
def test_without_keras_hub_its_networks_say_what_to_install(maker, monkeypatch):
    monkeypatch.setitem(sys.modules, "keras_hub", None)
    with pytest.raises(UnsupportedError, match="pip install keras-hub"):
        maker()
