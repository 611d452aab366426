import csv
import json

import pytest

from checkmate_tf.ir.errors import SolverError
from checkmate_tf.solvers import Limits, compare
from checkmate_tf.solvers.compare import Row, Spread, main, published, spreads, summaries
from tests import strategies
from tests.pure.test_solvers_command import instance_of


def row(solver, budget, cost, **changes):
    fields = {"instance": "net", "budget": budget, "solver": solver, "status": "feasible", "feasible": cost is not None,
              "cost": cost, "overhead": None, "peak": None, "bound": None, "bound_scope": "", "seconds": 0.0}
    return Row(**fields | changes)


ROWS = (row("a", 0.9, 10.0), row("b", 0.9, 20.0), row("a", 0.5, None), row("b", 0.5, 30.0),
        row("printed", 0.5, 1.0, is_published=True), row("a", 0.3, None), row("b", 0.3, None))


def test_ratios_are_geometric_means_over_plans_with_the_coverage_beside():
    # Somebody has a plan at 0.9 and at 0.5: two cases. a: 10/10 at one of them. b: 20/10 and 30/30, sqrt(2 * 1) = 1.414.
    first, second = summaries(ROWS)
    assert (first.solver, first.ratio, first.covered, first.cases) == ("a", 1.0, 1, 2)
    assert (second.solver, second.covered, second.cases) == ("b", 2, 2) and second.ratio == pytest.approx(2 ** 0.5)


def test_ratios_to_a_reference_cover_what_the_reference_covers():
    first, second = summaries(ROWS, "a")  # a has a plan at 0.9 only
    assert (first.ratio, first.covered, first.cases) == (1.0, 1, 1)
    assert (second.ratio, second.covered, second.cases) == (pytest.approx(2.0), 1, 1)


def test_seeds_are_cases_of_their_own_and_their_spread_is_told():
    seeds = (row("a", 0.9, 10.0, overhead=0.0), row("a", 0.9, 11.0, overhead=0.1, seed=1), row("a", 0.9, None, seed=2))
    (summary,) = summaries(seeds)  # sqrt(10/10 * 11/10)
    assert (summary.covered, summary.cases) == (2, 3) and summary.ratio == pytest.approx(1.1 ** 0.5)
    assert spreads((*seeds, ROWS[4])) == [Spread("net", 0.9, "a", 2, 3, 0.0, 0.05, 0.1)]
    assert spreads(ROWS[5:]) == [Spread("net", 0.3, name, 0, 1, None, None, None) for name in "ab"]


def test_published_numbers_are_found_by_instance_and_budget():
    found = {row.solver: row for row in published("rl1_n100", 0.7, 1000.0)}
    assert set(found) == {"FastSA"} and not found["FastSA"].feasible and found["FastSA"].cost == pytest.approx(1022.0)
    assert {row.solver for row in published("rl1_n100", 0.9, 1.0)} == {"FastSA", "MOCCASIN", "Checkmate MILP"}
    assert list(published("another", 0.9, 1.0)) == []


def test_every_published_number_has_a_source():
    data = json.loads(compare._PUBLISHED.read_text())
    assert all(entry["source"] in data["sources"] for entry in (*data["plans"], *data["ratios"]))


def test_a_solver_that_breaks_a_promise_gets_no_plan_in_the_table(monkeypatch):
    def broken(*_):
        raise SolverError("above the budget")
    monkeypatch.setattr(compare, "solve", broken)
    (found,) = compare.compare(strategies.linear_net(3), "net", 5, 0.9, ["greedy"], Limits())
    assert found.status == "error: above the budget" and not found.feasible and found.cost is None


@pytest.mark.parametrize("suffix", ["csv", "json"])
def test_the_command_writes_what_it_prints(tmp_path, capsys, suffix):
    path, output = tmp_path / "net.json", tmp_path / f"table.{suffix}"
    path.write_text(json.dumps(instance_of(8)))
    code = main([str(path), "--budgets", "0.9,0.5", "--solvers", "greedy,chen_sqrt", "--time-limit", "1",
                 "--output", str(output)])
    assert code == 0
    printed = capsys.readouterr().out
    assert "greedy" in printed and "coverage" in printed and "2/2" in printed
    rows = json.loads(output.read_text()) if suffix == "json" else list(csv.DictReader(output.read_text().splitlines()))
    assert [(row["solver"], float(row["budget"])) for row in rows] == [
        ("greedy", 0.9), ("chen_sqrt", 0.9), ("greedy", 0.5), ("chen_sqrt", 0.5)]
    assert all(float(row["peak"]) <= float(row["budget"]) for row in rows if row["peak"])


def test_shares_count_from_the_floor_and_every_seed_gets_its_rows(tmp_path, capsys):
    path, output = tmp_path / "net.json", tmp_path / "table.json"
    path.write_text(json.dumps(instance_of(8)))  # keeping everything takes 10, the floor is 4
    code = main([str(path), "--shares", "0.25,1", "--solvers", "auto", "--order", "fixed", "--seed", "4", "--seeds", "2",
                 "--time-limit", "10", "--output", str(output)])
    rows = json.loads(output.read_text())
    assert code == 0 and "worst" in capsys.readouterr().out
    assert [(row["budget"], row["seed"]) for row in rows] == [(budget / 10, seed) for budget in (5, 10) for seed in (4, 5)]
    assert {row["bound_scope"] for row in rows[:2]} == {"plans whose first runs come in the given order"}


def test_an_unknown_solver_is_refused(tmp_path, capsys):
    path = tmp_path / "net.json"
    path.write_text(json.dumps(instance_of(2)))
    assert main([str(path), "--solvers", "magic"]) == 2
    assert "Received: 'magic'" in capsys.readouterr().err
