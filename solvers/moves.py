"""Random changes of a slotted schedule, and the annealing loop that keeps or takes them back.

The moves, after FastSA but compound, so that what is only good together is tried together:

- *drop*: a value is not held between two uses but recomputed before the second one; with a probability drawn for each
  move, each input that is gone by then is recomputed, too, in one go with what it needs, instead of kept longer;
  and half of the time, later recomputations of the same ops go.
- *remove* a recomputation, and in turn those that were made only for it.
- *shift* a run between the runs and uses around it (in free order also first runs).
- In free order a share of the shifts *advances* a first run together with all that it waits for, or *postpones* it
  together with all that waits for it: orders that differ in where a whole branch runs are many single shifts apart,
  most of which hold more.
- *insert* any op anywhere: rarely useful, but it makes every schedule reachable.

What is minimized is cost + multiplier * bytes over the budget, summed over slots, as a share of budget times
slots a step. The multiplier grows while something is over the budget and shrinks otherwise. The acceptance
threshold is drawn before the move: a chain that costs more than could be accepted is given up before it is made.
"""

from typing import NamedTuple

import numpy as np

from checkmate_tf.solvers import slots
from checkmate_tf.ir.compiled import compiled, leaf

MULTIPLIER, BEST, CROWDED = range(3)  # places in Walk.numbers
_LONGEST_CHAIN = 64
_TOGETHER = 0.3  # of the shifts in free order
_SMALL = 1e-5  # of the budget: values below are not dropped


class Order(NamedTuple):
    """What only the order of first runs depends on: control edges both ways, and overwriting ops by reader."""

    after_start: np.ndarray
    after_op: np.ndarray
    before_start: np.ndarray    # ops that come after the op
    before_op: np.ndarray
    reader_start: np.ndarray    # ops that read what the op overwrites
    reader_op: np.ndarray


class Walk(NamedTuple):
    """What a walk carries from batch to batch."""

    edge_value: np.ndarray      # int64 [edges], values that may be dropped before ...
    edge_reader: np.ndarray     # int64 [edges], ... this use
    edge_weight: np.ndarray     # float64 [edges], running sum from above 0 to 1
    free_ops: np.ndarray        # int64, ops that may run more than once
    stamp: np.ndarray           # int64 [ops + 1], the last one is the clock
    chain: np.ndarray           # int64 [_LONGEST_CHAIN]
    best: np.ndarray            # int64 [slots], the order of the best schedule that fits, then -1
    numbers: np.ndarray         # float64 [3]


def order_rules(graph) -> Order:
    """The rules on first runs of the graph."""
    befores = [[] for _ in graph.ops]
    for op in graph.ops:
        for before in op.after:
            befores[before].append(op.index)
    readers = [sorted({reader for value in op.overwrites for reader in graph.consumers[value] if reader != op.index})
               for op in graph.ops]
    return Order(*slots.rows([op.after for op in graph.ops]), *slots.rows(befores), *slots.rows(readers))


def walk_for(problem: slots.Problem, schedule: slots.Schedule) -> Walk:
    """A walk that has not begun: half of its drops go to large values, half to any."""
    budget = max(int(schedule.counters[slots.BUDGET]), 1)
    value = np.repeat(np.arange(len(problem.producer), dtype=np.int64), np.diff(problem.use_start))
    may = ~problem.pinned[problem.producer] & (problem.size > _SMALL * budget)
    value, reader = value[may[value]], problem.use_op[may[value]]
    size = problem.size[value].astype(float)
    weight = np.cumsum(size / max(size.sum(), 1.0) + 1.0 / max(len(size), 1))
    ops = len(problem.scratch)
    return Walk(value, reader, weight / weight[-1:], np.flatnonzero(~problem.pinned).astype(np.int64),
                np.zeros(ops + 1, np.int64), np.zeros(_LONGEST_CHAIN, np.int64),
                np.full(len(schedule.op_at), -1, np.int64), np.array([1e-2, np.inf, 0.0]))


