import json

import pytest
import tensorflow as tf

from checkmate_tf import solvers, steps
from checkmate_tf.ir.graph import load_instance
from checkmate_tf.ir.simulate import keep_all_timeline, structural_floor
from checkmate_tf.ir.verify import verify_graph


def _small(is_causal):
    model = steps.transformer(is_causal=is_causal, vocabulary=50, length=16, blocks=2, width=8, heads=2)
    model.compile("adam", "mse")
    return model, tf.TensorSpec([3, 16], tf.int32), tf.TensorSpec([3, 16, 50])


@pytest.mark.parametrize("is_causal", [True, False])
def test_a_causal_transformer_does_not_see_what_comes_later(is_causal):
    model, _, _ = _small(is_causal)
    tokens = tf.random.stateless_uniform([1, 16], (1, 2), 0, 50, tf.int32)
    changed = tf.concat([tokens[:, :10], (tokens[:, 10:] + 1) % 50], axis=1)
    before, after = model(tokens)[0, :10], model(changed)[0, :10]
    assert bool(tf.reduce_all(tf.abs(before - after) < 1e-5)) == is_causal


def test_a_step_is_written_as_an_instance_that_solvers_read(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(steps, "STEPS", {"Tiny": lambda: _small(True)})
    assert steps.main([str(tmp_path), "Tiny", "--profile", "a100"]) == 0
    path = tmp_path / "tiny.json"
    graph = verify_graph(load_instance(path))
    assert capsys.readouterr().out == f"{path}: {len(graph.ops)} ops\n"
    assert "profile a100" in json.loads(path.read_text())["source"]
    assert max(value.bytes for value in graph.values) >= 3 * 16 * 50 * 4  # the scores are the largest value
    assert graph.resident_bytes > 0 and any(op.once for op in graph.ops) and any(op.overwrites for op in graph.ops)
    budget = (structural_floor(graph)[0] + keep_all_timeline(graph).peak_bytes) // 2
    assert solvers.solve(graph, budget, solvers.get("greedy"), solvers.Limits(seconds=20)).plan is not None
