"""What a user sees: on any width, on a terminal or none, loud or silent; and the memory timeline as a picture."""

import logging

import keras
import matplotlib.figure
import pytest
from rich.console import Console

import checkmate_tf
from budgets import recompute, recomputations, tight_budget
from checkmate_tf.report import Narrator, as_text, plan_table, short_name, solution_table
from checkmate_tf.solvers import Progress
from networks import conv_net, digits


@pytest.fixture(scope="module")
def batch():
    return digits(16)


@pytest.fixture(scope="module")
def trained(batch):
    model = recompute(conv_net(optimizer="sgd"))
    model.train_on_batch(*batch)
    return model.checkmate


def _words(printed: str) -> str:
    return " ".join(printed.replace("│", " ").split())


def test_names_are_of_layers_and_ops_without_the_models_name():
    assert short_name("gradient_tape/functional_1/conv2d_1/convolution/Conv2DBackpropInput") == (
        "conv2d_1/convolution/Conv2DBackpropInput (backward)")
    assert short_name("functional_1/add_1/Add") == "add_1/Add"
    assert short_name("sgd/AssignSub") == "sgd/AssignSub"
    assert short_name("AddN") == "AddN"
    assert short_name("") == ""


def test_the_first_screen_tells_everything_there_is_to_know(trained, capsys):
    trained.summary()
    printed = capsys.readouterr().out
    labels = ("device", "budget", "weights", "optimizer slots", "batch", "peak, everything kept", "planned peak", "recomputed", "predicted time",
              "solver", "measured peak")
    assert [label for label in labels if f"│ {label} " in printed] == list(labels)
    words = _words(printed)
    assert "of a step, over keeping everything" in words and "given as '100GB'" in words


def test_what_is_recomputed_is_named_by_kind(trained, capsys):
    trained.summary()
    printed = _words(capsys.readouterr().out)
    graph, runs = trained._steps[next(iter(trained._steps))].prepared.graph, trained.solution.timeline.runs
    kinds = {op.kind for op, count in zip(graph.ops, runs) if count > 1}
    again = sum(runs) - len(runs)
    assert f"{again} runs of {len(runs)} ops: " in printed and any(f" {kind}" in printed for kind in kinds)


@pytest.mark.parametrize("width", [60, 80, 200])
def test_tables_fit_the_width(width, trained, capsys):
    console = Console(width=width, color_system=None)
    console.print(plan_table("1GB", trained.solution, trained.estimate, 12_345_678))
    console.print(trained.estimate.table())
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= width for line in lines)
    assert any("12.3 MB" in line for line in lines)


def test_the_summary_prints_though_the_model_was_compiled_silent(batch, capsys):
    model = recompute(conv_net(optimizer="sgd"), verbose=0)
    model.checkmate.summary()
    assert "planned when the first batch arrives" in capsys.readouterr().out
    model.train_on_batch(*batch)
    assert not capsys.readouterr().out
    model.checkmate.summary()
    assert "planned peak" in capsys.readouterr().out


@pytest.mark.parametrize("verbose", [1, 2, "auto"])
def test_the_table_comes_before_the_first_step_and_without_control_characters(verbose, batch, capsys):
    model = recompute(conv_net(optimizer="sgd"), verbose=verbose)
    model.train_on_batch(*batch)
    model.train_on_batch(*batch)
    printed = capsys.readouterr().out
    assert printed.count("training within a memory budget") == 1 and "\x1b" not in printed and "\r" not in printed
    assert recomputations(model) > 0


def test_two_tells_every_stage_and_nothing_is_told_twice(capsys):
    with Narrator(2) as narrator:
        for text in ("tracing", "measuring 9 ops", "measuring 9 ops: 1 done", "measuring 9 ops: 2 done", "solving"):
            narrator.stage(text)
    assert [line.split("(")[0].strip() for line in capsys.readouterr().out.splitlines()] == [
        "checkmate_tf: tracing", "checkmate_tf: measuring 9 ops", "checkmate_tf: solving"]


def test_a_solvers_progress_is_incumbent_bound_and_gap():
    seen = []
    narrator = Narrator(0)
    narrator.stage = seen.append
    narrator.solving(2.0, Progress(None, 2.0, 0.1))
    narrator.solving(2.0, Progress(2.2, 2.0, 0.1))
    assert seen == ["solving: best +10.00 % time, bound +0.00 %, gap 10.00 %"]


def test_without_interactive_logging_all_goes_to_the_log(batch, capsys, caplog):
    keras.config.disable_interactive_logging()
    try:
        with caplog.at_level(logging.INFO, logger="absl"):
            model = recompute(conv_net(optimizer="sgd", jit_compile=True), verbose=1)
            model.train_on_batch(*batch)
            model.checkmate.summary()
    finally:
        keras.config.enable_interactive_logging()
    assert not capsys.readouterr().out
    assert "jit_compile=True is ignored" in caplog.text and caplog.text.count("planned peak") == 2


def test_an_estimate_and_a_solution_are_readable_as_text(trained):
    text = str(trained.estimate)
    assert "largest values" in text and trained.estimate.device in text and "gradient_tape" not in text
    assert "planned peak" in as_text(solution_table(trained.solution))


def test_the_estimate_adds_up(batch):
    model = conv_net()
    needs = checkmate_tf.estimate(model, *batch, profile="cpu", verbose=0)
    assert needs.resident["weights"] == 4 * sum(variable.numpy().size for variable in model.weights)
    assert needs.batch_bytes == batch[0].nbytes + batch[1].nbytes
    assert needs.resident_bytes == sum(needs.resident.values()) < needs.floor_bytes < needs.keep_all_peak_bytes
    assert needs.largest[0][2] == max(size for _, _, size in needs.largest) == 16 * 16 * 16 * 16 * 4


def test_estimates_and_solutions_show_themselves_in_a_notebook(trained):
    for shown, label in ((trained.estimate, "floor of any plan"), (trained.solution, "planned peak")):
        page = shown._repr_html_()
        assert page.startswith("<table>") and page.endswith("</table>") and "<td" in page and label in page
        assert page.count("<tr>") == page.count("</tr>") > 4 and "color" not in page
    assert "planned peak" in str(trained.solution) and "Compute(" not in str(trained.solution)


@pytest.mark.parametrize("ending, start", [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_the_memory_timeline_is_saved_without_a_display(ending, start, trained, tmp_path, monkeypatch):
    monkeypatch.delenv("DISPLAY", raising=False)
    figure = checkmate_tf.plot_memory(trained.solution, tmp_path / f"memory.{ending}")
    assert isinstance(figure, matplotlib.figure.Figure)
    assert (tmp_path / f"memory.{ending}").read_bytes().startswith(start)
    labels = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert len(labels) == 3 and labels[-1] == "budget 100 GB"
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert len(texts) == 2 and all("largest at the peak" in text and "conv2d" in text for text in texts)


def test_a_plan_made_without_training_prints_the_same(batch):
    model = conv_net(optimizer="sgd")
    solution = checkmate_tf.plan(model, tight_budget(model, *batch), *batch, profile="cpu", time_limit=5, verbose=0)
    assert f"{sum(solution.timeline.runs) - len(solution.timeline.runs)} runs" in as_text(solution_table(solution))
