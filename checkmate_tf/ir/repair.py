"""Another order of the same computations that takes less memory when placed.

Which chunk a value is given depends on what has come back before it, so a plan's placed peak moves when some computation
moves by a few steps, although its live bytes hardly do. From a plan, single runs are moved by random distances; a move
stays if the placed peak is no higher. The runs are the same, and so is their time. A search, not a proof: it ends when
the plan fits, when its time is over, or when at the pace so far that would not suffice. One try costs one placement, some
milliseconds a thousand steps.
"""

import random
import time
from collections.abc import Callable, Sequence

from checkmate_tf.ir.errors import PlanError
from checkmate_tf.ir.graph import Graph
from checkmate_tf.ir.plan import Plan, plan_from_order
from checkmate_tf.ir.verify import verify_plan

_LARGE = 0.01                  # of the largest value: runs that make less are seldom worth moving
_LARGE_SHARE = 0.8             # of the tries move a run that makes a large value
_FARTHEST = 200
_PACE_SHARE, _PACE_TRIES = 0.2, 200     # of the time, and tries, after which the pace counts


def repaired(graph: Graph, order: Sequence[int], placed: Callable[[Plan], tuple[Plan, int]], limit_bytes: int, seconds: float,
             seed: int = 0) -> tuple[Plan, int]:
    """(a plan with the same runs, its placed peak): at most `limit_bytes` if the time suffices, and never more than that
    of the order given.

    placed: a plan as it is to be placed, with fillers it may be, and its peak
    """
    choices = random.Random(seed)
    order = list(order)
    plan, first = placed(plan_from_order(graph, order))
    least = first
    started, tries = time.monotonic(), 0
    largest = max((value.bytes for value in graph.values), default=0)
    is_large = [any(graph.values[value].bytes >= _LARGE * largest for value in op.outputs) for op in graph.ops]
    while least > limit_bytes:
        share = (time.monotonic() - started) / seconds if seconds > 0 else 1.0
        is_slow = share > _PACE_SHARE and tries >= _PACE_TRIES and first - least < share * (first - limit_bytes)
        if share >= 1 or is_slow:
            break
        tries += 1
        moved = _moved(graph, order, is_large, choices)
        if moved is None:
            continue
        try:
            candidate = verify_plan(graph, plan_from_order(graph, moved))
        except PlanError:
            continue
        candidate, peak = placed(candidate)
        if peak <= least:
            order, plan, least = moved, candidate, peak
    return plan, least


def _moved(graph: Graph, order: list[int], is_large: list[bool], choices: random.Random) -> list[int] | None:
    """The order with one run somewhere else, within what its neighbours in the graph allow; None if it cannot move."""
    position = choices.randrange(len(order))
    if not is_large[order[position]] and choices.random() < _LARGE_SHARE:
        return None
    op = graph.ops[order[position]]
    distance = min(int(choices.expovariate(1 / 20)) + 1, _FARTHEST) * choices.choice((-1, 1))
    makers = {graph.values[value].producer for value in op.inputs}
    readers = {reader for value in op.outputs for reader in graph.consumers[value]}
    stop = position
    step = 1 if distance > 0 else -1
    while 0 <= stop + step < len(order) and abs(stop - position) < abs(distance):
        neighbour = order[stop + step]
        if neighbour == op.index or neighbour in (readers if step > 0 else makers):
            break
        stop += step
    if stop == position:
        return None
    moved = order.copy()
    moved.insert(stop, moved.pop(position))
    return moved
