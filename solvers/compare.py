"""The table of all solvers: what each makes of some instances within some budgets, with published numbers beside.

    python -m checkmate_tf.solvers.compare INSTANCE.json... --budgets 0.9,0.7,0.5 --time-limit 10 --output table.csv
    python -m checkmate_tf.solvers.compare INSTANCE.json... --shares 0.6,0.4,0.2 --solvers auto,fastsa --seeds 10

One row for each instance, budget, solver and seed. Shares are budgets as shares of the way from the floor, below which no
plan can go, to the peak of keeping everything. Every plan has passed the simulator: none above its budget is in the
table as a plan. Solvers are run one after the other, in this process. Published rows come from `published.json`, which
says where from; they were taken on other machines, with other notions of the peak, and to one digit.

Below stands, for each solver, the geometric mean of its cost over the reference's: over the least known cost in the
table, or the cost of `--reference SOLVER`, as in Checkmate's table 2. A mean over the budgets where a solver finds a
plan flatters those that give up early, so its coverage stands beside: plans found of those that somebody here found.
With several seeds a third table says how far they are apart.
"""

import argparse
import csv
import dataclasses
import json
import math
import pathlib
import sys
import time
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console
from rich.table import Table

from checkmate_tf.ir.errors import CheckmateError
from checkmate_tf.ir.graph import Graph, load_instance
from checkmate_tf.ir.simulate import keep_all_timeline, structural_floor
from checkmate_tf.ir.verify import verify_graph
from checkmate_tf.solvers import Limits, get, names, solve
from checkmate_tf.solvers.__main__ import budget_from_text, solver_in_order
from checkmate_tf.solvers.base import Scope

_WIDTH = 140  # of a table that goes to a file
_PUBLISHED = pathlib.Path(__file__).with_name("published.json")


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of the table. What does not exist is None; `is_published` means that nothing was run.

    budget, peak: shares of the peak of keeping everything; overhead, bound: shares of its cost beyond it; bound_scope:
    which plans the bound holds for, "" for all; seconds: of solving
    """

    instance: str
    budget: float
    solver: str
    status: str
    feasible: bool
    cost: float | None
    overhead: float | None
    peak: float | None
    bound: float | None
    bound_scope: str
    seconds: float
    is_published: bool = False
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Summary:
    """A solver over the whole table: the geometric mean of cost / reference, and for how many cases it has a plan."""

    solver: str
    ratio: float | None
    covered: int
    cases: int


@dataclasses.dataclass(frozen=True)
class Spread:
    """A solver on one instance and budget over several seeds: how many found a plan, and the overheads of those."""

    instance: str
    budget: float
    solver: str
    found: int
    seeds: int
    best: float | None
    mean: float | None
    worst: float | None


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; the exit code."""
    options = _parser().parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else _WIDTH)
    try:
        rows = []
        for row in _rows(options):
            print(_line(row), file=sys.stderr)
            rows.append(row)
        print_table(console, rows, options.reference)
        if options.output is not None:
            write(options.output, rows)
    except CheckmateError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    return 1 if any(row.status.startswith("error") for row in rows) else 0


def compare(graph: Graph, instance: str, budget_bytes: int, budget: float, solvers: Iterable[str], limits: Limits,
            order: str | None = None) -> Iterator[Row]:
    """A row for each solver. A solver that breaks a promise gets a row that says so, not a plan.

    order: "fixed" or "free", for solvers that leave the choice
    """
    base = keep_all_timeline(graph)
    for name in solvers:
        started = time.monotonic()
        try:
            solution = solve(graph, budget_bytes, solver_in_order(name, order), limits)
        except CheckmateError as error:
            yield Row(instance, budget, name, f"error: {error}", False, None, None, None, None, "",
                      time.monotonic() - started, seed=limits.seed)
            continue
        has_plan = solution.plan is not None
        has_bound = solution.bound_seconds > solution.base_seconds
        yield Row(instance, budget, name, solution.status.value, has_plan, solution.seconds if has_plan else None,
                  solution.overhead if has_plan else None,
                  solution.peak_bytes / max(base.peak_bytes, 1) if has_plan else None,
                  solution.bound_seconds / solution.base_seconds - 1 if has_bound else None,
                  solution.stats.get("bound_scope", "") if has_bound else "", solution.stats["solve_seconds"],
                  seed=limits.seed)


