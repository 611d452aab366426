"""What `checkmate-tf fidelity` says of its rows."""

import pytest

from checkmate_tf.fidelity import cliffs, summary


def _rows(*peaks_and_times):
    shares = (None, 0.8, 0.6, 0.4)
    return [{"model": "VGG16", "batch": 8, "share": share, "simulated": 1, "measured": peak, "predicted": time}
            for share, (peak, time) in zip(shares, peaks_and_times)]


def test_less_memory_for_more_time_is_no_cliff():
    assert cliffs(_rows((400_000_000, 0.0), (300_000_000, 0.01), (300_000_000, 0.01), (200_000_000, 0.5))) == []


def test_nor_is_what_the_peak_of_one_plan_differs_by_when_it_is_written_again():
    assert cliffs(_rows((400_000_000, 0.0), (300_000_000, 0.01), (300_200_000, 0.01), (200_000_000, 0.5))) == []


@pytest.mark.parametrize("peak, time, text", [
    (310_000_000, 0.02, "VGG16, 8, at 60 %: the measured peak rises from 300 MB to 310 MB"),
    (290_000_000, 0.0, "VGG16, 8, at 60 %: the planned time falls from +1.00 to +0.00 %")])
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
    assert summary(rows) == [
        "Peaks within 0.97 to 1.00 of planned, rounded: 2 of 4. Extra times within 3 points: 1 of 3, within 6: 2.",
        "Of 1 steps with nothing recomputed, run at once, 1 take at most plain Keras's memory, 0 at most 1.03 times its time."]
