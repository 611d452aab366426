"""Which idle value to drop, and how to get it back: the inner loop of the greedy planner.

At the worst step some values are idle: live, but not used between their last use before it and the next use after it
(or used by the step itself, which could take over the value's memory if it died there). Dropping one frees its bytes
in between and costs a recomputation right before the next use. What that needs is either still live there, or is kept
alive longer, or is recomputed too, or is recomputed later anyway and can be had now and kept until then. Bytes are
traded against time at a rate of exchange: with the rate of the best drop itself, choosing the cheaper way for each input maximizes bytes per second (Dinkelbach's method for ratios).

Bytes held longer count where they hurt: `weight` is a running sum over slots, so that size times the difference of two
weights measures a life. With all the weight on the worst step this is bytes freed there per second; spread over
the steps over the budget, it is overflow removed per second.
"""

from typing import NamedTuple

import numpy as np

from checkmate_tf.solvers import slots
from checkmate_tf.ir.compiled import compiled, leaf

FITS, STUCK, NO_ROOM, STOPPED = range(4)
_KEEP, _RECOMPUTE = 1, 2
_MOST_OPS = 400  # recomputed together at most
_NEARLY_ALL = 0.9999
_FREE = 1e-9  # what a run counts for at least, as a share of the graph's seconds


class Scratchpad(NamedTuple):
    """Memory for the search of one chain; `stamp` says which entries belong to it."""

    stamp: np.ndarray     # int64 [ops]
    price: np.ndarray     # float64 [ops], weighted bytes of having the op's outputs
    choice: np.ndarray    # int8 [values], _KEEP or _RECOMPUTE; 0 where live
    seen: np.ndarray      # int64 [values]
    stack: np.ndarray     # int64 [ops]
    cursor: np.ndarray    # int64 [ops]
    chain: np.ndarray     # int64 [ops], the ops to recompute
    clock: np.ndarray     # int64 [2]: the stamp, ops in the chain


def scratchpad(ops: int, values: int) -> Scratchpad:
    """Empty memory for graphs of this size."""
    return Scratchpad(np.zeros(ops, np.int64), np.zeros(ops), np.zeros(values, np.int8), np.zeros(values, np.int64),
                      np.zeros(ops, np.int64), np.zeros(ops, np.int64), np.zeros(ops, np.int64), np.zeros(2, np.int64))


@compiled
def worst_slot(schedule):
    """The first slot that holds the most."""
    block = np.argmax(schedule.highest)
    start = block * slots.BLOCK
    return start + np.argmax(schedule.held[start:start + slots.BLOCK])


def candidates_of(problem: slots.Problem) -> np.ndarray:
    """The values worth a decision: of those that can be made again, the largest, which hold nearly all bytes."""
    may = np.flatnonzero(~problem.pinned[problem.producer] & (problem.size > 0))
    may = may[np.argsort(-problem.size[may], kind="stable")]
    held = np.cumsum(problem.size[may])
    return may[:np.searchsorted(held, _NEARLY_ALL * held[-1]) + 1] if len(may) else may


