"""What a user reads: progress and tables, on any terminal or none, and in a notebook."""

import dataclasses
import html
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import keras
from absl import logging
from rich.console import Console
from rich.table import Table

from checkmate_tf.bridge import measure
from checkmate_tf.ir.graph import Graph
from checkmate_tf.ir.plan import Compute, plan_from_order
from checkmate_tf.ir.simulate import structural_floor
from checkmate_tf.ir.units import format_bytes
from checkmate_tf.solvers import Progress, Solution, Status

_QUIET_SECONDS = 1.0
_LARGEST_VALUES = 5
_KINDS = 3


@dataclasses.dataclass(frozen=True)
class MemoryEstimate:
    """What a training step needs when nothing is planned. Sizes are in bytes.

    resident: label -> bytes held during the whole step: weights, optimizer slots, other variables, the batch
    keep_all_peak_bytes, peak_op: the simulated peak without recomputation, and the op that runs there
    floor_bytes, floor_op: what no plan can go below, and the op that needs it
    largest: (op name, shape, bytes) of the largest values
    step_seconds: the predicted time of the step without recomputation
    """

    device: str
    resident: dict[str, int]
    keep_all_peak_bytes: int
    peak_op: str
    floor_bytes: int
    floor_op: str
    largest: tuple[tuple[str, tuple[int, ...], int], ...]
    step_seconds: float

    @property
    def resident_bytes(self) -> int:
        """Everything that is held whatever the plan."""
        return sum(self.resident.values())

    @property
    def batch_bytes(self) -> int:
        """The batch alone."""
        return self.resident["batch"]

    @classmethod
    def of(cls, prepared) -> "MemoryEstimate":
        """The estimate of a prepared step."""
        graph, base = prepared.graph, prepared.base
        floor_bytes, floor_op = structural_floor(graph)
        largest = sorted(graph.values, key=lambda value: (-value.bytes, value.index))[:_LARGEST_VALUES]
        return cls(measure.device_description(), prepared.residents.rows(), base.peak_bytes,
                   op_at_peak(graph, base.peak_step), floor_bytes, graph.ops[floor_op].name if floor_op >= 0 else "",
                   tuple((graph.ops[value.producer].name, value.shape, value.bytes) for value in largest), base.seconds)

    def table(self) -> Table:
        """The estimate as a table."""
        table = _table("checkmate_tf: memory of one training step")
        table.add_row("device", "", self.device)
        _add_residents(table, self.resident)
        table.add_section()
        table.add_row("peak, everything kept", format_bytes(self.keep_all_peak_bytes), f"at {short_name(self.peak_op)}")
        table.add_row("floor of any plan", format_bytes(self.floor_bytes), f"at {short_name(self.floor_op)}")
        table.add_section()
        for position, (name, shape, size) in enumerate(self.largest):
            table.add_row("" if position else "largest values", format_bytes(size), f"{short_name(name)} {list(shape)}")
        return table

    def __str__(self) -> str:
        return as_text(self.table())

    def _repr_html_(self) -> str:
        return as_html(self.table())


def short_name(name: str) -> str:
    """A TensorFlow op's name as a user knows it: layer and op, without the model's name, the backward ones marked."""
    *scopes, last = name.split("/")
    backward = scopes[:1] == ["gradient_tape"]
    scopes = scopes[1:] if backward else scopes
    scopes = scopes[1:] if len(scopes) > 1 else scopes
    return "/".join([*scopes, last]) + (" (backward)" if backward else "")


def op_at_peak(graph: Graph, step: int) -> str:
    """The op that runs at a step of the keep-everything plan."""
    steps = plan_from_order(graph, graph.order).steps
    computed = [item for item in steps[:step + 1] if isinstance(item, Compute)]
    return graph.ops[computed[-1].op].name if computed else ""


