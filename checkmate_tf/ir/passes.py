"""Passes that shrink a graph before a solver sees it: Graph -> (Graph, lift); lift takes a small graph's order back.

All of them contract groups of ops into one. A contracted op reads what its members read from outside, makes what
somebody outside reads, and takes their seconds; while it runs, everything it reads stays, so its scratch is the most
that its members hold at once beyond its outputs. Thus the lifted order of any valid order of the small graph is
valid, costs the same, and its peak is never above what the small graph's simulation says. What may be lost is cheap
plans, since a group runs as a whole; each pass says why it expects to lose little.

A group must be convex (no path leaves it and comes back), run once if a member does, and may hide an overwritten value
only if it runs once. `contract` refuses what breaks this; the passes below choose groups that do not:

- `gather_sources`   reads of variables and the like, which hold nothing and wait for nothing, become one first op
- `contract_tails`   what only leads from one gradient to its variables' writes (the optimizer) becomes one op
- `contract_chains`  an op with one reader is run with it, where that holds no more bytes than keeping its output
- `fold_small`       ops that make next to nothing run with the op they read from
"""

import dataclasses
import heapq
from collections.abc import Callable, Sequence

from checkmate_tf.ir.errors import GraphError
from checkmate_tf.ir.graph import Graph, Op, Value
from checkmate_tf.ir.simulate import keep_all_timeline, structural_floor
from checkmate_tf.ir.verify import verify_graph

Lift = Callable[[Sequence[int]], tuple[int, ...]]

_SMALL = 1e-4  # of the peak: values below this are not worth a decision


def shrink(graph: Graph) -> tuple[Graph, Lift]:
    """All passes, one after the other."""
    lifts = []
    for shrinking in (gather_sources, contract_tails, contract_chains, fold_small, contract_chains):
        graph, lift = shrinking(graph)
        lifts.append(lift)

    def lift_all(order: Sequence[int]) -> tuple[int, ...]:
        for lift in reversed(lifts):
            order = lift(order)
        return tuple(order)

    return graph, lift_all


def contract(graph: Graph, leader: Sequence[int]) -> tuple[Graph, Lift]:
    """One op for each group of ops with the same leader (an op index); groups come in the order of their leaders where
    what they read allows it. Raises GraphError for groups that are not convex, or that hide an overwritten value.
    """
    members: dict[int, list[int]] = {}
    for op in range(len(graph.ops)):
        members.setdefault(leader[op], []).append(op)
    order = _sorted_groups(graph, leader, members)
    number = {group: index for index, group in enumerate(order)}
    is_seen = _seen_from_outside(graph, leader, members)
    values: list[Value] = []
    renamed: dict[int, int] = {}
    for group in order:
        made = [value for op in members[group] for value in graph.ops[op].outputs if is_seen[value]]
        for port, value in enumerate(made):
            renamed[value] = len(values)
            values.append(dataclasses.replace(graph.values[value], index=len(values), producer=number[group],
                                              port=port))
    ops = tuple(_contracted(graph, index, group, members[group], leader, number, renamed)
                for index, group in enumerate(order))
    small = Graph(ops, tuple(values), tuple(renamed[value] for value in graph.results), graph.resident_bytes)
    runs = [tuple(members[group]) for group in order]
    return verify_graph(small), lambda small_order: tuple(op for group in small_order for op in runs[group])


def gather_sources(graph: Graph) -> tuple[Graph, Lift]:
    """Ops that run once, read nothing, wait for nothing and hold nothing run first, together. Nothing is lost: their
    values take no bytes, and nobody may run them again.
    """
    sources = [op.index for op in graph.ops if op.once is not None and not (op.inputs or op.after or op.overwrites)
               and op.scratch_bytes == 0 and not any(graph.values[value].bytes for value in op.outputs)]
    leader = list(graph.order)
    for op in sources:
        leader[op] = sources[0]
    return contract(graph, leader)


