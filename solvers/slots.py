"""A schedule in slots: a state that search can change in small, exactly invertible steps.

An order of computations is laid out over many more slots than it has steps, as in FastSA (Imanishi et al., NeurIPS
2023), so that a run can be put in or taken out without moving the others. Each value of run i of an op lives from
the run's slot to its last use before run i + 1, results of the last run to the end: the very frees that
`plan_from_order` derives, so the largest `held` over slots is the simulated peak. An empty slot holds no more
than the last run before it. A slot whose run takes over the memory of an input that dies there (`Op.reuses`) holds
that much less; `dying` counts such inputs.

Bytes held are kept in blocks of 64 slots with a lazy addend, bounds on their maximum and minimum, and the bytes over
the budget summed over slots; changing a value's life costs one visit per block, not per slot. Slots are looked at
one by one only in blocks that may be over the budget: there the bounds are exact.

Two tuples of arrays travel through all compiled functions: `Problem` (the graph in compressed rows, never changed) and
`Schedule` (changed in place). The functions keep an order valid as long as: what is inserted is no `pinned` op (one
that must run once), stands after the first run of what it reads, and before the writers that overwrite it (`deadline`).
"""

from typing import NamedTuple

import numpy as np

from checkmate_tf.ir.graph import Graph
from checkmate_tf.ir.compiled import compiled, leaf

BLOCK = 64
# Places in Schedule.counters.
BUDGET, OVERFLOW, LENGTH, LOGGED, LOGGING, MANY, CHANGES = range(7)


class Problem(NamedTuple):
    """A graph as arrays. Rows are compressed: those of i are at [start[i], start[i + 1])."""

    input_start: np.ndarray     # int64 [ops + 1]
    input_value: np.ndarray
    output_start: np.ndarray    # int64 [ops + 1]
    output_value: np.ndarray
    use_start: np.ndarray       # int64 [values + 1]
    use_op: np.ndarray
    writer_start: np.ndarray    # int64 [ops + 1]
    writer_op: np.ndarray       # ops that overwrite an input of the op
    taken_start: np.ndarray     # int64 [values + 1]
    taken_op: np.ndarray        # ops that can take over the value's memory
    producer: np.ndarray        # int64 [values]
    size: np.ndarray            # int64 [values], bytes
    scratch: np.ndarray         # int64 [ops], bytes
    cost: np.ndarray            # float64 [ops], share of the graph's seconds
    pinned: np.ndarray          # bool [ops], runs once
    is_result: np.ndarray       # bool [values]


class Schedule(NamedTuple):
    """Runs in slots and what they hold."""

    op_at: np.ndarray       # int64 [slots], -1 where empty
    run_slot: np.ndarray    # int64 [ops, runs], ascending
    runs: np.ndarray        # int64 [ops]
    last_use: np.ndarray    # int64 [values, runs]; the run's slot when unused
    dying: np.ndarray       # int64 [slots], inputs of the run there that die with it and whose memory it can take over
    held: np.ndarray        # int64 [slots], without the block's `lazy`
    lazy: np.ndarray        # int64 [blocks]
    highest: np.ndarray     # int64 [blocks], at least the most bytes held; exact where that is over the budget
    lowest: np.ndarray      # int64 [blocks], at most the fewest bytes held
    over: np.ndarray        # int64 [blocks], bytes over the budget, summed over slots
    log: np.ndarray         # int64 [steps, 4]: 1, -1 or 0 for inserted, removed or shifted, op, slot, slot before
    many: np.ndarray        # int64 [ops]: the first counters[MANY] are the ops with more than one run
    many_at: np.ndarray     # int64 [ops]: where in `many`, or -1
    counters: np.ndarray    # int64 [7]
    spent: np.ndarray       # float64 [1], sum of Problem.cost over runs


