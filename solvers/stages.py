"""A training step cut into stages: as a chain, or in parts between which more than one value passes.

`chain_of` cuts the forward pass after every op past which nothing but its own outputs goes on, save for small values
(statistics, shapes), which are kept: the *borders*. What reads next to nothing, a mask of random numbers say, counts to
the stage of its reader. Stage i is what lies between two borders, with the backward ops that read it. `parts_of` cuts
anywhere, where few bytes cross.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import numpy as np

from checkmate_tf.ir.graph import Graph
from checkmate_tf.ir.simulate import keep_all_timeline
from checkmate_tf.solvers.chen import forward_ops

_SMALL = 1e-4  # of what keeping everything holds: values below this may go past a border


@dataclasses.dataclass(frozen=True, slots=True)
class Stage:
    """Forward ops between two borders, and the backward ops that come when the gradients get there.

    reads: values from before that they use    border: the values that go on    carried: small ones that go further, too
    passing_bytes: gradients from behind that are still needed before; waiting_bytes: those that the stage does not touch
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    reads: frozenset[int]
    border: tuple[int, ...]
    carried: frozenset[int]
    passing_bytes: int
    waiting_bytes: int


def chain_of(graph: Graph, most_stages: int) -> tuple[Stage, ...]:
    """The stages, in order; fewer than three mean that the graph is no chain worth the name."""
    small_bytes = _small_bytes(graph)
    forward = _forward(graph, small_bytes)
    if len(forward) == len(graph.ops):
        return ()
    borders = _thin(_borders(graph, forward, small_bytes), len(forward), most_stages)
    border_ops = {forward[place] for place in borders}
    count = len(borders) + 1

    def stage_for(makers: Sequence[tuple[int, int]]) -> int:
        """The first stage of any of these; what a border op made is there in the next one, too."""
        return min((min(stage + (op in border_ops), count - 1) for op, stage in makers), default=count - 1)

    cut = _Cut(graph, forward, borders, small_bytes, stage_for)
    stages = []
    for number in range(count):
        border = tuple(graph.ops[cut.forward[number][-1]].outputs) if number < count - 1 else ()
        carried = {value for value in cut.leaving(number) - set(border) if graph.values[value].bytes <= small_bytes}
        reads = {value for value in cut.reads(number) if cut.stage_of[graph.values[value].producer] < number}
        passing, waiting = _gradients(graph, cut.done_in, number)
        stages.append(Stage(cut.forward[number], cut.backward[number], frozenset(reads), border, frozenset(carried), passing,
                            waiting))
    return tuple(stages)


def parts_of(graph: Graph, most_parts: int) -> tuple[Stage, ...]:
    """Stages of about equal numbers of ops between any cuts that few bytes cross; `border` is all that others read.

    Of the gradients nothing is said: passing and waiting bytes are 0.
    """
    small_bytes = _small_bytes(graph)
    forward = _forward(graph, small_bytes)
    crossing = _crossing_bytes(graph, forward)
    reach = len(forward) // (3 * most_parts)
    cuts = set()
    for number in range(1, most_parts):
        middle = number * len(forward) // most_parts
        places = range(max(middle - reach, 0), min(middle + reach + 1, len(forward) - 1))
        cuts.update(sorted(places, key=lambda place: (crossing[place], place))[:1])
    borders = np.array(sorted(cuts), dtype=np.int64)
    cut = _Cut(graph, forward, borders, small_bytes,
               lambda makers: max((stage for _, stage in makers), default=len(borders)))
    stages = []
    for number, (ops, backward) in enumerate(zip(cut.forward, cut.backward)):
        leaving = cut.leaving(number)
        carried = {value for value in leaving if graph.values[value].bytes <= small_bytes}
        stages.append(Stage(ops, backward, frozenset(cut.reads(number)), tuple(sorted(leaving - carried)),
                            frozenset(carried), 0, 0))
    return tuple(stages)


