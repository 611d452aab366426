"""The cut relaxation: an integer program that every plan satisfies, whatever it runs again, how often and when.

Checkmate's stages (see `programs`) coarsened to the few phases between chosen cuts (see `cuts`), with memory charged
where every plan certainly holds it. Read as variables of 0 and 1:

    R[j,k]   op k runs at least once in phase j
    S[j,v]   right after the cut that begins phase j value v is live: it is used before it is made again, or a result

Any plan has such R and S, and minimising the seconds of R bounds its cost, under

    R[j,k] <= R[j,i] + S[j,v]            k reads v, which i makes
    S[j,v] <= R[j-1,i] + S[j-1,v]        i makes v; results must be in S at the end
    sum of R[.,k] >= 1                   over the phases in which the first run of k can be
    need(t) + sum M S[j,v] <= budget     at cut t, over what it does not touch
    need(k) R[j,k] + sum M P[j,v] <= budget   while k runs in phase j, over what it does not touch

P[j,v] = 1 where v is live throughout phase j: at its end, or read by the cut that ends it, and not made in it
(P >= S[j+1,v] - R[j,i], P >= 1 - R[j,i]). While a first run of a phase is done, in the scope "fixed", also what a later one
reads is live if the phase does not make it. need(k) is what k itself takes: inputs, outputs and scratch, less what its
output can take over. These last rows see the memory of what is run again; they double the size of the program and
most plans do not hang on them, so they can be left out (`rows_within`).

What keeps it small. R has columns only between the phase of the earliest first run and that in which the last reader
may want the op; what must run once, and what makes next to nothing, is never run again, and fixed entries are no
columns. The smallest values, together no more than a ten-thousandth of the budget, count as nothing. A budget that is a
little larger, and bytes that are less, only make the bound smaller, never wrong.

Few cuts do better than many: in the linear relaxation many phases recompute a value half here and half there from
a half-kept input. The tests compare with an exhaustive search over all plans of small graphs.
"""

import math

import numpy as np

from checkmate_tf.ir.graph import Graph, Op
from checkmate_tf.ir.simulate import needed_bytes
from checkmate_tf.solvers.backend import LinearModel
from checkmate_tf.solvers.cuts import Phases

_COST_SCALE = 1e4      # running everything once costs this much in the program: tolerances then suit every graph
_LARGEST_BUDGET = 1e5  # bytes are scaled so that the budget is no more than this
_ROUNDING = 1e-9       # the budget is this much larger, so that no sum of rounded bytes breaks it
_NOTHING = 1e-4        # of the budget: what the smallest values, which count as nothing, take together


