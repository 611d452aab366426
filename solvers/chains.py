"""A training step as a chain of stages, and the exact dynamic programme over its persistent schedules.

`stages` says where the graph is cut. For each stage there are options (`rotor` has one, `rockmate` many): run forward
keeping something for the backward ops, run these later, perhaps with some recomputation.

The programme is Beaumont et al.'s ("Optimal checkpointing for heterogeneous chains: how to train deep neural networks
with limited memory", arXiv 1911.13214), with Rockmate's options. Opt(m, a, b) is the least time in which the stages a
to b run forward and backward, when what stage a reads is held already (and not counted), the gradients from behind b
are held, and m bytes are there for the rest:

    keep stage a     f_a + b_a + Opt(m - saved_a, a + 1, b)                         the least over its options
    checkpoint j     sum of f_i over a <= i < j  +  Opt(m - w_(j-1), j, b)  +  Opt(m, a, j - 1)

where w_j is the size of border j, and each needs its own working memory to fit into m. Schedules are *persistent*: a
checkpoint stays until its stage has run backward. Memory is counted in 1/500 of the budget. All of that is a model,
with liveness inside stages simplified; so the programme is solved for somewhat more than the budget as well, and the
plan is the fastest whose simulated peak fits. Cost: O(L^3) operations on arrays of m for L stages.
"""

import dataclasses
import math
import time
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import NamedTuple

import numpy as np

from checkmate_tf.ir.graph import Graph
from checkmate_tf.ir.plan import plan_from_order
from checkmate_tf.ir.simulate import simulate
from checkmate_tf.solvers.demand import Player
from checkmate_tf.solvers.stages import Stage

_UNITS = 500
_ROOM = 1.25  # of the budget, up to which the programme is solved
_TRIES = 12   # schedules looked at around the ones that fit