def contract_tails(graph: Graph) -> tuple[Graph, Lift]:
    """What only leads from one large value (a gradient) to ops that run once (writes of its variables) becomes one op.

    Members must not make less than they read: what condenses a large value should run early. The group stands where the
    gradient was last read, so that lives no longer than before; the writes come earlier, when the layer's forward ops
    have no more reason to run. A group that would need more than some op of the graph needs anyway is left alone.
    """
    small_bytes = int(_SMALL * keep_all_timeline(graph).peak_bytes)
    floor_bytes = structural_floor(graph)[0] - graph.resident_bytes
    successors = _successors(graph)
    results = {graph.values[value].producer for value in graph.results}
    roots: list[frozenset[int]] = []
    starts = set()
    for op in graph.ops:
        before = {graph.values[value].producer for value in op.inputs}.union(op.after)
        inherited = frozenset().union(*(roots[other] for other in before))
        if _condenses(graph, op, small_bytes) or op.index in results or len(inherited) > 1:
            starts.add(op.index)
            inherited = frozenset(value for value in op.outputs if graph.values[value].bytes > small_bytes)
        roots.append(inherited)
    tail: list[int | None] = [None] * len(graph.ops)
    members: dict[int, list[int]] = {}
    for op in reversed(graph.ops):
        own = roots[op.index]
        if op.index in starts:
            continue
        behind = {tail[other] for other in successors[op.index]}
        if not behind and _is_pinned(op):
            behind = set(own)
        if len(behind) == 1 and None not in behind and own <= behind:
            tail[op.index], = behind
            members.setdefault(tail[op.index], []).append(op.index)
    leader = list(graph.order)
    for value, group in members.items():
        if _needed_bytes(graph, group) <= floor_bytes:
            anchor = max((op for op in group if value in graph.ops[op].inputs), default=group[0])
            for op in group:
                leader[op] = anchor
    return contract(graph, leader)


def contract_chains(graph: Graph) -> tuple[Graph, Lift]:
    """An op whose only successors are in one group joins that group, where that takes no more bytes.

    Running it later holds its inputs longer instead of its outputs: it joins if those are no larger (or already needed
    by the group), as in FastSA's grouping. The group must not need more than its parts, or no plan could go as low as
    before. Lost is only the freedom to keep the output from one run of the reader to its next.
    """
    small_bytes = int(_SMALL * keep_all_timeline(graph).peak_bytes)
    successors = _successors(graph)
    results = {graph.values[value].producer for value in graph.results}
    leader = list(graph.order)
    members = {op: [op] for op in graph.order}
    needs = [_needed_bytes(graph, [op]) for op in graph.order]
    for op in reversed(graph.ops):
        groups = {leader[other] for other in successors[op.index]}
        if len(groups) != 1 or op.index in results:
            continue
        group = groups.pop()
        if _is_pinned(op) and not any(_is_pinned(graph.ops[member]) for member in members[group]):
            continue
        if not _is_pinned(op) and any(graph.writers[value] for value in op.outputs):
            continue
        joined = [op.index, *members[group]]
        read_already = {value for member in members[group] for value in graph.ops[member].inputs}
        more = sum(graph.values[value].bytes for value in op.inputs if value not in read_already)
        less = sum(graph.values[value].bytes for value in op.outputs)
        apart = max(needs[group], _needed_bytes(graph, [op.index]))
        together = _needed_bytes(graph, joined)
        if more <= max(less, small_bytes) and together <= apart + small_bytes:
            leader[op.index] = group
            members[group] = joined
            needs[group] = together
    return contract(graph, leader)


