"""Pictures of plans, as Matplotlib figures: no display is needed, and nothing of pyplot's global state is touched.

    plot_memory(solution)       memory over the step, planned and with everything kept
    plot_schedule(solution)     which op is computed, kept and recomputed in which stage (Checkmate's Figure 7)
    plot_tradeoff(frame)        overhead over budget, a line for each solver (Checkmate's Figure 5)
    plot_batches(frame)         the largest batch of each planner as bars (Checkmate's Figure 6)
    plot_estimate(estimate)     what a step holds, whatever the plan, at the floor, and with everything kept

Each returns the figure, and saves it where `to_file` is given (PNG, SVG or PDF by its ending). Colours are Okabe and Ito's,
which colour-blind people tell apart; lines differ in their markers, too, so that black and white will do. The
ground is white whatever the page's.
"""

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from checkmate_tf.ir.errors import PlanError, UnsupportedError
from checkmate_tf.ir.plan import Compute, Plan
from checkmate_tf.ir.units import format_bytes

COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000", "#B8A900")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">", "h", "p")
_PLAN, _KEPT, _LIMIT = "#0072B2", "#E69F00", "#D55E00"
_NOTHING, _KEPT_CELL, _COMPUTED, _RECOMPUTED = range(4)
_CELLS = ("#FFFFFF", "#C9DCEB", "#0072B2", "#D55E00")
_MOST_CELLS = 600
_LONGEST_NAME = 44              # beside a picture
_CROSS_ROW = 0.03               # of the height, for each solver's crosses


def plot_memory(solution, to_file=None, *, dpi: int = 150) -> Figure:
    """The memory held over the step, planned and with everything kept, against the budget; both peaks are marked, and beside
    stands which values are the largest then, where the solution knows them.

    Raises PlanError for a solution without a plan.
    """
    _need_plan(solution)
    figure, axes = _axes((10, 4) if "held_at_peak" in solution.stats else (8, 4))
    for timeline, color, label, held_at, height in (
            (solution.base, _KEPT, "everything kept", "held_at_base_peak", 1.0),
            (solution.timeline, _PLAN, "this plan", "held_at_peak", 0.45)):
        held = [size / 1e6 for size in timeline.live_bytes]
        axes.plot(timeline.start_seconds, held, color=color, linewidth=1.0, drawstyle="steps-post",
                  label=f"{label}: peak {format_bytes(timeline.peak_bytes)}")
        axes.fill_between(timeline.start_seconds, held, step="post", alpha=0.2, color=color, linewidth=0)
        if timeline.live_bytes:
            axes.plot(timeline.start_seconds[timeline.peak_step], timeline.peak_bytes / 1e6, "o", color=color,
                      markersize=5)
        if solution.stats.get(held_at):
            lines = [f"largest at the peak, {label}:"]
            lines += [f"{format_bytes(size):>8}  {_end_of(name)}" for name, size in solution.stats[held_at]]
            axes.annotate("\n".join(lines), (1.02, height), xycoords="axes fraction", va="top", fontsize=7, family="monospace")
            axes.plot(1.01, height - 0.02, "o", color=color, markersize=5, transform=axes.transAxes, clip_on=False)
    axes.axhline(solution.budget_bytes / 1e6, color=_LIMIT, linewidth=1.2, linestyle="--",
                 label=f"budget {format_bytes(solution.budget_bytes)}")
    axes.set(xlabel="predicted time into the step (s)", ylabel="memory held (MB)", ylim=(0, None))
    axes.set_xlim(0, max(solution.timeline.seconds, solution.base.seconds) or 1)
    axes.legend(loc="lower center", fontsize=8)
    return _saved(figure, to_file, dpi)


def _end_of(name: str) -> str:
    """The name, or its end where it is too long to stand beside a picture."""
    return name if len(name) <= _LONGEST_NAME else "…" + name[1 - _LONGEST_NAME:]