@compiled
def anneal(problem, schedule, order, walk, random, mix, is_free, budget, moves, hot, cold):
    """Some moves at temperatures from hot to cold, geometrically; the best schedule is left in the walk.

    mix: shares of drop, remove, shift (the rest inserts)   # float64 [3]
    budget: the true one; the schedule's own may be softer (smaller), to leave room for spikes
    """
    numbers = walk.numbers
    counters = schedule.counters
    temperature = hot
    cooling = (cold / hot) ** (1.0 / max(moves, 1))
    for move in range(moves):
        temperature *= cooling
        if move % 64 == 0:
            over = counters[slots.OVERFLOW] > 0
            multiplier = numbers[MULTIPLIER] * 1.02 if over else numbers[MULTIPLIER] / 1.02
            numbers[MULTIPLIER] = min(max(multiplier, 1e-6), 50.0)
            is_untidy = numbers[CROWDED] > 64 or counters[slots.CHANGES] > 4096 + 8 * counters[slots.LENGTH]
            if move % 1024 == 0 and is_untidy:
                slots.spread(problem, schedule, slots.order_of(schedule), -1, 0)
                numbers[CROWDED] = 0
        scale = numbers[MULTIPLIER] * counters[slots.LENGTH] / (float(counters[slots.BUDGET]) * len(schedule.op_at))
        spent, overflow = schedule.spent[0], counters[slots.OVERFLOW]
        threshold = -temperature * np.log(1.0 - random.random())
        most = spent + threshold + scale * overflow
        slots.begin(schedule)
        kind = random.random()
        if kind < mix[0]:
            _drop(problem, schedule, walk, random, most - spent)
        elif kind < mix[0] + mix[1]:
            _remove(problem, schedule, order, random, is_free)
        elif kind < mix[0] + mix[1] + mix[2]:
            if not is_free or random.random() >= _TOGETHER:
                _shift(problem, schedule, order, walk, random, is_free)
            elif random.random() < 0.5:
                _advance(problem, schedule, order, walk, random)
            else:
                _postpone(problem, schedule, order, walk, random)
        else:
            _insert(problem, schedule, walk, random)
        if counters[slots.LOGGED] == 0:
            continue
        if schedule.spent[0] + scale * counters[slots.OVERFLOW] > most:
            slots.undo(problem, schedule)
        elif schedule.spent[0] < numbers[BEST] - 1e-12 and (counters[slots.OVERFLOW] == 0
                                                           or np.max(schedule.highest) <= budget):
            numbers[BEST] = schedule.spent[0]
            _keep(schedule, walk)
    counters[slots.LOGGING] = 0


@leaf
def _keep(schedule, walk):
    at = 0
    for slot in range(len(schedule.op_at)):
        if schedule.op_at[slot] >= 0:
            walk.best[at] = schedule.op_at[slot]
            at += 1
    if at < len(walk.best):
        walk.best[at] = -1


@compiled
def _drop(problem, schedule, walk, random, most_cost):
    if len(walk.edge_value) == 0:
        return
    edge = np.searchsorted(walk.edge_weight, random.random())
    value, reader = walk.edge_value[edge], walk.edge_reader[edge]
    runs = schedule.runs[reader]
    if runs == 0:
        return
    until = schedule.run_slot[reader, int(random.random() * runs)]
    op = problem.producer[value]
    run = slots.run_before(schedule, op, until)
    since = slots.use_before(problem, schedule, value, until, schedule.run_slot[op, run])
    if until - since <= 2:
        return
    depth = random.random()
    count = _chain(problem, schedule, walk, random, op, until, depth * depth, most_cost)
    if count == 0:
        return
    chain = np.sort(walk.chain[:count])
    slot = until
    lowest = until
    for step in range(count - 1, -1, -1):
        slot -= 1
        while slot > since and schedule.op_at[slot] >= 0:
            slot -= 1
        if slot <= since:
            walk.numbers[CROWDED] += 1
            return
        walk.chain[step] = slot
        lowest = slot
    if until - lowest > 4 * count + 32:
        walk.numbers[CROWDED] += 1
    slots_of_chain = walk.chain[:count].copy()
    for step in range(count):
        slots.insert(problem, schedule, chain[step], slots_of_chain[step])
    if random.random() < 0.5:
        for step in range(count):
            later = slots.run_before(schedule, chain[step], until) + 1
            if later < schedule.runs[chain[step]]:
                slots.remove_with_causes(problem, schedule, chain[step], later)