def fold_small(graph: Graph) -> tuple[Graph, Lift]:
    """An op whose outputs are small and that waits for one group only runs with that group.

    It is kept or recomputed with what it is made from, which decides about its few bytes, too. Ops that take more than
    a thousandth of the time stay alone, and what runs once does not join what need not.
    """
    small_bytes = int(_SMALL * keep_all_timeline(graph).peak_bytes)
    floor_bytes = structural_floor(graph)[0] - graph.resident_bytes
    dear_seconds = graph.seconds / 1000
    predecessors = _predecessors(graph)
    leader = list(graph.order)
    members = {op: [op] for op in graph.order}
    for op in graph.ops:
        groups = {leader[other] for other in predecessors[op.index]}
        made = sum(graph.values[value].bytes for value in op.outputs)
        if len(groups) != 1 or made > small_bytes or op.seconds > dear_seconds:
            continue
        group = groups.pop()
        if _is_pinned(op) and not any(_is_pinned(graph.ops[member]) for member in members[group]):
            continue
        if any(graph.writers[value] for value in (*op.inputs, *op.outputs)):
            continue
        joined = [*members[group], op.index]
        if _needed_bytes(graph, joined) <= floor_bytes:
            leader[op.index] = group
            members[group] = joined
    return contract(graph, leader)


def _is_pinned(op: Op) -> bool:
    return op.once is not None or bool(op.overwrites)


def _condenses(graph, op, small_bytes) -> bool:
    if not op.outputs:
        return False
    read = max((graph.values[value].bytes for value in op.inputs), default=0)
    return max(sum(graph.values[value].bytes for value in op.outputs), small_bytes) < read


def _predecessors(graph) -> list[set[int]]:
    """For each op those that must come before it: makers of inputs, control edges, readers of what it overwrites."""
    found = [{graph.values[value].producer for value in op.inputs} | set(op.after) for op in graph.ops]
    for op in graph.ops:
        for value in op.overwrites:
            found[op.index].update(reader for reader in graph.consumers[value] if reader != op.index)
            found[op.index].add(graph.values[value].producer)
    return found


def _successors(graph) -> list[set[int]]:
    found: list[set[int]] = [set() for _ in graph.ops]
    for op, befores in enumerate(_predecessors(graph)):
        for before in befores:
            found[before].add(op)
    return found


def _sorted_groups(graph, leader, members) -> list[int]:
    after: dict[int, set[int]] = {group: set() for group in members}
    for op, befores in enumerate(_predecessors(graph)):
        for before in befores:
            if leader[before] != leader[op]:
                after[leader[before]].add(leader[op])
    waiting = dict.fromkeys(members, 0)
    for groups in after.values():
        for group in groups:
            waiting[group] += 1
    ready = [group for group, count in waiting.items() if count == 0]
    heapq.heapify(ready)
    order = []
    while ready:
        group = heapq.heappop(ready)
        order.append(group)
        for other in after[group]:
            waiting[other] -= 1
            if waiting[other] == 0:
                heapq.heappush(ready, other)
    if len(order) < len(members):
        stuck = next(group for group, count in waiting.items() if count)
        raise GraphError("Groups must be convex: no path may leave one and come back. Received: a group of "
                         f"{len(members[stuck])} ops around {graph.ops[stuck].name!r} that is not, or comes after one")
    return order


def _seen_from_outside(graph, leader, members) -> list[bool]:
    """Which values a small graph must show: of single ops, results, and what another group reads or overwrites."""
    seen = [len(members[leader[value.producer]]) == 1
            or any(leader[reader] != leader[value.producer] for reader in graph.consumers[value.index])
            or any(leader[writer] != leader[value.producer] for writer in graph.writers[value.index])
            for value in graph.values]
    for value in graph.results:
        seen[value] = True
    return seen


