"""Another order of the same computations that takes less memory when placed.

Which chunk a value is given depends on what has come back before it, so a plan's placed peak moves when some computation
moves by a few steps, although its live bytes hardly do. From a plan, single runs are moved by random distances, up to a little behind the
place where most is held or lacking; a move stays if no more is. The runs are the same, and so is their time. A search, not a proof: it ends
when the plan fits, when its time is over, or when at the pace so far that would not suffice. All of a try is compiled, its placement
(`chunks`) takes most of the time: a millisecond a thousand steps at most, less where it is soon known to be worse.
"""

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from checkmate_tf.ir import chunks
from checkmate_tf.ir.compiled import compiled, leaf
from checkmate_tf.ir.graph import Graph
from checkmate_tf.ir.placement import LEAST_FILLER_BYTES, ROUNDS, Layout, Placer, fillers_from, flat, starts
from checkmate_tf.ir.plan import Plan, plan_from_order
from checkmate_tf.ir.verify import verify_plan

_LARGE = 0.01                  # of the largest value: runs that make less are seldom worth moving
_SMALL_SHARE = 0.2             # of the tries with a run that makes no large value
_MEAN_DISTANCE, _FARTHEST = 20, 200
_TRIES_BETWEEN_LOOKS_AT_THE_CLOCK = 100
_PACE_SHARE, _PACE_TRIES = 0.2, 400     # of the time, and tries, after which the pace counts
HOMELESS_DIVISOR = 1000
_LEAST, _WORST, _IS_FILLED, _CLOCK = range(4)        # places in Search.numbers


class Rules(NamedTuple):
    """What an order of runs depends on, in compressed rows."""

    input_start: np.ndarray     # int64 [ops + 1]
    inputs: np.ndarray
    output_start: np.ndarray
    outputs: np.ndarray
    results: np.ndarray         # int64
    before_start: np.ndarray
    before: np.ndarray          # ops that the op does not come before: what makes its inputs, and what it must come after
    behind_start: np.ndarray
    behind: np.ndarray          # the other way round
    is_large: np.ndarray        # bool [ops]


class Search(NamedTuple):
    """What changes from try to try."""

    order: np.ndarray           # int64 [runs], the best so far
    fillers: np.ndarray         # int64 [runs], of that
    moved: np.ndarray           # int64 [runs], the one that is tried
    found: np.ndarray           # int64 [runs], its fillers
    none: np.ndarray            # int64 [runs], zeros
    steps: np.ndarray
    needed: np.ndarray          # bool [values]
    stamp: np.ndarray           # int64 [ops]
    numbers: np.ndarray         # int64 [4]


def rules_for(graph: Graph) -> Rules:
    """The rules of this graph. Control edges and overwriting count for all runs of an op, which is stricter than they need be."""
    before = [{graph.values[value].producer for value in op.inputs} | set(op.after)
              | {reader for value in op.overwrites for reader in graph.consumers[value]} - {op.index} for op in graph.ops]
    behind: list[list[int]] = [[] for _ in graph.ops]
    for op, others in enumerate(before):
        for other in others:
            behind[other].append(op)
    largest = max((value.bytes for value in graph.values), default=0)
    is_large = [any(graph.values[value].bytes >= _LARGE * largest for value in op.outputs) for op in graph.ops]
    rows = [list(map(sorted, before)), behind]
    return Rules(starts([op.inputs for op in graph.ops]), flat(op.inputs for op in graph.ops),
                 starts([op.outputs for op in graph.ops]), flat(op.outputs for op in graph.ops), np.array(graph.results, np.int64),
                 starts(rows[0]), flat(rows[0]), starts(rows[1]), flat(rows[1]), np.array(is_large, np.bool_))


