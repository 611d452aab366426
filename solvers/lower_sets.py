"""Chains of lower sets: what to keep of any graph when each block between is recomputed once.

Kusumoto, Inoue, Watanabe, Akiba and Koyama, "A graph theoretic framework of recomputation algorithms for
memory-efficient backpropagation", NeurIPS 2019, arXiv 1905.11722. A lower set L of the forward graph contains what its
members are made from; its boundary is what is read outside of it. A chain of lower sets L_1 < ... < L_k = V stands for
the plan that keeps the boundaries and, backwards, recomputes the rest of each block V_i = L_i - L_(i-1) but the last
once. Where Chen's borders are single ops, a boundary may be any cut: U-Nets have none of one op, and many small ones.

The dynamic programme runs over pairs (L, overhead so far) and keeps the least bytes cached so far. From L to a larger
L'

    overhead  grows by the time of V' outside the boundary of L' (nothing for the last block)
    cached    grows by the bytes of the boundary of L' that are not in L
    and       cached so far + the bytes of V' + its gradients <= the budget

    exact         all lower sets where there are at most `most_sets`
    approximate   otherwise the sets of all ancestors of one op (the paper's), and the first ops in the given order; on
                  large graphs an even choice of twice `most_sets` of these

The memory of a block is the paper's estimate, with the gradients' share read from the backward ops; what counts is the
simulator. So the programme is solved for budgets below and above the given one, and of all overheads it finds the
cheapest plan that fits is taken. The kept values are turned into an order as in `chen`: a block's values are recomputed
when they are asked for, and only those.

Not done: recomputing gradients, recomputing a value twice (see `griewank`), or keeping a value without a boundary that
holds it. Overheads are counted in 1/100, rounded, of the forward time, and once a plan is found of its overhead. Cost:
pairs of sets times 100, in NumPy: a second or two for 350 ops. No bound comes from here. The tests compare with all
chains of lower sets of small graphs.
"""

import dataclasses
import math
import time
from collections.abc import Iterator, Sequence

import numpy as np

from checkmate_tf.ir.graph import Graph
from checkmate_tf.ir.plan import plan_from_order
from checkmate_tf.ir.simulate import keep_all_timeline, simulate
from checkmate_tf.solvers.base import Answer, Limits, Progress, Report, StoppedBy
from checkmate_tf.solvers.chen import forward_ops, order_without

_GRAINS = 100
_AIMS = (1.0, 0.9, 1.1, 0.8, 1.25, 0.65, 1.5, 0.5)  # shares of the budget
_SPREAD = 12                                        # overheads looked at for each of them


@dataclasses.dataclass(frozen=True)
class LowerSets:
    """Exact over lower sets where there are at most `most_sets` of them. max_forward_ops: larger graphs are not tried."""

    most_sets: int = 400
    max_forward_ops: int = 3_000
    name: str = "lower_sets"

    def search(self, graph: Graph, budget_bytes: int, limits: Limits, report: Report) -> Answer:
        started = time.monotonic()
        deadline = started + limits.seconds
        if keep_all_timeline(graph).peak_bytes <= budget_bytes:
            return Answer(graph.order, StoppedBy.DONE)
        forward = forward_ops(graph)
        if not forward or len(forward) == len(graph.ops):
            return Answer(None, StoppedBy.DONE, stats={"sets": 0})
        if len(forward) > self.max_forward_ops:
            return Answer(None, StoppedBy.SIZE)
        family = all_lower_sets(graph, forward, self.most_sets)
        is_exact = family is not None
        family = family if family is not None else _thinned(pruned_lower_sets(graph, forward), 2 * self.most_sets)
        programme = _Programme(graph, forward, family, deadline)
        best, best_seconds, tried, stopped_by = None, math.inf, set(), StoppedBy.DONE
        forward_seconds = sum(graph.ops[op].seconds for op in forward)
        rounds = [(aim, is_fine) for is_fine in (False, True) for aim in _AIMS]
        for aim, is_fine in rounds:
            if is_fine and best is None:
                break
            most_seconds = best_seconds - graph.seconds if is_fine else forward_seconds
            for dropped in programme.drops(int(aim * budget_bytes), most_seconds):
                if time.monotonic() > deadline:
                    stopped_by = StoppedBy.TIME
                    break
                if dropped in tried:
                    continue
                tried.add(dropped)
                order = order_without(graph, dropped)
                timeline = simulate(graph, plan_from_order(graph, order))
                if timeline.peak_bytes <= budget_bytes and timeline.seconds < best_seconds:
                    best, best_seconds = order, timeline.seconds
                    report(Progress(best_seconds, graph.seconds, time.monotonic() - started))
        if time.monotonic() > deadline:
            stopped_by = StoppedBy.TIME
        return Answer(best, stopped_by, stats={"sets": len(family), "all_sets": is_exact, "plans": len(tried)})