class _Cut:
    """The ops of each stage. stage_of: of forward ops; done_in: of backward ops

    stage_for: from each forward op whose large values a backward op reads, and its stage, to the stage where the latter belongs
    """

    def __init__(self, graph: Graph, forward: Sequence[int], borders: np.ndarray, small_bytes: int,
                 stage_for: Callable[[Sequence[tuple[int, int]]], int]):
        self._graph = graph
        self.stage_of = {op: int(np.searchsorted(borders, place)) for place, op in enumerate(forward)}
        self.done_in: dict[int, int] = {}
        ops_forward: list[list[int]] = [[] for _ in range(len(borders) + 1)]
        ops_backward: list[list[int]] = [[] for _ in range(len(borders) + 1)]
        for op in forward:
            ops_forward[self.stage_of[op]].append(op)
        for op in graph.ops:
            if op.index not in self.stage_of:
                makers = {graph.values[value].producer for value in op.inputs if graph.values[value].bytes > small_bytes}
                stage = min([stage_for([(maker, self.stage_of[maker]) for maker in makers if maker in self.stage_of]),
                             *(self.done_in[maker] for maker in graph.predecessors[op.index] if maker in self.done_in)])
                ops_backward[stage].append(op.index)
                self.done_in[op.index] = stage
        self.forward, self.backward = tuple(map(tuple, ops_forward)), tuple(map(tuple, ops_backward))

    def leaving(self, number: int) -> set[int]:
        """The values that the stage makes forward and others read."""
        here = {*self.forward[number], *self.backward[number]}
        return {value for op in self.forward[number] for value in self._graph.ops[op].outputs
                if not here.issuperset(self._graph.consumers[value])}

    def reads(self, number: int) -> set[int]:
        """The forward values of other stages that it reads."""
        return {value for op in (*self.forward[number], *self.backward[number]) for value in self._graph.ops[op].inputs
                if self.stage_of.get(self._graph.values[value].producer, number) != number}


def _forward(graph: Graph, small_bytes: int) -> list[int]:
    """The forward ops, those that read next to nothing as late as their readers allow."""
    before: dict[int, int] = {}
    for index in reversed(forward_ops(graph)):
        op = graph.ops[index]
        readers = [before[reader] for value in op.outputs for reader in graph.consumers[value] if reader in before]
        waits = readers and op.once is None and sum(graph.values[value].bytes for value in op.inputs) <= small_bytes
        before[index] = min(readers) if waits else index
    return sorted(before, key=lambda index: (before[index], index))


def _small_bytes(graph: Graph) -> int:
    return int(_SMALL * (keep_all_timeline(graph).peak_bytes - graph.resident_bytes))


def _crossing_bytes(graph: Graph, forward: Sequence[int]) -> list[int]:
    """For each place in the forward order the bytes that are read behind it and made before or at it."""
    place_of = {op: place for place, op in enumerate(forward)}
    change = [0] * (len(forward) + 1)
    for op in forward:
        for value in graph.ops[op].outputs:
            last = max((place_of[reader] for reader in graph.consumers[value] if reader in place_of), default=-1)
            if last >= 0:
                change[place_of[op]] += graph.values[value].bytes
                change[last] -= graph.values[value].bytes
    return list(itertools.accumulate(change))


def _borders(graph: Graph, forward: Sequence[int], small_bytes: int) -> list[int]:
    """Places in the forward order behind which only values of the op at that place are read, and small ones."""
    place_of = {op: place for place, op in enumerate(forward)}
    furthest = -1  # place of the last forward reader of anything made before
    found = []
    for place, op in enumerate(forward[:-1]):
        readers = [place_of[reader] for value in graph.ops[op].outputs if graph.values[value].bytes > small_bytes
                   for reader in graph.consumers[value] if reader in place_of]
        if readers and furthest <= place:
            found.append(place)
        furthest = max([furthest, *readers])
    return found


def _thin(borders: Sequence[int], ops: int, most_stages: int) -> np.ndarray:
    """Some of the borders, evenly, so that there are at most so many stages."""
    if len(borders) >= most_stages:
        wanted = (np.arange(1, most_stages) * ops) // most_stages
        borders = sorted({min(borders, key=lambda place: (abs(place - at), place)) for at in wanted.tolist()})
    return np.array(borders, dtype=np.int64)


def _gradients(graph: Graph, done_in: dict[int, int], number: int) -> tuple[int, int]:
    passing = waiting = 0
    for op, stage in done_in.items():
        if stage <= number:
            continue
        for value in graph.ops[op].outputs:
            later = [done_in[reader] for reader in graph.consumers[value] if reader in done_in]
            if any(reader <= number for reader in later) or value in graph.results:
                passing += graph.values[value].bytes
                waiting += graph.values[value].bytes if number not in later else 0
    return passing, waiting
