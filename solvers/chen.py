"""Segments, square root of n and greedy: the heuristics that keep a few forward values and recompute the rest.

Chen et al. (2016, "Training deep nets with sublinear memory cost") keep the values at the borders of segments of the
forward pass, drop those inside, and run a segment's forward ops again when the backward pass reaches it.
Checkmate (section 6.1 and appendix B) lifts this from chains to graphs. The borders are chosen among *candidates*:

    chen_*        articulation points of the undirected forward graph: ops without which it falls apart
    linearized_*  every forward op, in the given order

by one of two rules:

    *_sqrt        every k-th candidate, k = floor(sqrt(number of candidates))
    *_greedy      walk the forward ops and add up their bytes; a candidate at which the sum reaches b becomes a border
                  and the sum starts anew. b sweeps a grid, the cheapest plan that fits wins.

What follows the last border is still there when the backward pass begins, so it is kept as well.

From the kept ops to an order (`recomputing_order`): walk all ops once, in the given order; before a backward op, run
again what it reads of dropped forward values, and what they were made from, up to values that are kept or have been
recomputed already. Once recomputed a value stays until its last use, as in the paper. Gradients are never
recomputed, nor is an op that must run once or whose inputs have been overwritten by then: its values simply stay. So
the order is valid on any graph; what each value's life is follows from the order alone.

Without forward and backward flags everything is forward, there is nothing to recompute for, and the answer is to keep
everything. No lower bound comes from here. Cost: O(V + E) per border set.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Sequence, Set

from checkmate_tf.ir.graph import Graph
from checkmate_tf.ir.plan import plan_from_order
from checkmate_tf.ir.simulate import simulate
from checkmate_tf.solvers.base import Answer, Limits, Progress, Report, StoppedBy
from checkmate_tf.solvers.matrices import last_stages

Candidates = Callable[[Graph], tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class SquareRoot:
    """Every k-th candidate is kept, with k the square root of their number."""

    name: str
    candidates: Candidates

    def search(self, graph: Graph, budget_bytes: int, limits: Limits, report: Report) -> Answer:
        kept = square_root_borders(self.candidates(graph))
        return _cheapest(graph, budget_bytes, limits, report, [kept])


@dataclasses.dataclass(frozen=True)
class Greedy:
    """Segments of at least b bytes; `steps` values of b are tried."""

    name: str
    candidates: Candidates
    steps: int = 200

    def search(self, graph: Graph, budget_bytes: int, limits: Limits, report: Report) -> Answer:
        candidates = self.candidates(graph)
        forward_bytes = sum(_output_bytes(graph, op) for op in forward_ops(graph))
        # Quadratic, because the borders change often while b is small and seldom when it is large.
        grid = (forward_bytes * (step / self.steps) ** 2 for step in range(self.steps + 1))
        borders = (greedy_borders(graph, candidates, segment_bytes) for segment_bytes in grid)
        return _cheapest(graph, budget_bytes, limits, report, borders)


def forward_ops(graph: Graph) -> tuple[int, ...]:
    """The ops that are not marked as backward and read nothing that is made there, in order."""
    is_backward = [False] * len(graph.ops)
    for op in graph.ops:
        is_backward[op.index] = op.backward or any(is_backward[maker] for maker in graph.predecessors[op.index])
    return tuple(op for op, is_after in enumerate(is_backward) if not is_after)


def articulation_points(graph: Graph) -> tuple[int, ...]:
    """Forward ops whose removal disconnects the undirected forward graph, ascending (Hopcroft and Tarjan 1973).

    An iterative depth-first search, O(V + E). An op is one if some child in the search tree reaches nothing
    above it, or if it is a root with two children.
    """
    neighbours: dict[int, list[int]] = {op: [] for op in forward_ops(graph)}
    for op in neighbours:
        for producer in graph.predecessors[op]:
            if producer in neighbours:
                neighbours[op].append(producer)
                neighbours[producer].append(op)
    depth: dict[int, int] = {}
    lowest: dict[int, int] = {}
    found: set[int] = set()
    for root in neighbours:
        if root in depth:
            continue
        depth[root] = lowest[root] = 0
        root_children = 0
        stack = [(root, -1, iter(neighbours[root]))]
        while stack:
            op, parent, unseen = stack[-1]
            child = next(unseen, None)
            if child is None:
                stack.pop()
                if parent == root:
                    root_children += 1
                elif parent >= 0 and lowest[op] >= depth[parent]:
                    found.add(parent)
                if parent >= 0:
                    lowest[parent] = min(lowest[parent], lowest[op])
            elif child not in depth:
                depth[child] = lowest[child] = depth[op] + 1
                stack.append((child, op, iter(neighbours[child])))
            elif child != parent:
                lowest[op] = min(lowest[op], depth[child])
        if root_children > 1:
            found.add(root)
    return tuple(sorted(found))


def square_root_borders(candidates: Sequence[int]) -> frozenset[int]:
    """Every k-th of the candidates, k = floor(sqrt(number of candidates))."""
    stride = max(1, math.isqrt(len(candidates)))
    return frozenset(candidates[stride - 1::stride])


def greedy_borders(graph: Graph, candidates: Iterable[int], segment_bytes: float) -> frozenset[int]:
    """The candidates at which the forward bytes since the last border reach `segment_bytes`."""
    allowed = frozenset(candidates)
    borders = set()
    since_border_bytes = 0
    for op in forward_ops(graph):
        since_border_bytes += _output_bytes(graph, op)
        if op in allowed and since_border_bytes >= segment_bytes:
            borders.add(op)
            since_border_bytes = 0
    return frozenset(borders)


def recomputing_order(graph: Graph, borders: Set[int]) -> tuple[int, ...]:
    """The order that keeps the borders and the last segment, and recomputes other forward values when needed."""
    last_border = max(borders, default=-1)
    return order_without(graph, {op for op in forward_ops(graph) if op < last_border and op not in borders})


def order_without(graph: Graph, dropped: Set[int]) -> tuple[int, ...]:
    """The order that lets go of what these forward ops make, and recomputes it when a backward op asks for it."""
    dropped = set(dropped)
    last = last_stages(graph)
    order: list[int] = []
    for op in graph.ops:
        if op.backward:
            again: set[int] = set()
            stack = list(graph.predecessors[op.index])
            while stack:
                producer = stack.pop()
                if producer in dropped and last[producer] >= op.index:
                    dropped.remove(producer)
                    again.add(producer)
                    stack.extend(graph.predecessors[producer])
            order.extend(sorted(again))
        order.append(op.index)
    return tuple(order)


def _cheapest(graph: Graph, budget_bytes: int, limits: Limits, report: Report,
              border_sets: Iterable[frozenset[int]]) -> Answer:
    """The cheapest order within the budget of those that the border sets give; of equal ones that of least peak."""
    started = time.monotonic()
    best, best_rank, tried = None, (math.inf, math.inf), set()
    stopped_by = StoppedBy.DONE
    for borders in border_sets:
        if tried and time.monotonic() - started > limits.seconds:
            stopped_by = StoppedBy.TIME
            break
        if borders in tried:
            continue
        tried.add(borders)
        order = recomputing_order(graph, borders)
        timeline = simulate(graph, plan_from_order(graph, order))
        rank = (timeline.seconds, timeline.peak_bytes)
        if timeline.peak_bytes <= budget_bytes and rank < best_rank:
            best, best_rank = order, rank
            report(Progress(timeline.seconds, graph.seconds, time.monotonic() - started))
    return Answer(best, stopped_by, stats={"border_sets": len(tried)})


def _output_bytes(graph: Graph, op: int) -> int:
    return sum(graph.values[value].bytes for value in graph.ops[op].outputs)