@dataclasses.dataclass(frozen=True, slots=True)
class Option:
    """A way to run a stage: these ops forward, keeping `saved`, and those backward, some of them recomputations.

    The bytes leave out what the stage reads; the backward ones include what is saved and the gradients.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    saved: frozenset[int]
    seconds: float
    saved_bytes: int
    forward_bytes: int
    backward_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Action:
    """Run stage `stage` forward (keeping nothing inside, or for an option), or backward."""

    kind: str  # "pass", "keep", "back"
    stage: int
    option: Option | None = None
    keeps_input: bool = True


def keeping_option(graph: Graph, stage: Stage) -> Option:
    """The option that keeps all that the backward ops read."""
    own = {value for op in stage.forward for value in graph.ops[op].outputs}
    saved = frozenset(value for op in stage.backward for value in graph.ops[op].inputs if value in own)
    return option_of(graph, stage, stage.forward, stage.backward, saved | frozenset(stage.border))


def option_of(graph: Graph, stage: Stage, forward: Sequence[int], backward: Sequence[int],
              saved: Set[int]) -> Option:
    """An option with its time and memory worked out."""
    size = lambda values: sum(graph.values[value].bytes for value in values)  # noqa: E731
    gone_on = {value for op in stage.backward for value in graph.ops[op].outputs}
    left = {value for value in gone_on if set(graph.consumers[value]) - set(stage.backward) or value in graph.results}
    seconds = sum(graph.ops[op].seconds for op in (*forward, *backward))
    return Option(tuple(forward), tuple(backward), frozenset(saved), seconds, size(saved),
                  peak_within(graph, forward, saved, stage.reads),
                  peak_within(graph, backward, left, stage.reads) + stage.waiting_bytes)


def peak_within(graph: Graph, ops: Sequence[int], needed_after: Set[int], outside: Set[int]) -> int:
    """The peak of a part of an order; values made before it are held until their last use, `outside` is not counted."""
    live = set(needed_after)
    held = sum(graph.values[value].bytes for value in live if value not in outside)
    peak = held
    for index in reversed(ops):
        op = graph.ops[index]
        dying = (value for value in op.reuses if value not in live and value not in outside)
        taken_over = max((graph.values[value].bytes for value in dying), default=0)
        unused = [value for value in op.outputs if value not in live]
        for value in (*unused, *op.inputs):
            if value not in live:
                live.add(value)
                held += graph.values[value].bytes if value not in outside else 0
        peak = max(peak, held + op.scratch_bytes - taken_over)
        for value in op.outputs:
            live.discard(value)
            held -= graph.values[value].bytes if value not in outside else 0
    return peak


def first_fit(graph: Graph, stages: Sequence[Stage], options: Sequence[Sequence[Option]], budget_bytes: int,
              deadline: float) -> tuple[tuple[int, ...] | None, float, bool]:
    """The cheapest schedule that fits, its seconds, and whether there was time to look.

    The programme's schedules are tried from above the budget on down, by bisection: memory mostly falls with m, and a few
    neighbours are looked at where it does not.
    """
    table = _Table(graph, stages, options, budget_bytes)
    if not table.fill(deadline):
        return None, math.inf, False
    units = [table.units]
    for smaller in range(table.units, -1, -1):
        if table.seconds(smaller) > table.seconds(units[-1]) * (1 + 1e-12):
            units.append(smaller)
    units = [number for number in units if math.isfinite(table.seconds(number))]
    known: dict[int, tuple[tuple[int, ...], float] | None] = {}

    def fits(place: int) -> bool:
        if place not in known and time.monotonic() <= deadline:
            order = play(graph, stages, table.actions(units[place]))
            timeline = simulate(graph, plan_from_order(graph, order))
            known[place] = (order, timeline.seconds) if timeline.peak_bytes <= budget_bytes else None
        return known.get(place) is not None

    last = len(units) - 1
    tries = [last, *(last * step // _TRIES for step in range(_TRIES - 1, 0, -1))]
    high = next((place for place in tries if units and fits(place)), None)
    if high is None:
        return None, math.inf, time.monotonic() <= deadline
    low = 0
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    for place in range(high, max(high - _TRIES, -1), -1):
        fits(place)
    order, seconds = min((found for found in known.values() if found is not None), key=lambda found: found[1])
    return order, seconds, time.monotonic() <= deadline


def play(graph: Graph, stages: Sequence[Stage], actions: Sequence[Action]) -> tuple[int, ...]:
    """The order of these actions. Whatever a stage needs beyond the chain's borders is made on demand."""
    player = Player(graph)
    for action in actions:
        stage = stages[action.stage]
        if action.kind == "back":
            run_backward(player, stage, action.option, frozenset())
        else:
            run_forward(player, stage, frozenset(stage.border) if action.kind == "pass" else action.option.saved)
            if not action.keeps_input:
                forget(player, stages[action.stage - 1].border)
    return player.finish()


def run_forward(player: Player, stage: Stage, kept: Set[int]) -> None:
    """Runs a stage forward, for the first time or once more, and forgets all of it but what is kept or carried."""
    for op in stage.forward:
        player.run(op)
    player.fetch(value for value in sorted(kept) if player.can_renew(value))
    forget(player, _own(player.graph, stage) - kept - stage.carried)


def run_backward(player: Player, stage: Stage, option: Option, kept: Set[int]) -> None:
    """Runs a stage backward as the option says, and forgets its forward values but for what is kept or carried."""
    again = set(stage.forward)
    for op in option.backward:
        outputs = player.graph.ops[op].outputs
        if op in again and all(player.can_renew(value) for value in outputs):
            forget(player, outputs)
            player.fetch(outputs)
        player.run(op)
    forget(player, _own(player.graph, stage) - kept - stage.carried)


def forget(player: Player, values: Iterable[int]) -> None:
    """Lets go of those of the values that are held."""
    for value in values:
        if player.held[value]:
            player.forget(value)


def _own(graph: Graph, stage: Stage) -> set[int]:
    return {value for op in stage.forward for value in graph.ops[op].outputs}


