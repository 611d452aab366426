"""What less memory costs, as a frame: `tradeoff` on models."""

import keras
import pytest
import tensorflow as tf

import checkmate_tf
from checkmate_tf.ir.errors import BudgetError, NotCompiledError, SolverError
from networks import conv_net, digits, layers

QUICK = {"profile": "cpu", "time_limit": 1, "verbose": 0, "cache": None}


@pytest.fixture(scope="module")
def batch():
    return digits(16)


def _between(needs, share: float) -> int:
    """Bytes so far on the way from the floor to the peak of keeping everything, whatever else the process holds."""
    return int(needs.floor_bytes + share * (needs.keep_all_peak_bytes - needs.floor_bytes))


def test_a_row_for_each_solver_and_budget(batch):
    model = conv_net(optimizer="sgd")
    needs = checkmate_tf.estimate(model, *batch, profile="cpu", verbose=0)
    frame = checkmate_tf.tradeoff(model, *batch, budgets=["1MB", _between(needs, 0.8), needs.keep_all_peak_bytes + 1000000, 1000],
                                  solvers=("greedy", "chen_greedy"), **QUICK)
    assert list(frame["solver"]) == 4 * ["greedy"] + 4 * ["chen_greedy"]
    greedy = frame[frame["solver"] == "greedy"].set_index("budget_bytes")
    assert list(greedy.index)[0] == 1_000_000 and list(greedy.index)[-1] == 1000
    found = greedy[greedy["seconds"].notna()]
    assert (found["peak_bytes"] <= found.index).all() and len(found) >= 2
    assert greedy["overhead"].iloc[2] == 0 and greedy["status"].iloc[2] == "optimal"
    assert greedy["status"].iloc[3] == "infeasible" and greedy["floor_bytes"].iloc[3] > 1000
    assert (found["seconds"] / (1 + found["overhead"])).round(12).nunique() == 1


def test_specs_do_and_default_budgets_reach_from_the_floor_to_keeping_everything():
    frame = checkmate_tf.tradeoff(conv_net(optimizer="sgd"), tf.TensorSpec([16, 16, 16, 3]), tf.TensorSpec([16], tf.int64),
                                  solvers="keep_all", **QUICK)
    assert len(frame) == 10 and frame["budget_bytes"].is_monotonic_increasing
    assert frame["budget_bytes"].iloc[0] == frame["floor_bytes"].iloc[0]
    assert frame["budget_bytes"].iloc[-1] == frame["keep_all_bytes"].iloc[0] == frame["peak_bytes"].iloc[-1]


def test_a_second_call_takes_the_rows_of_the_first(batch, tmp_path):
    needs = checkmate_tf.estimate(conv_net(optimizer="sgd"), *batch, profile="cpu", verbose=0)
    options = {**QUICK, "cache": tmp_path, "budgets": [_between(needs, 0.7)], "solvers": ("greedy",)}
    first = checkmate_tf.tradeoff(conv_net(optimizer="sgd"), *batch, **options)
    count = len(list(tmp_path.glob("*.json")))
    assert count == 1 and first["status"].iloc[0] == "feasible"
    checkmate_tf.tradeoff(conv_net(optimizer="sgd"), *batch, **{**options, "profile": "v100"})
    assert len(list(tmp_path.glob("*.json"))) == 2


@pytest.mark.parametrize("change, error, text", [
    ({"budgets": [-1]}, BudgetError, "positive"), ({"solvers": ("magic",)}, SolverError, "Known solvers"),
    ({"workers": 0}, SolverError, "workers=0"), ({"time_limit": 0}, SolverError, "time_limit=0"),
    ({"solvers": (7,)}, SolverError, "Received: 7")])
def test_bad_arguments_are_refused_before_anything_is_traced(change, error, text, batch):
    with pytest.raises(error, match=text):
        checkmate_tf.tradeoff(conv_net(), *batch, **{**QUICK, **change})


def test_a_model_without_a_training_step_is_refused(batch):
    with pytest.raises(NotCompiledError):
        checkmate_tf.tradeoff(keras.Sequential([layers.Input((2,)), layers.Dense(1)]), *batch, **QUICK)
