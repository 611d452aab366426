"""Checkmate's integer program, eq. 9, stage by stage: what every plan satisfies, and exact memory for chosen stages.

Letters and stages are those of `matrices.py`. The program minimises sum C R under

    (1b)  R[t,k] <= R[t,i] + S[t,v]              op k reads v, which op i makes
    (1c)  S[t,v] <= R[t-1,i] + S[t-1,v]
    (8)   R[t,t] = 1, R[t,k] = 0 for k > t, S[t,v] = 0 for v not yet made

What our graphs have beyond the paper's: ops that must run once or read what is overwritten later have no R after
`last_stages`; control edges hold because first runs come in the order of indices; results are what S holds after the
last stage, which has no first run and may make them again. Fixed entries of R and S share two columns, a zero and a
one, which keeps the rows uniform.

*Exact memory* of a stage t, as in the paper:

    (2)   U[t,0] = sum M S[t] + made by op 0
    (3,4) U[t,k+1] = U[t,k] - sum M FREE[t,.,k] + made by op k+1
    (7b)  FREE[t,v,k] >= R[t,k] - S[t+1,v] - sum R[t,j]      readers j of v after k
    (7c)  FREE[t,v,k] is 0 where it has a hazard
          U[t,k] + scratch of k R[t,k] - M D[t,k] <= budget
          D[t,k] <= 1, sum over v of FREE[t,v,k]       v inputs whose memory op k can take over, all of size M

In place of (7c)'s single row with its large factor stand the rows that the paper's artifact adds to another model:
FREE[t,v,k] <= R[t,k]; FREE[t,v,k] + S[t+1,v] <= 1; FREE[t,v,k] + R[t,j] <= 1; sum over k of FREE[t,v,k] <= 1. The
integer points are the same and the relaxation is tighter. Values of no bytes, and releases after a stage's last
op, need no FREE. With exact memory for all stages this is eq. 9.

*Certain memory*, for every stage. Read the letters more loosely: R[t,k] says that op k runs at least once after the
first run of t - 1 and up to that of t, S[t,v] that v is live right after the first run of t - 1. Whatever a plan with
these first runs does in between, in whatever order and however often, the rows above hold, and so do

    at the first run of t:  need(t) + sum of M S[t+1,v] over the other v                   <= budget
    at reruns of k:         need(k) R[t,k] + sum of M P[t,v] over v that k does not touch  <= budget

with need(k) the inputs, outputs and scratch of k, less what its output can take over, and P[t,v] = 1 where v is live
throughout stage t: it is live at its start and its end, and not made in between (P >= S[t,v] + S[t+1,v] - 1 - R[t,i]), or
op t reads it and it is not made in between (P >= 1 - R[t,i]). Without exact stages the optimum is a lower bound for *all* plans in this order, much quicker
to find than that of eq. 9 and mostly the same.
"""

import math
from collections.abc import Collection, Sequence

import numpy as np

from checkmate_tf.ir.graph import Graph, Op
from checkmate_tf.solvers import matrices
from checkmate_tf.solvers.backend import LinearModel

_COST_SCALE = 1e4      # running everything once costs this much in the program: tolerances then suit every graph
_LARGEST_BUDGET = 1e5  # a larger one, after division by the common divisor, is scaled down to this


