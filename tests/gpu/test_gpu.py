"""On a GPU: a planned step stays within its budget there too, and trains as plain Keras does."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import checkmate_tf
from checkmate_tf import zoo

pytestmark = pytest.mark.skipif(not tf.config.list_physical_devices("GPU"), reason="TensorFlow sees no GPU on this machine")


def _unet():
    keras.utils.set_random_seed(0)
    model = zoo.unet(size=128, levels=3)
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse", jit_compile=False)
    return model


def test_a_unet_trains_within_its_budget_on_the_gpu():
    clean, _ = zoo.photo_crops(24, 128)
    model, plain = _unet(), _unet()
    needs = checkmate_tf.estimate(model, clean[:8], clean[:8], verbose=0)
    budget = int(needs.resident_bytes + 0.6 * (needs.keep_all_peak_bytes - needs.resident_bytes))
    checkmate_tf.compile(model, budget, verbose=0)
    losses = [one.fit(clean, clean, batch_size=8, shuffle=False, verbose=0).history["loss"] for one in (model, plain)]
    assert sum(model.checkmate.solution.timeline.runs) > len(model.checkmate.solution.timeline.runs)
    assert 0 < model.checkmate.measured_peak_bytes <= budget
    np.testing.assert_allclose(*losses, rtol=1e-3)


def test_xla_is_switched_off_on_the_gpu_with_a_message(capsys):
    clean, _ = zoo.photo_crops(8, 128)
    model = zoo.unet(size=128, levels=3)
    model.compile("sgd", "mse")
    checkmate_tf.compile(model, 0.9, time_limit=10)
    model.train_on_batch(clean, clean)
    assert "jit_compile=True is ignored" in capsys.readouterr().out
