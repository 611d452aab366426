"""A custom loop's step within a budget: the same results as without, recomputation counted, the peak measured."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import checkmate_tf
from checkmate_tf.bridge import measure

QUICK = {"solver": "greedy", "profile": "cpu", "verbose": 0}
SPECS = tf.TensorSpec([512, 64]), tf.TensorSpec([512, 64])


def _loop(seed: int = 0):
    """(step, variables): a deep network trained by gradient descent with momentum, by hand."""
    keras.utils.set_random_seed(seed)
    weights = [tf.Variable(tf.random.stateless_normal([64, 64], [seed, layer]) / 8) for layer in range(12)]
    momenta = [tf.Variable(tf.zeros_like(weight)) for weight in weights]
    steps = tf.Variable(0, dtype=tf.int64)

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            hidden = x
            for weight in weights:
                hidden = tf.nn.swish(hidden @ weight)
            loss = tf.reduce_mean((hidden - y) ** 2)
        gradients = tape.gradient(loss, weights)
        if loss > 1e9:                  # autograph's business
            loss = loss * 0.0
        for weight, momentum, gradient in zip(weights, momenta, gradients):
            momentum.assign(0.9 * momentum + gradient)
            weight.assign_sub(0.1 * momentum)
        steps.assign_add(1)
        return {"loss": loss, "steps": steps.read_value()}
    return step, [*weights, *momenta, steps]


def _batch(size: int = 512):
    return tf.random.stateless_normal([size, 64], [1, size]), tf.random.stateless_normal([size, 64], [2, size])


def _tight(step) -> int:
    """A budget half way between what is resident and the peak of keeping everything."""
    needs = checkmate_tf.rematerialize(step, 1.0, *SPECS, **QUICK).estimate
    return int(needs.resident_bytes + 0.6 * (needs.keep_all_peak_bytes - needs.resident_bytes))


@pytest.mark.kind("own training steps", "custom loops (rematerialize)")
def test_a_custom_loop_trains_the_same_and_recomputes():
    (step, variables), (reference, expected) = _loop(), _loop()
    # Priced by measuring: a named profile knows no scratch, so that the first plans may be replaced.
    planned = checkmate_tf.rematerialize(step, _tight(step), *SPECS, solver="greedy", verbose=0)
    assert sum(planned.solution.timeline.runs) > len(planned.solution.timeline.runs)
    peaks = []
    for _ in range(6):
        outputs, wanted = planned(*_batch()), reference(*_batch())
        peaks.append(planned.measured_peak_bytes or 0)      # none yet where the step has just been planned again
        assert int(outputs["steps"]) == int(wanted["steps"])
        np.testing.assert_allclose(outputs["loss"], wanted["loss"], rtol=1e-6)
    for variable, other in zip(variables, expected):
        np.testing.assert_allclose(variable, other, rtol=1e-5, atol=1e-7)
    if measure.measured_memory() is not None:
        assert max(peaks) > 0
    planned.summary()


def test_another_shape_is_planned_when_it_comes():
    step, _ = _loop()
    planned = checkmate_tf.rematerialize(step, "1GB", **QUICK)
    assert planned.solution is None
    for size in (8, 512):
        assert np.isfinite(planned(*(part.numpy() for part in _batch(size)))["loss"])
    assert planned.solution.peak_bytes <= 10 ** 9


def test_a_plain_function_of_several_structures_is_taken_too():
    weight = tf.Variable(2.0)
    planned = checkmate_tf.rematerialize(lambda pair, factor: (pair["a"] * weight + pair["b"]) * factor, "1GB",
                                         {"a": tf.TensorSpec([3]), "b": tf.TensorSpec([3])}, tf.TensorSpec([]), **QUICK)
    np.testing.assert_array_equal(planned({"a": tf.ones([3]), "b": tf.zeros([3])}, tf.constant(3.0)), [6, 6, 6])


@pytest.mark.parametrize("budget, error", [("lots", checkmate_tf.BudgetError), (0, checkmate_tf.BudgetError),
                                           (100, checkmate_tf.InfeasibleBudgetError)])
def test_a_wrong_budget_is_an_error_and_changes_nothing(budget, error):
    step, variables = _loop()
    before = [variable.numpy() for variable in variables]
    with pytest.raises(error):
        checkmate_tf.rematerialize(step, budget, *SPECS, **QUICK)
    for variable, value in zip(variables, before):
        np.testing.assert_array_equal(variable, value)


def test_what_is_no_function_or_has_an_open_shape_is_refused():
    with pytest.raises(checkmate_tf.UnsupportedError, match="function of tensors"):
        checkmate_tf.rematerialize(3, "1GB")
    with pytest.raises(checkmate_tf.UnsupportedError, match="fully known"):
        checkmate_tf.rematerialize(lambda x: x + 1, "1GB", tf.TensorSpec([None, 2]), **QUICK)