def repaired(placer: Placer, rules: Rules, order: Sequence[int], layouts: Sequence[tuple[Layout, int]], limit_bytes: int,
             device_bytes: int, seconds: float, seed: int = 0) -> tuple[Plan, int]:
    """(a plan with the same runs, its peak on paper): at most `limit_bytes` if the time suffices, and never more than that
    of the order given, bare or with fillers.

    layouts: one or two, each with its limit; the peak is the higher one. device_bytes: where something is lacking, the peak is above this,
    by how much. Raises PlanError for an order that is none.
    """
    graph = placer.graph
    plan_from_order(graph, order)
    spaces = tuple(layout.space(limit) for layout, limit in (layouts[0], layouts[-1]))
    runs = len(order)
    search = Search(np.array(order, np.int64), *(np.zeros(runs, np.int64) for _ in range(4)),
                    np.zeros(runs + int(np.diff(rules.input_start)[list(order)].sum() + np.diff(rules.output_start)[list(order)].sum()),
                             np.int64),
                    np.zeros(len(graph.values), np.bool_), np.zeros(len(graph.ops), np.int64), np.zeros(4, np.int64))
    search.numbers[_LEAST] = chunks.NO_MORE
    random = np.random.Generator(np.random.PCG64(seed))
    memory = placer.memory(order, *spaces)
    numbers = (len(set(layouts)), int(graph.resident_bytes), int(device_bytes), int(limit_bytes))
    tried(placer.asked, rules, search, memory, spaces, random, 0, *numbers)
    first = search.numbers[_LEAST]
    started, tries = time.monotonic(), 0
    while search.numbers[_LEAST] > limit_bytes and runs:
        share = (time.monotonic() - started) / seconds if seconds > 0 else 1.0
        gained = first - search.numbers[_LEAST]
        if share >= 1 or (share > _PACE_SHARE and tries >= _PACE_TRIES and gained < share * (first - limit_bytes)):
            break
        tried(placer.asked, rules, search, memory, spaces, random, _TRIES_BETWEEN_LOOKS_AT_THE_CLOCK, *numbers)
        tries += _TRIES_BETWEEN_LOOKS_AT_THE_CLOCK
    plan = plan_from_order(graph, search.order.tolist())
    return (verify_plan(graph, Plan(plan.steps, plan.graph_key, fillers_from(search.fillers), plan.makers)), int(search.numbers[_LEAST]))


@compiled
def tried(asked, rules, search, memory, spaces, random, tries, layouts, resident_bytes, device_bytes, limit_bytes):
    """Makes so many tries, fewer if the plan fits before; judges the order as it is first, where that has not been done."""
    numbers = search.numbers
    if numbers[_LEAST] == chunks.NO_MORE:
        _copy(search.moved, search.order)
        _judge(asked, rules, search, memory, spaces, layouts, resident_bytes, device_bytes, limit_bytes)
    for _ in range(tries):
        if numbers[_LEAST] <= limit_bytes:
            break
        last = min(len(search.order), numbers[_WORST] + _FARTHEST)
        position = random.integers(0, last)
        if not rules.is_large[search.order[position]] and random.random() >= _SMALL_SHARE:
            continue
        distance = min(int(random.exponential(_MEAN_DISTANCE)) + 1, _FARTHEST)
        if _move(rules, search, position, distance, 1 if random.random() < 0.5 else -1):
            _judge(asked, rules, search, memory, spaces, layouts, resident_bytes, device_bytes, limit_bytes)


@leaf
def _copy(to, of):
    for place in range(len(of)):
        to[place] = of[place]


@leaf
def _move(rules, search, position, distance, step):
    """Moves one run in `moved`, as far as what it depends on allows; whether it can move."""
    order, moved, stamp = search.order, search.moved, search.stamp
    op = order[position]
    search.numbers[_CLOCK] += 1
    clock = search.numbers[_CLOCK]
    stamp[op] = clock
    if step < 0:
        for number in range(rules.before_start[op], rules.before_start[op + 1]):
            stamp[rules.before[number]] = clock
    else:
        for number in range(rules.behind_start[op], rules.behind_start[op + 1]):
            stamp[rules.behind[number]] = clock
    stop = position
    while distance > 0 and 0 <= stop + step < len(order) and stamp[order[stop + step]] != clock:
        stop += step
        distance -= 1
    if stop == position:
        return False
    _copy(moved, order)
    for place in range(position, stop, step):
        moved[place] = order[place + step]
    moved[stop] = op
    return True