def published(instance: str, budget: float, base_seconds: float) -> Iterator[Row]:
    """The published numbers for this instance and budget."""
    for plan in json.loads(_PUBLISHED.read_text())["plans"]:
        if plan["instance"] == instance and math.isclose(plan["budget"], budget):
            overhead = plan["overhead_percent"] / 100
            status = f"{plan['order']} order" if plan["feasible"] else f"{plan['order']} order, over the budget"
            yield Row(instance, budget, plan["method"], status, plan["feasible"], base_seconds * (1 + overhead), overhead,
                      None, None, "", plan["seconds"], True)


def summaries(rows: Sequence[Row], reference: str | None = None) -> list[Summary]:
    """For each solver that was run its mean ratio and its coverage, in the order of the rows."""
    costs: dict[tuple[str, float], list[float]] = {}
    for row in rows:
        if row.feasible and not row.is_published and reference in (None, row.solver):
            costs.setdefault((row.instance, row.budget), []).append(row.cost)
    found = []
    for solver in dict.fromkeys(row.solver for row in rows if not row.is_published):
        ratios = [row.cost / min(costs[row.instance, row.budget]) for row in rows
                  if row.solver == solver and row.feasible and min(costs.get((row.instance, row.budget), [0.0])) > 0]
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else None
        cases = sum(row.solver == solver and (row.instance, row.budget) in costs for row in rows)
        found.append(Summary(solver, mean, len(ratios), cases))
    return found


def spreads(rows: Iterable[Row]) -> list[Spread]:
    """For each instance, budget and solver that was run what its seeds found, in the order of the rows."""
    groups: dict[tuple[str, float, str], list[Row]] = {}
    for row in rows:
        if not row.is_published:
            groups.setdefault((row.instance, row.budget, row.solver), []).append(row)
    found = []
    for key, group in groups.items():
        overheads = [row.overhead for row in group if row.feasible]
        numbers = (min(overheads), math.fsum(overheads) / len(overheads), max(overheads)) if overheads else (None,) * 3
        found.append(Spread(*key, len(overheads), len(group), *numbers))
    return found


def print_table(console: Console, rows: Sequence[Row], reference: str | None = None) -> None:
    """All rows, and below the summaries."""
    table = Table("instance", "budget", "solver", "cost", "overhead", "peak", "feasible", "bound", "seconds",
                  title="Solvers. Published rows in brackets; a bound marked * holds for the given order")
    for column in table.columns[3:]:
        column.justify = "right"
    case = None
    for row in rows:
        if case not in (None, (row.instance, row.budget)):
            table.add_section()
        case = (row.instance, row.budget)
        solver = rf"\[{row.solver}]" if row.is_published else row.solver
        bound = _text(row.bound, "{:.3%}") + ("*" if row.bound_scope not in ("", Scope.ANY) else "")
        table.add_row(row.instance, f"{row.budget:.3g}", solver, _text(row.cost, "{:.6g}"), _text(row.overhead, "{:.3%}"),
                      _text(row.peak, "{:.1%}"), "yes" if row.feasible else row.status, bound, f"{row.seconds:.2f}")
    console.print(table)
    table = Table("solver", f"cost / {reference or 'least known'}", "coverage",
                  title="Geometric means over the budgets where a plan was found, and how many those are")
    for summary in summaries(rows, reference):
        table.add_row(summary.solver, _text(summary.ratio, "{:.4f}"), f"{summary.covered}/{summary.cases}")
    console.print(table)
    if len({row.seed for row in rows}) > 1:
        table = Table("instance", "budget", "solver", "plans", "best", "mean", "worst", title="Overheads over all seeds")
        for spread in spreads(rows):
            overheads = (_text(number, "{:.3%}") for number in (spread.best, spread.mean, spread.worst))
            table.add_row(spread.instance, f"{spread.budget:.3g}", spread.solver, f"{spread.found}/{spread.seeds}", *overheads)
        console.print(table)


