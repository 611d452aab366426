"""What small graphs really cost: a naive simulator and exhaustive searches. Shares no code with the package.

Graphs are read through their plain fields only (`ops`, `values`, `results`, `resident_bytes`).

`peak_bytes` looks, at every step, through the rest of the order for a use. `cheapest` is Dijkstra's search over the
states of a device: which ops have run, which values are live, and where the schedule may go on. Before each run it
may let go of any live values, so nothing is assumed about frees. Three scopes of schedules, each within the next:

- "stages": Checkmate's frontier-advancing stages. First runs come in the order of indices; between the first runs of
  t - 1 and t the ops below t may run, each at most once, in ascending order.
- "fixed": first runs come in the order of indices; anything may run again at any time.
- "free": any order.
"""

import heapq
import itertools
import math


def peak_bytes(graph, order):
    """The peak of an order of computations, by looking ahead from every step; None if it is no schedule."""
    never = len(order)
    peak = graph.resident_bytes
    for now in range(len(order)):
        op = graph.ops[order[now]]
        held = graph.resident_bytes + op.scratch_bytes + sum(graph.values[value].bytes for value in op.outputs)
        dying = 0
        for value in graph.values:
            if value.producer == op.index:
                continue
            made_before = value.producer in order[:now]
            uses = [step for step in range(now, never) if value.index in graph.ops[order[step]].inputs]
            made_again = next((step for step in range(now, never) if order[step] == value.producer), never)
            needed = (uses and uses[0] < made_again) or (value.index in graph.results and made_again == never)
            if needed and not made_before:
                return None
            held += value.bytes if needed else 0
            later = [step for step in uses if step > now]
            lives_on = (later and later[0] < made_again) or (value.index in graph.results and made_again == never)
            if value.index in op.reuses and not lives_on:
                dying = value.bytes
        peak = max(peak, held - dying)
    return peak


def seconds(graph, order):
    """The cost of an order."""
    return sum(graph.ops[op].seconds for op in order)


def cheapest(graph, budget_bytes, scope="fixed"):
    """The least seconds of a schedule in this scope within the budget; infinite if there is none."""
    done = frozenset(range(len(graph.ops)))
    start = (frozenset(), frozenset(), -1)
    costs = {start: 0.0}
    queue = [(0.0, 0, start)]
    numbers = itertools.count(1)
    while queue:
        cost, _, state = heapq.heappop(queue)
        if cost > costs[state]:
            continue
        ran, live, _ = state
        if ran == done and live >= set(graph.results):
            return cost
        for op, after in _moves(graph, budget_bytes, scope, state):
            total = cost + graph.ops[op].seconds
            if total < costs.get(after, math.inf):
                costs[after] = total
                heapq.heappush(queue, (total, next(numbers), after))
    return math.inf


def _moves(graph, budget_bytes, scope, state):
    """Every run that may come next with every choice of what is let go before it."""
    ran, live, previous = state
    for op in graph.ops:
        if not _may_run(op, graph, scope, ran, previous) or not live >= set(op.inputs):
            continue
        made = set(op.outputs)
        loose = sorted(live - made - set(op.inputs))
        last = op.index if scope == "stages" and op.index in ran else -1
        for count in range(len(loose) + 1):
            for kept in itertools.combinations(loose, count):
                during = set(kept) | set(op.inputs) | made
                held = sum(graph.values[value].bytes for value in during) + graph.resident_bytes + op.scratch_bytes
                for dying in (None, *op.reuses):
                    given = graph.values[dying].bytes if dying is not None else 0
                    if held - given <= budget_bytes:
                        yield op.index, (ran | {op.index}, frozenset(during - {dying}), last)


def _may_run(op, graph, scope, ran, previous):
    again = op.index in ran
    if scope in ("stages", "fixed") and not again and len(ran) != op.index:
        return False
    if scope == "stages" and again and op.index <= previous:
        return False
    if again and op.once is not None:
        return False
    if not again and not ran >= set(op.after):
        return False
    overwritten = {value for other in ran for value in graph.ops[other].overwrites}
    return not overwritten & set(op.inputs)