def plot_schedule(solution, to_file=None, *, dpi: int = 150) -> Figure:
    """The plan as a matrix, a column for each op and a row for each stage, which ends with the first run of one more op.

    A cell says whether the op is computed for the first time in the stage (the diagonal), recomputed, or not run while
    something it made is held at the stage's start. Beyond some hundred ops a cell stands for several, and shows what is
    rarest. Raises PlanError for a solution without a plan.
    """
    _need_plan(solution)
    cells = schedule_cells(solution.plan)
    figure, axes = _axes((6.5, 6))
    count = len(cells)
    axes.imshow(_coarser(cells), cmap=ListedColormap(_CELLS), vmin=-0.5, vmax=len(_CELLS) - 0.5, interpolation="nearest",
                extent=(0, count, count, 0), aspect="equal")
    axes.set(xlabel="op, in order of first runs", ylabel="stage, ending with the first run of the op of this number")
    again = int(np.sum(solution.timeline.runs)) - len(solution.timeline.runs)
    named = [(_COMPUTED, "computed"), (_RECOMPUTED, f"recomputed ({again} runs)")]
    named += [(_KEPT_CELL, "kept")] if solution.plan.makers else []
    axes.legend(handles=[Patch(facecolor=_CELLS[cell], edgecolor="#555555", label=label) for cell, label in named],
                loc="upper right", fontsize=8)
    axes.set_title(f"{solution.solver}: peak {format_bytes(solution.peak_bytes)}, time +{100 * solution.overhead:.1f} %",
                   fontsize=10)
    return _saved(figure, to_file, dpi)


def schedule_cells(plan: Plan) -> np.ndarray:
    """What happens to each op in each stage: 0 nothing, 1 kept, 2 computed, 3 recomputed.   # uint8 [stages, ops]

    Ops come in the order of their first runs, so stage t ends with the first run of op t. Where the plan does not say
    who makes its values, nothing is marked as kept.
    """
    column = {op: position for position, op in enumerate(dict.fromkeys(plan.order))}
    values_of: dict[int, list[int]] = {}
    for value, op in enumerate(plan.makers):
        values_of.setdefault(op, []).append(value)
    cells = np.zeros((len(column), len(column)), dtype=np.uint8)
    held: set[int] = set()
    stage, is_over = 0, False
    for step in plan.steps:
        if not isinstance(step, Compute):
            held.discard(step.value)
            continue
        if is_over and stage + 1 < len(cells):
            stage, is_over = stage + 1, False
            cells[stage, [column[plan.makers[value]] for value in held]] = _KEPT_CELL
        here = column[step.op]
        held.update(values_of.get(step.op, ()))
        cells[stage, here] = _COMPUTED if here == stage and not is_over else _RECOMPUTED
        is_over = is_over or here == stage
    return cells


def plot_tradeoff(frame, to_file=None, *, max_overhead: float | None = None, dpi: int = 150) -> Figure:
    """Overhead over budget from the rows of `tradeoff`, a line for each solver.

    max_overhead: where the axis ends, so that a solver far off does not flatten the others; 1.0 is twice the time

    Budgets for which a solver has no plan are crosses on the upper edge; dashed lines mark the floor below which no plan can
    go, and the peak when everything is kept. Without rows the figure says so. Raises UnsupportedError for a frame that is not
    one of `tradeoff`.
    """
    _need_columns(frame, ("solver", "budget_bytes", "overhead"))
    figure, axes = _axes((8, 4.5))
    unit, unit_name = _unit(frame["budget_bytes"].max() if len(frame) else 0)
    axes.set(xlabel=f"budget ({unit_name})", ylabel="extra time of a step (%)")
    if not len(frame):
        axes.text(0.5, 0.5, "no rows: there is nothing to draw", ha="center", va="center", transform=axes.transAxes)
    solvers = frame["solver"].nunique()
    for number, (solver, rows) in enumerate(frame.groupby("solver", sort=False)):
        rows = rows.sort_values("budget_bytes")
        found = rows[rows["overhead"].notna()]
        color, marker = COLORS[number % len(COLORS)], _MARKERS[number % len(_MARKERS)]
        axes.plot(found["budget_bytes"] / unit, 100 * found["overhead"], color=color, marker=marker, markersize=5, linewidth=1.3,
                  linestyle="-" if number < len(COLORS) else "--", label=f"{solver} ({len(found)} of {len(rows)} budgets)",
                  clip_on=max_overhead is not None)
        missing = rows[rows["overhead"].isna()]
        axes.plot(missing["budget_bytes"] / unit, np.full(len(missing), 0.985 - _CROSS_ROW * number), "x", color=color, markersize=5,
                  transform=axes.get_xaxis_transform())
    for name, label, style in (("floor_bytes", "floor of any plan", ":"), ("keep_all_bytes", "everything kept", "--")):
        if name in frame and len(frame):
            size = frame[name].iloc[0]
            axes.axvline(size / unit, color="#555555", linewidth=1, linestyle=style, label=f"{label}: {format_bytes(size)}")
    if frame["overhead"].isna().any():
        axes.plot([], [], "x", color="#555555", markersize=5, label="no plan found")
    most = max_overhead or (frame["overhead"].max() if frame["overhead"].notna().any() else 0.0)
    axes.set_ylim(0, 105 * max(most, 0.01) / max(0.3, 1 - _CROSS_ROW * (solvers + 1)))
    if axes.get_legend_handles_labels()[0]:
        figure.legend(loc="outside right upper", fontsize=8, frameon=False)
    return _saved(figure, to_file, dpi)


