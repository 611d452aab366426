"""Never worse than without this package: what planning takes for each kind, and what a step costs where the budget holds it all.

    pytest tests/tf -n 0 --loose kinds.jsonl       measures each kind instead of testing it, and appends a line for it
    python tests/tf/loose.py kinds.jsonl           prints how many there are, and the worst

For each kind three copies train: plain Keras's; one planned by `auto` at 60 % of the way from what is resident to the
keep-everything peak, with a cache of prices that is empty; and one whose budget holds everything. "cold" is how much longer the
second's first training takes than the first's. "time" and "peak" are the third's over plain Keras's, the bytes counted from
what is held before; times are medians of trainings in turn, and say something where a training takes a while.
"""

import dataclasses
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time

_TURNS = 7
_LONG_SECONDS = 0.005           # of a training that says something about time
_SHARE = 0.6
_GAP = 0.003                    # near enough, as where `auto` is not a solver of one's own


def install(path: str) -> None:
    """From now on the comparisons of `budgets` measure."""
    import budgets

    def same_training(make, train, rtol=None, share=None):
        _append(path, _measured(make, train))
        return None

    budgets.assert_same_training = same_training
    budgets.assert_trains_within = lambda make, *batch, **settings: same_training(make, budgets.train_on(*batch))


def _append(path: str, row: dict) -> None:
    import pytest
    name = os.environ["PYTEST_CURRENT_TEST"].partition("::")[2].removesuffix(" (call)")
    with open(path, "a") as lines:
        lines.write(json.dumps({"kind": name} | row) + "\n")
    pytest.skip("measured instead of tested, as --loose asks")


def _measured(make, train) -> dict:
    import checkmate_tf
    from checkmate_tf import solvers
    from checkmate_tf.bridge import measure
    from checkmate_tf.ir.simulate import keep_all_timeline

    @dataclasses.dataclass(frozen=True)
    class AutoAtShare:
        name: str = "auto"

        def search(self, graph, budget_bytes, limits, report):
            own_bytes = graph.resident_bytes + int(_SHARE * (keep_all_timeline(graph).peak_bytes - graph.resident_bytes))
            return solvers.get("auto").search(graph, min(budget_bytes, own_bytes), dataclasses.replace(limits, gap=_GAP), report)

    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="checkmate_tf_cold_")
    plain = make()
    first_seconds = _seconds(train, plain)
    tight = checkmate_tf.compile(make(), "100GB", solver=AutoAtShare(), verbose=0)
    cold_seconds = _seconds(train, tight) - first_seconds
    loose = checkmate_tf.compile(make(), "100GB", verbose=0)
    train(loose)
    peaks, seconds = {}, {"plain": [], "loose": []}
    for turn in range(_TURNS):
        for name, model in (("plain", plain), ("loose", loose)):
            measure.reset_peak()
            before_bytes = measure.measured_memory()[0]
            seconds[name].append(_seconds(train, model))
            peaks[name] = max(peaks.get(name, 0), measure.measured_memory()[1] - before_bytes)
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    return {"cold_seconds": cold_seconds, "plain_seconds": medians["plain"], "time": medians["loose"] / medians["plain"],
            "plain_bytes": peaks["plain"], "peak": peaks["loose"] / max(peaks["plain"], 1)}


def _seconds(train, model) -> float:
    started = time.perf_counter()
    train(model)
    return time.perf_counter() - started


def summary(path: pathlib.Path) -> str:
    """How many kinds there are, and the worst in each respect."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    timed = [row for row in rows if row["plain_seconds"] >= _LONG_SECONDS]
    lines = [f"{len(rows)} kinds, {len(timed)} of them with trainings of {1000 * _LONG_SECONDS:.0f} ms or more"]
    more = [row | {"more_kb": (row["peak"] - 1) * row["plain_bytes"] / 1000} for row in rows]
    for key, found, most in (("cold_seconds", rows, 60), ("time", timed, 1.03), ("peak", rows, 1), ("more_kb", more, 0)):
        if not found:
            continue
        worst = sorted(found, key=lambda row: row[key], reverse=True)
        above = sum(row[key] > most + 0.0005 for row in found)
        lines.append(f"{key}: median {statistics.median(row[key] for row in found):.3f}, {above} above {most}, worst "
                     + ", ".join(f"{row[key]:.3f} ({row['kind']})" for row in worst[:8]))
    return "\n".join(lines)


if __name__ == "__main__":
    print(summary(pathlib.Path(sys.argv[1])))
