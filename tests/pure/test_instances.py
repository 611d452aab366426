import copy
import json

import pytest

from checkmate_tf.ir.errors import GraphError
from checkmate_tf.ir.graph import graph_from_instance, instance_from_graph, load_instance
from checkmate_tf.ir.simulate import keep_all_timeline
from checkmate_tf.ir.verify import verify_graph
from tests import oracle, strategies

INSTANCE = {
    "name": "tiny", "source": "by hand",
    "ops": [{"name": "a", "cost": 1, "bytes": 4, "backward": False},
            {"name": "b", "cost": 2.5, "bytes": 2, "backward": False},
            {"name": "grad", "cost": 0, "bytes": 1, "backward": True}],
    "edges": [[0, 1], [0, 2], [1, 2]]}


def changed(change):
    instance = copy.deepcopy(INSTANCE)
    change(instance)
    return instance


def test_an_instance_becomes_a_graph():
    graph = verify_graph(graph_from_instance(INSTANCE))
    assert [op.name for op in graph.ops] == ["a", "b", "grad"]
    assert [op.inputs for op in graph.ops] == [(), (0,), (0, 1)]
    assert [op.backward for op in graph.ops] == [False, False, True]
    assert (graph.seconds, graph.resident_bytes, graph.results) == (3.5, 0, ())
    assert keep_all_timeline(graph).peak_bytes == 7


def test_backward_may_be_left_out():
    graph = graph_from_instance({"ops": [{"name": "a", "cost": 0, "bytes": 0}], "edges": []})
    assert not graph.ops[0].backward


def test_an_empty_instance_is_an_empty_graph():
    assert graph_from_instance({"ops": [], "edges": []}).ops == ()


def test_a_graph_with_everything_in_it_survives_being_written():
    for seed in range(60):
        graph = strategies.random_graph(seed, max_ops=9)
        again = verify_graph(graph_from_instance(json.loads(json.dumps(instance_from_graph(graph, "any")))))
        assert again.ops == graph.ops and again.values == graph.values
        assert (again.results, again.resident_bytes) == (graph.results, graph.resident_bytes)
    assert oracle.peak_bytes(again, again.order) == keep_all_timeline(graph).peak_bytes


def test_outputs_are_named_by_op_and_port():
    graph = verify_graph(graph_from_instance({
        "ops": [{"name": "a", "cost": 1, "bytes": [4, 2]}, {"name": "none", "cost": 1, "bytes": [], "after": [0]},
                {"name": "b", "cost": 1, "bytes": 2, "reuses": [[0, 1]], "scratch_bytes": 3, "once": "a draw"}],
        "edges": [[0, 2, 1], [0, 2]], "results": [[2, 0]], "resident_bytes": 5}))
    assert [op.outputs for op in graph.ops] == [(0, 1), (), (2,)]
    assert (graph.ops[2].inputs, graph.ops[2].reuses, graph.ops[1].after) == ((1, 0), (1,), (0,))
    # 5 resident, 4 + 2 from a, 3 scratch; b's own 2 take over a's second output.
    assert keep_all_timeline(graph).peak_bytes == 14


@pytest.mark.parametrize("change, message", [
    (lambda instance: instance["ops"][0].update(bytes=[1, 0.5]), "whole"),
    (lambda instance: instance["ops"][0].update(scratch_bytes=0.5), "whole"),
    (lambda instance: instance.update(results=[[2, 1]]), "no output 1 of op 2"),
    (lambda instance: instance.update(edges=[[0, 1], [0, 1, 0]]), "only once"),
    (lambda instance: instance.pop("edges"), "edges"),
    (lambda instance: instance.pop("ops"), "ops"),
    (lambda instance: instance["ops"][0].pop("cost"), "cost"),
    (lambda instance: instance["ops"][0].pop("bytes"), "bytes"),
    (lambda instance: instance["ops"][0].update(bytes=1.5), "whole"),
    (lambda instance: instance["ops"][0].update(bytes=float("inf")), "whole"),
    (lambda instance: instance["ops"][0].update(bytes="many"), "TypeError"),
    (lambda instance: instance["ops"][0].update(cost="high"), "ValueError"),
    (lambda instance: instance.update(edges=[[0, 1, 2]]), "ValueError"),
    (lambda instance: instance.update(edges=[[0, 3]]), "of 3 ops"),
    (lambda instance: instance.update(edges=[[-1, 1]]), "of 3 ops"),
    (lambda instance: instance.update(edges=[[0, 1], [1, 0]]), "a cycle"),
    (lambda instance: instance.update(edges=[[1, 1]]), "a cycle"),
    (lambda instance: instance.update(edges=[[0, 1], [0, 1]]), "only once")])
def test_a_malformed_instance_is_refused(change, message):
    with pytest.raises(GraphError, match=message):
        graph_from_instance(changed(change))


@pytest.mark.parametrize("change", [
    lambda instance: instance["ops"][0].update(bytes=-1), lambda instance: instance["ops"][0].update(cost=-1),
    lambda instance: instance["ops"][0].update(cost=float("nan"))])
def test_unsound_numbers_are_refused_by_verify(change):
    with pytest.raises(GraphError, match="^G3"):
        verify_graph(graph_from_instance(changed(change)))


def test_files_are_read(tmp_path):
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(INSTANCE))
    assert load_instance(path).key == graph_from_instance(INSTANCE).key


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", "3"])
def test_files_that_hold_no_instance_are_refused(tmp_path, text):
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(GraphError, match="Received"):
        load_instance(path)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(GraphError, match="missing.json"):
        load_instance(tmp_path / "missing.json")