def problem_from(graph: Graph) -> Problem:
    """The graph as arrays; costs are shares of its total, so that thresholds mean the same for every graph."""
    total = graph.seconds or 1.0
    is_result = np.zeros(len(graph.values), np.bool_)
    is_result[list(graph.results)] = True
    writers = [sorted({writer for value in op.inputs for writer in graph.writers[value] if writer != op.index})
               for op in graph.ops]
    takers: list[list[int]] = [[] for _ in graph.values]
    for op in graph.ops:
        for value in op.reuses:
            takers[value].append(op.index)
    return Problem(*rows([op.inputs for op in graph.ops]), *rows([op.outputs for op in graph.ops]),
                   *rows(graph.consumers), *rows(writers), *rows(takers),
                   np.array([value.producer for value in graph.values], np.int64),
                   np.array([value.bytes for value in graph.values], np.int64),
                   np.array([op.scratch_bytes for op in graph.ops], np.int64),
                   np.array([op.seconds / total for op in graph.ops], np.float64),
                   np.array([op.once is not None or bool(op.overwrites) for op in graph.ops], np.bool_), is_result)


def schedule_from(problem: Problem, order, budget_bytes: int, slots_per_step: int = 6,
                  room: int = 0, runs: int = 16) -> Schedule:
    """The order in slots, evenly spread. `budget_bytes` is what values may hold, without the resident bytes.

    `runs` is how often an op can run; `room` is a number of steps the schedule should be able to grow to.
    """
    ops, values = len(problem.scratch), len(problem.producer)
    blocks = -(-max(slots_per_step * max(len(order), room), 2 * BLOCK) // BLOCK)
    most = int(np.bincount(np.asarray(order, np.int64), minlength=1).max(initial=0))
    runs = max(runs, most + 2)
    slots = blocks * BLOCK
    schedule = Schedule(np.full(slots, -1, np.int64), np.zeros((ops, runs), np.int64), np.zeros(ops, np.int64),
                        np.zeros((values, runs), np.int64), np.zeros(slots, np.int64), np.zeros(slots, np.int64),
                        np.zeros(blocks, np.int64), np.zeros(blocks, np.int64), np.zeros(blocks, np.int64), np.zeros(blocks, np.int64),
                        np.zeros((4096, 4), np.int64), np.zeros(ops, np.int64), np.full(ops, -1, np.int64),
                        np.zeros(7, np.int64), np.zeros(1))
    schedule.counters[BUDGET] = budget_bytes
    spread(problem, schedule, np.asarray(order, np.int64), -1, 0)
    return schedule


def copy_of(schedule: Schedule) -> Schedule:
    """The same schedule, in arrays of its own."""
    return Schedule(*(array.copy() for array in schedule))


def restore(schedule: Schedule, saved: Schedule) -> None:
    """Makes the schedule what another of the same shape is."""
    for array, other in zip(schedule, saved):
        np.copyto(array, other)


def peak_of(schedule: Schedule) -> int:
    """The most bytes held, without the resident bytes."""
    return int((schedule.held + np.repeat(schedule.lazy, BLOCK)).max())


@compiled
def order_of(schedule):
    """The ops in order of computation."""
    return schedule.op_at[schedule.op_at >= 0]


@compiled
def spread(problem, schedule, order, roomy_step, room):
    """Lays the order out anew, evenly, with at least `room` empty slots before step `roomy_step`."""
    for array in (schedule.dying, schedule.held, schedule.lazy, schedule.highest, schedule.lowest, schedule.over):
        array[:] = 0
    schedule.op_at[:] = -1
    schedule.runs[:] = 0
    schedule.many_at[:] = -1
    counters = schedule.counters
    for counter in (OVERFLOW, LENGTH, LOGGED, LOGGING, MANY, CHANGES):
        counters[counter] = 0
    schedule.spent[0] = 0.0
    slots = len(schedule.op_at) - 1 - room  # the last slot stays empty: results live up to it
    extra = 0
    for step in range(len(order)):
        if step == roomy_step:
            extra = room
        insert(problem, schedule, order[step], (step * slots) // max(len(order), 1) + slots // (2 * len(order)) + extra)
    counters[CHANGES] = 0


@leaf
def add_held(schedule, first, last, delta):
    """Adds bytes to the slots from first to last, both included."""
    if delta == 0 or first > last:
        return
    first_block, last_block = first // BLOCK, last // BLOCK
    if first_block == last_block:
        _add_in_block(schedule, first_block, first, last + 1, delta)
        return
    _add_in_block(schedule, first_block, first, (first_block + 1) * BLOCK, delta)
    _add_in_block(schedule, last_block, last_block * BLOCK, last + 1, delta)
    budget = schedule.counters[BUDGET]
    change = 0
    for block in range(first_block + 1, last_block):
        schedule.lazy[block] += delta
        lowest, highest = schedule.lowest[block], schedule.highest[block] + delta
        schedule.lowest[block] = lowest + delta
        schedule.highest[block] = highest
        if highest <= budget:
            change -= schedule.over[block]
            schedule.over[block] = 0
        elif lowest >= budget and lowest + delta >= budget:
            change += BLOCK * delta
            schedule.over[block] += BLOCK * delta
        else:
            _look_at_block(schedule, block)
    schedule.counters[OVERFLOW] += change


@leaf
def _add_in_block(schedule, block, first, end, delta):
    held = schedule.held
    for slot in range(first, end):
        held[slot] += delta
    if delta > 0:
        schedule.highest[block] += delta
    else:
        schedule.lowest[block] += delta
    if schedule.highest[block] > schedule.counters[BUDGET]:
        _look_at_block(schedule, block)


@leaf
def _look_at_block(schedule, block):
    held = schedule.held
    lazy = schedule.lazy[block]
    limit = schedule.counters[BUDGET] - lazy
    highest = lowest = held[block * BLOCK]
    over = 0
    for slot in range(block * BLOCK, (block + 1) * BLOCK):
        highest = max(highest, held[slot])
        lowest = min(lowest, held[slot])
        over += max(held[slot] - limit, 0)
    schedule.highest[block] = highest + lazy
    schedule.lowest[block] = lowest + lazy
    schedule.counters[OVERFLOW] += over - schedule.over[block]
    schedule.over[block] = over


@leaf
def run_before(schedule, op, slot):
    """The number of the op's last run before the slot, or -1."""
    run = schedule.runs[op] - 1
    while run >= 0 and schedule.run_slot[op, run] >= slot:
        run -= 1
    return run


@leaf
def use_before(problem, schedule, value, slot, at_least):
    """The last slot before `slot` in which the value is read, or `at_least`."""
    found = at_least
    for place in range(problem.use_start[value], problem.use_start[value + 1]):
        reader = problem.use_op[place]
        run = run_before(schedule, reader, slot)
        if run >= 0:
            found = max(found, schedule.run_slot[reader, run])
    return found


@leaf
def use_after(problem, schedule, value, slot):
    """The first slot after `slot` in which the value is read, or the last slot of all."""
    found = len(schedule.op_at) - 1
    for place in range(problem.use_start[value], problem.use_start[value + 1]):
        reader = problem.use_op[place]
        run = run_before(schedule, reader, slot + 1) + 1
        if run < schedule.runs[reader]:
            found = min(found, schedule.run_slot[reader, run])
    return found


@leaf
def deadline(problem, schedule, op):
    """The first slot in which the op can no longer run, because something it reads has been overwritten."""
    found = len(schedule.op_at)
    for place in range(problem.writer_start[op], problem.writer_start[op + 1]):
        writer = problem.writer_op[place]
        if schedule.runs[writer] > 0:
            found = min(found, schedule.run_slot[writer, 0])
    return found


@leaf
def _end_at(problem, schedule, value, run, slot):
    """Moves the last use of this run's value to the slot; what is held in between is the caller's business."""
    old = schedule.last_use[value, run]
    if old != slot:
        schedule.last_use[value, run] = slot
        _dies(problem, schedule, value, old, -1)
        _dies(problem, schedule, value, slot, 1)


@leaf
def _dies(problem, schedule, value, slot, sign):
    """The value dies in this slot (or no longer does): a run there that can take over its memory holds less."""
    op = schedule.op_at[slot]
    for place in range(problem.taken_start[value], problem.taken_start[value + 1]):
        if problem.taken_op[place] == op:
            before = schedule.dying[slot]
            schedule.dying[slot] = before + sign
            if min(before, before + sign) == 0:
                add_held(schedule, slot, slot, -sign * problem.size[value])


@leaf
def insert(problem, schedule, op, slot):
    """Puts a run into an empty slot. All that it reads must have run before; there must be room for one more run."""
    run_slot, last_use, counters = schedule.run_slot, schedule.last_use, schedule.counters
    run, count = run_before(schedule, op, slot) + 1, schedule.runs[op]
    for later in range(count, run, -1):
        run_slot[op, later] = run_slot[op, later - 1]
    run_slot[op, run] = slot
    schedule.runs[op] = count + 1
    schedule.op_at[slot] = op
    add_held(schedule, slot, slot, problem.scratch[op])
    for place in range(problem.output_start[op], problem.output_start[op + 1]):
        value = problem.output_value[place]
        for later in range(count, run, -1):
            last_use[value, later] = last_use[value, later - 1]
        last_use[value, run] = slot
        if run > 0 and last_use[value, run - 1] > slot:
            last_use[value, run] = last_use[value, run - 1]
            last_use[value, run - 1] = use_before(problem, schedule, value, slot, run_slot[op, run - 1])
            _dies(problem, schedule, value, last_use[value, run - 1], 1)
            add_held(schedule, last_use[value, run - 1] + 1, slot - 1, -problem.size[value])
        elif count == 0 and problem.is_result[value]:
            last_use[value, run] = len(schedule.op_at) - 1
            add_held(schedule, slot, last_use[value, run], problem.size[value])
        else:
            add_held(schedule, slot, slot, problem.size[value])
    _read(problem, schedule, op, slot)
    if count == 1:
        schedule.many[counters[MANY]] = op
        schedule.many_at[op] = counters[MANY]
        counters[MANY] += 1
    _count(schedule, problem.cost[op], 1, op, slot)


@leaf
def remove(problem, schedule, op, run):
    """Takes out a run that is not the first, or a first one that nobody uses before the second."""
    run_slot, last_use, counters = schedule.run_slot, schedule.last_use, schedule.counters
    slot, count = run_slot[op, run], schedule.runs[op]
    _read_no_more(problem, schedule, op, slot)
    for place in range(problem.output_start[op], problem.output_start[op + 1]):
        value = problem.output_value[place]
        if last_use[value, run] == slot:
            add_held(schedule, slot, slot, -problem.size[value])
        else:
            add_held(schedule, last_use[value, run - 1] + 1, slot - 1, problem.size[value])
            _dies(problem, schedule, value, last_use[value, run - 1], -1)
            last_use[value, run - 1] = last_use[value, run]
        for later in range(run, count - 1):
            last_use[value, later] = last_use[value, later + 1]
    for later in range(run, count - 1):
        run_slot[op, later] = run_slot[op, later + 1]
    add_held(schedule, slot, slot, -problem.scratch[op])
    schedule.runs[op] = count - 1
    schedule.op_at[slot] = -1
    if count == 2:
        counters[MANY] -= 1
        moved, at = schedule.many[counters[MANY]], schedule.many_at[op]
        schedule.many[at] = moved
        schedule.many_at[moved] = at
        schedule.many_at[op] = -1
    _count(schedule, -problem.cost[op], -1, op, slot)


@leaf
def shift(problem, schedule, op, run, slot):
    """Moves a run to an empty slot between the op's runs around it, before its first use and after what it reads."""
    old = schedule.run_slot[op, run]
    _read_no_more(problem, schedule, op, old)
    for place in range(problem.output_start[op], problem.output_start[op + 1]):
        value = problem.output_value[place]
        if schedule.last_use[value, run] == old:
            add_held(schedule, old, old, -problem.size[value])
            add_held(schedule, slot, slot, problem.size[value])
            schedule.last_use[value, run] = slot
        elif slot < old:
            add_held(schedule, slot, old - 1, problem.size[value])
        else:
            add_held(schedule, old, slot - 1, -problem.size[value])
    add_held(schedule, old, old, -problem.scratch[op])
    add_held(schedule, slot, slot, problem.scratch[op])
    schedule.op_at[old] = -1
    schedule.op_at[slot] = op
    schedule.run_slot[op, run] = slot
    _read(problem, schedule, op, slot)
    _log(schedule, 0, op, slot, old)


@leaf
def _read(problem, schedule, op, slot):
    for place in range(problem.input_start[op], problem.input_start[op + 1]):
        value = problem.input_value[place]
        made = run_before(schedule, problem.producer[value], slot)
        if slot > schedule.last_use[value, made]:
            add_held(schedule, schedule.last_use[value, made] + 1, slot, problem.size[value])
            _end_at(problem, schedule, value, made, slot)


@leaf
def _read_no_more(problem, schedule, op, slot):
    for place in range(problem.input_start[op], problem.input_start[op + 1]):
        value = problem.input_value[place]
        maker = problem.producer[value]
        made = run_before(schedule, maker, slot)
        if schedule.last_use[value, made] == slot:
            last = use_before(problem, schedule, value, slot, schedule.run_slot[maker, made])
            _end_at(problem, schedule, value, made, last)
            add_held(schedule, last + 1, slot, -problem.size[value])


@leaf
def _count(schedule, cost, sign, op, slot):
    schedule.spent[0] += cost
    schedule.counters[LENGTH] += sign
    _log(schedule, sign, op, slot, slot)


@leaf
def _log(schedule, kind, op, slot, old):
    counters = schedule.counters
    counters[CHANGES] += 1
    if counters[LOGGING] and counters[LOGGED] < len(schedule.log):
        logged = schedule.log[counters[LOGGED]]
        logged[0], logged[1], logged[2], logged[3] = kind, op, slot, old
        counters[LOGGED] += 1


@leaf
def begin(schedule):
    """From here on steps are logged, for `undo`."""
    schedule.counters[LOGGED] = 0
    schedule.counters[LOGGING] = 1


@leaf
def log_is_full(schedule):
    """Whether a long compound move must end now to stay undoable."""
    return schedule.counters[LOGGED] > len(schedule.log) - 256


@leaf
def undo(problem, schedule):
    """Takes back every step since `begin`."""
    schedule.counters[LOGGING] = 0
    for step in range(schedule.counters[LOGGED] - 1, -1, -1):
        kind, op, slot = schedule.log[step, 0], schedule.log[step, 1], schedule.log[step, 2]
        if kind == 0:
            shift(problem, schedule, op, run_before(schedule, op, slot + 1), schedule.log[step, 3])
        elif kind > 0:
            remove(problem, schedule, op, run_before(schedule, op, slot + 1))
        else:
            insert(problem, schedule, op, slot)
    schedule.counters[LOGGED] = 0


@leaf
def is_idle_run(problem, schedule, op, run):
    """Whether nobody uses what this run makes."""
    for place in range(problem.output_start[op], problem.output_start[op + 1]):
        if schedule.last_use[problem.output_value[place], run] != schedule.run_slot[op, run]:
            return False
    return True


@compiled
def remove_with_causes(problem, schedule, op, run):
    """Removes a recomputation, and in turn the recomputations that were made only for it."""
    todo = [(op, schedule.run_slot[op, run])]
    while len(todo) > 0 and not log_is_full(schedule):
        op, slot = todo.pop()
        run = run_before(schedule, op, slot + 1)
        if run < 1 or schedule.run_slot[op, run] != slot:
            continue
        remove(problem, schedule, op, run)
        for place in range(problem.input_start[op], problem.input_start[op + 1]):
            maker = problem.producer[problem.input_value[place]]
            made = run_before(schedule, maker, slot)
            if made > 0 and is_idle_run(problem, schedule, maker, made):
                todo.append((maker, schedule.run_slot[maker, made]))


def rows(rows):
    start = np.zeros(len(rows) + 1, np.int64)
    start[1:] = np.cumsum([len(row) for row in rows])
    return start, np.array([entry for row in rows for entry in row], np.int64)
