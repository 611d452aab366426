import json
import time

import pytest

from checkmate_tf.ir.graph import graph_from_instance, load_instance
from checkmate_tf.ir.plan import plan_from_order
from checkmate_tf.ir.simulate import keep_all_timeline, simulate
from checkmate_tf.ir.verify import verify_graph, verify_plan
from checkmate_tf.solvers.base import Deadline
from checkmate_tf.solvers.bounds import findings
from checkmate_tf.solvers.layered import layered_instance, main


@pytest.mark.parametrize("ops", [1, 2, 50, 3000])
def test_a_layered_graph_has_its_ops_and_one_layer_of_ends(ops):
    graph = verify_graph(graph_from_instance(layered_instance(ops, width=8, seed=3)))
    unread = [value for value, readers in enumerate(graph.consumers) if not readers]
    assert len(graph.ops) == ops and unread == list(range(unread[0], ops)) and len(unread) <= 8
    assert sum(not op.inputs for op in graph.ops) <= 8


def test_a_seed_makes_one_graph():
    assert layered_instance(60, seed=1) == layered_instance(60, seed=1) != layered_instance(60, seed=2)


def test_the_command_writes_an_instance(tmp_path, capsys):
    path = tmp_path / "net.json"
    assert main(["--ops", "30", "--seed", "7", "--output", str(path)]) == 0
    assert len(load_instance(path).ops) == 30 and json.loads(path.read_text())["name"] == "layered_n30_s7"
    with pytest.raises(SystemExit):
        main(["--ops", "0", "--output", str(path)])
    assert "must be positive" in capsys.readouterr().err


def test_ten_thousand_ops_are_judged_and_bounded_in_a_moment():
    graph = verify_graph(graph_from_instance(layered_instance(10_000)))
    started = time.monotonic()
    base = keep_all_timeline(graph)
    found = next(findings(graph, base.peak_bytes * 2 // 3, "any", Deadline(60)))
    assert simulate(graph, verify_plan(graph, plan_from_order(graph, graph.order))) == base
    assert found.bound_seconds > 1.01 * graph.seconds
    assert time.monotonic() - started < 20  # about one second where nobody else computes