def all_lower_sets(graph: Graph, forward: Sequence[int], most: int) -> np.ndarray | None:
    """Every lower set but the empty one, by size, bool [sets, forward ops]; None if there are more than `most`."""
    place = {op: number for number, op in enumerate(forward)}
    inputs = [sum(1 << place[made] for made in graph.predecessors[op]) for op in forward]
    found, latest = {0}, {0}  # sets as the bits of a number
    while latest:
        latest = {known | 1 << op for known in latest for op in range(len(forward))
                  if not known >> op & 1 and known & inputs[op] == inputs[op]}
        found |= latest
        if len(found) > most + 1:
            return None
    sets = sorted(found - {0}, key=lambda known: (known.bit_count(), known))
    return np.array([[known >> op & 1 for op in range(len(forward))] for known in sets], dtype=bool)


def pruned_lower_sets(graph: Graph, forward: Sequence[int]) -> np.ndarray:
    """For each op it and its ancestors, and the ops up to it, by size, bool [sets, forward ops]."""
    place = {op: number for number, op in enumerate(forward)}
    closure = np.eye(len(forward), dtype=bool)
    for number, op in enumerate(forward):
        for made in graph.predecessors[op]:
            closure[number] |= closure[place[made]]
    prefixes = np.tri(len(forward), dtype=bool)
    family = np.unique(np.vstack([closure, prefixes]), axis=0)
    return family[np.argsort(family.sum(axis=1), kind="stable")]


def _thinned(family: np.ndarray, most: int) -> np.ndarray:
    """At most about so many of the sets, evenly by size, the last one among them."""
    return family[np.unique(np.linspace(0, len(family) - 1, most).astype(np.int64))] if len(family) > most else family


