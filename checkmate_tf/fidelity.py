"""`checkmate-tf fidelity`: whether steps take the memory and the time that was planned, model by model.

For each workload, in a process of its own under TensorFlow's best-fit allocator: plain Keras's peak; then, with everything kept
(in another order than the trace's where plain Keras takes less than that) and at each share of the way from resident bytes to
the keep-everything peak, the planned peak in whole chunks beside the allocator's over three steps, and the plan's cost, the extra
time expected of it with what caches save (`ir/caches.py`), and the measured one, as ratios to keeping everything, interleaved. The
computations of these steps run one after another, as planned, even where so much memory is left over that `fit` runs some at once;
kept / plain is of everything kept and run at once. Where the budget is also tightened in equal steps, only peaks are measured at
those. Below stands where a tighter budget takes more memory or costs less, which none should. With a limit, each share's budget is
also put on a process as the hard limit of its memory, in which `fit` runs twenty steps.
"""

import contextlib
import dataclasses
import functools
import gc
import itertools
import json
import math
from collections.abc import Callable, Sequence

import keras
import numpy as np
import tensorflow as tf
from rich.console import Console
from rich.table import Table

import checkmate_tf
from checkmate_tf import planning, rounds, solvers, zoo
from checkmate_tf.benchmark import child, ratios
from checkmate_tf.bridge import measure as device
from checkmate_tf.bridge.emit import emit
from checkmate_tf.ir.errors import CheckmateError, UnsupportedError
from checkmate_tf.ir.plan import Plan, plan_from_order
from checkmate_tf.ir.units import format_bytes
from checkmate_tf.solvers import ignore_progress

MIB = 1 << 20
_RUNS = 3
_LIMITED_STEPS = 20
OPTIMIZERS: dict[str, Callable[[], keras.optimizers.Optimizer]] = {
    "SGD": lambda: keras.optimizers.SGD(0.001, momentum=0.9), "Adam": lambda: keras.optimizers.Adam(),
    "AdamW": lambda: keras.optimizers.AdamW(global_clipnorm=1.0)}


@dataclasses.dataclass(frozen=True)
class Case:
    """model() is not compiled yet; data(count) gives that many inputs and targets; loss: Keras's name or object."""

    model: Callable[[], keras.Model]
    data: Callable[[int], tuple[np.ndarray, np.ndarray]]
    loss: object
    batches: tuple[int, int]


def _pictures(name: str, size: int, batches: tuple[int, int]) -> Case:
    return Case(lambda: getattr(keras.applications, name)(weights=None, input_shape=(size, size, 3), classes=zoo.CLASSES),
                lambda count: zoo.photo_crops(count, size), "sparse_categorical_crossentropy", batches)


def _texts(vocabulary: int, causal: bool, batches: tuple[int, int], length: int = 128) -> Case:
    def data(count):
        tokens = zoo.passages(count, length + 1, vocabulary)
        return (tokens[:, :-1], tokens[:, 1:]) if causal else (tokens[:, 1:], tokens[:, 1:])
    return Case(lambda: zoo.transformer(vocabulary, causal, length), data,
                keras.losses.SparseCategoricalCrossentropy(from_logits=True), batches)


def _denoised(model: Callable[[], keras.Model], size: int, volume: bool, batches: tuple[int, int]) -> Case:
    def data(count):
        crops, _ = zoo.photo_crops(count * size if volume else count, size)
        clean = crops[..., :1].reshape(count, size, size, size, 1) if volume else crops
        return clean + np.random.default_rng(1).normal(0, 0.1, clean.shape).astype(np.float32), clean
    return Case(model, data, "mse", batches)


def _rows(steps: int, features: int, batches: tuple[int, int]) -> Case:
    def data(count):
        crops, bands = zoo.photo_crops(count, steps)
        return crops[:, :, :features, 0], bands
    return Case(lambda: zoo.lstm(steps, features), data, "sparse_categorical_crossentropy", batches)