class CutProgram:
    """The program for a graph, a budget and the phases between some cuts.

    model: to be solved    cost_unit: cost in the model per second
    """

    def __init__(self, graph: Graph, budget_bytes: int, phases: Phases, *, rows_within: bool = True):
        self.model = LinearModel()
        self.cost_unit = _COST_SCALE / graph.seconds if graph.seconds > 0 else 1.0
        self._graph, self._phases = graph, phases
        held_bytes = budget_bytes - graph.resident_bytes
        unit_bytes = max(1.0, held_bytes / _LARGEST_BUDGET)
        self._budget = held_bytes / unit_bytes * (1 + _ROUNDING)
        self._sizes = _worthwhile(graph, held_bytes) / unit_bytes
        self._is_held = self._sizes > 0
        self._producers = np.array([value.producer for value in graph.values], dtype=np.int64)
        self._needs = np.array([needed_bytes(graph, op) for op in graph.ops]) / unit_bytes
        self._add_columns()
        self._add_dependencies()
        self._add_first_runs()
        self._add_overwriting()
        for cut in range(len(phases.cuts)):
            self._add_memory_at(cut)
        if rows_within:
            for phase in range(phases.count):
                self._add_memory_within(phase)

    def runs(self, solution: np.ndarray) -> np.ndarray:
        """R of a solution, bool [phases, ops]."""
        return solution[self._runs] > 0.5

    def _add_columns(self) -> None:
        """R  # int [phases, ops]; S with a last row for the results  # int [phases + 1, values]."""
        graph, model, phases, producers = self._graph, self.model, self._phases, self._producers
        last_runs, useful_until = self._usefulness()
        is_certain = phases.earliest == phases.latest
        turns = np.arange(phases.count)[:, None]
        is_forced = is_certain & (turns == phases.earliest)
        is_open = (turns >= phases.earliest) & (turns <= last_runs) & ~is_forced
        costs = np.array([op.seconds for op in graph.ops]) * self.cost_unit
        self._zero = int(model.columns(1, upper=0.0)[0])
        self._one = int(model.columns(1, lower=1.0, cost=float(costs[is_certain].sum()))[0])
        self._runs = np.where(is_forced, self._one, self._zero)
        self._runs[is_open] = model.columns(int(is_open.sum()), cost=np.broadcast_to(costs, is_open.shape)[is_open])
        turns = np.arange(phases.count + 1)[:, None]
        is_useful = (turns > phases.earliest[producers]) & (turns <= useful_until)
        is_there = is_useful & ~self._is_held & (turns > phases.latest[producers])  # what takes nothing is kept
        is_open = is_useful & ~is_there
        is_there[-1] = is_open[-1] = False
        is_there[-1, list(graph.results)] = True
        self._kept = np.where(is_there, self._one, self._zero)
        self._kept[is_open] = model.columns(int(is_open.sum()))

    def _usefulness(self) -> tuple[np.ndarray, np.ndarray]:
        """The last phase in which running an op may help, and that in which a value may be used, or -1."""
        graph, phases = self._graph, self._phases
        last_runs = phases.latest.copy()
        useful_until = np.full(len(graph.values), -1)
        useful_until[list(graph.results)] = phases.count
        for op in reversed(graph.ops):
            worth = -1
            for value in op.outputs:
                for reader in graph.consumers[value]:
                    useful_until[value] = max(useful_until[value], last_runs[reader])
                if self._is_held[value]:
                    worth = max(worth, useful_until[value])
            last_runs[op.index] = max(phases.latest[op.index], min(phases.last[op.index], worth, phases.count - 1))
        return last_runs, useful_until

    def _add_dependencies(self) -> None:
        values = np.array([value for op in self._graph.ops for value in op.inputs], dtype=np.int64)
        readers = np.array([op.index for op in self._graph.ops for _ in op.inputs], dtype=np.int64)
        self._add_implications(self._runs[:, readers], self._runs[:, self._producers[values]], self._kept[:-1, values])
        self._add_implications(self._kept[1:], self._runs[:, self._producers], self._kept[:-1])

    def _add_implications(self, what, one_way, other_way) -> None:
        """what <= one_way + other_way, where that is not clear already; columns as arrays of one shape."""
        is_open = (what != self._zero) & (one_way != self._one) & (other_way != self._one)
        self.model.rows([(what[is_open], 1), (one_way[is_open], -1), (other_way[is_open], -1)], high=0)

    def _add_first_runs(self) -> None:
        earliest, latest = self._phases.earliest, self._phases.latest
        for op in self._graph.ops:
            if earliest[op.index] < latest[op.index]:
                columns = self._runs[earliest[op.index]:latest[op.index] + 1, op.index]
                self.model.row(columns, 1.0, low=1.0, high=1.0 if op.once is not None else math.inf)
            for before in op.after:
                for phase in range(earliest[op.index], latest[before]):
                    columns = [self._runs[phase, op.index], *self._runs[:phase + 1, before]]
                    self.model.row(columns, [1.0, *[-1.0] * (phase + 1)], high=0)

    def _add_overwriting(self) -> None:
        """Who reads what is overwritten runs in no phase after the one in which that happens."""
        earliest, latest = self._phases.earliest, self._phases.latest
        for writer in self._graph.ops:
            if not writer.overwrites or earliest[writer.index] == latest[writer.index]:
                continue
            readers = {reader for value in writer.overwrites for reader in self._graph.consumers[value]}
            for reader in sorted(readers - {writer.index}):
                for phase in range(earliest[writer.index] + 1, latest[writer.index] + 1):
                    if self._runs[phase, reader] != self._zero:
                        columns = self._runs[earliest[writer.index]:phase, writer.index]
                        if writer.once is None:
                            columns = columns[:1]
                        self.model.row([self._runs[phase, reader], *columns], 1.0, high=1.0)

    def _add_memory_at(self, cut: int) -> None:
        op, kept = self._graph.ops[self._phases.cuts[cut]], self._kept[cut + 1]
        others = np.setdiff1d(np.flatnonzero(self._is_held & (kept != self._zero)), _touched(op))
        self.model.row(kept[others], self._sizes[others], high=self._budget - self._needs[op.index])

    def _add_memory_within(self, phase: int) -> None:
        """Memory at all runs of a phase but the cut that ends it."""
        model, sizes, runs = self.model, self._sizes, self._runs[phase]
        throughout, made, may_last = self._add_throughout(phase)
        lasting = np.flatnonzero(throughout != self._zero)
        total = int(model.columns(1, upper=self._budget, integer=False)[0])
        model.row([*throughout[lasting], total], [*sizes[lasting], -1], high=0)
        ending = self._phases.cuts[phase] if phase < len(self._phases.cuts) else -1
        read_later: set[int] = set()
        for op in reversed(self._graph.ops):
            if runs[op.index] == self._zero:
                continue
            is_first = runs[op.index] == self._one and self._phases.is_ordered
            if op.index != ending:
                touched = {value for value in _touched(op) if self._is_held[value]}
                surely = np.array(sorted(read_later - touched) if is_first else [], dtype=np.int64)
                apart = np.array([value for value in (*touched, *surely) if throughout[value] != self._zero],
                                 dtype=np.int64)
                model.row([total, runs[op.index], *throughout[apart], *made[surely]],
                          [1.0, self._needs[op.index], *-sizes[apart], *-sizes[surely]],
                          high=self._budget - sizes[surely].sum())
            if is_first:
                read_later.update(value for value in op.inputs if may_last[value])

    def _add_throughout(self, phase: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Columns of P and of R of the makers, and whether P may be 1, by value."""
        model, phases, producers = self.model, self._phases, self._producers
        made, after = self._runs[phase][producers], self._kept[phase + 1]
        may_last = self._is_held & (made != self._one) & (phases.earliest[producers] <= phase)
        end = after.copy()
        if phase < len(phases.cuts):
            end[list(self._graph.ops[phases.cuts[phase]].inputs)] = self._one
        throughout = np.where(may_last & (made == self._zero), end, self._zero)
        new = np.flatnonzero(may_last & (made != self._zero) & (end != self._zero))
        throughout[new] = model.columns(len(new), integer=False)
        model.rows([(throughout[new], 1), (end[new], -1), (made[new], 1)], low=0)
        return throughout, made, may_last


def _touched(op: Op) -> list[int]:
    """What the op's needed bytes count. They do not count an input whose memory its output can take over, so where
    that is kept it comes on top; of several such inputs nobody knows which.
    """
    taken_over = op.reuses if len(op.reuses) == 1 else ()
    return [value for value in (*op.inputs, *op.outputs) if value not in taken_over]


def _worthwhile(graph: Graph, held_bytes: int) -> np.ndarray:
    """The bytes of each value, the smallest left out."""
    sizes = np.array([value.bytes for value in graph.values], dtype=np.int64)
    by_size = np.argsort(sizes, kind="stable")
    sizes[by_size[np.cumsum(sizes[by_size]) <= _NOTHING * held_bytes]] = 0
    return sizes


def order_from(graph: Graph, phases: Phases, runs: np.ndarray) -> tuple[int, ...]:
    """A plan's order that runs in each phase what R says, as late as it is wanted there; it may not fit.

    First runs come in the order of indices, and what they read is run right before; what a phase runs only for later
    ones comes at its end, before the cut. # runs: bool [phases, ops]
    """
    order: list[int] = []
    ran: set[int] = set()
    for phase in range(phases.count):
        todo = set(np.flatnonzero(runs[phase]).tolist())
        firsts = sorted(todo - ran)
        cut = [phases.cuts[phase]] if phase < len(phases.cuts) else []
        for op in (*firsts, *sorted(todo), *cut):
            if [op] != cut or todo == {op}:
                _run(graph, op, todo, order)
        ran.update(order)
    return tuple(order)


def _run(graph, op, todo, order) -> None:
    """Appends the op, and before it what of `todo` it waits for."""
    stack = [(op, False)]
    while stack:
        op, is_ready = stack.pop()
        if op not in todo:
            continue
        if is_ready:
            todo.discard(op)
            order.append(op)
            continue
        stack.append((op, True))
        waits_for = {graph.values[value].producer for value in graph.ops[op].inputs}
        waits_for.update(reader for value in graph.ops[op].overwrites for reader in graph.consumers[value]
                         if reader != op)
        stack.extend((other, False) for other in sorted(waits_for, reverse=True))
