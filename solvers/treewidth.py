"""Divide along small separators: schedules for very little memory on graphs of small treewidth.

Kumar, Purohit, Svitkina, Vee and Wang, "Efficient rematerialization for deep networks", NeurIPS 2019. Read as an
undirected graph, a training step is like a ladder: forward ops on one side, gradients on the other, rungs between, cut
anywhere by a few ops. A tree decomposition has such cuts for bags. With k + 1 ops a bag and a balanced bag taken out
again and again there are O(log n) levels, and the schedule below holds one bag a level, and what is being read: O(k log
n) values. The price is time: each op of a bag has all that it reads from the parts made anew, n^O(log k) runs.

1. Tree decomposition by min-fill elimination: the op whose neighbours lack the fewest edges among themselves goes next,
   its bag is itself and its neighbours, which become a clique.
2. Separator tree: the bag that leaves the smallest largest part (a centroid of the decomposition) is the root, what it
   leaves are the children, down to `depth` levels; what is left then is a leaf.
3. schedule(part with bag X, wanted W): for each op of X that W is made from, in order: schedule what it reads in each
   child, run it, let go of what was read. Then the same for what W wants of the children. At the end let go of X but W.
   A leaf runs what W is made from in order.
4. Post-pass: with memory to spare, runs are cancelled, dearest first, as long as everything fits (`fit`). Where
   a little is lacking, because bags are counted in ops and not in bytes, the greedy planner goes over it first.

The pathwidth form has only two levels: ops are laid out in a line with few edges across any place, cuts at even
distance are the root's bag, the pieces between are leaves: with sqrt(n) pieces O(k sqrt n) values and each piece run
but a few times. All depths and numbers of pieces in powers of two are tried, up to orders of `most_runs` runs an op on
average; of the plans that fit the cheapest is taken. Where everybody else fails for want of memory this may still find
a plan, with many recomputations; it knows nothing about costs or bytes before step 4, where most of them go again. On
random graphs, whose treewidth is in the hundreds, it is of no use.

Not the paper's: ops that run once stay, since nothing else is possible, and what must come before what is up to
`demand`. No bound comes from here. The tests check bags and separators against their definitions, the memory on long
nets against O(k log n), and judge all plans with the simulator.
"""

import dataclasses
import heapq
import math
import time
from collections.abc import Iterator, Sequence

from checkmate_tf.ir.graph import Graph
from checkmate_tf.ir.plan import plan_from_order
from checkmate_tf.ir.simulate import keep_all_timeline, simulate
from checkmate_tf.solvers.base import Answer, Limits, Progress, Report, StoppedBy
from checkmate_tf.solvers.demand import Player
from checkmate_tf.solvers.fit import fitted


@dataclasses.dataclass(frozen=True)
class Part:
    """A set of ops, the bag that separates them, and the parts that it leaves. # sets of ops as the bits of a number"""

    ops: int
    bag: int
    children: tuple["Part", ...] = ()


@dataclasses.dataclass(frozen=True)
class Treewidth:
    """most_runs: how long an order may get, in runs per op."""

    most_runs: int = 60
    name: str = "treewidth"

    def search(self, graph: Graph, budget_bytes: int, limits: Limits, report: Report) -> Answer:
        started = time.monotonic()
        deadline = started + limits.seconds
        base = keep_all_timeline(graph)
        if base.peak_bytes <= budget_bytes:
            return Answer(graph.order, StoppedBy.DONE)
        best, best_seconds, stopped_by = None, math.inf, StoppedBy.DONE
        stats: dict = {"smallest_peak_bytes": base.peak_bytes}
        for form, part in _parts(graph, deadline, stats):
            order = _scheduled(graph, part, self.most_runs * len(graph.ops), deadline)
            if time.monotonic() > deadline:
                stopped_by = StoppedBy.TIME
            if order is None:
                continue
            peak_bytes = simulate(graph, plan_from_order(graph, order)).peak_bytes
            stats["smallest_peak_bytes"] = min(stats["smallest_peak_bytes"], peak_bytes)
            if stopped_by is StoppedBy.DONE:
                order = fitted(graph, order, budget_bytes, deadline - time.monotonic())
            timeline = simulate(graph, plan_from_order(graph, order))
            if timeline.peak_bytes <= budget_bytes and timeline.seconds < best_seconds:
                best, best_seconds, stats["form"] = order, timeline.seconds, form
                report(Progress(best_seconds, graph.seconds, time.monotonic() - started))
            if time.monotonic() > deadline:
                stopped_by = StoppedBy.TIME
                break
        return Answer(best, stopped_by, stats=stats)


