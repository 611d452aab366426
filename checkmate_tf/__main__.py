"""The command line: `checkmate-tf demo`, and `estimate`, `plan` and `tradeoff` for a saved model.

    checkmate-tf demo
    checkmate-tf estimate MODEL.keras --batch-size 64
    checkmate-tf plan MODEL.keras --batch-size 64 --budget 2GB --output plan.json --plot plan.png
    checkmate-tf tradeoff MODEL.keras --batch-size 64 --solvers auto greedy --plot tradeoff.png
    checkmate-tf benchmark ResNet50 --shares 0.8 0.6 0.5
    checkmate-tf fidelity ResNet50 --steps 10 --limit
"""

import argparse
import contextlib
import dataclasses
import json
import os
import sys

from checkmate_tf.ir.errors import CheckmateError, NotCompiledError, PlanError, UnsupportedError


def main(arguments: list[str] | None = None) -> int:
    """Runs one command. Errors of this package are told in their own words, with exit code 2."""
    parsed = _parser().parse_args(arguments)
    # TensorFlow greets on the error stream, where only what went wrong belongs; whoever has set this wants to see more.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    try:
        return parsed.run(parsed)
    except CheckmateError as error:
        print(f"checkmate-tf: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="checkmate-tf", description="Train Keras models inside a memory budget.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    demo = commands.add_parser("demo", help="train a network that does not fit, and draw how")
    demo.add_argument("--plot", default="checkmate_tf_demo.png", help="where to save the picture")
    demo.add_argument("--role", choices=("estimate", "plain", "checkmate"), help=argparse.SUPPRESS)
    demo.add_argument("--answer", help=argparse.SUPPRESS)
    demo.set_defaults(run=_demo)
    benchmark = commands.add_parser("benchmark",
                                    help="measure peaks and step times against plain Keras on this machine")
    benchmark.add_argument("models", nargs="*", help="names of built-in workloads; all of them by default")
    benchmark.add_argument("--shares", nargs="*", type=float, default=[0.8, 0.6, 0.5],
                           help="budgets, as shares of the way from resident bytes to the keep-everything peak")
    benchmark.add_argument("--json", action="store_true", help="a JSON line a row instead of a table")
    benchmark.set_defaults(run=_benchmark)
    fidelity = commands.add_parser("fidelity", help="hold planned peaks and times against what steps take on this machine")
    fidelity.add_argument("models", nargs="*", help="names of built-in models; all of them by default")
    fidelity.add_argument("--shares", nargs="*", type=float, default=[0.6, 0.4],
                          help="budgets, as shares of the way from resident bytes to the keep-everything peak")
    fidelity.add_argument("--time-limit", type=float, default=10.0, help="seconds for each plan")
    fidelity.add_argument("--steps", type=int, default=0,
                          help="tighten the budget in so many equal steps, too, of which peaks alone are measured")
    fidelity.add_argument("--limit", action="store_true", help="train 20 steps under each share's budget as a hard limit, too")
    fidelity.add_argument("--json", action="store_true", help="a JSON line a row instead of a table")
    fidelity.set_defaults(run=_fidelity)
    for name, help_text, run in (("estimate", "what a training step of a saved model needs", _estimate),
                                 ("plan", "a plan for a saved model within a budget", _plan),
                                 ("tradeoff", "what less memory costs a saved model, for several solvers and budgets", _tradeoff)):
        command = commands.add_parser(name, help=help_text)
        command.add_argument("model", help="a .keras file of a compiled model")
        command.add_argument("--batch-size", type=int, required=True)
        command.add_argument("--profile", default="auto", help="auto (measure this device) or a named profile")
        command.add_argument("--json", action="store_true", help="JSON instead of a table")
        command.add_argument("--plot", help="where to save a picture: PNG, SVG or PDF")
        command.set_defaults(run=run)
        if name == "plan":
            command.add_argument("--budget", required=True, help="such as 2GB, 1.5GiB, or a fraction such as 0.6")
            command.add_argument("--solver", default="auto")
            command.add_argument("--time-limit", type=float, default=60.0, help="seconds")
            command.add_argument("--output", help="where to save the plan as JSON")
            command.add_argument("--schedule", help="where to save a picture of what is recomputed when")
        if name == "tradeoff":
            command.add_argument("--budgets", nargs="*", help="such as 2GB 0.6; by default ten from the floor to keeping everything")
            command.add_argument("--solvers", nargs="*", default=["auto"])
            command.add_argument("--time-limit", type=float, default=20.0, help="seconds for each solver and budget")
            command.add_argument("--workers", type=int, help="processes that solve side by side; by default one for each core")
            command.add_argument("--no-cache", action="store_true", help="neither take nor keep what was solved before")
    return parser


def _demo(parsed) -> int:
    from checkmate_tf import demo
    if parsed.role is not None:
        demo.child(parsed.role, parsed.answer, parsed.plot)
        return 0
    return demo.run(parsed.plot)


def _benchmark(parsed) -> int:
    from checkmate_tf import benchmark
    return benchmark.run(parsed.models, parsed.shares, as_json=parsed.json)


def _fidelity(parsed) -> int:
    from checkmate_tf import fidelity
    return fidelity.run(parsed.models, parsed.shares, parsed.time_limit, parsed.limit, parsed.steps, parsed.json)


def _estimate(parsed) -> int:
    import checkmate_tf
    from checkmate_tf import plots
    model, batch = _load(parsed)
    needs = checkmate_tf.estimate(model, *batch, profile=parsed.profile, verbose=0)
    print(json.dumps(dataclasses.asdict(needs)) if parsed.json else needs)
    with _saving("The picture"):
        if parsed.plot:
            plots.plot_estimate(needs, parsed.plot)
    return 0


def _plan(parsed) -> int:
    import checkmate_tf
    from checkmate_tf import report
    model, batch = _load(parsed)
    solution = checkmate_tf.plan(model, _budget(parsed.budget), *batch, solver=parsed.solver, time_limit=parsed.time_limit,
                                 profile=parsed.profile, verbose=0 if parsed.json else "auto")
    print(json.dumps(_solution_fields(solution)) if parsed.json else report.as_text(report.solution_table(solution)))
    with _saving("The plan"):
        if parsed.output:
            solution.save(parsed.output)
        if parsed.plot:
            checkmate_tf.plot_memory(solution, parsed.plot)
        if parsed.schedule:
            checkmate_tf.plot_schedule(solution, parsed.schedule)
    return 0


def _tradeoff(parsed) -> int:
    import checkmate_tf
    from checkmate_tf import report
    model, batch = _load(parsed)
    budgets = [_budget(text) for text in parsed.budgets] if parsed.budgets else None
    frame = checkmate_tf.tradeoff(model, *batch, budgets=budgets, solvers=parsed.solvers, time_limit=parsed.time_limit,
                                  profile=parsed.profile, workers=parsed.workers, cache=None if parsed.no_cache else "auto",
                                  verbose=0 if parsed.json else "auto")
    print(frame.to_json(orient="records", lines=True, double_precision=15).strip() if parsed.json else
          report.as_text(report.tradeoff_table(frame)))
    with _saving("The picture"):
        if parsed.plot:
            checkmate_tf.plot_tradeoff(frame, parsed.plot)
    return 0


def _solution_fields(solution) -> dict:
    fields = {name: getattr(solution, name) for name in (
        "solver", "budget_bytes", "peak_bytes", "placed_peak_bytes", "base_peak_bytes", "seconds", "base_seconds", "overhead",
        "bound_seconds", "gap")}
    return {"status": solution.status.value, "stopped_by": solution.stopped_by.value, **fields,
            "solve_seconds": solution.stats["solve_seconds"], "recomputed_runs": sum(solution.timeline.runs) - len(solution.timeline.runs)}


@contextlib.contextmanager
def _saving(what: str):
    """Says in a line what could not be saved."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise PlanError(f"{what} could not be saved: {_one_line(error)}") from error


def _load(parsed):
    """The saved model, and specs of a batch for it: inputs, and targets shaped like what the loss expects."""
    import keras
    import tensorflow as tf
    if parsed.batch_size < 1:
        raise UnsupportedError(f"A batch has at least one example. Received: --batch-size {parsed.batch_size}")
    try:
        model = keras.saving.load_model(parsed.model)
    except (OSError, ValueError, TypeError) as error:
        raise UnsupportedError("A saved Keras model is needed. "
                               f"Received: {parsed.model} ({_one_line(error)})") from error
    if not model.compiled:
        raise NotCompiledError("The model was saved before it was compiled: call model.compile(...), then "
                               f"model.save(...). Received: {parsed.model}")
    if getattr(model, "inputs", None) is None or getattr(model, "outputs", None) is None:
        raise UnsupportedError("The shapes of a subclassed model's inputs are not in its file: use "
                               f"checkmate_tf.estimate or plan from Python, with a batch. Received: {parsed.model} ({type(model).__name__})")

    sparse = "sparse" in str((model.get_compile_config() or {}).get("loss", ""))

    def batch_spec(tensor):
        return tf.TensorSpec([parsed.batch_size, *tensor.shape[1:]], tensor.dtype)

    def target_spec(tensor):
        shape = [parsed.batch_size, *tensor.shape[1:]]
        return tf.TensorSpec(shape[:-1], tf.int64) if sparse else tf.TensorSpec(shape, tensor.dtype)

    return model, (tf.nest.map_structure(batch_spec, model.input), tf.nest.map_structure(target_spec, model.output))


def _budget(text: str) -> int | float | str:
    """A budget as it is typed: whole numbers are bytes, other numbers fractions, and the rest has a unit."""
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


if __name__ == "__main__":
    sys.exit(main())
