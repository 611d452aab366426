import json
import subprocess
import sys

import pytest

from checkmate_tf import solvers
from checkmate_tf.ir.graph import graph_from_instance
from checkmate_tf.ir.plan import plan_from_order
from checkmate_tf.ir.simulate import simulate
from checkmate_tf.solvers.__main__ import budget_from_text, main
from tests import strategies

FIELDS = ["instance", "solver", "status", "budget", "peak", "base_peak", "cost", "base_cost", "overhead", "bound",
          "gap", "seconds"]


def instance_of(layers):
    graph = strategies.linear_net(layers)
    return {"name": f"net{layers}", "source": "generated",
            "ops": [{"name": op.name, "cost": op.seconds, "bytes": value.bytes, "backward": op.backward}
                    for op, value in zip(graph.ops, graph.values)],
            "edges": [[producer, op.index] for op in graph.ops for producer in graph.predecessors[op.index]]}


@pytest.fixture
def net(tmp_path):
    path = tmp_path / "file.json"
    path.write_text(json.dumps(instance_of(16)))
    return path


def run(capsys, *arguments):
    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_one_json_line_with_these_fields(net, capsys):
    code, out, err = run(capsys, net, "--budget", 1, "--solver", "keep_all")
    assert (code, err, out.count("\n")) == (0, "", 1)
    line = json.loads(out)
    assert list(line) == FIELDS
    # 17 forward values live when the first gradient is made, and that gradient.
    assert (line["instance"], line["budget"], line["peak"], line["base_peak"]) == ("net16", 18, 18, 18)
    assert (line["status"], line["cost"], line["base_cost"]) == ("optimal", 33.0, 33.0)
    assert (line["overhead"], line["bound"], line["gap"]) == (0.0, 33.0, 0.0)


def test_output_holds_an_order_that_does_what_the_line_says(net, tmp_path, capsys):
    output = tmp_path / "plan.json"
    _, out, _ = run(capsys, net, "--budget", 0.6, "--solver", "chen_greedy", "--output", output)
    line, plan = json.loads(out), json.loads(output.read_text())
    graph = graph_from_instance(json.loads(net.read_text()))
    timeline = simulate(graph, plan_from_order(graph, plan["steps"]))
    assert plan["instance"] == "net16"
    assert (timeline.peak_bytes, timeline.seconds) == (line["peak"], line["cost"])
    assert line["peak"] <= line["budget"] == 10


def test_no_plan_is_an_answer_with_nulls_and_no_file(net, tmp_path, capsys):
    output = tmp_path / "plan.json"
    code, out, err = run(capsys, net, "--budget", 0.5, "--solver", "keep_all", "--output", output)
    line = json.loads(out)
    assert code == 0 and line["status"] == "unknown" and not output.exists() and "not written" in err
    assert [line[field] for field in ("peak", "cost", "overhead", "gap")] == [None] * 4


def test_a_budget_below_the_floor_is_infeasible(net, capsys):
    _, out, _ = run(capsys, net, "--budget", 3, "--solver", "keep_all")
    assert json.loads(out)["status"] == "infeasible"


@pytest.mark.parametrize("text, expected", [("0.8", 80), ("1", 100), ("1.0", 100), ("1.5", 1), ("4000", 4000),
                                            ("0.29", 29), ("1e3", 1000)])
def test_up_to_one_is_a_fraction_and_above_is_absolute(text, expected):
    assert budget_from_text(text, 100) == expected


@pytest.mark.parametrize("name", solvers.names())
@pytest.mark.parametrize("order", ["fixed", "free"])
def test_every_solver_takes_both_orders(net, capsys, name, order):
    code, out, _ = run(capsys, net, "--budget", 1, "--solver", name, "--order", order, "--time-limit", 5)
    assert code == 0 and json.loads(out)["solver"] == name


def test_a_proof_for_the_given_order_is_none_when_any_order_is_asked_for(net, capsys):
    lines = [json.loads(run(capsys, net, "--budget", 12, "--solver", "ilp", "--order", order)[1])
             for order in ("fixed", "free")]
    assert [line["status"] for line in lines] == ["optimal", "feasible"]
    assert lines[0]["cost"] == lines[1]["cost"] > lines[1]["base_cost"]
    assert [line["bound"] for line in lines] == [lines[0]["cost"], lines[1]["base_cost"]]


@pytest.mark.parametrize("arguments, error", [
    (["--budget", "0"], "BudgetError"), (["--budget", "-1"], "BudgetError"), (["--budget", "much"], "BudgetError"),
    (["--budget", "nan"], "BudgetError"), (["--budget", "inf"], "BudgetError"),
    (["--budget", "1e999999999"], "BudgetError"),
    (["--budget", "1", "--solver", "magic"], "SolverError"),
    (["--budget", "1", "--solver", "keep_all", "--output", "/"], "PlanError")])
def test_refusals_are_typed_and_exit_with_2(net, capsys, arguments, error):
    code, out, err = run(capsys, net, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith(error + ": ") and "Received" in err and "Traceback" not in err


@pytest.mark.parametrize("text", ["", "[]", '{"ops": []}',
                                  '{"ops": [{"name": "a", "cost": 1, "bytes": 1}], "edges": [[0, 0]]}',
                                  '{"ops": [{"name": "a", "cost": -1, "bytes": 1}], "edges": []}'])
def test_a_bad_instance_is_a_graph_error(tmp_path, capsys, text):
    path = tmp_path / "bad.json"
    path.write_text(text)
    code, out, err = run(capsys, path, "--budget", 1)
    assert (code, out) == (2, "") and err.startswith("GraphError: ")


@pytest.mark.parametrize("arguments", [[], ["--budget", "1", "--threads", "0"],
                                       ["--budget", "1", "--time-limit", "nan"],
                                       ["--budget", "1", "--order", "random"]])
def test_bad_options_exit_with_2(net, capsys, arguments):
    with pytest.raises(SystemExit) as stopped:
        main([str(net), *arguments])
    assert stopped.value.code == 2


def test_the_module_runs_without_importing_tensorflow(net):
    command = [sys.executable, "-X", "importtime", "-m", "checkmate_tf.solvers", str(net), "--budget", "1",
               "--solver", "keep_all"]
    finished = subprocess.run(command, capture_output=True, text=True, check=True)
    imported = {line.rsplit("|", 1)[1].strip().split(".")[0] for line in finished.stderr.splitlines() if "|" in line}
    assert json.loads(finished.stdout)["status"] == "optimal"
    assert "checkmate_tf" in imported and not imported & {"tensorflow", "keras"}