@leaf
def _chain(problem, schedule, walk, random, op, until, depth, most_cost):
    """The ops to recompute at the slot, into walk.chain; 0 if they cost too much or one of them cannot run."""
    clock = len(walk.stamp) - 1
    walk.stamp[clock] += 1
    stamp = walk.stamp[clock]
    if not _can_run(problem, schedule, op, until):
        return 0
    walk.stamp[op] = stamp
    walk.chain[0] = op
    count, done = 1, 0
    cost = problem.cost[op]
    while done < count:
        current = walk.chain[done]
        done += 1
        for place in range(problem.input_start[current], problem.input_start[current + 1]):
            value = problem.input_value[place]
            maker = problem.producer[value]
            if walk.stamp[maker] == stamp or problem.pinned[maker]:
                continue
            run = slots.run_before(schedule, maker, until)
            if schedule.last_use[value, run] >= until or random.random() >= depth:
                continue
            if count == _LONGEST_CHAIN or not _can_run(problem, schedule, maker, until):
                continue
            walk.stamp[maker] = stamp
            walk.chain[count] = maker
            count += 1
            cost += problem.cost[maker]
            if cost > 2.0 * most_cost:
                return 0
    return count


@leaf
def _can_run(problem, schedule, op, slot):
    return (not problem.pinned[op] and schedule.runs[op] < schedule.run_slot.shape[1]
            and slots.deadline(problem, schedule, op) > slot)


@compiled
def _remove(problem, schedule, order, random, is_free):
    count = schedule.counters[slots.MANY]
    if count == 0:
        return
    op = schedule.many[int(random.random() * count)]
    run = int(random.random() * schedule.runs[op])
    if run > 0:
        slots.remove_with_causes(problem, schedule, op, run)
    elif is_free and slots.is_idle_run(problem, schedule, op, 0):
        second = schedule.run_slot[op, 1]
        for place in range(order.before_start[op], order.before_start[op + 1]):
            if schedule.run_slot[order.before_op[place], 0] < second:
                return
        slots.remove(problem, schedule, op, 0)


@leaf
def _shift(problem, schedule, order, walk, random, is_free):
    many = schedule.counters[slots.MANY]
    if many > 0 and (not is_free or random.random() < 0.5):
        op = schedule.many[int(random.random() * many)]
    elif is_free:
        op = int(random.random() * len(problem.scratch))
    else:
        return
    run = int(random.random() * schedule.runs[op])
    if run == 0 and not is_free:
        return
    slot = schedule.run_slot[op, run]
    low, high = _room_around(problem, schedule, order, op, run)
    kind = random.random()
    if kind < 0.5:
        to = low + 1 + int(random.random() * (high - low - 1))
        step = 1 if random.random() < 0.5 else -1
    elif kind < 0.75:
        to, step = low + 1, 1
    else:
        to, step = high - 1, -1
    while low < to < high and schedule.op_at[to] >= 0:
        to += step
    if low < to < high and to != slot:
        slots.shift(problem, schedule, op, run, to)


@leaf
def _room_around(problem, schedule, order, op, run):
    """The slots between which the run may move without any use changing the run that it is served by."""
    slot = schedule.run_slot[op, run]
    low = schedule.run_slot[op, run - 1] if run > 0 else -1
    high = schedule.run_slot[op, run + 1] if run + 1 < schedule.runs[op] else len(schedule.op_at) - 1
    high = min(high, slots.deadline(problem, schedule, op))
    for place in range(problem.output_start[op], problem.output_start[op + 1]):
        value = problem.output_value[place]
        if run > 0:
            low = max(low, schedule.last_use[value, run - 1])
        if schedule.last_use[value, run] > slot:
            high = min(high, slots.use_after(problem, schedule, value, slot))
    if run == 0:
        for place in range(problem.input_start[op], problem.input_start[op + 1]):
            low = max(low, schedule.run_slot[problem.producer[problem.input_value[place]], 0])
        for place in range(order.after_start[op], order.after_start[op + 1]):
            low = max(low, schedule.run_slot[order.after_op[place], 0])
        for place in range(order.before_start[op], order.before_start[op + 1]):
            high = min(high, schedule.run_slot[order.before_op[place], 0])
        for place in range(order.reader_start[op], order.reader_start[op + 1]):
            reader = order.reader_op[place]
            low = max(low, schedule.run_slot[reader, schedule.runs[reader] - 1])
    return low, high