def plot_batches(frame, to_file=None, *, dpi: int = 150) -> Figure:
    """The largest batch of each planner for each model, as bars over what keeping everything allows.

    frame: a row for each model and planner, with the columns model, planner, batch_size, and keep_all_batch_size
    Raises UnsupportedError for another frame. Without rows the figure says so.
    """
    _need_columns(frame, ("model", "planner", "batch_size", "keep_all_batch_size"))
    models, planners = list(dict.fromkeys(frame["model"])), list(dict.fromkeys(frame["planner"]))
    figure, axes = _axes((max(6, 1.6 * len(models) + 1), 4.5))
    if not len(frame):
        axes.text(0.5, 0.5, "no rows: there is nothing to draw", ha="center", va="center", transform=axes.transAxes)
    width = 0.85 / max(1, len(planners))
    for number, planner in enumerate(planners):
        rows = frame[frame["planner"] == planner]
        places = [models.index(model) + (number - (len(planners) - 1) / 2) * width for model in rows["model"]]
        bars = axes.bar(places, rows["batch_size"] / rows["keep_all_batch_size"], width=0.92 * width, label=planner,
                        color=COLORS[number % len(COLORS)])
        axes.bar_label(bars, [str(size) for size in rows["batch_size"]], fontsize=6.5, rotation=90, padding=2)
    axes.set(ylabel="largest batch, over that of keeping everything", xticks=range(len(models)), xticklabels=models)
    axes.margins(y=0.15)
    if planners:
        figure.legend(loc="outside right upper", fontsize=8, frameon=False)
    return _saved(figure, to_file, dpi)


def plot_estimate(estimate, to_file=None, *, dpi: int = 150) -> Figure:
    """What a step holds: the residents, what the neediest op adds to them (the floor), and what keeping everything adds."""
    figure, axes = _axes((8, 2.4))
    parts = {**estimate.resident, "the neediest op": estimate.floor_bytes - estimate.resident_bytes,
             "keeping everything": estimate.keep_all_peak_bytes - estimate.floor_bytes}
    unit, unit_name = _unit(estimate.keep_all_peak_bytes)
    left = 0.0
    for number, (label, size) in enumerate(parts.items()):
        axes.barh([0], [size / unit], left=left, height=0.6, color=COLORS[number % len(COLORS)], label=f"{label}: {format_bytes(size)}")
        left += size / unit
    axes.axvline(estimate.floor_bytes / unit, color="#555555", linewidth=1, linestyle=":", label=f"floor: {format_bytes(estimate.floor_bytes)}")
    axes.set(xlabel=f"memory of one training step ({unit_name})", yticks=[], ylim=(-0.5, 0.5))
    axes.spines["left"].set_visible(False)
    figure.legend(loc="outside upper left", fontsize=8, frameon=False, ncols=2)
    return _saved(figure, to_file, dpi)


def _axes(size: tuple[float, float]):
    figure = Figure(figsize=size, layout="constrained", facecolor="white")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _saved(figure: Figure, to_file, dpi: int) -> Figure:
    if to_file is not None:
        figure.savefig(to_file, dpi=dpi)
    return figure


def _need_plan(solution) -> None:
    if solution.plan is None:
        raise PlanError(f"A solution without a plan has nothing to draw. Received: a solution that is {solution.status.value}")


def _need_columns(frame, names) -> None:
    missing = [name for name in names if name not in getattr(frame, "columns", ())]
    if missing:
        raise UnsupportedError(f"The rows to draw need the columns {', '.join(names)}. Received: {type(frame).__name__} without "
                               f"{', '.join(missing)}")


def _unit(most_bytes: float) -> tuple[float, str]:
    return (1e9, "GB") if most_bytes >= 2e9 else (1e6, "MB") if most_bytes >= 2e6 else (1, "bytes")


def _coarser(cells: np.ndarray) -> np.ndarray:
    """At most some hundred rows and columns, each the largest of a block: recomputed before computed before kept."""
    block = -(-len(cells) // _MOST_CELLS)
    if block <= 1:
        return cells
    rest = -len(cells) % block
    padded = np.pad(cells, ((0, rest), (0, rest)))
    side = len(padded) // block
    return padded.reshape(side, block, side, block).max(axis=(1, 3))
