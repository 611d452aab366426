"""What loops and branches hold inside, which is in no shape of the graph around them.

A loop that is differentiated leaves, in lists, what each of its turns computed; the loop of its gradient takes that off again.
The lists' own tensors say nothing of it: here their bytes are those of what a turn puts in, each buffer once, times the
turns. What one turn (or a branch) needs besides is scratch: the most that its ops hold at a time, in the order in which they were
traced.

How many turns a loop takes is known where its most is a constant, as Keras's and `tf.map_fn`'s are, or where it is a gradient
of such a loop, or fills lists of a known length; else it counts as one.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from checkmate_tf.bridge import private
from checkmate_tf.bridge.trace import SOURCES
from checkmate_tf.bridge.views import ALWAYS, is_view

LOOPS = frozenset({"While", "StatelessWhile"})
_BRANCHES = frozenset({"If", "StatelessIf"})
CALLING = LOOPS | _BRANCHES | {"Case", "StatelessCase", "PartitionedCall", "StatefulPartitionedCall"}
_PUTS = frozenset({"TensorListPushBack", "TensorListSetItem"})  # the last input is what is put in
_FILLS = frozenset({"TensorListFromTensor", "ZerosLike"})       # both make every element anew
_COUNTER, _MOST_TURNS = 0, 1    # positions among the variables of a loop that TensorFlow differentiates


class Inside:
    """Looks into the ops of a graph that call functions.

    library: the functions by name;  bytes_of: the bytes of an output that is a tensor of its own
    """

    def __init__(self, library: Mapping[str, Any], bytes_of: Callable[[tf.Tensor], int]):
        self._library, self._bytes_of = library, bytes_of
        self._body = functools.lru_cache(maxsize=None)(self._body)

    def bodies(self, operation: tf.Operation) -> list[tf.Graph]:
        """The functions of which an op runs one, a loop's body for each turn; none for other ops."""
        if operation.type in LOOPS:
            return [self._body(operation, "body")]
        if operation.type in _BRANCHES:
            return [self._body(operation, "then_branch"), self._body(operation, "else_branch")]
        return []

    def turns(self, operation: tf.Operation) -> int:
        """How often a loop runs its body at most, as far as that is known; 1 for other ops."""
        if operation.type not in LOOPS:
            return 1
        most = operation.inputs[_MOST_TURNS] if len(operation.inputs) > _MOST_TURNS else None
        if most is not None and self._counts(operation):
            known = tf.get_static_value(most)
            if known is not None and known > 0:
                return int(known)
            if most.op.type in LOOPS and most.value_index == _COUNTER:
                return self.turns(most.op)
        lengths = [tf.get_static_value(tensor.op.inputs[1]) for tensor in operation.inputs if tensor.op.type == "TensorListReserve"]
        return max((int(length) for length in lengths if length is not None), default=1)

    def lists(self, operation: tf.Operation) -> dict[int, tuple[int, int]]:
        """Output position -> (number, bytes of each) of what the op has put into the list there when it has run."""
        if operation.type in _FILLS and operation.outputs[0].dtype == tf.variant:
            elements = self._elements(operation.outputs[0])
            return {} if elements is None else {0: elements}
        if operation.type not in LOOPS:
            return {}
        found, counted = {}, set()
        for position, put in self._put_in(operation).items():
            buffer = self._buffer(operation, put)
            if buffer is not None and buffer.ref() not in counted:
                counted.add(buffer.ref())
                found[position] = self.turns(operation), self._bytes_of(buffer)
        return found

    def _elements(self, tensor: tf.Tensor) -> tuple[int, int] | None:
        """(number, bytes of each) of what is in a list, wherever it was put in; None where that is not known."""
        maker = _root(tensor).op
        if maker.type == "ZerosLike":
            return self._elements(maker.inputs[0])
        if maker.type == "TensorListFromTensor":
            whole = maker.inputs[0]
            rows = whole.shape[0] if whole.shape.rank else None
            return None if not rows else (rows, self._bytes_of(whole) // rows)
        if maker.type not in LOOPS:
            return None
        body, position = self._body(maker, "body"), _root(tensor).value_index
        if _root(body.outputs[position]) is body.inputs[position]:      # the loop does not change it
            return self._elements(maker.inputs[position])
        put = self._put_in(maker).get(position)
        return None if put is None else (self.turns(maker), self._bytes_of(put))

    def scratch_bytes(self, operation: tf.Operation) -> int:
        """The most that one turn, or one of the branches, holds beside inputs, outputs and lists."""
        kept = {put.ref() for put in self._put_in(operation).values()} if operation.type in LOOPS else set()
        return max((self._most_held(body, kept) for body in self.bodies(operation)), default=0)

    def _most_held(self, body: tf.Graph, kept: set) -> int:
        last = {}
        operations = body.get_operations()
        for position, operation in enumerate(operations):
            for tensor in operation.inputs:
                last[_root(tensor).ref()] = position
        for tensor in body.outputs:
            last[_root(tensor).ref()] = len(operations)
        held, most, ends = 0, 0, {}
        for position, operation in enumerate(operations):
            if operation.type in SOURCES or is_view(operation):
                continue
            sizes = {tensor.ref(): self._bytes_of(tensor) for tensor in operation.outputs if tensor.ref() not in kept}
            held += sum(sizes.values()) + sum(count * size for count, size in self.lists(operation).values())
            most = max(most, held + self.scratch_bytes(operation))
            for tensor, size in sizes.items():
                ends.setdefault(last.get(tensor, position), []).append(size)
            held -= sum(ends.pop(position, ()))
        return most

    def _put_in(self, operation: tf.Operation) -> dict[int, tf.Tensor]:
        """Output position -> what each turn puts into the list there."""
        found = {}
        for position, tensor in enumerate(self._body(operation, "body").outputs):
            lists = [tensor] if tensor.dtype == tf.variant else []
            while lists:
                maker = _root(lists.pop()).op
                if maker.type in _PUTS:
                    found[position] = _root(maker.inputs[-1])
                elif maker.type == "AddN":      # a gradient's list is the sum of what there was and one with a turn's part
                    lists += maker.inputs
        return found

    def _buffer(self, operation: tf.Operation, put: tf.Tensor) -> tf.Tensor | None:
        """Where what is put in was computed; None for what is the same in every turn. A variable of the loop was, in the turn
        before."""
        body = self._body(operation, "body")
        inputs = {tensor.ref(): position for position, tensor in enumerate(body.inputs)}
        position = inputs.get(put.ref())
        if position is None:
            return None if put.op.type == "Const" else put
        carried = _root(body.outputs[position])
        return None if carried is put or carried.ref() in inputs else carried

    def _counts(self, operation: tf.Operation) -> bool:
        """Whether the loop has a counter and its most among its variables, as TensorFlow's own have."""
        body = self._body(operation, "body")
        return (_root(body.outputs[_MOST_TURNS]) is body.inputs[_MOST_TURNS]
                and _root(body.outputs[_COUNTER]).op.type in ("AddV2", "Add"))

    def _body(self, operation: tf.Operation, attribute: str) -> tf.Graph:
        inputs = operation.inputs if operation.type in LOOPS else operation.inputs[1:]
        with operation.graph.as_default():
            return private.function_graph(self._library[operation.get_attr(attribute).name], [tensor.shape for tensor in inputs])


def _root(tensor: tf.Tensor) -> tf.Tensor:
    while tensor.op.type in ALWAYS:
        tensor = tensor.op.inputs[0]
    return tensor