def write(path: pathlib.Path, rows: Sequence[Row]) -> None:
    """The rows as JSON, or else as comma-separated values, by the file's name."""
    lines = [dataclasses.asdict(row) for row in rows]
    if path.suffix == ".json":
        path.write_text(json.dumps(lines, indent=1, allow_nan=False) + "\n")
        return
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in dataclasses.fields(Row)])
        writer.writeheader()
        writer.writerows(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m checkmate_tf.solvers.compare",
                                     description="Runs solvers on instances and prints the table.")
    parser.add_argument("instances", type=pathlib.Path, nargs="+", metavar="INSTANCE.json")
    budgets = parser.add_mutually_exclusive_group()
    budgets.add_argument("--budgets", default="0.9,0.7,0.5", help="fractions of the keep-everything peak, or absolute")
    budgets.add_argument("--shares", help="shares of the way from the floor to the keep-everything peak, instead")
    parser.add_argument("--solvers", default=",".join(names()), help=f"some of {', '.join(names())}")
    parser.add_argument("--reference", choices=names(), help="the solver whose cost the ratios are to")
    parser.add_argument("--time-limit", type=float, default=10.0, metavar="SECONDS")
    parser.add_argument("--threads", type=int, default=Limits().threads)
    parser.add_argument("--seed", type=int, default=Limits().seed)
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds, from --seed on")
    parser.add_argument("--order", choices=("fixed", "free"), help="for solvers that leave the choice")
    parser.add_argument("--output", type=pathlib.Path, help="a .csv or .json file")
    return parser


def _rows(options: argparse.Namespace) -> Iterator[Row]:
    solvers = [name for name in options.solvers.split(",") if name]
    for name in solvers:
        get(name)
    limits = Limits(seconds=options.time_limit, threads=options.threads)
    for path in options.instances:
        graph = verify_graph(load_instance(path))
        instance = json.loads(path.read_text()).get("name", path.stem)
        base = keep_all_timeline(graph)
        for budget_bytes, budget in _budgets(options, graph, base.peak_bytes):
            for seed in range(options.seed, options.seed + options.seeds):
                yield from compare(graph, instance, budget_bytes, budget, solvers, dataclasses.replace(limits, seed=seed),
                                   options.order)
            yield from published(instance, budget, base.seconds)


def _budgets(options: argparse.Namespace, graph: Graph, base_peak_bytes: int) -> Iterator[tuple[int, float]]:
    """Bytes, and the same as a fraction of the keep-everything peak."""
    for text in (options.shares or options.budgets).split(","):
        if options.shares is None:
            budget_bytes = budget_from_text(text, base_peak_bytes)
        else:
            floor_bytes, _ = structural_floor(graph)
            budget_bytes = floor_bytes + budget_from_text(text, base_peak_bytes - floor_bytes)
        is_fraction = options.shares is None and float(text) <= 1
        yield budget_bytes, float(text) if is_fraction else budget_bytes / max(base_peak_bytes, 1)


def _line(row: Row) -> str:
    return (f"{row.instance} {row.budget:.3g} {row.solver} seed {row.seed}: {row.status}, overhead {_text(row.overhead, '{:.3%}')}, "
            f"{row.seconds:.2f} s")


def _text(number: float | None, form: str) -> str:
    return "-" if number is None else form.format(number)


if __name__ == "__main__":
    sys.exit(main())