CASES = {
    "VGG16": _pictures("VGG16", 64, (8, 32)), "ResNet50": _pictures("ResNet50", 64, (8, 32)),
    "MobileNetV2": _pictures("MobileNetV2", 96, (8, 32)), "DenseNet121": _pictures("DenseNet121", 64, (8, 32)),
    "EfficientNetB0": _pictures("EfficientNetB0", 64, (8, 32)), "InceptionV3": _pictures("InceptionV3", 96, (8, 32)),
    "ConvNeXtTiny": _pictures("ConvNeXtTiny", 64, (8, 32)), "UNet": _denoised(zoo.unet, 128, False, (2, 8)),
    "UNet3D": _denoised(zoo.unet_3d, 32, True, (2, 8)), "BERT": _texts(5000, False, (4, 16)), "GPT2": _texts(5000, True, (4, 16)),
    "ViT": Case(zoo.vit, lambda count: zoo.photo_crops(count, 64), "sparse_categorical_crossentropy", (16, 64)),
    "LSTM": _rows(64, 32, (32, 128))}


def run(names: Sequence[str], shares: Sequence[float], seconds: float, limit: bool = False, steps: int = 0,
        as_json: bool = False) -> int:
    """Measures these cases (all when none are named), each at both batch sizes, and prints a row for each share and for
    keeping everything. seconds: for each plan; steps: in which the budget is tightened, too. Raises UnsupportedError for a name that
    is not known."""
    unknown = [name for name in names if name not in CASES]
    if unknown:
        raise UnsupportedError(f"Known models are {', '.join(CASES)}. Received: {', '.join(unknown)}")
    rows, failed = [], 0
    tightened = [step / steps for step in range(1, steps) if step / steps not in shares]
    for name in names or CASES:
        for size in CASES[name].batches:
            lines, code = child(f"fidelity.measure({name!r}, {size}, {list(shares)!r}, {tightened!r}, {seconds})", {})
            failed = failed or code
            for row in lines:
                if limit and row["share"] in shares and "simulated" in row:
                    mebibytes = -(-row["budget"] // MIB)
                    trained, code = child(f"fidelity.train({name!r}, {size}, {mebibytes * MIB}, {seconds})",
                                          {"TF_CPU_BFC_MEM_LIMIT_IN_MB": str(mebibytes)})
                    row["limited"] = trained[-1]["limited"] if code == 0 and trained else f"died ({code})"
                rows.append(row)
                if as_json:
                    print(json.dumps(row), flush=True)
    if not as_json:
        console = Console(highlight=False, width=150)
        console.print(_table(rows, limit))
        console.print("\n".join(summary(rows)))
        found = cliffs(rows)
        console.print("\n".join(found) if found else "As budgets tighten, no measured peak rises and no planned cost falls.")
    return failed


def cliffs(rows: Sequence[dict]) -> list[str]:
    """Where, from one budget of a case to the next smaller one, the measured peak rises or the planned cost falls."""
    found = []
    for before, row in _tightenings(rows):
        where = f"{row['model']}, {row['batch']}, at {100 * row['share']:.0f} %: the"
        if row["measured"] > before["measured"]:
            same = ", under the same plan" if all(row[name] == before[name] for name in ("simulated", "cost")) else ""
            found.append(f"{where} measured peak rises from {format_bytes(before['measured'])} to {format_bytes(row['measured'])}, "
                         f"by {100 * (row['measured'] / before['measured'] - 1):.3f} %{same}")
        if row["cost"] < before["cost"]:
            found.append(f"{where} planned cost falls from {100 * before['cost']:+.2f} to {100 * row['cost']:+.2f} %")
    return found


def _tightenings(rows: Sequence[dict]) -> list[tuple[dict, dict]]:
    """The rows of each budget of a case, everything kept first, and of the next smaller one that has a plan."""
    found = []
    for case in dict.fromkeys((row["model"], row["batch"]) for row in rows):
        planned = sorted((row for row in rows if (row["model"], row["batch"]) == case and "simulated" in row),
                         key=lambda row: math.inf if row["share"] is None else row["share"], reverse=True)
        found += itertools.pairwise(planned)
    return found


def summary(rows: Sequence[dict]) -> list[str]:
    """How many peaks and times are as planned, and how many steps with nothing recomputed are no worse than plain Keras's."""
    planned = [row for row in rows if "simulated" in row]
    timed = [row for row in planned if "time_over_keep" in row]
    kept = [row for row in timed if row["share"] is None]
    extra = [100 * (row["time_over_keep"] - 1 - row["predicted"]) for row in timed if row["share"] is not None]
    lines = [f"{_as_planned(timed)}. Extra times within 3 points: {sum(abs(points) <= 3 for points in extra)} of {len(extra)}, within 6: "
             f"{sum(abs(points) <= 6 for points in extra)}; below what was planned: {sum(points < 0 for points in extra)}.",
             f"Of {len(kept)} steps with nothing recomputed, {sum(row['measured'] <= row['plain_peak'] for row in kept)} take at most plain "
             f"Keras's memory run one after another, {sum(row['at_once_peak'] <= row['plain_peak'] for row in kept)} run at once, "
             f"{sum(row['keep_over_plain'] <= 1.03 for row in kept)} then at most 1.03 times its time."]
    if len(planned) > len(timed):
        lines.append(f"With all tightened budgets: {_as_planned(planned)}; from one to the next: {len(_tightenings(rows))}.")
    return lines


def _as_planned(rows: Sequence[dict]) -> str:
    ratios_found = [row["measured"] / row["simulated"] for row in rows]
    return (f"Peaks within 0.97 to 1.00 of planned, rounded: {sum(0.965 <= ratio < 1.005 for ratio in ratios_found)} of "
            f"{len(ratios_found)}, all within {min(ratios_found):.2f} to {max(ratios_found):.2f}")


def _compiled(name: str, size: int) -> tuple[keras.Model, str]:
    """The model with an optimizer of its turn: neighbouring cases and sizes have different ones."""
    case = CASES[name]
    turn = list(CASES).index(name) + case.batches.index(size)
    optimizer = list(OPTIMIZERS)[turn % len(OPTIMIZERS)]
    keras.utils.set_random_seed(0)
    model = case.model()
    model.compile(OPTIMIZERS[optimizer](), case.loss, metrics=["mae"] if case.loss == "mse" else ["accuracy"])
    return model, optimizer


def measure(name: str, size: int, shares: Sequence[float], tightened: Sequence[float], seconds: float) -> None:
    """Measures one case at one batch size in this process; prints a JSON line a row, keeping everything first.

    tightened: further shares, of which the peak alone is measured
    """
    model, optimizer = _compiled(name, size)
    batch = tuple(tf.constant(part) for part in CASES[name].data(size))
    planning.build(model, batch)
    model.make_train_function()
    plain_bytes = _peak_bytes(lambda: model.train_function(iter([batch])))
    prepared = planning.prepare(model, batch, "auto", lambda text: None, batch_is_there=True)
    graph, base = prepared.graph, prepared.base
    keep, kept_bytes = _kept(prepared, plain_bytes, seconds)
    common = {"model": name, "batch": size, "optimizer": optimizer, "ops": len(graph.ops), "resident": graph.resident_bytes,
              "plain_peak": plain_bytes}
    rows, plans = [], {}

    def add(share, budget_bytes, plan, placed_bytes, cost, expected):
        measured_bytes = _peak_bytes(functools.partial(emit(prepared.traced, graph, plan), batch))
        gc.collect()        # a step's constants take memory as long as it is there
        rows.append(common | {"share": share, "budget": budget_bytes, "simulated": placed_bytes, "cost": cost, "predicted": expected,
                              "measured": measured_bytes})
        if share not in tightened:
            plans[share] = plan

    budgets = {share: int(graph.resident_bytes + share * (base.peak_bytes - graph.resident_bytes))
               for share in sorted({*shares, *tightened}, reverse=True)}
    answers = rounds.solve_within_each(prepared, list(budgets.values()), solvers.get("auto"), planning.limits_for("auto", seconds),
                                       ignore_progress)
    prepared.places.give_way()
    add(None, None, keep, kept_bytes, 0.0, 0.0)
    for (share, budget_bytes), answer in zip(budgets.items(), answers):
        if isinstance(answer, CheckmateError):
            rows.append(common | {"share": share, "budget": budget_bytes, "error": str(answer).splitlines()[0]})
        else:
            add(share, budget_bytes, answer.plan, answer.placed_peak_bytes, answer.overhead,
                answer.expected_overhead)
    at_once = emit(prepared.traced, graph, keep, math.inf)
    at_once_bytes = _peak_bytes(lambda: at_once(batch))
    steps = {"at once": at_once, **{share: emit(prepared.traced, graph, plan) for share, plan in plans.items()}}
    measured = ratios({"plain": lambda: model.train_function(iter([batch])),
                       **{share: lambda step=step: step(batch) for share, step in steps.items()}})
    for row in rows:
        if row["share"] in steps:
            row |= {"time_over_keep": measured[row["share"]] / measured[None], "keep_over_plain": measured["at once"],
                    "at_once_peak": at_once_bytes}
        print(json.dumps(row), flush=True)


def _kept(prepared: planning.Prepared, plain_bytes: int, seconds: float) -> tuple[Plan, int]:
    """A plan that computes nothing twice and its peak when placed: in the order of the trace, unless plain Keras takes less than
    that and another order does not."""
    graph, placed_bytes = prepared.graph, rounds.place_keep_all(prepared, 1 << 62)
    if placed_bytes > plain_bytes:
        with contextlib.suppress(CheckmateError):
            found = rounds.solve_within(prepared, plain_bytes, solvers.get("auto"), planning.limits_for("auto", seconds),
                                        ignore_progress)
            if len(found.plan.order) == len(graph.ops) and found.placed_peak_bytes < placed_bytes:
                return found.plan, found.placed_peak_bytes
    return plan_from_order(graph, graph.order), placed_bytes


def train(name: str, size: int, budget_bytes: int, seconds: float) -> None:
    """Trains one case for some steps within a budget, in a process that has no more; prints a JSON line."""
    model, _ = _compiled(name, size)
    x, y = CASES[name].data(4 * size)
    batches = ((x[start:start + size], y[start:start + size]) for start in itertools.cycle(range(0, 4 * size, size)))
    checkmate_tf.compile(model, budget_bytes, time_limit=seconds, verbose=0)
    try:
        losses = model.fit(batches, steps_per_epoch=_LIMITED_STEPS, verbose=0).history["loss"]
        told = "trains" if np.isfinite(losses).all() else "loss is not finite"
    except checkmate_tf.InfeasibleBudgetError as error:
        told = f"refused (needs {format_bytes(error.minimum_bytes)})"
    print(json.dumps({"limited": told}), flush=True)


def _peak_bytes(step: Callable[[], object]) -> int:
    """The allocator's peak over some steps, after one to warm up."""
    step()
    device.reset_peak()
    for _ in range(_RUNS):
        step()
    return device.measured_memory()[1]


def _table(rows: Sequence[dict], limit: bool) -> Table:
    table = Table(title="Planned against measured, on this machine", title_justify="left")
    for column in ("model", "batch", "optimizer", "share", "simulated", "measured", "ratio", "plain peak", "cost", "predicted",
                   "time", "kept / plain", "its peak", *(["at the limit"] if limit else [])):
        table.add_column(column, justify="left" if column in ("model", "optimizer") else "right")
    for row in rows:
        cells = [row["model"], str(row["batch"]), row["optimizer"], "keep" if row["share"] is None else f"{100 * row['share']:.0f} %"]
        if "simulated" in row:
            cells += [format_bytes(row["simulated"]), format_bytes(row["measured"]), f"{row['measured'] / row['simulated']:.3f}",
                      format_bytes(row["plain_peak"]), *(f"{100 * row[name]:+.1f} %" for name in ("cost", "predicted"))]
            cells += [f"{100 * (row['time_over_keep'] - 1):+.1f} %", f"{row['keep_over_plain']:.2f}",
                      format_bytes(row["at_once_peak"])] if "time_over_keep" in row else [""] * 3
        else:
            cells += ["no plan", "", "", format_bytes(row["plain_peak"]), "", "", "", "", ""]
        table.add_row(*cells, *([row.get("limited", "")] if limit else []))
    return table
