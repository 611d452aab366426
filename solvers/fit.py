"""Makes an order fit a budget, or use it up: for planners whose orders need not come out just right.

What is over the budget is brought down by the greedy planner's drops; what is below is used to cancel recomputations,
dearest first, as long as all fits. First runs stay in the order they are given in. Either may fail: what comes out is
an order, and whether it fits is for `simulate` to say.
"""

import math
from collections.abc import Sequence

import numpy as np

from checkmate_tf.ir.graph import Graph
from checkmate_tf.solvers import drops, greedy, slots
from checkmate_tf.solvers.base import Deadline

_LONGEST = 40_000


def fitted(graph: Graph, order: Sequence[int], budget_bytes: int, seconds: float = math.inf) -> tuple[int, ...]:
    """The order with the recomputations that the budget asks for, if need be, and without those that it does not.

    seconds: how long that may take
    """
    if len(order) > _LONGEST:
        return tuple(order)
    problem = slots.problem_from(graph)
    deadline = Deadline(seconds)
    schedule = slots.schedule_from(problem, order, budget_bytes - graph.resident_bytes, slots_per_step=3)
    if schedule.counters[slots.OVERFLOW] > 0:
        candidates = drops.candidates_of(problem)
        greedy.lower(problem, schedule, candidates, np.ones(len(candidates)), 0.1, deadline)
    if schedule.counters[slots.OVERFLOW] == 0:
        greedy.tidy(problem, schedule, deadline)
    return tuple(slots.order_of(schedule).tolist())
