"""What the allocator's peak, read after each step, does to a plan: nothing, another plan, an error, or a surplus to reckon with."""

import tempfile

import keras
import pytest

import checkmate_tf
from budgets import assert_same_variables, in_a_process_of_its_own, recompute, recomputations, tight_budget
from checkmate_tf import rounds
from checkmate_tf.bridge import measure
from networks import conv_net, digits, momentum_net, plain_after

BATCH = 32


class FakePeaks:
    """Stands in for the allocator's statistics: these peaks of checked runs in turn, then the true ones; none in other
    runs and when planning, where what is held is true.

    resets counts how often a peak was reset.
    """

    def __init__(self, monkeypatch, *peaks):
        self.peaks, self.resets, self.armed = list(peaks), 0, False
        self.real_memory, self.real_reset = measure.measured_memory, measure.reset_peak
        monkeypatch.setattr(measure, "measured_memory", self.memory)
        monkeypatch.setattr(measure, "reset_peak", self.reset)

    def reset(self):
        self.real_reset()
        self.resets, self.armed = self.resets + 1, True

    def memory(self):
        armed, self.armed = self.armed, False
        if armed:
            return (0, self.peaks.pop(0)) if self.peaks else self.real_memory()
        return self.real_memory()[0], 0


@pytest.fixture(scope="module")
def batch():
    return digits(BATCH)


def _large():
    """Large enough that one measured peak says more about the plan than about what else the process does."""
    return conv_net(optimizer=keras.optimizers.SGD(0.05, momentum=0.9), size=32, width=16)


def test_the_measured_peak_stays_within_the_budget():
    x, y = digits(BATCH, size=32)
    model = _large()
    budget = tight_budget(model, x, y, share=0.6)
    checkmate_tf.compile(model, budget, time_limit=4, verbose=0)
    for _ in range(3):
        model.train_on_batch(x, y)
    assert recomputations(model) > 0
    assert 0 < model.checkmate.measured_peak_bytes <= budget
    measure.reset_peak()
    for _ in range(3):
        model.train_on_batch(x, y)
    assert measure.measured_memory()[1] <= budget


def test_a_peak_above_the_budget_is_told_and_planned_again(monkeypatch, capsys):
    x, y = digits(BATCH, size=32)
    model, reference = _large(), _large()
    budget = tight_budget(model, x, y, share=0.7)
    recompute(model, budget=budget, solver="greedy", verbose=1)
    FakePeaks(monkeypatch, budget + 500_000)
    model.train_on_batch(x, y)
    assert "500 KB above the budget" in " ".join(capsys.readouterr().out.split())
    assert model.checkmate.solution.peak_bytes <= budget - 500_000
    for _ in range(4):
        model.train_on_batch(x, y)
    assert 0 < model.checkmate.measured_peak_bytes <= budget
    for _ in range(5):
        reference.train_on_batch(x, y)
    assert_same_variables(model, reference)


@pytest.mark.parametrize("high_run", [1, 2, 3])
def test_the_peak_of_each_of_the_first_three_runs_counts_and_none_is_reset_later(high_run, batch, monkeypatch):
    model = momentum_net()
    budget = tight_budget(model, *batch, share=0.8)
    recompute(model, budget=budget, share=2.0)
    fake = FakePeaks(monkeypatch, *[1000] * (high_run - 1), budget + 1000, 3000, 2000, 1000)
    plans = []
    for _ in range(high_run + 5):
        model.train_on_batch(*batch)
        plans.append(model.checkmate.solution)
    assert [plan is plans[-1] for plan in plans] == [run >= high_run for run in range(1, high_run + 6)]
    assert fake.resets == high_run + 3
    assert model.checkmate.measured_peak_bytes == 3000
    assert_same_variables(model, plain_after(high_run + 5, batch))


def test_a_later_run_above_the_budget_is_planned_again_and_never_ends_the_training(batch, monkeypatch):
    model = momentum_net()
    budget = tight_budget(model, *batch, share=0.9)
    recompute(model, budget=budget)
    for _ in range(4):
        model.train_on_batch(*batch)
    settled = model.checkmate.solution
    with monkeypatch.context() as patch:
        patch.setattr(measure, "measured_memory", lambda: (0, budget + 1000))
        model.train_on_batch(*batch)
    assert model.checkmate.solution is not settled
    monkeypatch.setattr(measure, "measured_memory", lambda: (0, budget + 100_000_000))
    with pytest.warns(UserWarning, match="training goes on under the present one"):
        for _ in range(5):
            model.train_on_batch(*batch)
    assert_same_variables(model, plain_after(10, batch))


@pytest.mark.slow
def test_a_peak_that_stays_above_the_budget_is_an_error(batch, monkeypatch):
    model = momentum_net()
    budget = tight_budget(model, *batch, share=0.9)
    recompute(model, budget=budget)
    FakePeaks(monkeypatch, *[budget + 10_000] * 10)
    with pytest.raises(checkmate_tf.InfeasibleBudgetError, match="measured on top by the allocator") as caught:
        for _ in range(10):
            model.train_on_batch(*batch)
    assert caught.value.minimum_bytes > budget
    assert not hasattr(model, "checkmate")
    model.train_on_batch(*batch)


@pytest.mark.slow
def test_what_a_step_took_beyond_its_plan_is_reckoned_with_by_the_next_plan():
    in_a_process_of_its_own(__name__, "what_the_next_plan_reckons_with")


def what_the_next_plan_reckons_with():
    """The first plan of each model, that is: some of the true peaks of their first runs come out above the budget."""
    batch, surpluses = digits(BATCH), []

    def solve_within(prepared, budget_bytes, solver, limits, report, surplus_bytes=0, before=None):
        if before is None:
            surpluses.append(surplus_bytes)
        return real(prepared, budget_bytes, solver, limits, report, surplus_bytes, before)
    real = rounds.solve_within
    with tempfile.TemporaryDirectory() as cache:
        for _ in range(2):
            keras.backend.clear_session(free_memory=False)
            with pytest.MonkeyPatch.context() as patched:
                patched.setenv("XDG_CACHE_HOME", cache)
                patched.setattr("checkmate_tf.keras.is_plenty", lambda *arguments: False)
                patched.setattr(rounds, "solve_within", solve_within)
                model = momentum_net()
                needs = checkmate_tf.estimate(model, *batch, verbose=0)
                budget = int(needs.resident_bytes + 0.8 * (needs.keep_all_peak_bytes - needs.resident_bytes)) + 1_000_000
                checkmate_tf.compile(model, budget, solver="greedy", time_limit=10, verbose=0)
                model.train_on_batch(*batch)
                step = _only_step(model.checkmate)
                step.measured_bytes = 0          # only the peaks that follow count
                unchecked_runs = 3 - step.checked_runs
                FakePeaks(patched, *[step.solution.placed_peak_bytes + 20_000] * unchecked_runs)
                for _ in range(unchecked_runs):
                    model.train_on_batch(*batch)
    assert surpluses == [0, 20_000]


def _only_step(checkmate):
    (step,) = checkmate._steps.values()
    return step


def test_a_device_without_statistics_is_told_and_trains(batch, monkeypatch, capsys):
    monkeypatch.setattr(measure, "measured_memory", lambda: None)
    model = recompute(momentum_net())
    for _ in range(5):
        model.train_on_batch(*batch)
    assert model.checkmate.measured_peak_bytes is None and recomputations(model) > 0
    model.checkmate.summary()
    assert "not measured" in capsys.readouterr().out
    assert_same_variables(model, plain_after(5, batch))
