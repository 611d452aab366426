"""Parts of a training step as small graphs of their own, and the options that a solver finds for them.

A block is a stage's forward and backward ops with the rest of the net made small:

    input (once) -> the block's forward ops -> rest (once) -> its backward ops

where `input` makes what the block reads, and `rest` stands for all that happens between forward and backward: it reads
what goes on and makes the gradients that come back. A solver plans this graph at a grid of budgets: one for the peak,
and one for what may be saved across `rest`, which asks for scratch bytes in the amount that may not be. What comes
before `rest` in a plan is the option's forward, what comes after its backward part. Of all options only those are kept
that no other beats in time and bytes at once. Equal blocks, and deep nets are full of them, are solved once.
"""

import dataclasses
import time
from collections.abc import Sequence

from checkmate_tf.ir.graph import Graph, Op, Value
from checkmate_tf.ir.simulate import keep_all_timeline, structural_floor
from checkmate_tf.solvers import chains
from checkmate_tf.solvers.base import Limits, Solver, ignore_progress
from checkmate_tf.solvers.chains import Option
from checkmate_tf.solvers.stages import Stage, chain_of

_PEAK_SHARES = (1.0, 0.75, 0.5, 0.25, 0.0)         # of the way from the block's floor to its peak
_SAVED_SHARES = (1.0, 0.85, 0.7, 0.55, 0.4, 0.25, 0.1, 0.0)  # of what keeping all saves


def count_blocks(graph: Graph, most: int) -> tuple[int, int]:
    """Into how many blocks, at most so many, the graph is cut, and how many of them are distinct."""
    stages = chain_of(graph, most)
    return len(stages), len({_signature(block_graph(graph, stage)[0]) for stage in stages})


def block_options(graph: Graph, stages: Sequence[Stage], inner: Solver, deadline: float,
                  limits: Limits) -> tuple[list[list[Option]], int]:
    """For each stage its options, and how many distinct blocks there were. After the deadline only the plain ones."""
    known: dict[tuple, list[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
    options = []
    for stage in stages:
        block, ops = block_graph(graph, stage)
        signature = _signature(block)
        if signature not in known:
            known[signature] = _orders(block, inner, deadline, limits)
        found = [chains.keeping_option(graph, stage)]
        for before, after in known[signature]:
            forward, backward = [ops[op] for op in before], [ops[op] for op in after]
            own = {value for op in stage.forward for value in graph.ops[op].outputs}
            made: set[int] = set()
            saved = set(stage.border)
            for op in backward:
                saved |= (set(graph.ops[op].inputs) & own) - made
                made |= set(graph.ops[op].outputs)
            found.append(chains.option_of(graph, stage, forward, backward, saved))
        options.append(_undominated(found))
    return options, len(known)


def block_graph(graph: Graph, stage: Stage) -> tuple[Graph, list[int]]:
    """The block between `input` and `rest`, and for each of its ops the op of the whole graph, -1 for these two."""
    ops: list[Op] = []
    values: list[Value] = []
    index_of: dict[int, int] = {}

    def add(op: Op | None, name: str, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        number = len(ops)
        for port, value in enumerate(outputs):
            index_of[value] = len(values)
            values.append(Value(len(values), number, port, graph.values[value].bytes))
        made = tuple(index_of[value] for value in outputs)
        read = tuple(sorted({index_of[value] for value in inputs}))
        if op is None:
            ops.append(Op(number, name, "block", read, made, once="the rest of the net"))
        else:
            ops.append(Op(number, str(number), "block", read, made, seconds=op.seconds, scratch_bytes=op.scratch_bytes,
                          once=op.once, backward=op.backward, reuses=tuple(index_of[value] for value in op.reuses)))

    own = {value for op in (*stage.forward, *stage.backward) for value in graph.ops[op].outputs}
    early = sorted({value for op in stage.forward for value in graph.ops[op].inputs if value not in own} | stage.reads)
    late = sorted({value for op in stage.backward for value in graph.ops[op].inputs if value not in own} - set(early))
    add(None, "input", (), early)
    for op in stage.forward:
        add(graph.ops[op], "", graph.ops[op].inputs, graph.ops[op].outputs)
    add(None, "rest", stage.border, late)
    for op in stage.backward:
        add(graph.ops[op], "", graph.ops[op].inputs, graph.ops[op].outputs)
    results = tuple(index_of[value] for op in stage.backward for value in graph.ops[op].outputs
                    if value in graph.results or set(graph.consumers[value]) - set(stage.backward))
    return Graph(tuple(ops), tuple(values), results), [-1, *stage.forward, -1, *stage.backward]


def _orders(block: Graph, inner: Solver, deadline: float,
            limits: Limits) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The forward and backward parts of the block's plans at a grid of budgets."""
    rest = next(op.index for op in block.ops if op.name == "rest")
    held = keep_all_timeline(block).live_bytes
    peak_bytes, floor_bytes = max(held), structural_floor(block)[0]
    across_bytes = _across(block, rest)
    found = set()
    for peak_share in _PEAK_SHARES:
        budget_bytes = floor_bytes + int(peak_share * (peak_bytes - floor_bytes))
        for saved_share in _SAVED_SHARES:
            if time.monotonic() > deadline:
                return sorted(found)
            fixed = sum(block.values[value].bytes for value in (*block.ops[0].outputs, *block.ops[rest].outputs,
                                                                *block.ops[rest].inputs))
            scratch_bytes = max(0, budget_bytes - fixed - int(saved_share * across_bytes))
            tight = dataclasses.replace(block, ops=tuple(
                dataclasses.replace(op, scratch_bytes=scratch_bytes) if op.index == rest else op for op in block.ops))
            if structural_floor(tight)[0] > budget_bytes:
                continue
            order = inner.search(tight, budget_bytes, limits, ignore_progress).order
            if order is not None:
                at = order.index(rest)
                found.add((tuple(op for op in order[:at] if op), order[at + 1:]))
    return sorted(found)


def _across(block: Graph, rest: int) -> int:
    """The bytes that keeping everything holds across `rest`, without what it reads and what `input` makes."""
    return sum(value.bytes for value in block.values if 0 < value.producer < rest
               and value.index not in block.ops[rest].inputs
               and any(reader > rest for reader in block.consumers[value.index]))


def _undominated(options: Sequence[Option]) -> list[Option]:
    """Those options that no other equals or beats in everything; the first of equals."""
    def rank(option):
        return (option.seconds, option.saved_bytes, option.forward_bytes, option.backward_bytes)
    kept: list[Option] = []
    for option in sorted(options, key=rank):
        if not any(all(a <= b for a, b in zip(rank(other), rank(option))) for other in kept):
            kept.append(option)
    return kept


def _signature(block: Graph) -> tuple:
    """Everything about a block but the names."""
    return (tuple((op.inputs, op.outputs, op.seconds, op.scratch_bytes, op.once is not None, op.backward,
                   op.reuses) for op in block.ops),
            tuple(value.bytes for value in block.values), block.results)