def neighbours(graph: Graph) -> list[int]:
    """For each op the ops that it reads from or that read from it, as bits."""
    near = [0] * len(graph.ops)
    for op in graph.ops:
        for made in graph.predecessors[op.index]:
            near[op.index] |= 1 << made
            near[made] |= 1 << op.index
    return near


def decomposition(near: Sequence[int], deadline: float = math.inf) -> tuple[list[int], list[int]] | None:
    """Bags and parents of a tree decomposition, one for each op; None when the time is over.

    Bag v is v and its neighbours when it was eliminated; its parent is the bag of the one of them that goes next, or -1.
    """
    near = list(near)
    left = (1 << len(near)) - 1
    bags, position = [0] * len(near), [0] * len(near)
    stamp = [0] * len(near)
    queue = [(_fill(near, op), near[op].bit_count(), op, 0) for op in range(len(near))]
    heapq.heapify(queue)
    eliminated = 0
    while queue:
        _, _, op, made = heapq.heappop(queue)
        if made != stamp[op] or not left >> op & 1:
            continue
        if time.monotonic() > deadline:
            return None
        position[op] = eliminated
        eliminated += 1
        around = near[op]
        bags[op] = around | 1 << op
        left &= ~(1 << op)
        touched = around
        for other in bits(around):
            missing = around & ~near[other] & ~(1 << other)
            near[other] = (near[other] | missing) & ~(1 << op)
            touched |= near[other] if missing else 0
        for other in bits(touched & left):
            stamp[other] += 1
            heapq.heappush(queue, (_fill(near, other), near[other].bit_count(), other, stamp[other]))
    parents = [min(bits(bag & ~(1 << op)), key=lambda other: position[other], default=-1) for op, bag in enumerate(bags)]
    return bags, parents


def separator_tree(bags: Sequence[int], parents: Sequence[int], depth: int) -> Part:
    """The parts that balanced bags leave, down to so many levels."""
    tree: list[list[int]] = [[] for _ in bags]
    for node, parent in enumerate(parents):
        if parent >= 0:
            tree[node].append(parent)
            tree[parent].append(node)
    return _separated(bags, tree, list(range(len(bags))), (1 << len(bags)) - 1, depth)


def line(near: Sequence[int], deadline: float = math.inf) -> list[int] | None:
    """The ops in an order in which few of those before any place have neighbours behind it; None when it takes long."""
    count = len(near)
    unplaced = [near[op].bit_count() for op in range(count)]
    placed, order, frontier = 0, [], set()
    while len(order) < count:
        if not frontier:
            frontier = {next(op for op in range(count) if not placed >> op & 1)}

        def growth(op):
            closed = sum(unplaced[other] == 1 for other in bits(near[op] & placed))
            return (unplaced[op] > 0) - closed, op

        if time.monotonic() > deadline:
            return None
        op = min(frontier, key=growth)
        frontier.remove(op)
        order.append(op)
        placed |= 1 << op
        for other in bits(near[op]):
            unplaced[other] -= 1
            if not placed >> other & 1:
                frontier.add(other)
    return order


def pieces(near: Sequence[int], order: Sequence[int], count: int) -> Part:
    """A line cut into so many pieces: the root's bag are the ops at the cuts, its children what lies between."""
    everything = (1 << len(near)) - 1
    placed, bag, chunks, chunk = 0, 0, [], 0
    for place, op in enumerate(order, start=1):
        placed |= 1 << op
        chunk |= 1 << op
        if place * count // len(order) > (place - 1) * count // len(order):
            for other in bits(placed):
                if near[other] & ~placed:
                    bag |= 1 << other
            chunks.append(chunk)
            chunk = 0
    children = tuple(Part(chunk & ~bag, chunk & ~bag) for chunk in chunks if chunk & ~bag)
    return Part(everything, bag, children) if bag else Part(everything, everything)


def bits(number: int) -> Iterator[int]:
    """The places of the ones, ascending."""
    while number:
        lowest = number & -number
        yield lowest.bit_length() - 1
        number ^= lowest


def _fill(near: Sequence[int], op: int) -> int:
    around = near[op]
    missing = sum((around & ~near[other]).bit_count() - 1 for other in bits(around))
    return missing // 2