@leaf
def bytes_at(schedule, slot):
    """What is held in the slot, without the resident bytes."""
    return schedule.held[slot] + schedule.lazy[slot // slots.BLOCK]


@leaf
def weigh(schedule, worst, spread, weight):
    """Fills `weight`: one for the worst slot, and `spread` for each step over the budget or near it."""
    budget = schedule.counters[slots.BUDGET]
    total = 0.0
    for slot in range(len(schedule.op_at)):
        weight[slot] = total
        if slot == worst:
            total += 1.0
        elif schedule.op_at[slot] >= 0 and spread > 0.0:
            held = bytes_at(schedule, slot)
            if held > budget:
                total += spread
            elif held > 0.9 * budget:
                total += spread * 0.1
    weight[len(schedule.op_at)] = total


@leaf
def _price_of_input(problem, schedule, weight, value, slot, rate, may_recompute):
    """(weighted bytes of keeping the value alive up to the slot, whether to look into recomputing it)."""
    maker = problem.producer[value]
    run = slots.run_before(schedule, maker, slot)
    until = schedule.last_use[value, run]
    if until >= slot:
        return 0.0, False
    keep = problem.size[value] * (weight[slot] - weight[until + 1])
    pays = may_recompute and keep > rate * max(problem.cost[maker], _FREE)
    return keep, pays and _can_run(problem, schedule, maker, slot)


@leaf
def _can_run(problem, schedule, op, slot):
    return (not problem.pinned[op] and schedule.runs[op] < schedule.run_slot.shape[1]
            and slots.deadline(problem, schedule, op) > slot)


@leaf
def _advance(problem, schedule, weight, op, slot):
    """Weighted bytes of having the op's next recomputation at `slot` instead; infinite where there is none."""
    run = slots.run_before(schedule, op, slot) + 1
    if run >= schedule.runs[op]:
        return np.inf
    later = schedule.run_slot[op, run]
    total = 0.0
    for place in range(problem.output_start[op], problem.output_start[op + 1]):
        value = problem.output_value[place]
        if schedule.last_use[value, run] > later:
            total += problem.size[value] * (weight[later] - weight[slot])
    return total


@leaf
def find_chain(problem, schedule, pad, weight, op, slot, rate):
    """Decides, input by input, how to recompute the op right before the slot; the ops to run are left in pad.chain.

    Returns (weighted bytes kept longer, seconds). Prices of shared inputs are counted once a reader while deciding,
    and once in the answer.
    """
    pad.clock[0] += 1
    stamp = pad.clock[0]
    visited = 1
    pad.stack[0], pad.cursor[0] = op, problem.input_start[op]
    pad.stamp[op] = stamp
    pad.price[op] = min(rate * max(problem.cost[op], _FREE), _advance(problem, schedule, weight, op, slot))
    depth = 0
    while depth >= 0:
        current = pad.stack[depth]
        place = pad.cursor[depth]
        if place == problem.input_start[current + 1]:
            depth -= 1
            continue
        value = problem.input_value[place]
        maker = problem.producer[value]
        keep, look = _price_of_input(problem, schedule, weight, value, slot, rate, visited < _MOST_OPS)
        if look and pad.stamp[maker] != stamp:
            visited += 1
            depth += 1
            pad.stack[depth], pad.cursor[depth] = maker, problem.input_start[maker]
            pad.stamp[maker] = stamp
            pad.price[maker] = min(rate * max(problem.cost[maker], _FREE),
                                   _advance(problem, schedule, weight, maker, slot))
            continue
        if look and pad.price[maker] < keep:
            pad.choice[value] = _RECOMPUTE
            pad.price[current] += pad.price[maker]
        else:
            pad.choice[value] = _KEEP
            pad.price[current] += keep
        pad.cursor[depth] += 1
    return _collect(problem, schedule, pad, weight, op, slot, rate)


@leaf
def _collect(problem, schedule, pad, weight, op, slot, rate):
    """Follows the choices: the chain's ops once each, its weighted bytes and seconds."""
    pad.clock[0] += 1
    stamp = pad.clock[0]
    pad.chain[0] = op
    pad.stamp[op] = stamp
    count, done = 1, 0
    kept, seconds = 0.0, 0.0
    while done < count:
        current = pad.chain[done]
        done += 1
        advance = _advance(problem, schedule, weight, current, slot)
        if advance < rate * max(problem.cost[current], _FREE):
            kept += advance
        else:
            seconds += problem.cost[current]
        for place in range(problem.input_start[current], problem.input_start[current + 1]):
            value = problem.input_value[place]
            if pad.seen[value] == stamp:
                continue
            pad.seen[value] = stamp
            maker = problem.producer[value]
            run = slots.run_before(schedule, maker, slot)
            until = schedule.last_use[value, run]
            if until >= slot:
                continue
            if pad.choice[value] == _RECOMPUTE:
                if pad.stamp[maker] != stamp:
                    pad.stamp[maker] = stamp
                    pad.chain[count] = maker
                    count += 1
            else:
                kept += problem.size[value] * (weight[slot] - weight[until + 1])
    pad.clock[1] = count
    return kept, seconds


@leaf
def score(problem, schedule, pad, weight, value, worst, rate):
    """(weighted bytes freed, seconds, the slot of the next use) of dropping the value around the worst slot."""
    maker = problem.producer[value]
    run = slots.run_before(schedule, maker, worst)
    if run < 0 or problem.size[value] == 0 or schedule.last_use[value, run] <= worst:
        return 0.0, 0.0, -1
    if schedule.op_at[worst] >= 0 and _reads(problem, schedule.op_at[worst], value) and not _may_die(
            problem, schedule, value, worst):
        return 0.0, 0.0, -1
    until = slots.use_after(problem, schedule, value, worst)
    if not _can_run(problem, schedule, maker, until):
        return 0.0, 0.0, -1
    since = slots.use_before(problem, schedule, value, worst, schedule.run_slot[maker, run])
    kept, seconds = find_chain(problem, schedule, pad, weight, maker, until, rate)
    first = since if _may_die(problem, schedule, value, since) else since + 1
    gain = problem.size[value] * (weight[until] - weight[first]) - kept
    return gain, seconds, until


@leaf
def _may_die(problem, schedule, value, slot):
    """Whether the run in the slot would hold less if the value died with it, since it can take over its memory."""
    op = schedule.op_at[slot]
    if op < 0 or schedule.dying[slot] > 0:
        return False
    for place in range(problem.taken_start[value], problem.taken_start[value + 1]):
        if problem.taken_op[place] == op:
            return True
    return False


@leaf
def _reads(problem, op, value):
    for place in range(problem.input_start[op], problem.input_start[op + 1]):
        if problem.input_value[place] == value:
            return True
    return False


@leaf
def best_score(problem, schedule, pad, weight, value, worst, rate):
    """As `score`, at the rate that the drop itself reaches; pad.chain is left accordingly."""
    gain, seconds, until = score(problem, schedule, pad, weight, value, worst, rate)
    if until < 0:
        return gain, seconds, until
    if gain > 0.0:
        own = gain / max(seconds, _FREE)
        return score(problem, schedule, pad, weight, value, worst, min(own, rate * 1e3))
    return score(problem, schedule, pad, weight, value, worst, 0.0)


@compiled
def recompute(problem, schedule, pad, slot, weight, rate):
    """Inserts pad.chain right before the slot, in the graph's order; False where the slots do not suffice."""
    count = pad.clock[1]
    chain = np.sort(pad.chain[:count])
    for free in range(slot - count, slot):
        if free < 0 or schedule.op_at[free] >= 0:
            return False
    for step in range(count):
        op = chain[step]
        slots.insert(problem, schedule, op, slot - count + step)
    for step in range(count):
        op = chain[step]
        if _advance(problem, schedule, weight, op, slot) < rate * max(problem.cost[op], _FREE):
            slots.remove_with_causes(problem, schedule, op, slots.run_before(schedule, op, slot) + 1)
    return True


@compiled
def lower(problem, schedule, pad, weight, spread, candidates, factor, rate, most_drops):
    """Drops values until the schedule fits. Returns FITS, STUCK, NO_ROOM (for lack of slots) or STOPPED, and the rate.

    spread: see `weigh`
    candidates: values that may be dropped   # int64 [n]
    factor: on the score of each of them   # float64 [n]
    rate: bytes for a second at the start
    """
    values = len(candidates)
    budget = schedule.counters[slots.BUDGET]
    scores = np.zeros(values)
    drops = 0
    while True:
        worst = worst_slot(schedule)
        if bytes_at(schedule, worst) <= budget:
            return FITS, rate
        if drops >= most_drops:
            return STOPPED, rate
        weigh(schedule, worst, spread, weight)
        for place in range(values):
            gain, seconds, until = best_score(problem, schedule, pad, weight, candidates[place], worst, rate)
            scores[place] = factor[place] * gain / max(seconds, _FREE) if until >= 0 else 0.0
        ranked = np.argsort(-scores)
        before = drops
        for at in range(values):
            place = ranked[at]
            if scores[place] <= 0.0 or bytes_at(schedule, worst) <= budget:
                break
            gain, seconds, until = best_score(problem, schedule, pad, weight, candidates[place], worst, rate)
            own = gain / max(seconds, _FREE)
            following = scores[ranked[at + 1]] if at + 1 < values else 0.0
            if until < 0 or gain <= 0.0 or (drops > before and own * factor[place] < 0.5 * following):
                continue
            if not recompute(problem, schedule, pad, until, weight, own):
                if drops > before:
                    break
                if not _make_room(problem, schedule, until, pad.clock[1]):
                    return NO_ROOM, rate
                drops += 1
                break
            rate = own
            drops += 1
        if drops == before:
            return STUCK, rate


@compiled
def _make_room(problem, schedule, slot, room):
    """Lays the schedule out anew with empty slots before the run in `slot`; False where that would be too dense."""
    order = slots.order_of(schedule)
    if 2 * (len(order) + room) > len(schedule.op_at):
        return False
    step = 0
    for before in range(slot):
        step += schedule.op_at[before] >= 0
    slots.spread(problem, schedule, order, step, room)
    return True


@compiled
def tidy(problem, schedule, ops):
    """Removes recomputations of these ops, in this order, as long as the schedule still fits. Returns how many went."""
    removed = 0
    for op in ops:
        run = schedule.runs[op] - 1
        while run >= 1:
            run = min(run, schedule.runs[op] - 1)
            if run < 1:
                break
            slots.begin(schedule)
            slots.remove_with_causes(problem, schedule, op, run)
            if schedule.counters[slots.OVERFLOW] > 0:
                slots.undo(problem, schedule)
            else:
                removed += 1
            run -= 1
    schedule.counters[slots.LOGGING] = 0
    return removed


@compiled
def ruin(problem, schedule, random, share, width):
    """Removes each recomputation in a random window of slots with probability `share`; the budget is not looked at.

    width: of the window, as a share of all slots. Returns how many recomputations went.
    """
    span = width * len(schedule.op_at)
    first = random.random() * (len(schedule.op_at) + span) - span
    removed = 0
    count = schedule.counters[slots.MANY]
    for op in schedule.many[:count].copy():
        run = schedule.runs[op] - 1
        while run >= 1:
            slot = schedule.run_slot[op, run]
            if first <= slot <= first + span and random.random() < share:
                slots.remove_with_causes(problem, schedule, op, run)
                removed += 1
            run = min(run, schedule.runs[op]) - 1
    return removed
