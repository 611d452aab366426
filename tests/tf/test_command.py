"""The command line on saved models: what it prints, what it writes, and that an error is a line and not a traceback."""

import json
import os
import subprocess
import sys

import keras
import pytest

from checkmate_tf.__main__ import main
from checkmate_tf.solvers import Solution
from networks import conv_net, layers

# Keras copies weights with NumPy's `copy=False`, which its variables do not take yet.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning")

BATCH = 4096                     # its step is large beside whatever else this process holds
QUICK = ["--batch-size", str(BATCH), "--profile", "cpu"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    conv_net(optimizer="sgd").save(folder / "model.keras")
    keras.Sequential([layers.Input((2,)), layers.Dense(1)]).save(folder / "uncompiled.keras")
    (folder / "text.keras").write_text("not a model\nat all")
    return folder


def _error(capsys, *arguments) -> str:
    assert main([str(argument) for argument in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("checkmate-tf: ") and "Traceback" not in captured.err
    return captured.err


def test_estimate_prints_what_a_step_needs(saved, capsys):
    assert main(["estimate", str(saved / "model.keras"), *QUICK]) == 0
    printed = capsys.readouterr().out
    assert all(text in printed for text in ("weights", "batch", "peak, everything kept", "floor of any plan", "largest values"))


def test_plan_prints_and_saves_a_plan_and_its_picture(saved, tmp_path, capsys):
    assert main(["plan", str(saved / "model.keras"), *QUICK, "--budget", "0.9", "--time-limit", "3",
                 "--output", str(tmp_path / "plan.json"), "--plot", str(tmp_path / "plan.svg")]) == 0
    assert "planned peak" in capsys.readouterr().out
    solution = Solution.load(tmp_path / "plan.json")
    assert solution.peak_bytes <= solution.budget_bytes == int(0.9 * solution.base_peak_bytes)
    assert "<svg" in (tmp_path / "plan.svg").read_text()[:1000]


def test_with_json_each_command_prints_json_and_nothing_else(saved, capsys):
    model = str(saved / "model.keras")
    assert main(["estimate", model, *QUICK, "--json"]) == 0
    needs = json.loads(capsys.readouterr().out)
    assert needs["floor_bytes"] < needs["keep_all_peak_bytes"] and needs["resident"]["batch"] == BATCH * (16 * 16 * 3 * 4 + 8)
    assert main(["plan", model, *QUICK, "--budget", "0.9", "--time-limit", "2", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["placed_peak_bytes"] <= plan["budget_bytes"] and plan["overhead"] >= 0 and plan["status"] in ("optimal", "feasible")
    assert main(["tradeoff", model, *QUICK, "--budgets", "0.9", "1KB", "--solvers", "greedy", "--json", "--no-cache"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["status"] for row in rows] == ["feasible", "infeasible"] and rows[1]["peak_bytes"] is None


def test_tradeoff_prints_a_table_and_saves_its_picture(saved, tmp_path, capsys):
    assert main(["tradeoff", str(saved / "model.keras"), *QUICK, "--budgets", "0.9", "1KB", "--solvers", "greedy", "keep_all",
                 "--plot", str(tmp_path / "tradeoff.png")]) == 0
    printed = capsys.readouterr().out
    assert "what less memory costs" in printed and "infeasible: the floor is" in printed and printed.count("greedy") == 2
    assert (tmp_path / "tradeoff.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("command", [["estimate", "--plot"], ["plan", "--budget", "0.9", "--solver", "greedy", "--schedule"]])
def test_every_command_saves_a_picture(command, saved, tmp_path, capsys):
    name, *options = command
    assert main([name, str(saved / "model.keras"), *QUICK, *options, str(tmp_path / "picture.png")]) == 0
    assert capsys.readouterr().out and (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("arguments, text", [
    (["estimate", "{}/nowhere.keras", *QUICK], "A saved Keras model is needed. Received: "),
    (["estimate", "{}/text.keras", *QUICK], "text.keras"),
    (["estimate", "{}/uncompiled.keras", *QUICK], "saved before it was compiled"),
    (["estimate", "{}/model.keras", "--batch-size", "0"], "--batch-size 0"),
    (["estimate", "{}/model.keras", *QUICK, "--profile", "nothing"], "a100"),
    (["plan", "{}/model.keras", *QUICK, "--budget", "2 quux"], "known units are"),
    (["plan", "{}/model.keras", *QUICK, "--budget", "-1"], "must be positive"),
    (["plan", "{}/model.keras", *QUICK, "--budget", "1.5"], "in (0, 1]"),
    (["plan", "{}/model.keras", *QUICK, "--budget", "1GB", "--solver", "magic"], "Known solvers are"),
    (["plan", "{}/model.keras", *QUICK, "--budget", "1GB", "--output", "{}/no/such/folder.json"], "could not be saved"),
    (["plan", "{}/model.keras", *QUICK, "--budget", "1GB", "--plot", "{}/plan.quux"], "could not be saved"),
    (["tradeoff", "{}/model.keras", *QUICK, "--solvers", "magic"], "Known solvers are"),
    (["tradeoff", "{}/model.keras", *QUICK, "--budgets", "0"], "must be positive"),
    (["tradeoff", "{}/model.keras", *QUICK, "--workers", "0"], "workers=0"),
    (["estimate", "{}/model.keras", *QUICK, "--plot", "{}/plan.quux"], "could not be saved"),
    (["benchmark", "Nothing"], "Known workloads are"),
])
def test_an_error_is_one_line(arguments, text, saved, capsys):
    error = _error(capsys, *(argument.format(saved) for argument in arguments))
    assert text in error and error.count("\n") == 1


def test_a_budget_that_nothing_fits_prints_the_table_and_the_remedy(saved, capsys):
    error = _error(capsys, "plan", saved / "model.keras", *QUICK, "--budget", "1KB", "--time-limit", "2")
    assert "optimizer slots" in error and "smallest budget known to work" in error


def test_the_process_ends_with_code_2_and_a_single_line_of_its_own(saved):
    finished = subprocess.run([sys.executable, "-m", "checkmate_tf", "estimate", str(saved / "nowhere.keras"), *QUICK], check=False,
                              capture_output=True, text=True, timeout=120,
                              env=dict(os.environ, PYTHONPATH=os.pathsep.join(path for path in sys.path if path)))
    assert finished.returncode == 2 and not finished.stdout
    assert "Traceback" not in finished.stderr and finished.stderr.splitlines()[-1].startswith("checkmate-tf: A saved Keras model")
