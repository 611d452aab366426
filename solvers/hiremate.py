"""Hierarchical planning: the net in parts, options for each part, and one small problem of the parts.

Gusak, Zhao, Le Hellard, Li, Eyraud-Dubois and Beaumont, "HiRemate: hierarchical approach for efficient re-materialization
of neural networks", ICML 2025. `rockmate` needs a chain: places where a single value goes on. A U-Net's skips, an
encoder-decoder's memory leave none. Here the forward pass is cut anywhere, where few bytes cross, and whatever crosses a
cut is a value of the upper problem, with as many readers as it has:

    forward of part i     reads what crosses into it, makes what others read of it, and what it saves for its backward
    backward of part i    reads the saved, what crosses, and gradients; makes gradients

What a part saves, and what its two ops then take in seconds and scratch bytes, is its option; the options come from an
inner solver at a grid of budgets, equal parts sharing theirs, as in `rockmate`. Which option each part gets is chosen by a
price for saved bytes, the same for all parts, over a range of prices (Lagrange's way; the paper has integer programs on
each level); for every choice an outer solver plans the graph of the parts. The best of the plans, laid out in full and
simulated, is the answer.

What it leaves on the table: a part runs forward as a whole, and options are chosen by one price. The number of parts is
tried in a few sizes: few leave more to the inner solver, many more to the outer. No bound comes from here. The tests make
it plan a net of skips that `rotor` cannot, and compare it with `rockmate` where that can, too.
"""

import dataclasses
import math
import time
from collections.abc import Iterator, Sequence, Set

from checkmate_tf.ir.graph import Graph, GraphBuilder
from checkmate_tf.ir.plan import Free, plan_from_order
from checkmate_tf.ir.simulate import Timeline, keep_all_timeline, simulate
from checkmate_tf.solvers import chains
from checkmate_tf.solvers.base import Answer, Limits, Progress, Report, Solver, StoppedBy, ignore_progress
from checkmate_tf.solvers.blocks import block_options
from checkmate_tf.solvers.chains import Option
from checkmate_tf.solvers.demand import Player
from checkmate_tf.solvers.greedy import Greedy
from checkmate_tf.solvers.stages import Stage, parts_of

_PRICES = 8                     # of saved bytes, beside none
_ROOMS = (1.1, 1.0, 0.9, 0.8)   # of the budget, for the problem of the parts, which is a model
_OPTIONS_SHARE = 0.5            # of the time, for options
_OUTER_SHARE = 0.02             # of what is left, for one plan of the parts


@dataclasses.dataclass(frozen=True)
class HiRemate:
    """parts: at most how many the net is cut into, one attempt each; inner and outer: the solvers of a part, and of the graph
    of all parts."""

    parts: tuple[int, ...] = (8, 16, 32)
    inner: Solver = Greedy(attempts=1)
    outer: Solver = Greedy()
    name: str = "hiremate"

    def search(self, graph: Graph, budget_bytes: int, limits: Limits, report: Report) -> Answer:
        started = time.monotonic()
        deadline = started + limits.seconds
        if keep_all_timeline(graph).peak_bytes <= budget_bytes:
            return Answer(graph.order, StoppedBy.DONE)
        best, best_seconds, smallest_peak_bytes, stats = None, math.inf, math.inf, {}
        for count in self.parts:
            stages = parts_of(graph, count)
            until = time.monotonic() + _OPTIONS_SHARE * (deadline - time.monotonic()) / len(self.parts)
            options, distinct = block_options(graph, stages, self.inner, until, dataclasses.replace(limits, seconds=0.0))
            for order, timeline in self._orders(graph, stages, options, budget_bytes, limits, deadline):
                smallest_peak_bytes = min(smallest_peak_bytes, timeline.peak_bytes)
                if timeline.peak_bytes <= budget_bytes and timeline.seconds < best_seconds:
                    best, best_seconds = order, timeline.seconds
                    stats = {"parts": len(stages), "distinct_parts": distinct}
                    report(Progress(best_seconds, graph.seconds, time.monotonic() - started))
        if math.isfinite(smallest_peak_bytes):
            stats["smallest_peak_bytes"] = smallest_peak_bytes
        return Answer(best, StoppedBy.DONE if time.monotonic() <= deadline else StoppedBy.TIME, stats=stats)

    def _orders(self, graph: Graph, stages: Sequence[Stage], options: Sequence[Sequence[Option]], budget_bytes: int,
                limits: Limits, deadline: float) -> Iterator[tuple[tuple[int, ...], Timeline]]:
        """Full orders, simulated: for each choice of options the one made with the most room that fits, and all that do not."""
        for chosen in _choices(options):
            upper = _Upper(graph, stages, chosen)
            for room in _ROOMS:
                if time.monotonic() > deadline:
                    return
                allowed_bytes = graph.resident_bytes + int(room * (budget_bytes - graph.resident_bytes))
                left = dataclasses.replace(limits, seconds=_OUTER_SHARE * max(deadline - time.monotonic(), 0.0))
                answer = self.outer.search(upper.graph, allowed_bytes, left, ignore_progress)
                if answer.order is not None:
                    order = upper.laid_out(answer.order)
                    timeline = simulate(graph, plan_from_order(graph, order))
                    yield order, timeline
                    if timeline.peak_bytes <= budget_bytes:
                        break


