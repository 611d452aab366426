"""Steps for which the device has no room: told before they run, or when they fail, and never half-done."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from budgets import assert_same_variables, recompute
from checkmate_tf.bridge import audit
from checkmate_tf.bridge.rehearse import Places
from networks import conv_net, digits

OUT_OF_MEMORY = tf.errors.ResourceExhaustedError(None, None, "OOM when allocating")


@pytest.fixture(scope="module")
def batch():
    return digits(32)


def _sgd(**arguments):
    return conv_net(optimizer=keras.optimizers.SGD(0.05, momentum=0.9), activation="swish", **arguments)


def test_a_step_that_runs_out_of_memory_is_put_back_and_planned_again(batch, monkeypatch, capsys):
    model, reference = _sgd(dropout=0.3), _sgd(dropout=0.3)
    calls, real = [], audit.first_call

    def exhausted_once(step, data):
        calls.append(1)
        outputs = real(step, data)
        if len(calls) == 1:
            raise OUT_OF_MEMORY
        return outputs
    monkeypatch.setattr(audit, "first_call", exhausted_once)
    recompute(model, verbose=1)
    for one in (model, reference):
        for _ in range(3):
            one.train_on_batch(*batch)
    assert len(calls) == 2
    assert "Every variable has been put back" in " ".join(capsys.readouterr().out.split())
    assert_same_variables(model, reference)


def test_a_step_for_which_there_is_no_room_any_more_is_planned_again_before_it_runs(batch, monkeypatch, capsys):
    model, reference = _sgd(dropout=0.3), _sgd(dropout=0.3)
    rooms, ran, real = [False], [], audit.first_call
    monkeypatch.setattr(Places, "fits_now", lambda places, plan: rooms.pop() if rooms else True)
    monkeypatch.setattr(audit, "first_call", lambda step, data: (ran.append(step), real(step, data))[1])
    recompute(model, verbose=1)
    for one in (model, reference):
        for _ in range(3):
            one.train_on_batch(*batch)
    assert not rooms and len(ran) == 1
    assert "has no room for the plan any more" in " ".join(capsys.readouterr().out.split())
    assert_same_variables(model, reference)


def test_where_no_other_plan_was_found_running_out_of_memory_is_an_error_and_costs_no_value(batch, monkeypatch):
    model = recompute(_sgd())
    for _ in range(4):
        model.train_on_batch(*batch)
    (step,) = model.checkmate._steps.values()
    step.watched, step.checked_runs = False, 0
    monkeypatch.setattr(Places, "fits_now", lambda places, plan: False)
    before, real = [variable.numpy() for variable in model.variables], step.run

    def exhausted(data):
        real(data)
        raise OUT_OF_MEMORY
    step.run = exhausted
    with pytest.raises(tf.errors.ResourceExhaustedError):
        model.train_on_batch(*batch)
    assert all(np.array_equal(variable.numpy(), value) for variable, value in zip(model.variables, before))
