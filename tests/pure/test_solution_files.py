import json

import pytest

from checkmate_tf import solvers
from checkmate_tf.ir.errors import PlanError
from checkmate_tf.ir.simulate import simulate
from checkmate_tf.ir.verify import verify_plan
from tests import strategies

GRAPH = strategies.linear_net(8)


@pytest.fixture
def solution():
    return solvers.solve(GRAPH, 8, solvers.get("linearized_greedy"))


def test_a_solution_reads_back_as_it_was(solution, tmp_path):
    path = tmp_path / "plan.json"
    solution.save(path)
    loaded = solvers.Solution.load(path)
    assert loaded == solution
    assert max(loaded.timeline.runs) == 2
    verify_plan(GRAPH, loaded.plan)


def test_without_a_plan_there_is_nothing_to_save(tmp_path):
    path = tmp_path / "plan.json"
    with pytest.raises(PlanError):
        solvers.solve(GRAPH, 1, solvers.get("keep_all")).save(path)
    assert not path.exists()


def test_a_plan_for_another_graph_is_refused_by_whoever_uses_it(solution, tmp_path):
    path = tmp_path / "plan.json"
    solution.save(path)
    other = strategies.linear_net(8, bytes=2)
    for use in (verify_plan, simulate):
        with pytest.raises(PlanError, match="another graph"):
            use(other, solvers.Solution.load(path).plan)


@pytest.mark.parametrize("corrupt", [
    lambda fields: fields.pop("steps"), lambda fields: fields.pop("graph_key"), lambda fields: fields.pop("format"),
    lambda fields: fields.update(format="checkmate_tf plan 0"), lambda fields: fields.update(status="great"),
    lambda fields: fields.update(stopped_by=None), lambda fields: fields.update(steps=3),
    lambda fields: fields.update(steps=["a"]), lambda fields: fields.update(timeline={}),
    lambda fields: fields.update(timeline=[]), lambda fields: fields.pop("budget_bytes")])
def test_a_corrupted_file_is_refused(solution, tmp_path, corrupt):
    path = tmp_path / "plan.json"
    solution.save(path)
    fields = json.loads(path.read_text())
    corrupt(fields)
    path.write_text(json.dumps(fields))
    with pytest.raises(PlanError, match="Received"):
        solvers.Solution.load(path)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"3", b"null", b"\x80\x81"])
def test_a_foreign_file_is_refused(tmp_path, content):
    path = tmp_path / "foreign.json"
    path.write_bytes(content)
    with pytest.raises(PlanError, match="Solution.save"):
        solvers.Solution.load(path)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(PlanError, match="missing.json"):
        solvers.Solution.load(tmp_path / "missing.json")


def test_a_truncated_file_is_refused(solution, tmp_path):
    path = tmp_path / "plan.json"
    solution.save(path)
    path.write_text(path.read_text()[:-10])
    with pytest.raises(PlanError):
        solvers.Solution.load(path)


def test_steps_that_were_tampered_with_do_not_pass_as_a_plan(solution, tmp_path):
    path = tmp_path / "plan.json"
    solution.save(path)
    fields = json.loads(path.read_text())
    fields["steps"] = fields["steps"][1:]
    path.write_text(json.dumps(fields))
    with pytest.raises(PlanError):
        verify_plan(GRAPH, solvers.Solution.load(path).plan)