class Narrator:
    """Tells what is going on. As a context it shows a live line on a terminal, or a line a stage elsewhere.

    verbose: 0 is silent; 1 and "auto" are live where the output is a terminal; 2 is a line a stage
    """

    def __init__(self, verbose: Any):
        self._level = 1 if verbose == "auto" else int(verbose)
        self._console = Console(highlight=False)
        self._status = None
        self._started = time.monotonic()
        self._stage = ""

    def __enter__(self) -> "Narrator":
        if self._level == 1 and self._console.is_terminal and keras.config.is_interactive_logging_enabled():
            self._status = self._console.status("checkmate_tf: starting")
            self._status.start()
        return self

    def __exit__(self, *error) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None

    def stage(self, text: str) -> None:
        """A new stage, or the same one further on; without a terminal only its start is told, once it takes time."""
        kind = text.split(":")[0]
        seconds = time.monotonic() - self._started
        if self._status is not None:
            self._status.update(f"checkmate_tf: {text} ({seconds:.0f} s)")
        elif kind != self._stage and (seconds > _QUIET_SECONDS or self._level == 2):
            self.say(f"{kind} ({seconds:.1f} s so far)")
        self._stage = kind

    def solving(self, base_seconds: float, progress: Progress) -> None:
        """A solver's progress: incumbent, bound and gap over the step without recomputation."""
        if progress.incumbent_seconds is None or base_seconds <= 0:
            return
        gap = progress.incumbent_seconds / max(progress.bound_seconds, 1e-30) - 1
        self.stage(f"solving: best +{100 * (progress.incumbent_seconds / base_seconds - 1):.2f} % time, bound "
                   f"+{100 * (progress.bound_seconds / base_seconds - 1):.2f} %, gap {100 * gap:.2f} %")

    def say(self, text: str) -> None:
        """One line, through Keras's switch: standard output, or the log when interactive logging is off."""
        if self._level == 0:
            return
        if keras.config.is_interactive_logging_enabled():
            self._console.print(f"checkmate_tf: {text}", markup=False)
        else:
            logging.info("checkmate_tf: %s", text)

    def show(self, table: Table) -> None:
        """A table, through the same switch."""
        if self._level == 0:
            return
        if keras.config.is_interactive_logging_enabled():
            self._console.print(table)
        else:
            logging.info("%s", as_text(table))


def plan_table(budget: Any, solution: Solution | None, estimate: MemoryEstimate | None, measured_peak_bytes: int | None,
               recomputed: Sequence[tuple[str, int]] = ()) -> Table:
    """The first screen: device, budget, residents, peaks, recomputation, and how good the plan is.

    recomputed: (kind of op, runs more than one each) of what the plan recomputes most
    """
    table = _table("checkmate_tf: training within a memory budget")
    given = "a saved plan's" if isinstance(budget, Solution) else f"given as {budget!r}"
    if solution is None or estimate is None:
        table.add_row("budget", "", f"{given}; planned when the first batch arrives")
        return table
    table.add_row("device", "", estimate.device)
    table.add_row("budget", format_bytes(solution.budget_bytes), given)
    _add_residents(table, estimate.resident)
    table.add_section()
    table.add_row("peak, everything kept", format_bytes(estimate.keep_all_peak_bytes),
                  f"at {short_name(estimate.peak_op)}")
    _add_plan(table, solution, recomputed)
    if measured_peak_bytes is not None:
        table.add_row("measured peak", format_bytes(measured_peak_bytes),
                      f"the allocator's: {100 * measured_peak_bytes / solution.placed_peak_bytes:.1f} % of what was planned")
    elif measure.measured_memory() is None:
        table.add_row("measured peak", "not measured", "this device's allocator keeps no statistics")
    return table


def solution_table(solution: Solution) -> Table:
    """A plan without a model: budget, peaks, recomputation, and how good the plan is."""
    table = _table("checkmate_tf: a plan")
    table.add_row("budget", format_bytes(solution.budget_bytes), "")
    table.add_row("peak, everything kept", format_bytes(solution.base_peak_bytes), "")
    _add_plan(table, solution, ())
    return table


def recomputed_kinds(graph: Graph, solution: Solution) -> tuple[tuple[str, int], ...]:
    """(kind of op, runs more than one each) of what a plan recomputes, the most time first."""
    again: dict[str, int] = {}
    seconds: dict[str, float] = {}
    for op, runs in zip(graph.ops, solution.timeline.runs):
        if runs > 1:
            again[op.kind] = again.get(op.kind, 0) + runs - 1
            seconds[op.kind] = seconds.get(op.kind, 0.0) + (runs - 1) * op.seconds
    return tuple((kind, again[kind]) for kind in sorted(again, key=lambda kind: (-seconds[kind], kind)))


