"""Pictures without a display: what is in them, and that each kind of file is one."""

import dataclasses

import numpy as np
import pandas as pd
import pytest

from checkmate_tf import plots
from checkmate_tf.ir.errors import PlanError, UnsupportedError
from checkmate_tf.ir.graph import GraphBuilder
from checkmate_tf.ir.plan import plan_from_order
from checkmate_tf.solvers import Limits, Solution, get, solve


def chain():
    """a -> b -> c, and d reads a and c."""
    builder = GraphBuilder()
    a = builder.op("a", bytes=8, seconds=1.0)
    b = builder.op("b", [a], bytes=8, seconds=1.0)
    c = builder.op("c", [b], bytes=8, seconds=1.0)
    builder.op("d", [a, c], bytes=8, seconds=1.0, backward=True)
    return builder.build()


def solution() -> Solution:
    return solve(chain(), 100, get("keep_all"), Limits(1.0))


def rows(**changes) -> pd.DataFrame:
    return pd.DataFrame({"solver": ["auto", "auto", "ilp"], "budget_bytes": [2_000_000_000, 3_000_000_000, 2_000_000_000],
                         "overhead": [0.2, 0.0, np.nan], "floor_bytes": 1_500_000_000, "keep_all_bytes": 3_100_000_000} | changes)


def test_each_cell_of_a_schedule_says_what_happens_to_the_op_in_the_stage():
    # Stage 0 computes a; 1 computes b, with a held; 2 computes c, with a and b held, then both go; 3 recomputes a before d.
    plan = plan_from_order(chain(), [0, 1, 2, 0, 3])
    assert plots.schedule_cells(plan).tolist() == [[2, 0, 0, 0],
                                                   [1, 2, 0, 0],
                                                   [0, 1, 2, 0],
                                                   [3, 0, 1, 2]]


def test_a_plan_that_does_not_know_its_makers_shows_runs_only():
    plan = dataclasses.replace(plan_from_order(chain(), [0, 1, 2, 0, 3]), makers=())
    assert plots.schedule_cells(plan).tolist() == [[2, 0, 0, 0], [0, 2, 0, 0], [0, 0, 2, 0], [3, 0, 0, 2]]


def test_a_run_after_the_last_first_run_is_a_recomputation_in_the_last_stage():
    builder = GraphBuilder()
    a = builder.op("a", bytes=8)
    builder.op("b", [a], bytes=8)
    plan = plan_from_order(builder.build([a]), [0, 1, 0])
    assert plots.schedule_cells(plan).tolist() == [[2, 0], [3, 2]]


def test_large_schedules_are_drawn_with_a_cell_for_several_ops():
    cells = np.zeros((1300, 1300), dtype=np.uint8)
    cells[7, 3] = 3
    coarse = plots._coarser(cells)
    assert coarse.shape == (434, 434) and coarse[2, 1] == 3 and coarse.sum() == 3


def test_makers_are_saved_with_the_plan(tmp_path):
    solution().save(tmp_path / "plan.json")
    assert Solution.load(tmp_path / "plan.json").plan.makers == (0, 1, 2, 3)


def test_the_largest_values_at_both_peaks_are_named():
    held = {"held_at_peak": [["conv1/convolution", 8], ["a/" * 40 + "name", 8]], "held_at_base_peak": [["dense/MatMul", 16]]}
    figure = plots.plot_memory(dataclasses.replace(solution(), stats=held))
    texts = "\n".join(text.get_text() for text in figure.axes[0].texts)
    assert "conv1/convolution" in texts and "dense/MatMul" in texts and "everything kept" in texts
    assert max(map(len, texts.splitlines())) <= 60


@pytest.mark.parametrize("ending, start", [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
@pytest.mark.parametrize("plot, argument", [(plots.plot_memory, solution()), (plots.plot_schedule, solution()),
                                            (plots.plot_tradeoff, rows())], ids=["memory", "schedule", "tradeoff"])
def test_every_picture_is_saved_without_a_display(plot, argument, ending, start, tmp_path, monkeypatch):
    monkeypatch.delenv("DISPLAY", raising=False)
    plot(argument, tmp_path / f"picture.{ending}")
    assert (tmp_path / f"picture.{ending}").read_bytes().startswith(start)


def test_a_tradeoff_has_a_line_a_solver_and_marks_the_floor_and_keeping_everything():
    axes = plots.plot_tradeoff(rows()).axes[0]
    labels = axes.get_legend_handles_labels()[1]
    assert labels == ["auto (2 of 2 budgets)", "ilp (0 of 1 budgets)", "floor of any plan: 1.50 GB", "everything kept: 3.10 GB",
                      "no plan found"]
    drawn = axes.lines[0]
    assert list(drawn.get_xdata()) == [2.0, 3.0] and list(drawn.get_ydata()) == [20.0, 0.0]
    assert axes.get_xlabel() == "budget (GB)" and axes.get_ylabel() == "extra time of a step (%)"


def test_the_axis_of_a_tradeoff_can_end_before_a_solver_that_is_far_off():
    assert plots.plot_tradeoff(rows(overhead=[9.0, 0.1, np.nan])).axes[0].get_ylim()[1] > 900
    assert plots.plot_tradeoff(rows(overhead=[9.0, 0.1, np.nan]), max_overhead=0.5).axes[0].get_ylim()[1] < 100


def test_many_solvers_all_look_different():
    frame = pd.DataFrame({"solver": [f"solver {number}" for number in range(12)], "budget_bytes": 10, "overhead": 0.1})
    lines = plots.plot_tradeoff(frame).axes[0].lines
    looks = {(line.get_color(), line.get_marker(), line.get_linestyle()) for line in lines if line.get_marker() != "x"}
    assert len(looks) == 12


@pytest.mark.parametrize("count", [0, 1])
def test_an_empty_frame_says_so_and_a_single_row_is_drawn(count, tmp_path):
    figure = plots.plot_tradeoff(rows()[:count], tmp_path / "picture.png")
    assert any("no rows" in text.get_text() for text in figure.axes[0].texts) == (count == 0)


def test_batches_are_bars_over_what_keeping_everything_allows():
    frame = pd.DataFrame({"model": ["VGG19", "VGG19"], "planner": ["keep_all", "auto"], "batch_size": [100, 150],
                          "keep_all_batch_size": 100})
    axes = plots.plot_batches(frame).axes[0]
    assert [bar.get_height() for bar in axes.patches] == [1.0, 1.5] and [text.get_text() for text in axes.texts] == ["100", "150"]
    assert any("no rows" in text.get_text() for text in plots.plot_batches(frame[:0]).axes[0].texts)


def test_what_cannot_be_drawn_is_refused_with_the_reason():
    with pytest.raises(UnsupportedError, match="overhead.*Received: DataFrame without budget_bytes, overhead"):
        plots.plot_tradeoff(pd.DataFrame({"solver": []}))
    nothing = solve(chain(), 1, get("keep_all"), Limits(1.0))
    for plot in (plots.plot_memory, plots.plot_schedule):
        with pytest.raises(PlanError, match="infeasible"):
            plot(nothing)