class _Programme:
    """The dynamic programme over a family of lower sets, sorted by size; the last one is everything."""

    def __init__(self, graph: Graph, forward: Sequence[int], family: np.ndarray, deadline: float):
        self._graph, self._forward, self._family = graph, np.array(forward), family
        self._deadline = deadline
        place = {op: number for number, op in enumerate(forward)}
        count = len(forward)
        self._bytes = np.array([sum(graph.values[value].bytes for value in graph.ops[op].outputs) for op in forward])
        self._seconds = np.array([graph.ops[op].seconds for op in forward])
        reads = np.zeros((count, count), dtype=bool)  # [made, reader]
        for number, op in enumerate(forward):
            for made in graph.predecessors[op]:
                reads[place[made], number] = True
        outside = (~family).astype(np.float32) @ reads.T.astype(np.float32) > 0  # somebody outside reads it
        self._boundary = family & outside
        self._grain = 1.0
        # With a backward op, what it reads of its block and what it makes are held together.
        working = np.zeros(count, dtype=np.int64)
        for op in graph.ops:
            if op.backward:
                inner = [place[graph.values[value].producer] for value in op.inputs
                         if graph.values[value].producer in place]
                need = op.scratch_bytes + sum(graph.values[value].bytes for value in op.outputs) + sum(
                    graph.values[value].bytes for value in op.inputs if graph.values[value].producer not in place)
                if inner:
                    working[max(inner)] = max(working[max(inner)], need)
        self._working = working

    def drops(self, budget_bytes: int, most_seconds: float) -> Iterator[frozenset[int]]:
        """The ops to recompute, from the least overhead within this budget on, up to so many seconds."""
        self._grain = max(most_seconds / _GRAINS, 1e-300)
        cached, before = self._solve(budget_bytes - self._graph.resident_bytes)
        last = len(self._family) - 1
        fitting = np.flatnonzero(np.isfinite(cached[last]))
        # More overhead is of use only where it leaves less cached.
        falling = [grains for number, grains in enumerate(fitting)
                   if number == 0 or cached[last, grains] < cached[last, fitting[:number]].min()]
        picked = falling if len(falling) <= _SPREAD else [
            falling[number * (len(falling) - 1) // (_SPREAD - 1)] for number in range(_SPREAD)]
        for grains in picked:
            yield self._dropped(before, int(grains))

    def _solve(self, budget_bytes: int) -> tuple[np.ndarray, np.ndarray]:
        """Least cached bytes and the set before, for each set and overhead; the empty set is number -1."""
        sets, size = self._family, self._bytes
        count = len(sets)
        cached = np.full((count, _GRAINS + 1), np.inf)
        before = np.full((count, _GRAINS + 1), -2, dtype=np.int64)
        set_seconds = sets @ self._seconds
        set_bytes = sets @ size
        kept_bytes = self._boundary.astype(np.int64) * size
        kept_seconds = self._boundary * self._seconds
        for to in range(count):
            if time.monotonic() > self._deadline:
                break
            is_last = to == count - 1
            inside = sets[:to]
            smaller = np.flatnonzero(~(inside & ~sets[to]).any(axis=1))
            shared = inside[smaller]
            new_bytes = np.append(kept_bytes[to].sum() - shared @ kept_bytes[to], kept_bytes[to].sum())
            block_seconds = np.append(set_seconds[to] - set_seconds[smaller], set_seconds[to])
            redone = block_seconds - np.append(kept_seconds[to].sum() - shared @ kept_seconds[to], kept_seconds[to].sum())
            steps = np.rint(np.minimum(redone / self._grain, 2.0 * _GRAINS) * (not is_last)).astype(np.int64)
            block_bytes = np.append(set_bytes[to] - set_bytes[smaller], set_bytes[to])
            block_work = (~np.vstack([shared, np.zeros((1, sets.shape[1]), bool)]) & sets[to]) * self._working
            room = budget_bytes - block_bytes - block_work.max(axis=1)
            starts = np.vstack([cached[smaller], np.where(np.arange(_GRAINS + 1) == 0, 0.0, np.inf)])
            starts = np.where(starts <= room[:, None], starts + new_bytes[:, None], np.inf)
            numbers = np.append(smaller, -1)
            rows = np.flatnonzero(np.isfinite(starts).any(axis=1) & (steps <= _GRAINS))
            if len(rows):
                at = np.arange(_GRAINS + 1) - steps[rows, None]
                shifted = np.where(at >= 0, starts[rows[:, None], np.maximum(at, 0)], np.inf)
                least = shifted.argmin(axis=0)
                cached[to] = shifted[least, np.arange(_GRAINS + 1)]
                before[to] = np.where(np.isfinite(cached[to]), numbers[rows[least]], -2)
        return cached, before

    def _dropped(self, before: np.ndarray, grains: int) -> frozenset[int]:
        sets = self._family
        to, dropped, is_last = len(sets) - 1, set(), True
        while to >= 0:
            previous = int(before[to, grains])
            block = sets[to] & ~sets[previous] if previous >= 0 else sets[to]
            if not is_last:
                redone = block & ~self._boundary[to]
                dropped.update(self._forward[redone].tolist())
                grains -= int(np.rint((redone @ self._seconds) / self._grain))
            to, is_last = previous, False
        return frozenset(dropped)