@leaf
def _lay_out(rules, search):
    """Writes the steps of `moved`, each value freed as in `plan_from_order`; how many there are."""
    moved, steps, needed = search.moved, search.steps, search.needed
    needed[:] = False
    for value in rules.results:
        needed[value] = True
    first = len(steps)
    for position in range(len(moved) - 1, -1, -1):
        op = moved[position]
        frees = 0
        for number in range(rules.output_start[op], rules.output_start[op + 1]):
            frees += not needed[rules.outputs[number]]
        for number in range(rules.input_start[op], rules.input_start[op + 1]):
            frees += not needed[rules.inputs[number]]
        first -= frees + 1
        steps[first] = op
        place = first
        for number in range(rules.output_start[op], rules.output_start[op + 1]):
            value = rules.outputs[number]
            if not needed[value]:
                place += 1
                steps[place] = -1 - value
            needed[value] = False
        for number in range(rules.input_start[op], rules.input_start[op + 1]):
            value = rules.inputs[number]
            if not needed[value]:
                place += 1
                steps[place] = -1 - value
            needed[value] = True
    count = len(steps) - first
    for place in range(count):
        steps[place] = steps[first + place]
    return count


@leaf
def _judge(asked, rules, search, memory, spaces, layouts, resident_bytes, device_bytes, limit_bytes):
    """Keeps `moved`, bare or with fillers, if it takes no more than the best so far."""
    count = _lay_out(rules, search)
    numbers = search.numbers
    is_first, was_filled = numbers[_LEAST] == chunks.NO_MORE, numbers[_IS_FILLED]
    for is_filled in (was_filled, 1 - was_filled):
        score, worst = _score(asked, search, memory, spaces, layouts, count, is_filled, resident_bytes, device_bytes, numbers[_LEAST])
        if score > numbers[_LEAST] or (is_filled != was_filled and is_first and score == numbers[_LEAST]):
            continue
        numbers[_LEAST], numbers[_IS_FILLED], numbers[_WORST] = score, is_filled, 0
        for place in range(worst):
            numbers[_WORST] += search.steps[place] >= 0
        _copy(search.order, search.moved)
        _copy(search.fillers, search.found if is_filled else search.none)
        if not is_first or score <= limit_bytes:
            break


@leaf
def _score(asked, search, memory, spaces, layouts, count, is_filled, resident_bytes, device_bytes, most):
    """(peak on paper, the step where it is reached), something more than `most` if it is more than that."""
    most_bytes, most_lent = most - resident_bytes, max(0, most - device_bytes)
    highest, worst = 0, 0
    for number in range(layouts):
        rounds = ROUNDS
        if is_filled and number == 0:
            search.found[:] = 0
            base = chunks.play(asked, spaces[0], memory, search.steps, count, search.none, search.found, LEAST_FILLER_BYTES, 1, most_bytes,
                               most_lent)
            if _scored(memory.state, base, resident_bytes, device_bytes) > most:
                return chunks.NO_MORE, 0
            rounds = ROUNDS if memory.state[chunks.CHANGED] else 0
        if rounds:
            base = chunks.play(asked, spaces[number], memory, search.steps, count, search.found if is_filled else search.none, search.none,
                               -1, rounds, most_bytes, most_lent)
        score = _scored(memory.state, base, resident_bytes, device_bytes)
        if score > most:
            return chunks.NO_MORE, 0
        if score > highest:
            highest, worst = score, memory.state[chunks.WORST]
    return highest, worst


@leaf
def _scored(state, base, resident_bytes, device_bytes):
    peak_bytes = resident_bytes + state[chunks.PEAK] - base
    if state[chunks.LENT] == 0:
        return peak_bytes
    # Of two plans that lack as much, the one that does so less often is nearer to one that fits.
    return max(peak_bytes, device_bytes + state[chunks.LENT] + state[chunks.FROM_LENT] // HOMELESS_DIVISOR)
