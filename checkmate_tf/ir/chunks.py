"""The allocator of `placement`, compiled: plays a whole plan in a millisecond or a few.

Which of its chunks are free, and where, is all in arrays. The free ones are looked through from end to end for the best fit: there are some
dozens. `placement.Allocator` says what is meant; the tests hold one against the other.
"""

import numpy as np

from checkmate_tf.ir.compiled import compiled, leaf
from checkmate_tf.ir.units import GRANULE_BYTES

FIRST_REGION_BYTES = 2 << 20
WORTH_SPLITTING_BYTES = 128 << 20
NO_ADDRESS = 1 << 62             # above all that a device has
# Columns of a chunk: where it begins (-1: where small requests are served), bytes, the chunks around it in its region, its place among the
# free ones (-1: in use), and the next piece of the same value.
_ADDRESS, _SIZE, _BEFORE, _AFTER, _PLACE, _NEXT = range(6)
# State of the whole.
(_HELD, _PEAK, _REGIONS, _LENT, _FROM_LENT, _FIRST_LENT, _END, _NEXT_REGION, _LIMIT, _SMALL, _FREE, _UNUSED, _MADE) = range(13)


@leaf
def _unit(size):
    return max(GRANULE_BYTES, (size + GRANULE_BYTES - 1) // GRANULE_BYTES * GRANULE_BYTES)


@leaf
def _best_fit(chunks, free, state, size):
    """The smallest free chunk of at least this size, the lowest of equal ones; -1 if there is none."""
    best, best_size, best_address = -1, 0, 0
    for place in range(state[_FREE]):
        chunk = free[place]
        has = chunks[chunk, _SIZE]
        if has >= size and (best < 0 or has < best_size or (has == best_size and chunks[chunk, _ADDRESS] < best_address)):
            best, best_size, best_address = chunk, has, chunks[chunk, _ADDRESS]
    return best


@leaf
def _new(chunks, unused, state):
    if state[_UNUSED]:
        state[_UNUSED] -= 1
        return unused[state[_UNUSED]]
    state[_MADE] += 1
    return state[_MADE] - 1


@leaf
def _add_free(chunks, free, state, chunk):
    chunks[chunk, _PLACE] = state[_FREE]
    free[state[_FREE]] = chunk
    state[_FREE] += 1


@leaf
def _take_free(chunks, free, state, chunk):
    state[_FREE] -= 1
    last = free[state[_FREE]]
    free[chunks[chunk, _PLACE]] = last
    chunks[last, _PLACE] = chunks[chunk, _PLACE]
    chunks[chunk, _PLACE] = -1


@leaf
def _link(chunks, free, unused, state, address, size, before, after):
    chunk = _new(chunks, unused, state)
    chunks[chunk, _ADDRESS], chunks[chunk, _SIZE], chunks[chunk, _BEFORE], chunks[chunk, _AFTER] = address, size, before, after
    if before >= 0:
        chunks[before, _AFTER] = chunk
    if after >= 0:
        chunks[after, _BEFORE] = chunk
    _add_free(chunks, free, state, chunk)
    return chunk


@leaf
def _extend(chunks, free, unused, state, size):
    room = (state[_LIMIT] - state[_REGIONS]) // GRANULE_BYTES * GRANULE_BYTES
    if size > room:
        state[_LENT] += size
        state[_FIRST_LENT] = min(state[_FIRST_LENT], state[_END])
        _link(chunks, free, unused, state, state[_END], size, -1, -1)
        state[_END] += size + GRANULE_BYTES
        return
    grown = False
    while size > state[_NEXT_REGION]:
        state[_NEXT_REGION] *= 2
        grown = True
    region = min(state[_NEXT_REGION], room)
    if not grown:
        state[_NEXT_REGION] *= 2
    state[_REGIONS] += region
    _link(chunks, free, unused, state, state[_END], region, -1, -1)
    state[_END] += region + GRANULE_BYTES


@leaf
def _allocate(chunks, free, unused, state, size):
    """The chunk that serves a request."""
    is_small = size < state[_SMALL]
    size = _unit(size)
    if is_small:
        chunk = _new(chunks, unused, state)
        chunks[chunk, _ADDRESS], chunks[chunk, _SIZE] = -1, size
    else:
        chunk = _best_fit(chunks, free, state, size)
        if chunk < 0:
            _extend(chunks, free, unused, state, size)
            chunk = _best_fit(chunks, free, state, size)
        _take_free(chunks, free, state, chunk)
        rest = chunks[chunk, _SIZE] - size
        if rest >= size or rest >= WORTH_SPLITTING_BYTES:
            chunks[chunk, _SIZE] = size
            _link(chunks, free, unused, state, chunks[chunk, _ADDRESS] + size, rest, chunk, chunks[chunk, _AFTER])
        if chunks[chunk, _ADDRESS] >= state[_FIRST_LENT]:
            state[_FROM_LENT] += chunks[chunk, _SIZE]
    state[_HELD] += chunks[chunk, _SIZE]
    state[_PEAK] = max(state[_PEAK], state[_HELD])
    return chunk


@leaf
def _absorb(chunks, unused, state, chunk, after):
    chunks[chunk, _SIZE] += chunks[after, _SIZE]
    further = chunks[after, _AFTER]
    chunks[chunk, _AFTER] = further
    if further >= 0:
        chunks[further, _BEFORE] = chunk
    unused[state[_UNUSED]] = after
    state[_UNUSED] += 1


@leaf
def _release(chunks, free, unused, state, chunk):
    state[_HELD] -= chunks[chunk, _SIZE]
    if chunks[chunk, _ADDRESS] < 0:
        unused[state[_UNUSED]] = chunk
        state[_UNUSED] += 1
        return
    after, before = chunks[chunk, _AFTER], chunks[chunk, _BEFORE]
    if after >= 0 and chunks[after, _PLACE] >= 0:
        _take_free(chunks, free, state, after)
        _absorb(chunks, unused, state, chunk, after)
    if before >= 0 and chunks[before, _PLACE] >= 0:
        _take_free(chunks, free, state, before)
        _absorb(chunks, unused, state, before, chunk)
        chunk = before
    _add_free(chunks, free, state, chunk)


@leaf
def _filler_for(chunks, free, state, size):
    size = _unit(size)
    chunk = _best_fit(chunks, free, state, size)
    if chunk < 0:
        return 0
    rest = chunks[chunk, _SIZE] - size
    is_cut = rest >= size or rest >= WORTH_SPLITTING_BYTES
    if is_cut or rest < max(1, state[_SMALL]) or _best_fit(chunks, free, state, rest) != chunk:
        return 0
    return rest


@leaf
def _give(chunks, at, held, chunk):
    chunks[chunk, _NEXT] = at[held]
    at[held] = chunk


@leaf
def _return_all(chunks, free, unused, state, at, held):
    chunk = at[held]
    at[held] = -1
    while chunk >= 0:
        following = chunks[chunk, _NEXT]
        _release(chunks, free, unused, state, chunk)
        chunk = following


@compiled
def played(steps, takes, asked_from, asked_held, asked_bytes, first_output, reuses_from, reuses, neighbours, fillers, finds_from, rounds,
           held_count, residents, stretches, limit_bytes, small_bytes, capacity):
    """(peak beyond the residents, region bytes, lent bytes, bytes served from what is lent), and a filler for each computation.

    steps: op, or -1 - value where that is freed; takes: whether a value takes bytes; asked_from, asked_held, asked_bytes: what each op asks
    for, from where to where in the other two, 0 bytes where it is given back; first_output, reuses_from, reuses, neighbours: of each op its
    output or -1, inputs whose memory that may take over, and how many steps behind it may free some; fillers: bytes for each computation;
    finds_from: fillers of at least so many bytes are found as it goes, -1: none are; held_count: of values, scratch, and the filler, the
    last of them
    """
    chunks = np.empty((capacity, 6), np.int64)
    free, unused = np.empty(capacity, np.int64), np.empty(capacity, np.int64)
    at = np.full(held_count, -1, np.int64)
    filler = held_count - 1
    found = np.zeros(len(fillers), np.int64)
    state = np.zeros(13, np.int64)
    state[_FIRST_LENT], state[_LIMIT], state[_SMALL] = NO_ADDRESS, limit_bytes, small_bytes
    state[_NEXT_REGION] = min(limit_bytes, FIRST_REGION_BYTES)
    for number in range(len(stretches)):
        _link(chunks, free, unused, state, stretches[number, 0], stretches[number, 1], -1, -1)
        state[_REGIONS] += stretches[number, 1]
        state[_END] = max(state[_END], stretches[number, 0] + stretches[number, 1] + GRANULE_BYTES)
    while state[_NEXT_REGION] <= state[_REGIONS]:
        state[_NEXT_REGION] *= 2
    for size in residents:
        temporary = _allocate(chunks, free, unused, state, size)
        _allocate(chunks, free, unused, state, size)
        _release(chunks, free, unused, state, temporary)
    resident_bytes = state[_PEAK] = state[_HELD]
    for _ in range(rounds):
        computed = 0
        for position in range(len(steps)):
            step = steps[position]
            if step < 0:
                if takes[-1 - step]:
                    _return_all(chunks, free, unused, state, at, -1 - step)
                continue
            if fillers[computed] > 0:
                _give(chunks, at, filler, _allocate(chunks, free, unused, state, fillers[computed]))
            taken_over = -1
            for number in range(reuses_from[step], reuses_from[step + 1]):
                other = position + 1
                while taken_over < 0 and other < min(len(steps), position + 1 + neighbours[step]) and steps[other] < 0:
                    if -1 - steps[other] == reuses[number]:
                        taken_over = reuses[number]
                    other += 1
                if taken_over >= 0:
                    break
            output = first_output[step]
            takes_over = taken_over >= 0 and takes[taken_over]
            if takes_over:
                at[output] = at[taken_over]
                at[taken_over] = -1
            is_first = finds_from >= 0
            for number in range(asked_from[step], asked_from[step + 1]):
                held, size = asked_held[number], asked_bytes[number]
                if takes_over and held == output:
                    continue
                if size == 0:
                    _return_all(chunks, free, unused, state, at, held)
                    continue
                if is_first and size >= finds_from:
                    is_first = False
                    filler_bytes = _filler_for(chunks, free, state, size)
                    if filler_bytes >= finds_from:
                        found[computed] = filler_bytes
                        _give(chunks, at, filler, _allocate(chunks, free, unused, state, filler_bytes))
                _give(chunks, at, held, _allocate(chunks, free, unused, state, size))
            _return_all(chunks, free, unused, state, at, filler)
            computed += 1
        for held in range(held_count):
            _return_all(chunks, free, unused, state, at, held)
    return state[_PEAK] - resident_bytes, state[_REGIONS], state[_LENT], state[_FROM_LENT], found
