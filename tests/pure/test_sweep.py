"""Sweeps over solvers and budgets: what a row says, what is cached, and what goes wrong in a row instead of the sweep."""

import dataclasses
import json
import math
import os
import pathlib
import time

import pytest

from checkmate_tf import solvers, sweep
from checkmate_tf.ir.errors import SolverError
from checkmate_tf.ir.graph import Graph, GraphBuilder
from checkmate_tf.solvers import Answer, Limits, StoppedBy

LIMITS = Limits(seconds=2.0)


@dataclasses.dataclass(frozen=True)
class Sleeps:
    """Takes a minute, and leaves word of its process before."""

    path: str
    name: str = "sleeps"

    def search(self, graph, budget_bytes, limits, report):
        pathlib.Path(self.path).write_text(str(os.getpid()))
        time.sleep(60)


def training_chain(layers: int = 6, seconds: float = 1.0) -> Graph:
    """A chain of layers and its gradients: each backward op reads the forward op before it and the gradient so far."""
    builder = GraphBuilder(resident_bytes=100)
    forward = [builder.op("f0", bytes=10, seconds=seconds)]
    for layer in range(1, layers):
        forward.append(builder.op(f"f{layer}", [forward[-1]], bytes=10, seconds=seconds))
    gradient = builder.op("loss", [forward[-1]], bytes=10, seconds=seconds, backward=True)
    for layer in reversed(range(layers)):
        gradient = builder.op(f"b{layer}", [gradient, forward[layer]], bytes=10, seconds=seconds, backward=True)
    return builder.build([gradient])


@dataclasses.dataclass(frozen=True)
class Breaks:
    """Promises what is no plan, or ends its process."""

    dies: bool = False
    name: str = "breaks"

    def search(self, graph, budget_bytes, limits, report):
        if self.dies:
            os._exit(7)
        return Answer((0, 0), StoppedBy.DONE)


def run(graph, budgets, *names, **options):
    return sweep.sweep(graph, budgets, [solvers.get(name) for name in names], LIMITS, **options)


def test_a_row_for_each_solver_and_budget_with_what_the_solver_found():
    # The floor is a backward op with two inputs and an output, 130; everything kept is 6 forward values and 2 gradients, 180.
    frame = run(training_chain(), [130, 150, 180], "auto", "keep_all", workers=2)
    assert list(frame["solver"]) == 3 * ["auto"] + 3 * ["keep_all"] and list(frame["budget_bytes"]) == 2 * [130, 150, 180]
    assert set(frame["floor_bytes"]) == {130} and set(frame["keep_all_bytes"]) == {180}
    auto = frame[frame["solver"] == "auto"]
    assert (auto["peak_bytes"] <= auto["budget_bytes"]).all() and (auto["bound"] <= auto["seconds"]).all()
    assert auto["overhead"].iloc[0] > auto["overhead"].iloc[1] > auto["overhead"].iloc[2] == 0
    assert list(auto["seconds"] / 13 - 1) == pytest.approx(list(auto["overhead"]))
    assert list(frame["status"])[3:] == ["unknown", "unknown", "optimal"]
    assert frame["peak_bytes"].isna().tolist()[3:] == [True, True, False] and math.isnan(frame["overhead"].iloc[3])


def test_a_budget_below_the_floor_is_a_row_that_says_so():
    row = run(training_chain(), [110], "auto").iloc[0]
    assert row["status"] == "infeasible" and row["floor_bytes"] == 130 and math.isnan(row["seconds"])


def test_a_solver_that_fails_is_a_row_and_not_the_end():
    frame = sweep.sweep(training_chain(), [150], [Breaks(), Breaks(dies=True), solvers.get("greedy")], LIMITS, workers=1)
    assert list(frame["status"]) == ["unknown", "unknown", "feasible"]
    assert "no plan" in frame["stopped_by"][0] and "exit code 7" in frame["stopped_by"][1]


def test_a_solver_that_cannot_travel_is_refused():
    @dataclasses.dataclass(frozen=True)
    class Local(Breaks):
        pass
    with pytest.raises(SolverError, match="can be pickled.*Received: .*Local"):
        sweep.sweep(training_chain(), [150], [Local()], LIMITS)


@dataclasses.dataclass(frozen=True)
class Knows:
    """What it found for each budget: how often it runs the first op again, None without a plan, and a bound."""

    found: tuple[tuple[int, int | None, float], ...]
    name: str = "auto"

    def search(self, graph, budget_bytes, limits, report):
        again, bound = next((again, bound) for budget, again, bound in self.found if budget == budget_bytes)
        order = None if again is None else (0,) * again + graph.order
        return Answer(order, StoppedBy.TIME, bound)


