"""Cuts through a training step: ops whose first runs come one after the other whatever the plan, and what lies between.

Cuts t_1, ..., t_K divide every plan into phases: phase j is what runs after the first run of t_j, up to and including the
first run of t_{j+1}; phase 0 begins at the start and phase K ends at the end. With the scope "fixed" (first runs in the
order of indices) any ascending ops are cuts. With "any" each cut must come before the next in every plan: by what it
reads, by control edges, or because it reads what the other overwrites.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from checkmate_tf.ir.graph import Graph

SCOPES = ("fixed", "any")


@dataclasses.dataclass(frozen=True)
class Phases:
    """What any plan in the scope does when, in phases 0 to `count` - 1.

    is_ordered: first runs within a phase come in the order of indices, too
    earliest, latest: the phase of an op's first run is one of these or in between    # int [ops]
    last: no op runs after this phase    # int [ops]
    """

    cuts: tuple[int, ...]
    is_ordered: bool
    earliest: np.ndarray
    latest: np.ndarray
    last: np.ndarray

    @property
    def count(self) -> int:
        return len(self.cuts) + 1


def predecessors(graph: Graph) -> tuple[tuple[int, ...], ...]:
    """For each op those whose first runs come before its own in every plan."""
    found = [{graph.values[value].producer for value in op.inputs} | set(op.after) for op in graph.ops]
    for op in graph.ops:
        for value in op.overwrites:
            found[op.index].update(reader for reader in graph.consumers[value] if reader != op.index)
    return tuple(tuple(sorted(ops)) for ops in found)


def phases(graph: Graph, cuts: Sequence[int], scope: str) -> Phases:
    """The phases between the cuts, which must be ascending, and for the scope "any" a chain (`chain` finds one)."""
    ops = np.arange(len(graph.ops))
    if scope == "fixed":
        earliest = latest = np.searchsorted(np.array(cuts, dtype=np.int64), ops, side="left")
    else:
        before = predecessors(graph)
        earliest, latest = np.zeros(len(ops), dtype=np.int64), np.full(len(ops), len(cuts))
        for cut in cuts:
            latest -= _ancestors(before, cut)
            earliest += _descendants(before, cut)
    last = np.full(len(ops), len(cuts))
    for op in graph.ops:
        if op.once is not None:
            last[op.index] = latest[op.index]
        for value in op.inputs:
            for writer in graph.writers[value]:
                last[op.index] = min(last[op.index], latest[writer])
    return Phases(tuple(cuts), scope == "fixed", earliest, latest, last)


def chain(graph: Graph, weight: Sequence[float]) -> tuple[int, ...]:
    """The chain of ops, each before the next in every plan, with the largest sum of weights (not negative)."""
    before = predecessors(graph)
    total: list[float] = []
    previous = []
    for op in graph.ops:
        best = max(before[op.index], key=total.__getitem__, default=-1)
        previous.append(best)
        total.append(weight[op.index] + (total[best] if best >= 0 else 0.0))
    op = max(range(len(total)), key=total.__getitem__, default=-1)
    found = []
    while op >= 0:
        found.append(op)
        op = previous[op]
    return tuple(reversed(found))


def _ancestors(before, op) -> np.ndarray:
    """The op and what comes before it, bool [ops]."""
    found = np.zeros(len(before), dtype=bool)
    found[op] = True
    for other in range(op, -1, -1):
        if found[other]:
            found[list(before[other])] = True
    return found


def _descendants(before, op) -> np.ndarray:
    """What comes after the op, without itself, bool [ops]."""
    found = np.zeros(len(before), dtype=bool)
    found[op] = True
    for other in range(op + 1, len(before)):
        found[other] = any(found[earlier] for earlier in before[other])
    found[op] = False
    return found
