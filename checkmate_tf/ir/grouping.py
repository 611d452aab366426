"""Ops with the same label as one: a pass that makes a graph as coarse as somebody's words for its parts.

The label is a Keras layer and the side of the step, so that a graph of thousands of ops becomes one of some hundred, the
granularity that Checkmate's paper plans at. `contract` asks for groups that no path leaves and comes back to. A label's ops
need not be such a group (a residual layer, gradients that meet elsewhere), so one label may give several: the ops are walked
in order, and each joins the latest group of its label unless a path leads from that group through another one to it.

Ops that run once or overwrite something stay alone, or the whole layer could not be recomputed; so does what has no label.
Before that, the sources and the optimizer's updates are gathered as `passes` does it. What is lost: a layer's inner
values are never kept without the rest, and a group holds its inner values at once.
"""

from collections.abc import Sequence

from checkmate_tf.ir.graph import Graph
from checkmate_tf.ir.passes import Lift, contract, contract_tails, gather_sources


def group_by_label(graph: Graph, labels: Sequence[str | None]) -> tuple[Graph, Lift]:
    """The graph with an op for each group of equal labels, and the lift back.   # labels: [ops]"""
    first, first_lift = contract(graph, _leaders(graph, labels))
    lifts = [first_lift]
    for shrinking in (gather_sources, contract_tails):
        first, lift = shrinking(first)
        lifts.append(lift)

    def lift_all(order: Sequence[int]) -> tuple[int, ...]:
        for lift in reversed(lifts):
            order = lift(order)
        return tuple(order)

    return first, lift_all


def _leaders(graph: Graph, labels: Sequence[str | None]) -> list[int]:
    """For each op the first op of its group.

    Groups are numbered by their leaders; `above` has for each group a bit for every group that must come before it.
    """
    hidden = {value for op in graph.ops for value in op.overwrites}
    leader = list(graph.order)
    above: dict[int, int] = {}
    latest: dict[str, int] = {}
    readers_before = _overwritten_readers(graph)
    for op in graph.ops:
        before = {leader[graph.values[value].producer] for value in op.inputs}
        before |= {leader[other] for other in (*op.after, *readers_before.get(op.index, ()))}
        label = labels[op.index]
        is_free = (label is not None and op.once is None and not op.overwrites
                   and not any(value in hidden for value in op.outputs))
        group = latest.get(label) if is_free else None
        mask = 0
        for other in before - {group}:
            mask |= above[other] | 1 << other
        if group is not None and not mask >> group & 1:
            leader[op.index] = group
            for other, bits in above.items():
                if other == group or bits >> group & 1:
                    above[other] = bits | mask
        else:
            for other in before:
                mask |= above[other] | 1 << other
            above[op.index] = mask
            if is_free:
                latest[label] = op.index
    return leader


def _overwritten_readers(graph: Graph) -> dict[int, set[int]]:
    """For each op that overwrites values those that read them and must come first, and their makers."""
    return {op.index: {reader for value in op.overwrites for reader in (*graph.consumers[value], graph.values[value].producer)
                       if reader != op.index} for op in graph.ops if op.overwrites}