class _Table:
    """Opt(m, a, b) for all m."""

    def __init__(self, graph: Graph, stages: Sequence[Stage], options: Sequence[Sequence[Option]], budget_bytes: int):
        self._stages, self._options, count = stages, options, len(stages)
        unit = max((budget_bytes - graph.resident_bytes) / _UNITS, 1e-9)
        self.units = int(_UNITS * _ROOM)
        self._size = lambda size_bytes: min(int(round(size_bytes / unit)), self.units + 1)
        self._border = [self._size(sum(graph.values[value].bytes for value in stage.border)) for stage in stages]
        self._seconds = np.cumsum([0.0, *(sum(graph.ops[op].seconds for op in stage.forward) for stage in stages)])
        # Working memory of running a stage forward with nothing kept; what it reads counts unless it is a checkpoint.
        passing = [peak_within(graph, stage.forward, frozenset(stage.border), stage.reads) for stage in stages]
        self._pass = [self._size(peak) for peak in passing]
        self._pass_on = [self._size(peak + sum(graph.values[value].bytes for value in stages[number - 1].border))
                         for number, peak in enumerate(passing)]
        self._table = np.full((count, count), None, dtype=object)

    def fill(self, deadline: float) -> bool:
        """Works out all of it; False when the time is over before."""
        count = len(self._stages)
        for length in range(1, count + 1):
            for first in range(count - length + 1):
                if time.monotonic() > deadline:
                    return False
                best = np.full(self.units + 1, np.inf)
                for choice in self._choices(first, first + length - 1):
                    start = max(choice.need, *choice.shifts, 0)
                    if start <= self.units:
                        costs = choice.seconds
                        for table, shift in zip(choice.tables, choice.shifts):
                            costs = costs + table[start - shift:len(table) - shift]
                        np.minimum(best[start:], costs, out=best[start:])
                self._table[first, first + length - 1] = best
        return True

    def seconds(self, units: int) -> float:
        return float(self._table[0, len(self._stages) - 1][units])

    def actions(self, units: int) -> list[Action]:
        """What to do, in order, with this much memory."""
        return list(self._unrolled(0, len(self._stages) - 1, units))

    def _unrolled(self, first: int, last: int, units: int) -> Iterator[Action]:
        choice = min(self._choices(first, last), key=lambda choice: choice.at(units))
        if choice.option is not None:
            yield Action("keep", first, choice.option)
            if first < last:
                yield from self._unrolled(first + 1, last, units - choice.shifts[0])
            yield Action("back", first, choice.option)
            return
        for stage in range(first, choice.checkpoint):
            yield Action("pass", stage, keeps_input=stage == first)
        yield from self._unrolled(choice.checkpoint, last, units - choice.shifts[0])
        yield from self._unrolled(first, choice.checkpoint - 1, units)

    def _choices(self, first: int, last: int) -> Iterator["_Choice"]:
        passing = self._size(self._stages[last].passing_bytes)
        for option in self._options[first]:
            need = max(self._size(option.forward_bytes) + passing, self._size(option.backward_bytes))
            if first == last:
                yield _Choice(need, option.seconds, (), (0,), option=option)
            else:
                yield _Choice(need, option.seconds, (self._table[first + 1, last],), (self._size(option.saved_bytes),),
                              option=option)
        working = self._pass[first]
        for checkpoint in range(first + 1, last + 1):
            yield _Choice(working + passing, self._seconds[checkpoint] - self._seconds[first],
                          (self._table[checkpoint, last], self._table[first, checkpoint - 1]),
                          (self._border[checkpoint - 1], 0), checkpoint=checkpoint)
            working = max(working, self._pass_on[checkpoint])


class _Choice(NamedTuple):
    """seconds + the sum of table[m - shift], for m from `need` on."""

    need: int
    seconds: float
    tables: tuple[np.ndarray, ...]
    shifts: tuple[int, ...]
    option: Option | None = None
    checkpoint: int = -1

    def at(self, units: int) -> float:
        if units < max(self.need, *self.shifts, 0):
            return math.inf
        return self.seconds + sum(float(table[units - shift]) for table, shift in zip(self.tables, self.shifts))