def _contracted(graph, index, group, members, leader, number, renamed) -> Op:
    ops = [graph.ops[op] for op in members]
    made = {value for op in ops for value in op.outputs}
    inputs = dict.fromkeys(renamed[value] for op in ops for value in op.inputs if value not in made)
    overwrites = dict.fromkeys(renamed[value] for op in ops for value in op.overwrites if value not in made)
    outputs = tuple(renamed[value] for op in ops for value in op.outputs if value in renamed)
    after = {number[leader[before]] for op in ops for before in op.after} - {index}
    once = next((op.once for op in ops if op.once is not None), None)
    for op in ops:
        for value in op.inputs:
            if value in made and once is None and any(leader[writer] != group for writer in graph.writers[value]):
                raise GraphError("A group that reads a value of its own which another op overwrites must run once. "
                                 f"Received: {op.name!r} with the op that makes what it reads")
        # What reads a hidden value must come before its writer, which only a control edge can still say.
        after |= {number[leader[reader]] for value in op.overwrites for reader in graph.consumers[value]
                  if leader[reader] == leader[graph.values[value].producer] != group}
    if len(ops) == 1:
        return dataclasses.replace(ops[0], index=index, inputs=tuple(inputs), outputs=outputs,
                                   after=tuple(sorted(after)), overwrites=tuple(overwrites),
                                   reuses=tuple(renamed[value] for value in ops[0].reuses))
    shown = {value for value in made if value in renamed}
    held_bytes, reuses = _inside(graph, members, shown)
    scratch_bytes = max(0, held_bytes - sum(graph.values[value].bytes for value in shown))
    return Op(index, graph.ops[group].name, "group", tuple(inputs), outputs, tuple(sorted(after)),
              sum(op.seconds for op in ops), scratch_bytes, once, tuple(overwrites), graph.ops[group].backward,
              tuple(renamed[value] for value in reuses))


def _needed_bytes(graph, members) -> int:
    """At least what the group holds while it runs: what it reads from outside and its own values."""
    made = {value for op in members for value in graph.ops[op].outputs}
    inside = set(members)
    stays = {value for value in made if value in graph.results
             or any(reader not in inside for reader in graph.consumers[value])}
    read = {value for op in members for value in graph.ops[op].inputs} - made
    held, reuses = _inside(graph, sorted(members), stays)
    made_bytes = sum(graph.values[value].bytes for value in stays)
    taken_over = max((graph.values[value].bytes for value in reuses), default=0)
    return sum(graph.values[value].bytes for value in read) + max(held, made_bytes) - taken_over


def _inside(graph, members, stays) -> tuple[int, tuple[int, ...]]:
    """(the most that the members' own values and scratch take, the inputs whose memory the group can take over).

    Such an input is as large as the only value that stays, and if it dies with the group, the group never holds its
    memory and what it needs without that at once: it is taken over by the member that reads it last.
    """
    held = _held_inside(graph, members, stays)
    if len(stays) != 1:
        return held, ()
    size = graph.values[next(iter(stays))].bytes
    offered = dict.fromkeys(value for op in members for value in graph.ops[op].reuses
                            if graph.values[value].producer not in members and graph.values[value].bytes == size)
    return held, tuple(value for value in offered if _held_inside(graph, members, stays, value) <= max(held, size) - size)


def _held_inside(graph, members, stays, dying=None) -> int:
    """The most that the members' own values and scratch take while they run in order; values in `stays` are kept.

    dying: a value from outside that dies with its last reader; who takes over its memory holds that much less
    """
    last_reader = {value: op for op in members for value in graph.ops[op].inputs}
    inside = set(members)
    held, most = 0, 0
    for op in members:
        made = graph.ops[op].outputs
        held += sum(graph.values[value].bytes for value in made)
        ends = [value for value in dict.fromkeys((*graph.ops[op].inputs, *made)) if last_reader.get(value, op) == op
                and (value == dying or graph.values[value].producer in inside and value not in stays)]
        taken_over = next((value for value in graph.ops[op].reuses if value in ends), None)
        held -= graph.values[taken_over].bytes if taken_over is not None else 0
        most = max(most, held + graph.ops[op].scratch_bytes)
        held -= sum(graph.values[value].bytes for value in ends if value not in (taken_over, dying))
    return most