class StageProgram:
    """The program for a graph and a budget, with exact memory in the given stages and certain memory in all.

    model: to be solved    cost_unit: cost in the model per second
    """

    def __init__(self, graph: Graph, budget_bytes: int, exact_stages: Collection[int] = ()):
        self.model = LinearModel()
        self.cost_unit = _COST_SCALE / graph.seconds if graph.seconds > 0 else 1.0
        self._graph = graph
        self._stages = matrices.stage_count(graph)
        self._last = matrices.last_stages(graph)
        self._producers = np.array([value.producer for value in graph.values], dtype=np.int64)
        self._exact = np.array(sorted(exact_stages), dtype=np.int64)
        unit_bytes, self._budget = _memory_unit(graph, budget_bytes)
        self._sizes = np.array([value.bytes for value in graph.values]) / unit_bytes
        self._scratch = np.array([op.scratch_bytes for op in graph.ops]) / unit_bytes
        self._touched = [np.array(sorted({*op.inputs, *op.outputs}), dtype=np.int64) for op in graph.ops]
        self._needs = np.array([self._need(op) for op in graph.ops])
        self._add_columns()
        self._add_dependencies()
        for stage in range(self._stages):
            self._add_certain_memory(stage)
        self._add_releases()
        self._add_exact_memory()

    def start(self, order: Sequence[int]) -> dict[int, float]:
        """A stage plan as values of the integer columns."""
        runs = matrices.runs_from_order(self._graph, order)
        kept = matrices.kept_from_runs(self._graph, runs)
        start = dict(zip(self._runs.ravel().tolist(), runs.ravel().tolist()))
        start |= zip(self._kept[:-1].ravel().tolist(), kept.ravel().tolist())
        start |= zip(self._free.ravel().tolist(), matrices.frees(self._graph, runs, kept).ravel().tolist())
        return start | {self._zero: 0, self._one: 1}

    def kept(self, solution: np.ndarray, threshold: float = 0.5) -> np.ndarray:
        """S of a solution, rounded, bool [T, V]."""
        return solution[self._kept[:-1]] > threshold

    def _add_columns(self) -> None:
        """R  # int [T, N]; S with a last row for the results  # int [T + 1, V]; FREE  # int [T, F]."""
        graph, model, stages = self._graph, self.model, self._stages
        self._zero = int(model.columns(1, upper=0.0)[0])
        self._one = int(model.columns(1, lower=1.0, cost=graph.seconds * self.cost_unit)[0])
        self._runs = np.full((stages, len(graph.ops)), self._zero)
        for op in graph.ops:
            again = slice(op.index + 1, int(self._last[op.index]) + 1)
            count = int(self._last[op.index]) - op.index
            self._runs[again, op.index] = model.columns(count, cost=op.seconds * self.cost_unit)
            self._runs[op.index, op.index] = self._one
        self._kept = np.full((stages + 1, len(graph.values)), self._zero)
        for value in graph.values:
            readers = (self._last[reader] for reader in graph.consumers[value.index])
            end = stages - 1 if value.index in graph.results else max(readers, default=value.producer)
            self._kept[value.producer + 1:end + 1, value.index] = model.columns(end - value.producer)
        self._kept[stages, list(graph.results)] = self._one
        self._pairs = matrices.free_pairs(graph)
        self._free = np.full((stages, len(self._pairs)), self._zero)
        for column, (value, op) in enumerate(self._pairs):
            turns = self._exact[(self._exact > op) & (self._exact <= self._last[op])]
            if graph.values[value].bytes:
                self._free[turns, column] = model.columns(len(turns))

    def _add_dependencies(self) -> None:
        """(1b) and (1c)."""
        for op in self._graph.ops:
            turns = np.arange(op.index, self._last[op.index] + 1)
            for value in op.inputs:
                self.model.rows([(self._runs[turns, op.index], 1), (self._runs[turns, self._producers[value]], -1),
                                 (self._kept[turns, value], -1)], high=0)
        for value in self._graph.values:
            turns = np.nonzero(self._kept[:, value.index] != self._zero)[0]
            self.model.rows([(self._kept[turns, value.index], 1), (self._kept[turns - 1, value.index], -1),
                             (self._runs[turns - 1, value.producer], -1)], high=0)

    def _add_certain_memory(self, stage: int) -> None:
        """Memory at the first run that ends this stage, and at the reruns before it."""
        model, sizes = self.model, self._sizes
        before, after, runs = self._kept[stage], self._kept[stage + 1], self._runs[stage]
        first = self._graph.ops[stage:stage + 1]
        for op in first:
            others = np.setdiff1d(np.nonzero((after != self._zero) & (sizes > 0))[0], self._touched[op.index])
            if len(op.reuses) == 1:  # kept, its memory is not taken over
                others = np.append(others, op.reuses[0])
            model.row(after[others], sizes[others],
                      high=self._budget - self._needs[op.index])
        again = np.nonzero(runs[:stage] != self._zero)[0]
        if not len(again):
            return
        lasting = np.nonzero((before != self._zero) & (sizes > 0))[0]
        throughout = np.full(len(sizes), self._zero)
        throughout[lasting] = model.columns(len(lasting), integer=False)
        model.rows([(throughout[lasting], 1), (before[lasting], -1), (after[lasting], -1),
                    (runs[self._producers[lasting]], 1)], low=-1)
        read = np.array([value for op in first for value in op.inputs if throughout[value] != self._zero],
                        dtype=np.int64)
        model.rows([(throughout[read], 1), (runs[self._producers[read]], 1)], low=1)
        total = model.columns(1, upper=self._budget, integer=False)
        model.row([*throughout[lasting], *total], [*sizes[lasting], -1], high=0)
        inside = np.concatenate([self._touched[op] for op in again])
        numbers = np.arange(len(again))
        model.ragged_rows(np.concatenate([numbers, np.repeat(numbers, [len(self._touched[op]) for op in again]), numbers]),
                          np.concatenate([np.repeat(total, len(again)), throughout[inside], runs[again]]),
                          np.concatenate([np.ones(len(again)), -sizes[inside], self._needs[again]]), self._budget, len(again))

    def _add_releases(self) -> None:
        """(7b), (7c), and that a value is released once a stage at most (the paper's theorem 4.1)."""
        model, runs = self.model, self._runs
        for column, (value, op) in enumerate(self._pairs):
            turns = np.nonzero(self._free[:, column] != self._zero)[0]
            free, ran, kept_on = self._free[turns, column], runs[turns, op], self._kept[turns + 1, value]
            later = [reader for reader in self._graph.consumers[value] if reader > op]
            model.rows([(free, 1), (ran, -1)], high=0)
            model.rows([(free, 1), (kept_on, 1)], high=1)
            for reader in later:
                late = turns >= reader
                model.rows([(free[late], 1), (runs[turns[late], reader], 1)], high=1)
            model.rows([(free, 1), (ran, -1), (kept_on, 1), *((runs[turns, reader], 1) for reader in later)], low=0)
        columns_of: list[list[int]] = [[] for _ in self._graph.values]
        for column, (value, _) in enumerate(self._pairs):
            columns_of[value].append(column)
        for columns in columns_of:
            if len(columns) > 1:
                model.rows([(self._free[self._exact, column], 1) for column in columns], high=1)

    def _add_exact_memory(self) -> None:
        """(2), (3), (4) and the budget."""
        model = self.model
        released_after: list[list[int]] = [[] for _ in self._graph.ops]
        for column, (_, op) in enumerate(self._pairs):
            released_after[op].append(column)
        used = np.full(self._runs.shape, self._zero)  # U
        for op in self._graph.ops:
            made = float(self._sizes[list(op.outputs)].sum())
            turns = self._exact[self._exact >= op.index]
            taken_over = max((self._sizes[value] for value in op.reuses), default=0.0)
            used[turns, op.index] = model.columns(len(turns), upper=self._budget + taken_over, integer=False)
            terms = [(used[turns, op.index], 1), (self._runs[turns, op.index], -made)]
            if op.index == 0:
                terms.extend((self._kept[turns, value], -size) for value, size in enumerate(self._sizes))
            else:
                terms.append((used[turns, op.index - 1], -1))
                terms.extend((self._free[turns, column], self._sizes[self._pairs[column][0]])
                             for column in released_after[op.index - 1])
            model.rows(terms, low=0, high=0)
            limit = [(used[turns, op.index], 1), (self._runs[turns, op.index], self._scratch[op.index])]
            if taken_over:
                limit.append((self._discounts(op, turns), -taken_over))
            if op.scratch_bytes or taken_over:
                model.rows(limit, high=self._budget)

    def _discounts(self, op: Op, turns: np.ndarray) -> np.ndarray:
        """D: whether the output takes over the memory of an input  # float [turns]."""
        discounts = self.model.columns(len(turns), upper=1.0, integer=False)
        is_last = turns == op.index  # the stage ends with this run, so what is not kept into the next one is released
        kept_on = [(self._kept[turns[is_last] + 1, value], 1) for value in op.reuses]
        self.model.rows([(discounts[is_last], 1), *kept_on], high=len(op.reuses))
        released = [(self._free[turns[~is_last], column], -1) for column, (value, reader) in enumerate(self._pairs)
                    if reader == op.index and value in op.reuses]
        self.model.rows([(discounts[~is_last], 1), *released], high=0)
        return discounts

    def _need(self, op: Op) -> float:
        taken_over = max((self._sizes[value] for value in op.reuses), default=0.0)
        return float(self._scratch[op.index] + self._sizes[self._touched[op.index]].sum() - taken_over)


def _memory_unit(graph: Graph, budget_bytes: int) -> tuple[float, float]:
    """Bytes per unit, and the budget in units once the resident bytes are off."""
    everything = [*(value.bytes for value in graph.values), *(op.scratch_bytes for op in graph.ops)]
    divisor = math.gcd(*everything) or 1
    # No plan holds more than everything at once, so a larger budget need not be told from that.
    budget = min(budget_bytes - graph.resident_bytes, sum(everything)) // divisor
    shrink = max(1.0, budget / _LARGEST_BUDGET)
    return divisor * shrink, budget / shrink