def test_plans_go_to_wider_budgets_and_bounds_to_tighter_ones():
    graph = training_chain()
    base = graph.seconds
    solver = Knows(((400, 1, base), (500, 2, base), (600, None, base), (450, 2, base + 1)))
    frame = sweep.sweep(graph, [400, 500, 600, 450], [solver], LIMITS).set_index("budget_bytes")
    assert frame["seconds"].to_dict() == {400: base + 1, 450: base + 1, 500: base + 1, 600: base + 1}
    assert frame["bound"].to_dict() == {400: base + 1, 450: base + 1, 500: base, 600: base}
    assert frame["status"].to_dict() == {400: "optimal", 450: "optimal", 500: "feasible", 600: "feasible"}
    assert frame["peak_bytes"].nunique() == 1 and frame["gap"][500] == pytest.approx(1 / base)
    alone = sweep.sweep(graph, [400, 600], [dataclasses.replace(solver, name="knows")], LIMITS)
    assert alone["seconds"].isna().tolist() == [False, True] and alone["bound"].tolist() == [base, base]


def test_what_was_solved_is_not_solved_again(tmp_path):
    told = []
    first = run(training_chain(), [150, 180], "chen_greedy", cache=tmp_path, tell=lambda *done: told.append(done[:2]))
    assert told == [(1, 2), (2, 2)] and len(list(tmp_path.glob("*.json"))) == 2
    for path in tmp_path.glob("*.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"solve_seconds": -1.0}))
    again = run(training_chain(), [140, 150, 180], "chen_greedy", cache=tmp_path, tell=lambda *done: told.append(done[:2]))
    assert told[2:] == [(3, 3)] and list(again["solve_seconds"])[1:] == [-1, -1]
    assert again[["peak_bytes", "seconds"]].iloc[1:].values.tolist() == first[["peak_bytes", "seconds"]].values.tolist()


@pytest.mark.parametrize("graph, solver, limits", [
    (training_chain(seconds=2.0), "chen_greedy", LIMITS),
    (dataclasses.replace(training_chain(), resident_bytes=101), "chen_greedy", LIMITS),
    (training_chain(7), "chen_greedy", LIMITS),
    (training_chain(), "chen_sqrt", LIMITS),
    (training_chain(), dataclasses.replace(solvers.get("chen_greedy"), steps=9), LIMITS),
    (training_chain(), "chen_greedy", Limits(seconds=3.0))],
    ids=["prices", "residents", "graph", "solver", "options", "limits"])
def test_a_row_for_anything_else_is_never_taken(graph, solver, limits, tmp_path):
    run(training_chain(), [150], "chen_greedy", cache=tmp_path)
    solver = solvers.get(solver) if isinstance(solver, str) else solver
    sweep.sweep(graph, [150], [solver], limits, cache=tmp_path)
    assert len(list(tmp_path.glob("*.json"))) == 2


def test_an_interrupt_ends_the_processes_and_keeps_what_is_done(tmp_path):
    note = tmp_path / "process"

    def interrupt(done, total, text):
        while not (note.exists() and note.read_text()):
            time.sleep(0.05)
        raise KeyboardInterrupt

    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        sweep.sweep(training_chain(), [150], [solvers.get("keep_all"), Sleeps(str(note))], LIMITS, workers=2, cache=tmp_path,
                    tell=interrupt)
    assert time.monotonic() - started < 30 and len(list(tmp_path.glob("*.json"))) == 1
    with pytest.raises(ProcessLookupError):
        os.kill(int(note.read_text()), 0)


def test_a_broken_cache_file_is_solved_again(tmp_path):
    first = run(training_chain(), [150], "chen_greedy", cache=tmp_path)
    next(tmp_path.glob("*.json")).write_text("{")
    again = run(training_chain(), [150], "chen_greedy", cache=tmp_path)
    assert first["seconds"].equals(again["seconds"])


def test_where_nothing_can_be_kept_the_rows_come_with_a_warning(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="could not be kept"):
        frame = run(training_chain(), [150], "chen_greedy", cache=tmp_path / "file" / "folder")
    assert len(frame) == 1


def test_an_empty_sweep_is_an_empty_frame():
    frame = run(training_chain(), [])
    assert list(frame.columns) == list(sweep.COLUMNS) and not len(frame)


def test_default_budgets_reach_from_the_floor_to_keeping_everything():
    graph = training_chain()
    budgets = sweep.default_budgets(sweep.keep_all_timeline(graph), 130, 6)
    assert budgets == [130, 140, 150, 160, 170, 180]