@compiled
def _advance(problem, schedule, order, walk, random):
    """Moves the first run of an op to an earlier slot, with the first runs of all that it waits for."""
    first = schedule.run_slot[:, 0]
    op = int(random.random() * len(problem.scratch))
    distance = random.random()
    to = first[op] - 1 - int(distance * distance * first[op])
    clock = len(walk.stamp) - 1
    walk.stamp[clock] += 1
    walk.stamp[op] = walk.stamp[clock]
    walk.chain[0] = op
    count, done, low = 1, 0, -1
    while done < count:
        current = walk.chain[done]
        done += 1
        if order.reader_start[current] < order.reader_start[current + 1]:
            return  # it overwrites something, and all readers would have to go first
        inputs = problem.input_start[current + 1] - problem.input_start[current]
        for place in range(inputs + order.after_start[current + 1] - order.after_start[current]):
            if place < inputs:
                before = problem.producer[problem.input_value[problem.input_start[current] + place]]
            else:
                before = order.after_op[order.after_start[current] + place - inputs]
            if first[before] < to:
                low = max(low, first[before])
            elif walk.stamp[before] != walk.stamp[clock]:
                if count == _LONGEST_CHAIN:
                    return
                walk.stamp[before] = walk.stamp[clock]
                walk.chain[count] = before
                count += 1
    chain = walk.chain[:count][np.argsort(first[walk.chain[:count]])]
    for step in range(count - 1, -1, -1):
        while to > low and schedule.op_at[to] >= 0:
            to -= 1
        if to <= low:
            walk.numbers[CROWDED] += 1
            return
        walk.chain[step] = to
        to -= 1
    for step in range(count):
        slots.shift(problem, schedule, chain[step], 0, walk.chain[step])


@compiled
def _postpone(problem, schedule, order, walk, random):
    """Moves the first run of an op to a later slot, with the first runs of all that wait for it."""
    first = schedule.run_slot[:, 0]
    op = int(random.random() * len(problem.scratch))
    distance = random.random()
    high = len(schedule.op_at) - 1
    to = first[op] + 1 + int(distance * distance * (high - first[op] - 1))
    clock = len(walk.stamp) - 1
    walk.stamp[clock] += 1
    walk.stamp[op] = walk.stamp[clock]
    walk.chain[0] = op
    count, done = 1, 0
    while done < count:
        current = walk.chain[done]
        done += 1
        high = min(high, slots.deadline(problem, schedule, current))
        if schedule.runs[current] > 1:
            high = min(high, schedule.run_slot[current, 1])
        for place in range(problem.output_start[current], problem.output_start[current + 1]):
            value = problem.output_value[place]
            for use in range(problem.use_start[value], problem.use_start[value + 1]):
                reader = problem.use_op[use]
                if first[reader] > to:
                    high = min(high, first[reader])
                    continue
                if schedule.runs[reader] > 1:
                    high = min(high, schedule.run_slot[reader, 1])
                if walk.stamp[reader] != walk.stamp[clock]:
                    if count == _LONGEST_CHAIN:
                        return
                    walk.stamp[reader] = walk.stamp[clock]
                    walk.chain[count] = reader
                    count += 1
        for place in range(order.before_start[current], order.before_start[current + 1]):
            after = order.before_op[place]
            if first[after] > to:
                high = min(high, first[after])
            elif walk.stamp[after] != walk.stamp[clock]:
                if count == _LONGEST_CHAIN:
                    return
                walk.stamp[after] = walk.stamp[clock]
                walk.chain[count] = after
                count += 1
        if to >= high:
            return
    chain = walk.chain[:count][np.argsort(first[walk.chain[:count]])]
    for step in range(count):
        while to < high and schedule.op_at[to] >= 0:
            to += 1
        if to >= high:
            walk.numbers[CROWDED] += 1
            return
        walk.chain[step] = to
        to += 1
    for step in range(count - 1, -1, -1):
        slots.shift(problem, schedule, chain[step], 0, walk.chain[step])


@leaf
def _insert(problem, schedule, walk, random):
    if len(walk.free_ops) == 0:
        return
    op = walk.free_ops[int(random.random() * len(walk.free_ops))]
    first = schedule.run_slot[op, 0]
    end = min(slots.deadline(problem, schedule, op), len(schedule.op_at) - 1)
    slot = first + 1 + int(random.random() * (end - first - 1))
    if slot < end and schedule.op_at[slot] < 0 and schedule.runs[op] < schedule.run_slot.shape[1]:
        slots.insert(problem, schedule, op, slot)
