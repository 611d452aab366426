"""The allocator of `placement`, compiled: plays a whole plan in a millisecond or a few.

Which of its chunks are free, and where, is all in arrays. The free ones are looked through from end to end for the best fit: there are some
dozens. `placement.Allocator` says what is meant; the tests hold one against the other.
"""

from typing import NamedTuple

import numpy as np

from checkmate_tf.ir.compiled import leaf
from checkmate_tf.ir.units import GRANULE_BYTES

FIRST_REGION_BYTES = 2 << 20
WORTH_SPLITTING_BYTES = 128 << 20
NO_ADDRESS = 1 << 62             # above all that a device has
# Columns of a chunk: where it begins (-1: where small requests are served), bytes, the chunks around it in its region, its place among the
# free ones (-1: in use), and the next piece of the same value.
_ADDRESS, _SIZE, _BEFORE, _AFTER, _PLACE, _NEXT = range(6)
# State of the whole; WORST is the last step at which the peak or what is lent grew, CHANGED whether a round left memory otherwise.
(_HELD, PEAK, REGIONS, LENT, FROM_LENT, _FIRST_LENT, _END, _NEXT_REGION, _LIMIT, _SMALL, _FREE, _UNUSED, _MADE, WORST, CHANGED) = range(15)
_STATES = 15
NO_MORE = 1 << 62                # bytes that nothing exceeds


class Asked(NamedTuple):
    """What the ops of a graph ask for. Rows are compressed: those of op i are at [start[i], start[i + 1])."""

    takes: np.ndarray           # bool [values], whether it takes bytes
    start: np.ndarray           # int64 [ops + 1]
    held: np.ndarray            # int64, a value, or scratch after those
    bytes: np.ndarray           # int64, 0 where it is given back
    taker: np.ndarray           # int64 [ops], the output that may take over memory, or -1
    reuses_start: np.ndarray    # int64 [ops + 1]
    reuses: np.ndarray          # int64, inputs whose memory it may take over
    neighbours: np.ndarray      # int64 [ops], how many steps behind it may free some of its values
    count: int                  # of values, scratch, and the filler, the last of them


class Space(NamedTuple):
    """What is free when a step begins: see `placement.Layout`."""

    residents: np.ndarray       # int64, sizes
    stretches: np.ndarray       # int64 [stretches, 2], addresses and bytes
    limit_bytes: int
    small_bytes: int


class Memory(NamedTuple):
    """Chunks, and what is held where; made once for many plans."""

    chunks: np.ndarray
    free: np.ndarray
    unused: np.ndarray
    at: np.ndarray              # int64 [Asked.count], the first piece, or -1
    state: np.ndarray


def memory_for(asked: Asked, requests: int, space: Space) -> Memory:
    """Enough for plans of so many requests: each chunk in use may have a free one behind it, and a filler."""
    capacity = 3 * requests + 3 * len(space.residents) + len(space.stretches) + 64
    return Memory(np.empty((capacity, 6), np.int64), np.empty(capacity, np.int64), np.empty(capacity, np.int64),
                  np.empty(asked.count, np.int64), np.empty(_STATES, np.int64))


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
    room = (state[_LIMIT] - state[REGIONS]) // GRANULE_BYTES * GRANULE_BYTES
    if size > room:
        state[LENT] += size
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
    state[REGIONS] += region
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
            state[FROM_LENT] += chunks[chunk, _SIZE]
    state[_HELD] += chunks[chunk, _SIZE]
    state[PEAK] = max(state[PEAK], state[_HELD])
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


@leaf
def play(asked, space, memory, steps, count, fillers, found, finds_from, rounds, most_bytes, most_lent):
    """Plays a plan, and leaves in `memory.state` the PEAK in bytes, residents of the space included, the bytes of REGIONS, those LENT and
    those served FROM_LENT. Returns the bytes of the residents.

    steps: op, or -1 - value where that is freed, the first `count` of them; fillers: bytes for each computation; finds_from: fillers
    of at least so many bytes are taken as it goes, and left in `found`, -1: none are; rounds: how often, as far as one can differ from
    the one before; most_bytes, most_lent: it ends early where the peak beyond the residents, or what is lent, exceeds this
    """
    chunks, free, unused, at, state = memory.chunks, memory.free, memory.unused, memory.at, memory.state
    filler = asked.count - 1
    at[:] = -1
    state[:] = 0
    state[_FIRST_LENT], state[_LIMIT], state[_SMALL] = NO_ADDRESS, space.limit_bytes, space.small_bytes
    state[_NEXT_REGION] = min(space.limit_bytes, FIRST_REGION_BYTES)
    for number in range(len(space.stretches)):
        _link(chunks, free, unused, state, space.stretches[number, 0], space.stretches[number, 1], -1, -1)
        state[REGIONS] += space.stretches[number, 1]
        state[_END] = max(state[_END], space.stretches[number, 0] + space.stretches[number, 1] + GRANULE_BYTES)
    while state[_NEXT_REGION] <= state[REGIONS]:
        state[_NEXT_REGION] *= 2
    for size in space.residents:
        temporary = _allocate(chunks, free, unused, state, size)
        _allocate(chunks, free, unused, state, size)
        _release(chunks, free, unused, state, temporary)
    resident_bytes = state[PEAK] = state[_HELD]
    for _ in range(rounds):
        computed = 0
        peak_bytes, lent_bytes, taken_bytes = state[PEAK], state[LENT], state[LENT] + state[REGIONS]
        for position in range(count):
            step = steps[position]
            if step < 0:
                if asked.takes[-1 - step]:
                    _return_all(chunks, free, unused, state, at, -1 - step)
                continue
            if fillers[computed] > 0:
                _give(chunks, at, filler, _allocate(chunks, free, unused, state, fillers[computed]))
            taken_over = -1
            for number in range(asked.reuses_start[step], asked.reuses_start[step + 1]):
                other = position + 1
                while taken_over < 0 and other < min(count, position + 1 + asked.neighbours[step]) and steps[other] < 0:
                    if -1 - steps[other] == asked.reuses[number]:
                        taken_over = asked.reuses[number]
                    other += 1
                if taken_over >= 0:
                    break
            output = asked.taker[step]
            takes_over = taken_over >= 0 and asked.takes[taken_over]
            if takes_over:
                at[output] = at[taken_over]
                at[taken_over] = -1
            is_first = finds_from >= 0
            for number in range(asked.start[step], asked.start[step + 1]):
                held, size = asked.held[number], asked.bytes[number]
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
            if state[PEAK] > peak_bytes or state[LENT] > lent_bytes:
                peak_bytes, lent_bytes = state[PEAK], state[LENT]
                state[WORST] = position
                if peak_bytes - resident_bytes > most_bytes or lent_bytes > most_lent:
                    return resident_bytes
        for held in range(asked.count):
            _return_all(chunks, free, unused, state, at, held)
        state[CHANGED] = state[LENT] + state[REGIONS] != taken_bytes or state[FROM_LENT] > 0
        if not state[CHANGED]:
            break
    return resident_bytes
