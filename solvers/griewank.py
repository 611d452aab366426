"""Revolve: reverse a chain with s snapshots, each advance leaving new ones behind, at logarithmic growth of work.

Griewank and Walther, "Algorithm 799: Revolve", ACM Transactions on Mathematical Software 2000. A chain of l steps is to
be reversed with room for s snapshots, of which the start is one. If beta(s, r) = C(s + r, s) >= l for the least
possible r, no step needs to be advanced over more than r times, and the least number of advances is

    t(l, s) = r l - beta(s + 1, r - 1)

It is reached by advancing to a step m, leaving a snapshot there, reversing the rest with s - 1 snapshots, and then the
first m with s again; `split` gives such an m. With s = log l this takes O(log l) advances a step: the "log n" column of
Checkmate's tables. Where Chen's heuristics recompute every forward value once, this recomputes again and again, and
gets by with the least memory that keeps a chain's forward values only.

Steps are the segments of the forward pass between *candidates*, as in `chen`:

    griewank              articulation points of the undirected forward graph
    griewank_linearized   every forward op, in the given order

and a snapshot is what the candidate at a segment's end makes. On a chain that is Revolve. On other graphs Checkmate
prints no numbers; here recomputation goes back as far as it must, because values that bypass the candidates are kept
no longer than for the segment that reads them: valid on any graph, and dear where there are many. Gradients are never
recomputed. All s up to 12, then more coarsely, are tried; of the plans that fit the cheapest is taken.

Cost: one pass over the order for each s, as long as the order it makes. No bound comes from here, and none for other
plans: Revolve is optimal among schedules that keep whole states, counted in steps of equal size. The tests compare the
number of advances with the formula above and with a dynamic programme, and the orders of short chains with ones worked
out by hand.
"""

import bisect
import dataclasses
import math
import time
from collections.abc import Sequence

from checkmate_tf.ir.graph import Graph
from checkmate_tf.ir.plan import plan_from_order
from checkmate_tf.ir.simulate import keep_all_timeline, simulate
from checkmate_tf.solvers.base import Answer, Limits, Progress, Report, StoppedBy
from checkmate_tf.solvers.chen import Candidates, forward_ops
from checkmate_tf.solvers.demand import Player


@dataclasses.dataclass(frozen=True)
class Griewank:
    """The cheapest of Revolve's plans that fits, over all numbers of snapshots."""

    name: str
    candidates: Candidates

    def search(self, graph: Graph, budget_bytes: int, limits: Limits, report: Report) -> Answer:
        started = time.monotonic()
        if keep_all_timeline(graph).peak_bytes <= budget_bytes:
            return Answer(graph.order, StoppedBy.DONE)
        candidates = self.candidates(graph)
        best, best_seconds, best_snapshots, stopped_by = None, math.inf, -1, StoppedBy.DONE
        for snapshots in snapshot_counts(len(candidates)):
            if time.monotonic() - started > limits.seconds:
                stopped_by = StoppedBy.TIME
                break
            order = revolving_order(graph, candidates, snapshots, started + limits.seconds)
            if order is None:
                stopped_by = StoppedBy.TIME
                break
            timeline = simulate(graph, plan_from_order(graph, order))
            if timeline.peak_bytes <= budget_bytes and timeline.seconds < best_seconds:
                best, best_seconds, best_snapshots = order, timeline.seconds, snapshots
                report(Progress(best_seconds, graph.seconds, time.monotonic() - started))
        return Answer(best, stopped_by, stats={"candidates": len(candidates), "snapshots": best_snapshots})


def snapshot_counts(most: int) -> tuple[int, ...]:
    """The numbers of snapshots to try, most first: with fewer the passes get longer."""
    counts = set(range(min(most, 12) + 1))
    while most > 12:
        counts.add(most)
        most = math.floor(most * 0.85)
    return tuple(sorted(counts, reverse=True))


def split(steps: int, snapshots: int) -> int:
    """Where to leave the next of this many snapshots, the start not counted, to reverse with the fewest advances."""
    snapshots += 1
    repetitions = 1
    while math.comb(snapshots + repetitions, snapshots) < steps:
        repetitions += 1
    first = math.comb(snapshots + repetitions - 2, snapshots) if repetitions > 1 else 1
    return max(1, first, steps - math.comb(snapshots - 1 + repetitions, snapshots - 1))


def places(start: int, end: int, snapshots: int) -> list[int]:
    """The steps at whose beginning an advance from `start` to the last step before `end` leaves snapshots."""
    found = []
    while end - start > 1 and snapshots > 0:
        start += split(end - start, snapshots)
        snapshots -= 1
        found.append(start)
    return found


def revolving_order(graph: Graph, candidates: Sequence[int], snapshots: int,
                    deadline: float = math.inf) -> tuple[int, ...] | None:
    """Runs forward leaving snapshots, then backward, advancing from the nearest one whenever values are missing.

    None when time.monotonic() reaches the deadline.
    """
    forward = forward_ops(graph)
    borders = sorted(op for op in candidates if op != forward[-1])
    segment = {op: bisect.bisect_left(borders, op) for op in forward}
    members: list[list[int]] = [[] for _ in range(len(borders) + 1)]
    for op in forward:
        members[segment[op]].append(op)
    player = Player(graph)
    left = places(0, len(members), snapshots)
    current = None
    for op in graph.ops:
        if time.monotonic() > deadline:
            return None
        if op.backward:
            if current is None:
                current = len(members) - 1
                _keep_only(player, forward, [op.index, *members[current]], borders, left)
            missing = [value for value in op.inputs if not player.held[value]
                       and graph.values[value].producer in segment]
            if missing:
                current = max(segment[graph.values[value].producer] for value in missing)
                left = [place for place in left if place <= current]
                start = left[-1] if left else 0
                left += places(start, current + 1, snapshots - len(left))
                player.fetch(missing)
                _keep_only(player, forward, [op.index, *members[current]], borders, left)
        player.run(op.index)
    return player.finish()


def _keep_only(player: Player, forward: Sequence[int], ops: Sequence[int], borders: Sequence[int],
               left: Sequence[int]) -> None:
    """Forgets all forward values but the snapshots and what these ops read and make."""
    graph = player.graph
    kept = {value for place in left for value in graph.ops[borders[place - 1]].outputs}
    for op in ops:
        kept.update((*graph.ops[op].inputs, *graph.ops[op].outputs))
    for op in forward:
        for value in graph.ops[op].outputs:
            if player.held[value] and value not in kept:
                player.forget(value)
