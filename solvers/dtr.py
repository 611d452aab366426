"""Dynamic Tensor Rematerialization, offline: run in order, and when memory runs out evict what scores least.

Kirisame et al., "Dynamic Tensor Rematerialization", ICLR 2021. The device is played through once: each op is run in the
given order; what it reads and no longer finds is recomputed, recursively, while the inputs that are there are locked;
and whenever the next run does not fit, the held value with the least score h goes. With m the bytes of a value, c the
cost of its op, s its staleness, and e* the evicted values around it (those it would have to be remade from and those
that would have to be remade from it, through evicted ones only), the paper's heuristics are:

    dtr     (c + sum of c over e*) / (m s)
    eq      the same with e* as the union-find components of evicted values next to it; a value that is remade leaves
            its component's cost but not its links (the paper's phantom connections)
    local   c / (m s)         lru   1 / s          size   1 / m
    msps    (c + sum of c over the evicted values it would be remade from) / m

DTR works online, so s is the time since the last access. Here the whole order is known: values that no later op reads
are evicted at once, and with `foresight` s is the time until the next first run that reads the value, which is what
the time since the last one stands for. Not banished: they stay recomputable. Only values that cannot be made again are
truly let go, once nothing that was evicted and is needed depends on them.

The eviction is greedy, and whether it gets through is not monotone in the budget; so a few budgets below the given one
are tried as well, with either staleness, and the cheapest plan that fits is taken. Why not only the paper's "dtr":
walking e* for every candidate at every eviction touches up to a hundred times more values than "eq", by the authors'
count, and is no better on their graphs. No bound comes from here. With little memory DTR thrashes: an attempt that has
run 20 times as many ops as there are is given up, as is one that finds nothing to evict.

The tests replay evictions worked out by hand, and judge all plans with the simulator.
"""

import dataclasses
import math
import time

from checkmate_tf.ir.errors import SolverError
from checkmate_tf.ir.graph import Graph
from checkmate_tf.ir.plan import plan_from_order
from checkmate_tf.ir.simulate import keep_all_timeline, simulate, structural_floor
from checkmate_tf.solvers.base import Answer, Limits, Progress, Report, StoppedBy
from checkmate_tf.solvers.demand import Player

HEURISTICS = ("dtr", "eq", "local", "lru", "size", "msps")

_AIMS = (1.0, 0.97, 0.9, 0.8, 0.6, 0.3)  # internal budgets, from the floor (0) to the given one
_MOST_RUNS = 20  # per op, before an attempt is given up


@dataclasses.dataclass(frozen=True)
class Dtr:
    """heuristic: one of HEURISTICS; foresight: True, False, or None for the better of both."""

    heuristic: str = "eq"
    foresight: bool | None = None
    name: str = "dtr"

    def search(self, graph: Graph, budget_bytes: int, limits: Limits, report: Report) -> Answer:
        if self.heuristic not in HEURISTICS:
            raise SolverError(f"DTR's heuristics are {', '.join(HEURISTICS)}. Received: {self.heuristic!r}")
        started = time.monotonic()
        deadline = started + limits.seconds
        if keep_all_timeline(graph).peak_bytes <= budget_bytes:
            return Answer(graph.order, StoppedBy.DONE)
        floor_bytes = structural_floor(graph)[0]
        best, best_seconds, attempts = None, math.inf, 0
        for aim in _AIMS:
            for foresight in (True, False) if self.foresight is None else (self.foresight,):
                if time.monotonic() > deadline:
                    break
                attempts += 1
                aimed_bytes = floor_bytes + int(aim * (budget_bytes - floor_bytes))
                order = evicting_order(graph, aimed_bytes, self.heuristic, foresight, deadline)
                if order is None:
                    continue
                timeline = simulate(graph, plan_from_order(graph, order))
                if timeline.peak_bytes <= budget_bytes and timeline.seconds < best_seconds:
                    best, best_seconds = order, timeline.seconds
                    report(Progress(best_seconds, graph.seconds, time.monotonic() - started))
        return Answer(best, StoppedBy.TIME if time.monotonic() > deadline else StoppedBy.DONE,
                      stats={"attempts": attempts, "heuristic": self.heuristic})


def evicting_order(graph: Graph, budget_bytes: int, heuristic: str, foresight: bool,
                   deadline: float = math.inf) -> tuple[int, ...] | None:
    """The order that DTR runs through within this budget, or None where it gets stuck, thrashes, or takes too long."""
    device = _Device(graph, budget_bytes, heuristic, foresight, deadline)
    try:
        for op in graph.order:
            device.reach(op)
        for value in graph.results:
            device.reach_value(value)
    except _Stuck:
        return None
    return tuple(device.order)


class _Stuck(Exception):
    """Nothing is left to evict, or it takes too long."""


