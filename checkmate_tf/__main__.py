"""The command line: `checkmate-tf demo`, and `estimate` and `plan` for a saved model.

    checkmate-tf demo
    checkmate-tf estimate MODEL.keras --batch-size 64
    checkmate-tf plan MODEL.keras --batch-size 64 --budget 2GB --output plan.json --plot plan.png
    checkmate-tf benchmark ResNet50 --shares 0.8 0.6 0.5
"""

import argparse
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
    for name, help_text, run in (("estimate", "what a training step of a saved model needs", _estimate),
                                 ("plan", "a plan for a saved model within a budget", _plan)):
        command = commands.add_parser(name, help=help_text)
        command.add_argument("model", help="a .keras file of a compiled model")
        command.add_argument("--batch-size", type=int, required=True)
        command.add_argument("--profile", default="auto", help="auto (measure this device) or a named profile")
        command.set_defaults(run=run)
        if name == "plan":
            command.add_argument("--budget", required=True, help="such as 2GB, 1.5GiB, or a fraction such as 0.6")
            command.add_argument("--solver", default="auto")
            command.add_argument("--time-limit", type=float, default=60.0)
            command.add_argument("--output", help="where to save the plan as JSON")
            command.add_argument("--plot", help="where to save the memory timeline as a picture")
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


def _estimate(parsed) -> int:
    import checkmate_tf
    model, batch = _load(parsed)
    print(checkmate_tf.estimate(model, *batch, profile=parsed.profile, verbose=0))
    return 0


def _plan(parsed) -> int:
    import checkmate_tf
    from checkmate_tf import report
    model, batch = _load(parsed)
    solution = checkmate_tf.plan(model, _budget(parsed.budget), *batch, solver=parsed.solver,
                                 time_limit=parsed.time_limit, profile=parsed.profile)
    print(report.as_text(report.solution_table(solution)))
    try:
        if parsed.output:
            solution.save(parsed.output)
        if parsed.plot:
            checkmate_tf.plot_memory(solution, parsed.plot)
    except (OSError, ValueError) as error:
        raise PlanError(f"The plan could not be saved: {_one_line(error)}") from error
    return 0


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