def _separated(bags, tree, nodes: list[int], ops: int, depth: int) -> Part:
    if depth == 0 or len(nodes) <= 2:
        return Part(ops, ops)
    inside = set(nodes)
    root = nodes[0]
    order, above = [root], {root: -1}
    for node in order:
        for other in tree[node]:
            if other in inside and other not in above:
                above[other] = node
                order.append(other)
    if len(order) < len(nodes):  # the decomposition of an unconnected graph is a forest
        rest = [node for node in nodes if node not in above]
        mine = sum(1 << node for node in order) & ops
        return Part(ops, 0, (_separated(bags, tree, order, mine, depth),
                             _separated(bags, tree, rest, ops & ~mine, depth)))
    weight = {node: ops >> node & 1 for node in order}
    for node in reversed(order[1:]):
        weight[above[node]] += weight[node]
    total = weight[root]

    def largest(node):
        below = [weight[other] for other in tree[node] if other in inside and above.get(other) == node]
        return max([total - weight[node], *below]), node

    center = min(order, key=largest)
    bag = bags[center] & ops
    children = []
    for start in tree[center]:
        if start in inside:
            reached, seen = [start], {center, start}
            for node in reached:
                for other in tree[node]:
                    if other in inside and other not in seen:
                        seen.add(other)
                        reached.append(other)
            part = sum(1 << node for node in reached) & ops & ~bag
            if part:
                children.append(_separated(bags, tree, sorted(reached), part, depth - 1))
    return Part(ops, bag, tuple(children))


def _parts(graph: Graph, deadline: float, stats: dict) -> Iterator[tuple[str, Part]]:
    if not graph.ops:
        return
    near = neighbours(graph)
    order = line(near, deadline)
    count = 2
    while order is not None and count <= len(graph.ops) // 2:
        yield f"path of {count}", pieces(near, order, count)
        count *= 2
    found = decomposition(near, deadline)
    if found is None:
        return
    stats["width"] = max(bag.bit_count() for bag in found[0]) - 1
    for depth in range(1, len(graph.ops).bit_length() + 2):
        yield f"tree of depth {depth}", separator_tree(*found, depth)


class _TooLong(Exception):
    """The order gets too long, or it takes too long."""


def _scheduled(graph: Graph, part: Part, most_runs: int, deadline: float) -> tuple[int, ...] | None:
    """Step 3 for all ops that nobody reads and all results; None where it gets too long."""
    player = Player(graph)
    wanted = 0
    for op in graph.ops:
        if not any(graph.consumers[value] for value in op.outputs) or set(op.outputs) & set(graph.results):
            wanted |= 1 << op.index
    try:
        _Scheduler(graph, player, most_runs, deadline).schedule(part, wanted)
    except _TooLong:
        return None
    order = player.finish()
    return order if len(order) <= most_runs else None


class _Scheduler:
    """Step 3."""

    def __init__(self, graph: Graph, player: Player, most_runs: int, deadline: float):
        self._graph, self._player, self._most_runs, self._deadline = graph, player, most_runs, deadline
        self._reads = [sum(1 << made for made in graph.predecessors[op.index]) for op in graph.ops]
        self._ancestors: list[int] = []
        for op in graph.ops:
            above = 1 << op.index
            for made in graph.predecessors[op.index]:
                above |= self._ancestors[made]
            self._ancestors.append(above)

    def schedule(self, part: Part, wanted: int) -> None:
        if not wanted:
            return
        if len(self._player.order) > self._most_runs or time.monotonic() > self._deadline:
            raise _TooLong
        above = 0
        for op in bits(wanted):
            above |= self._ancestors[op]
        target = part.bag & above
        for op in bits(target):
            if self._is_held(op):
                continue
            fetched = 0
            for child in part.children:
                needed = self._reads[op] & child.ops
                fetched |= needed
                self.schedule(child, needed)
            self._run(op)
            self._forget(fetched)
        for child in part.children:
            self.schedule(child, wanted & ~part.bag & child.ops)
        self._forget(target & ~wanted)

    def _is_held(self, op: int) -> bool:
        return self._player.ran[op] and all(self._player.held[value] for value in self._graph.ops[op].outputs)

    def _run(self, op: int) -> None:
        self._player.run(op)
        self._player.fetch(self._graph.ops[op].outputs)

    def _forget(self, ops: int) -> None:
        for op in bits(ops):
            for value in self._graph.ops[op].outputs:
                self._player.forget(value)