class _Device(Player):
    """A player that counts bytes and evicts."""

    def __init__(self, graph: Graph, budget_bytes: int, heuristic: str, foresight: bool, deadline: float):
        super().__init__(graph)
        self._budget_bytes, self._deadline = budget_bytes, deadline
        self._held_bytes = graph.resident_bytes
        self._bytes = [value.bytes for value in graph.values]
        self._cost = [graph.ops[value.producer].seconds for value in graph.values]
        self._locks = [0] * len(graph.values)
        self._saved: list[int] = []  # locked until an op that overwrites has run
        # A clock that always advances: an op takes its seconds and a millionth of the average.
        self._tick = graph.seconds * 1e-6 / max(len(graph.ops), 1) or 1.0
        self._clock, self._start = 0.0, []
        for op in graph.ops:
            self._start.append(self._clock)
            self._clock += op.seconds + self._tick
        self._end, self._clock = self._clock, 0.0
        self._seen = [0.0] * len(graph.values)
        self._foresight = foresight
        self._next = [0] * len(graph.values)  # place in consumers of the next first run that reads the value
        self._current = 0
        self._score = getattr(self, f"_score_{heuristic}")
        self._sets = _Components(self._cost)

    def reach(self, op: int) -> None:
        """The first run of the op, and all recomputation before it."""
        self._current = op
        self._compute(op)
        for value in (*self.graph.ops[op].inputs, *self.graph.ops[op].outputs):
            if self.held[value] and not self.is_needed(value):
                self._let_go(value)

    def reach_value(self, value: int) -> None:
        """Makes sure that a result is there at the end."""
        self._locks[value] += 1
        if not self.held[value]:
            self._compute(self.graph.values[value].producer)

    def before_emit(self, op: int) -> None:
        """Makes, and locks until the op has run, what cannot be made once it has overwritten what it overwrites."""
        if self.ran[op]:
            return
        for lost in sorted(self._lost_with(self.graph.ops[op].overwrites)):
            for value in self.graph.ops[lost].outputs:
                if self.held[value] and (self.is_needed(value) or self._is_wanted_again(value)):
                    self._locks[value] += 1
                    self._saved.append(value)
        super().before_emit(op)

    def fetch(self, values) -> list[int]:
        for value in values:
            if not self.held[value]:
                self._compute(self.graph.values[value].producer)
            self._locks[value] += 1
            self._saved.append(value)
        return []

    def _compute(self, op: int) -> None:
        """Runs the op, and first what it misses, deepest first; inputs that are there are locked meanwhile."""
        stack = [(op, self._lock(op))]
        while stack:
            op, locked = stack[-1]
            missing = next((value for value in self.graph.ops[op].inputs if not self.held[value]), None)
            if missing is not None:
                producer = self.graph.values[missing].producer
                stack.append((producer, self._lock(producer)))
                continue
            self.before_emit(op)
            missing = next((value for value in self.graph.ops[op].inputs if not self.held[value]), None)
            if missing is not None:
                continue
            self._unlock(locked)
            self._lock_into(op, locked)
            self._make_room(op)
            self.emit(op)
            stack.pop()
            self._unlock(locked)
            if self.graph.ops[op].overwrites:
                self._unlock(self._saved)
                self._saved.clear()
            if stack:  # what was made for the op above is locked with the rest of its inputs
                self._lock_more(*stack[-1])

    def _lock(self, op: int) -> list[int]:
        locked: list[int] = []
        self._lock_into(op, locked)
        return locked

    def _lock_into(self, op: int, locked: list[int]) -> None:
        locked[:] = [value for value in self.graph.ops[op].inputs if self.held[value]]
        for value in locked:
            self._locks[value] += 1

    def _lock_more(self, op: int, locked: list[int]) -> None:
        self._unlock(locked)
        self._lock_into(op, locked)

    def _unlock(self, locked: list[int]) -> None:
        for value in locked:
            self._locks[value] -= 1

    def emit(self, op: int) -> None:
        if len(self.order) > _MOST_RUNS * len(self.graph.ops) or (
                len(self.order) % 64 == 0 and time.monotonic() > self._deadline):
            raise _Stuck
        for value in self.graph.ops[op].outputs:
            if not self.held[value]:
                self._held_bytes += self._bytes[value]
                if self.ran[op]:
                    self._sets.leave(value)
        super().emit(op)
        self._clock += self.graph.ops[op].seconds + self._tick
        for value in (*self.graph.ops[op].inputs, *self.graph.ops[op].outputs):
            self._seen[value] = self._clock

    def _make_room(self, op: int) -> None:
        outputs = self.graph.ops[op].outputs
        more = self.graph.ops[op].scratch_bytes + sum(self._bytes[value] for value in outputs if not self.held[value])
        while self._held_bytes + more > self._budget_bytes:
            victim, least = -1, math.inf
            for value, is_held in enumerate(self.held):
                if is_held and not self._locks[value] and self._bytes[value] and value not in outputs:
                    if not self.is_needed(value):
                        self._let_go(value)
                    elif self.can_renew(value) and (score := self._score(value)) < least:
                        victim, least = value, score
            if self._held_bytes + more <= self._budget_bytes:
                return
            if victim < 0:
                raise _Stuck
            self._evict(victim)

    def _let_go(self, value: int) -> None:
        """Evicts what no first run needs any more, if need be for good."""
        if self.can_renew(value):
            if not self._locks[value]:
                self._evict(value)
        elif not self._locks[value] and not self._is_wanted_again(value):
            self.held[value] = False
            self._held_bytes -= self._bytes[value]
            self._lose([value])

    def _is_wanted_again(self, value: int) -> bool:
        """Whether an evicted value that is needed, or one that it would be remade from, is made from this one."""
        stack, seen = [value], set()
        while stack:
            for reader in self.graph.consumers[stack.pop()]:
                if reader in seen or not self._renewable[reader]:
                    continue
                seen.add(reader)
                for output in self.graph.ops[reader].outputs:
                    if not self.held[output]:
                        if self.is_needed(output):
                            return True
                        stack.append(output)
        return False

    def _evict(self, value: int) -> None:
        self.held[value] = False
        self._held_bytes -= self._bytes[value]
        readers = (output for reader in self.graph.consumers[value] for output in self.graph.ops[reader].outputs)
        around = (*self.graph.ops[self.graph.values[value].producer].inputs, *readers)
        self._sets.join(value, [other for other in around if self._is_evicted(other)])

    def _is_evicted(self, value: int) -> bool:
        return not self.held[value] and self.ran[self.graph.values[value].producer]

    def _staleness(self, value: int) -> float:
        if not self._foresight:
            return self._clock - self._seen[value] + self._tick
        readers, place = self.graph.consumers[value], self._next[value]
        while place < len(readers) and self.ran[readers[place]]:
            place += 1
        self._next[value] = place
        until = self._start[readers[place]] if place < len(readers) else self._end
        return until - self._start[self._current] + self._tick

    def _score_dtr(self, value: int) -> float:
        cost = self._cost[value] + self._around(value, up=True) + self._around(value, up=False)
        return cost / (self._bytes[value] * self._staleness(value))

    def _score_eq(self, value: int) -> float:
        readers = (output for reader in self.graph.consumers[value] for output in self.graph.ops[reader].outputs)
        around = {self._sets.find(other) for other in
                  (*self.graph.ops[self.graph.values[value].producer].inputs, *readers) if self._is_evicted(other)}
        cost = self._cost[value] + sum(self._sets.cost[root] for root in sorted(around))
        return cost / (self._bytes[value] * self._staleness(value))

    def _score_local(self, value: int) -> float:
        return self._cost[value] / (self._bytes[value] * self._staleness(value))

    def _score_lru(self, value: int) -> float:
        return 1.0 / self._staleness(value)

    def _score_size(self, value: int) -> float:
        return 1.0 / self._bytes[value]

    def _score_msps(self, value: int) -> float:
        return (self._cost[value] + self._around(value, up=True)) / self._bytes[value]

    def _around(self, value: int, up: bool) -> float:
        """The cost of the evicted values that this one is made from (up), or that are made from it."""
        stack, seen, cost = [value], {value}, 0.0
        while stack:
            current = stack.pop()
            if up:
                near = self.graph.ops[self.graph.values[current].producer].inputs
            else:
                near = [output for reader in self.graph.consumers[current] for output in self.graph.ops[reader].outputs]
            for other in near:
                if other not in seen and self._is_evicted(other):
                    seen.add(other)
                    stack.append(other)
                    cost += self._cost[other]
        return cost


class _Components:
    """Union-find over evicted values with a running cost each."""

    def __init__(self, cost: list[float]):
        self._single = cost
        self._parent = list(range(len(cost)))
        self._member = list(range(len(cost)))  # the node that stands for the value: a fresh one after it was remade
        self.cost = [0.0] * len(cost)

    def find(self, value: int) -> int:
        node = self._member[value]
        while self._parent[node] != node:
            self._parent[node] = self._parent[self._parent[node]]
            node = self._parent[node]
        return node

    def join(self, value: int, others: list[int]) -> None:
        root = self.find(value)
        self.cost[root] += self._single[value]
        for other in others:
            other_root = self.find(other)
            if other_root != root:
                self._parent[other_root] = root
                self.cost[root] += self.cost[other_root]

    def leave(self, value: int) -> None:
        root = self.find(value)
        self.cost[root] = max(0.0, self.cost[root] - self._single[value])
        self._member[value] = len(self._parent)
        self._parent.append(len(self._parent))
        self.cost.append(0.0)