def _choices(options: Sequence[Sequence[Option]]) -> Iterator[tuple[Option, ...]]:
    """One option for each part, at prices from none for saved bytes to where only bytes count; each choice once."""
    seconds = sum(max(option.seconds for option in own) for own in options) or 1.0
    saved_bytes = sum(max(option.saved_bytes for option in own) for own in options) or 1
    seen = set()
    for number in range(_PRICES + 1):
        price = 0.0 if number == 0 else seconds / saved_bytes * 10.0 ** (number - _PRICES + 2)
        chosen = tuple(min(own, key=lambda option: (option.seconds + price * option.saved_bytes, option.saved_bytes))
                       for own in options)
        if chosen not in seen:
            seen.add(chosen)
            yield chosen


class _Upper:
    """The graph of the parts under one choice of options, and the way back from its orders."""

    def __init__(self, graph: Graph, stages: Sequence[Stage], chosen: Sequence[Option]):
        self._graph, self._stages, self._chosen = graph, stages, chosen
        self._builder = GraphBuilder(graph.resident_bytes)
        self._stage_of_act: list[int] = []
        self._values_of: list[tuple[int, ...]] = []  # for each value of the upper graph those that it stands for
        self._number_of: dict[int, int] = {}         # and back
        saved_by = []
        for number, (stage, option) in enumerate(zip(stages, chosen)):
            saved_by.append(len(self._values_of))
            inside = tuple(sorted(option.saved - set(stage.border)))
            self._add(number, option.forward, [inside, *((value,) for value in stage.border)], option.forward_bytes, stage.reads)
        for number in range(len(stages) - 1, -1, -1):
            stage, option = stages[number], chosen[number]
            left = [(value,) for op in stage.backward for value in graph.ops[op].outputs
                    if value in graph.results or not set(stage.backward).issuperset(graph.consumers[value])]
            self._add(number, option.backward, left, option.backward_bytes, stage.reads, saved_by[number])
        self.graph = self._builder.build(self._number_of[value] for value in graph.results if value in self._number_of)

    def _add(self, number: int, ops: Sequence[int], groups: Sequence[tuple[int, ...]], peak_bytes: int, outside: Set[int],
             saved: int | None = None) -> None:
        """One act of a stage, which makes one value for each group. outside: values that the peak leaves out"""
        size = lambda values: sum(self._graph.values[value].bytes for value in values)  # noqa: E731
        reads = {self._number_of[value] for op in ops for value in self._graph.ops[op].inputs if value in self._number_of}
        reads |= {saved} - {None}
        known_bytes = sum(size(set(self._values_of[value]) - outside) for value in reads) + sum(map(size, groups))
        self._builder.op(f"{'forward' if saved is None else 'backward'} {number}", sorted(reads), bytes=[*map(size, groups)],
                         seconds=sum(self._graph.ops[op].seconds for op in ops), backward=saved is not None,
                         once=None if saved is None else "gradients", scratch_bytes=max(0, peak_bytes - known_bytes))
        self._stage_of_act.append(number)
        for group in groups:
            self._number_of.update(dict.fromkeys(group, len(self._values_of)))
            self._values_of.append(group)

    def laid_out(self, order: Sequence[int]) -> tuple[int, ...]:
        """The order of the whole graph that does this."""
        player = Player(self._graph)
        for step in plan_from_order(self.graph, order).steps:
            if isinstance(step, Free):
                chains.forget(player, self._values_of[step.value])
                continue
            number = self._stage_of_act[step.op]
            stage, option = self._stages[number], self._chosen[number]
            if self.graph.ops[step.op].backward:
                chains.run_backward(player, stage, option, frozenset(stage.border))
            else:
                chains.run_forward(player, stage, option.saved)
        return player.finish()
