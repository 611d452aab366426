"""Recomputation on demand: the common floor under the planners that only say what to keep and what to let go.

A `Player` holds an order in the making. Its user runs ops for the first time and forgets values; whatever is then
missing is made again when somebody reads it, with all that it was made from, in the order of indices. So any sequence
of `run` and `forget` ends in a valid order, on any graph:

- What a value is made from may be gone for good: an op with a reason in `once` never runs again, and nobody may use a
  value that has been overwritten. `forget` refuses a value that could not be made again.
- Right before an op overwrites a value, everything that is still needed, is not held, and could not be made any more
  afterwards is made while it can be.
- A first run comes after the first runs of what it reads, of its `after`, and of all readers of what it overwrites.

Nothing is counted here. Whether a plan fits is for `simulate` to say; and a value that the player believes to be held
costs nothing after its last use, because frees follow from the order alone. An op is *renewable* while it may run again
and whatever it reads is held or renewable; what loses that by an overwritten value is found from its readers on.
"""

from collections.abc import Iterable

from checkmate_tf.ir.graph import Graph


class Player:
    """An order in the making.

    order: op indices so far    held: whether each value is believed to be there    ran: whether each op has run
    """

    def __init__(self, graph: Graph):
        self.graph = graph
        self.order: list[int] = []
        self.held = [False] * len(graph.values)
        self.ran = [False] * len(graph.ops)
        self._users_left = [len(readers) for readers in graph.consumers]  # ops that have not yet run
        for value in graph.results:
            self._users_left[value] += 1
        self._prior = [frozenset({*graph.predecessors[op.index], *op.after,
                                  *(reader for value in op.overwrites for reader in graph.consumers[value])} - {op.index})
                       for op in graph.ops]
        self._renewable = [op.once is None and not op.overwrites for op in graph.ops]

    def run(self, op: int) -> None:
        """The first run of this op, after what must come before it; nothing if it has run already."""
        if not self.ran[op]:
            self._perform(self._wanted([op], ()))

    def fetch(self, values: Iterable[int]) -> list[int]:
        """Makes sure that the values are held; the ops that ran for it."""
        wanted = self._wanted((), values)
        self._perform(wanted)
        return wanted

    def forget(self, value: int) -> bool:
        """Lets go of the value unless it could not be made again; whether it is gone now."""
        if self.held[value] and not self.can_renew(value):
            return False
        self.held[value] = False
        return True

    def can_renew(self, value: int) -> bool:
        """Whether the value, once made, can be made again at present."""
        return self._renewable[self.graph.values[value].producer]

    def is_needed(self, value: int) -> bool:
        """Whether an op that has not yet run reads the value, or it is a result."""
        return self._users_left[value] > 0

    def finish(self) -> tuple[int, ...]:
        """Runs what has not run, sees to the results; the order."""
        for op in self.graph.order:
            self.run(op)
        self.fetch(self.graph.results)
        return tuple(self.order)

    def emit(self, op: int) -> None:
        """Runs the op, whose inputs are held and which may run."""
        self.order.append(op)
        for value in self.graph.ops[op].outputs:
            self.held[value] = True
        if not self.ran[op]:
            self.ran[op] = True
            for value in self.graph.ops[op].inputs:
                self._users_left[value] -= 1
            if self.graph.ops[op].overwrites:
                self._lose(self.graph.ops[op].overwrites)

    def before_emit(self, op: int) -> None:
        """Makes what nobody could make any more once this op has overwritten what it overwrites."""
        if self.ran[op]:
            return
        lost = self._lost_with(self.graph.ops[op].overwrites)
        waiting = [value for other in sorted(lost) if self.ran[other] for value in self.graph.ops[other].outputs
                   if not self.held[value] and self._outlives(value, op)]
        self.fetch(waiting)

    def _outlives(self, value: int, op: int) -> bool:
        return self._users_left[value] > (value in self.graph.ops[op].inputs)

    def _wanted(self, ops: Iterable[int], values: Iterable[int]) -> list[int]:
        """The ops to run for first runs of `ops` and for the values, in order."""
        producers = self.graph.values
        stack, wanted = list(ops), set()
        stack.extend(producers[value].producer for value in values if not self.held[value])
        while stack:
            op = stack.pop()
            if op in wanted:
                continue
            wanted.add(op)
            stack.extend(producers[value].producer for value in self.graph.ops[op].inputs if not self.held[value])
            if not self.ran[op]:
                stack.extend(other for other in self._prior[op] if not self.ran[other])
        return sorted(wanted)

    def _perform(self, ops: list[int]) -> None:
        for op in ops:
            self.before_emit(op)
            if not self.ran[op] or not all(self.held[value] for value in self.graph.ops[op].outputs):
                self.emit(op)

    def _lose(self, values: Iterable[int]) -> None:
        """Nobody can read these values any more."""
        for op in self._lost_with(values):
            self._renewable[op] = False

    def _lost_with(self, values: Iterable[int]) -> set[int]:
        """The ops that are renewable now and are not once nobody can read these values."""
        stack, lost = list(values), set()
        while stack:
            for reader in self.graph.consumers[stack.pop()]:
                if self._renewable[reader] and reader not in lost:
                    lost.add(reader)
                    if self.ran[reader]:
                        stack.extend(value for value in self.graph.ops[reader].outputs if not self.held[value])
        return lost
