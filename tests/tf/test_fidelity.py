"""What `checkmate-tf fidelity` says of its rows."""

import pytest

from checkmate_tf.fidelity import cliffs, summary


def _rows(*peaks_and_times):
    shares = (None, 0.8, 0.6, 0.4)
    return [{"model": "VGG16", "batch": 8, "share": share, "simulated": 1, "measured": peak, "cost": time, "predicted": time}
            for share, (peak, time) in zip(shares, peaks_and_times)]


def test_less_memory_for_more_time_is_no_cliff():
    assert cliffs(_rows((400_000_000, 0.0), (300_000_000, 0.01), (300_000_000, 0.01), (200_000_000, 0.5))) == []


@pytest.mark.parametrize("peak, time, text", [
    (310_000_000, 0.02, "VGG16, 8, at 60 %: the measured peak rises from 300 MB to 310 MB, by 3.333 %"),
    (300_003_000, 0.01, "VGG16, 8, at 60 %: the measured peak rises from 300 MB to 300 MB, by 0.001 %, under the same plan"),
    (290_000_000, 0.0, "VGG16, 8, at 60 %: the planned cost falls from +1.00 to +0.00 %")])
def test_a_tighter_budget_that_takes_more_is_told(peak, time, text):
    assert cliffs(_rows((400_000_000, 0.0), (300_000_000, 0.01), (peak, time), (200_000_000, 0.5))) == [text]


def test_cases_are_held_against_themselves_only_in_any_order_and_where_there_is_a_plan():
    small, large = _rows((400, 0.0), (300, 0.1)), _rows((800, 0.0), (700, 0.0))
    for row in large:
        row["batch"] = 32
    refused = {"model": "VGG16", "batch": 8, "share": 0.7, "error": "no plan"}
    assert cliffs([*reversed(small), refused, *large]) == []


def test_what_is_as_planned_is_counted():
    common = {"simulated": 1000, "plain_peak": 1500, "at_once_peak": 1400, "keep_over_plain": 1.04}
    rows = [common | {"share": None, "measured": 1000, "predicted": 0.0, "time_over_keep": 1.0},
            common | {"share": 0.8, "measured": 970, "predicted": 0.10, "time_over_keep": 1.08},
            common | {"share": 0.6, "measured": 1020, "predicted": 0.10, "time_over_keep": 1.05},
            common | {"share": 0.4, "measured": 900, "predicted": 0.10, "time_over_keep": 1.00}, {"share": 0.2, "error": "no plan"}]
    told = [
        "Peaks within 0.97 to 1.00 of planned, rounded: 2 of 4, all within 0.90 to 1.02. Extra times within 3 points: 1 of 3, within 6: 2; "
        "below what was planned: 3.",
        "Of 1 steps with nothing recomputed, 1 take at most plain Keras's memory run one after another, 1 run at once, 0 then at most "
        "1.03 times its time."]
    assert summary(rows) == told
    tightened = {"simulated": 1000, "share": 0.5, "measured": 990, "predicted": 0.1}
    assert summary([row | {"model": "VGG16", "batch": 8} for row in (*rows, tightened)]) == [
        *told, "With all tightened budgets: Peaks within 0.97 to 1.00 of planned, rounded: 3 of 5, all within 0.90 to 1.02; "
        "from one to the next: 4."]