def _add_residents(table: Table, resident: Mapping[str, int]) -> None:
    table.add_section()
    for position, (label, size) in enumerate(resident.items()):
        table.add_row(label, format_bytes(size), "" if position else "these are held during the whole step")


def _add_plan(table: Table, solution: Solution, recomputed: Sequence[tuple[str, int]]) -> None:
    note = "with the allocator's chunks" if solution.placed_peak_bytes != solution.peak_bytes else ""
    if solution.plan.fillers:
        note += f", {len(solution.plan.fillers)} of them cut to size by fillers"
    table.add_row("planned peak", format_bytes(solution.placed_peak_bytes), note)
    again = sum(count - 1 for count in solution.timeline.runs)
    named = [f"{count} {kind}" for kind, count in recomputed[:_KINDS]]
    others = again - sum(count for _, count in recomputed[:_KINDS])
    kinds = ": " + ", ".join([*named, *([f"{others} others"] if others else [])]) if named else ""
    table.add_row("recomputed", f"{again} runs",
                  f"of {len(solution.timeline.runs)} ops{kinds}" if again else "nothing: everything is kept")
    table.add_row("predicted time", f"{100 * solution.expected_overhead:+.1f} %", "of a step, over keeping everything")
    table.add_row("solver", solution.solver, _quality(solution))


def as_text(table: Table) -> str:
    """A table as plain text."""
    console = Console(width=110, highlight=False, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def as_html(table: Table) -> str:
    """A table as HTML, for notebooks: colours and fonts are the page's, light or dark."""
    rows = zip(*(column.cells for column in table.columns))
    cells = ["".join(f'<td style="text-align:{column.justify}">{html.escape(str(cell))}</td>' for column, cell in zip(table.columns, row))
             for row in rows]
    head = "".join(f"<th>{html.escape(str(column.header))}</th>" for column in table.columns) if table.show_header else ""
    body = "".join(f"<tr>{row}</tr>" for row in cells)
    return f"<table><caption>{html.escape(str(table.title))}</caption>{f'<tr>{head}</tr>' if head else ''}{body}</table>"


def batch_table(search) -> Table:
    """What `max_batch_size` found."""
    table = _table("checkmate_tf: the largest batch")
    table.add_row("budget", format_bytes(search.budget_bytes), "")
    table.add_row("largest batch", str(search.batch_size), "no plan fits a larger one: an op alone needs more than the budget"
                  if search.is_proven else "for one more no plan was found")
    table.add_row("everything kept", str(search.keep_all_batch_size), "the largest batch without recomputation")
    table.add_row("limit of any plan", str(search.limit_batch_size), "beyond it an op alone needs more than the budget")
    table.add_section()
    table.add_row("peak, everything kept", format_bytes(search.solution.base_peak_bytes), "for the largest batch")
    _add_plan(table, search.solution, ())
    return table


def tradeoff_table(frame) -> Table:
    """The rows of `tradeoff`."""
    table = Table(title="checkmate_tf: what less memory costs", title_justify="left")
    for column in ("solver", "budget", "peak", "extra time", "bound", "status", "solved in"):
        table.add_column(column, justify="left" if column in ("solver", "status") else "right")
    for row in frame.to_dict("records"):
        base_seconds = row["seconds"] / (1 + row["overhead"])
        found = not math.isnan(row["seconds"])
        table.add_row(row["solver"], format_bytes(row["budget_bytes"]), format_bytes(row["peak_bytes"]) if found else "-",
                      f"+{100 * row['overhead']:.1f} %" if found else "-",
                      f"+{100 * (row['bound'] / base_seconds - 1):.1f} %" if found else "-",
                      row["status"] if row["status"] != "infeasible" else f"infeasible: the floor is {format_bytes(row['floor_bytes'])}",
                      "-" if math.isnan(row["solve_seconds"]) else f"{row['solve_seconds']:.1f} s")
    return table


def _quality(solution: Solution) -> str:
    solve_seconds = solution.stats.get("solve_seconds", math.nan)
    if solution.status is Status.OPTIMAL:
        return f"optimal, {solve_seconds:.1f} s"
    return f"{solution.status.value}, at most {100 * solution.gap:.1f} % above the bound, {solve_seconds:.1f} s"


def _table(title: str) -> Table:
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(overflow="fold")
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    return table
