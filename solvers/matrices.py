"""The paper's dictionary: from the matrices R, S, FREE and U to an order of computations, and back.

Checkmate (Jain et al., MLSys 2020, section 4) cuts a schedule into *stages*. In the frontier-advancing form (eqs.
8a-8c) there is one stage per op: stage t ends with the first run of op t, and before that it may run again any
earlier op, each at most once, in the order of their indices. A graph with results has one more stage behind, in which
results that were let go are made again. Rows are stages, T = N of them or N + 1:

    R     bool [T, N]   op k runs in stage t
    S     bool [T, V]   value v is kept from stage t - 1 into stage t
    FREE  bool [T, F]   value v is released in stage t right after op k; one column per pair (v, k), see `free_pairs`
    U     int  [T, N]   bytes held just after op k's turn in stage t, before its releases

Also more general than in the paper, where every op makes one value: S and FREE speak of values, R and U of
ops. And a value of an op with several outputs may be released right after that op itself, because a rerun makes
all of them while the stage may want only one.

Row-major reading of R is the order (the paper's Algorithm 1 without its releases, which `plan_from_order` derives).
The other way an order has matrices only if it is such a *stage plan*. S can be read off R: `kept_from_runs`
gives the least S, and `cheapest_runs` the least R for a given S, the repair of Algorithm 2 ("two-phase rounding").

With these two, U is exact: it equals what `simulate` finds. The paper's U charges a value in S that the stage does
not use (a spurious one) for the whole stage, but the least S has none.
"""

from collections.abc import Sequence

import numpy as np

from checkmate_tf.ir.errors import PlanError
from checkmate_tf.ir.graph import Graph


def stage_count(graph: Graph) -> int:
    """T: a stage for each op, and one more if there are results."""
    return len(graph.ops) + bool(graph.results)


def last_stages(graph: Graph) -> np.ndarray:
    """For each op the last stage that may run it: T - 1, or earlier if it must run once or reads what gets overwritten.

    An op whose input is overwritten by op w may run in the stages up to w (invariant P6), an op with a reason in `once`
    in its own stage alone. # int [N]
    """
    last = np.full(len(graph.ops), stage_count(graph) - 1, dtype=np.int64)
    for op in graph.ops:
        if op.once is not None:
            last[op.index] = op.index
        for value in op.inputs:
            last[op.index] = min((last[op.index], *graph.writers[value]))
    return last


def order_from_runs(runs: np.ndarray) -> tuple[int, ...]:
    """R, read row by row: the order of computations."""
    return tuple(int(op) for op in np.nonzero(runs)[1])


def runs_from_order(graph: Graph, order: Sequence[int]) -> np.ndarray:
    """R of an order, bool [T, N].

    Raises PlanError when the order is no stage plan: first runs that are not in the order of indices, or a stage
    that runs an op twice or out of the order of indices.
    """
    first_runs, stages = len(graph.ops), stage_count(graph)
    runs = np.zeros((stages, first_runs), dtype=bool)
    stage, previous = 0, -1
    for position, op in enumerate(order):
        if op > stage or op <= previous or stage == stages:
            raise PlanError("A stage plan runs in stage t some ops below t in ascending order, and then op t. "
                            f"Received: op {op} at position {position}, in stage {stage} after op {previous}")
        runs[stage, op] = True
        stage, previous = (stage + 1, -1) if op == stage else (stage, op)
    if stage < first_runs:
        raise PlanError(f"A stage plan runs all {first_runs} ops. Received: an order that ends in stage {stage}")
    return runs


def kept_from_runs(graph: Graph, runs: np.ndarray) -> np.ndarray:
    """The least S for this R, bool [T, V]: a value is kept into a stage if it is read again before it is made again."""
    needed = np.zeros(len(graph.values), dtype=bool)
    needed[list(graph.results)] = True
    kept = np.zeros((stage_count(graph), len(graph.values)), dtype=bool)
    for stage in range(stage_count(graph) - 1, -1, -1):
        for op in np.nonzero(runs[stage])[0][::-1]:
            needed[list(graph.ops[op].outputs)] = False
            needed[list(graph.ops[op].inputs)] = True
        kept[stage] = needed
    return kept


def cheapest_runs(graph: Graph, kept: np.ndarray) -> np.ndarray:
    """The least R for this S, bool [T, N]: no R that goes with S runs less (Checkmate's Algorithm 2, steps 3 and 4).

    What is kept into a stage, and was neither kept into nor made in the one before, is made there (eq. 1c); then each
    stage, from right to left, makes the inputs that it reads and does not hold (eq. 1b). Whether the runs are
    allowed (`last_stages`) is for the caller to see to, or for `verify_plan` to find out.
    """
    stages = stage_count(graph)
    producers = np.array([value.producer for value in graph.values], dtype=np.int64)
    results = np.zeros(len(graph.values), dtype=bool)
    results[list(graph.results)] = True
    runs = np.eye(stages, len(graph.ops), dtype=bool)
    for stage in range(stages):
        kept_on = kept[stage + 1] if stage + 1 < stages else results
        runs[stage, producers[kept_on & ~kept[stage]]] = True
        for op in range(min(stage + 1, len(graph.ops)) - 1, -1, -1):
            if runs[stage, op]:
                for value in graph.ops[op].inputs:
                    if not kept[stage, value]:
                        runs[stage, producers[value]] = True
    return runs


def free_pairs(graph: Graph) -> tuple[tuple[int, int], ...]:
    """The columns of FREE: pairs (value, op after which it may be released), by value and then by op."""
    pairs = []
    for value in graph.values:
        if len(graph.ops[value.producer].outputs) > 1:
            pairs.append((value.index, value.producer))
        pairs.extend((value.index, reader) for reader in graph.consumers[value.index])
    return tuple(pairs)


def frees(graph: Graph, runs: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """FREE by eq. 5, bool [T, F].

    Op k runs, v is not kept into the next stage, and no later reader runs in this one.
    """
    stages = stage_count(graph)
    released = np.zeros((stages, len(free_pairs(graph))), dtype=bool)
    kept_on = np.zeros((stages, len(graph.values)), dtype=bool)
    kept_on[:-1] = kept[1:]
    if stages:
        kept_on[-1, list(graph.results)] = True
    for column, (value, op) in enumerate(free_pairs(graph)):
        later = [reader for reader in graph.consumers[value] if reader > op]
        released[:, column] = runs[:, op] & ~kept_on[:, value] & ~runs[:, later].any(axis=1)
    return released


def memory(graph: Graph, runs: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """U by eqs. 2-4, int [T, N]: resident bytes, what is kept and made, and the scratch of the op whose turn it is, less
    the released input whose memory its output takes over."""
    sizes = np.array([value.bytes for value in graph.values], dtype=np.int64)
    made = np.array([sum(graph.values[value].bytes for value in op.outputs) for op in graph.ops], dtype=np.int64)
    scratch = np.array([op.scratch_bytes for op in graph.ops], dtype=np.int64)
    freed_after = np.zeros(runs.shape, dtype=np.int64)
    taken_over = np.zeros(runs.shape, dtype=np.int64)
    released = frees(graph, runs, kept)
    for column, (value, op) in enumerate(free_pairs(graph)):
        freed_after[:, op] += sizes[value] * released[:, column]
        if value in graph.ops[op].reuses:
            taken_over[:, op] = np.maximum(taken_over[:, op], sizes[value] * released[:, column])
    held = np.cumsum(runs * made, axis=1) - np.cumsum(freed_after, axis=1) + freed_after
    return graph.resident_bytes + (kept @ sizes)[:, None] + held - taken_over + runs * scratch
