"""A training step for any batch size, from those traced for two: sizes as functions of the batch.

Every dimension that grows with the batch lies on a line through both, and so do the bytes of the batch, the seconds and the
scratch of each op. Nothing is traced to look at another size. Dimensions are whole numbers, so sizes are what a
trace would say, to the byte; times and scratch are as near as a line is. Where the two graphs are not of the same ops, or a
dimension is not on a line of whole numbers, there are no `Lines`.
"""

import dataclasses

import tensorflow as tf

from checkmate_tf.bridge.rehearse import Places
from checkmate_tf.bridge.trace import Traced
from checkmate_tf.ir.graph import Value
from checkmate_tf.ir.simulate import keep_all_timeline
from checkmate_tf.ir.units import in_granules
from checkmate_tf.ir.verify import verify_graph
from checkmate_tf.planning import Prepared


@dataclasses.dataclass(frozen=True)
class Lines:
    """Two training steps of the same ops; every size is on a line through both.

    sizes: the two batch sizes;  steps: the two;  large: for each value of the first step that of the second;
    large_op: the same for ops
    """

    sizes: tuple[int, int]
    steps: tuple[Prepared, Prepared]
    large: tuple[Value, ...]
    large_op: tuple[int, ...]

    @classmethod
    def through(cls, sizes: tuple[int, int], steps: tuple[Prepared, Prepared]) -> "Lines | None":
        """None where the two are not of the same ops, or a dimension is not on a line of whole numbers."""
        first, second = (step.graph for step in steps)
        op_of = {op.name: op.index for op in second.ops}
        if len(first.ops) != len(second.ops) or any(op.name not in op_of for op in first.ops):
            return None
        large_op = tuple(op_of[op.name] for op in first.ops)
        large = []
        for value in first.values:
            made = second.ops[large_op[value.producer]].outputs
            if value.port >= len(made):
                return None
            large.append(second.values[made[value.port]])
        partner = {value.index: other.index for value, other in zip(first.values, large)}
        for op, other in zip(first.ops, large_op):
            theirs = second.ops[other]
            if (op.kind, op.once) != (theirs.kind, theirs.once) or [partner[value] for value in op.inputs] != list(theirs.inputs):
                return None
        lines = cls(sizes, steps, tuple(large), large_op)
        straight = all(len(value.shape) == len(other.shape) and all(_is_straight(sizes, *pair) for pair in zip(value.shape, other.shape))
                       for value, other in zip(first.values, large))
        return lines if straight else None

    def at(self, batch_size: int) -> Prepared:
        """The step for this batch size."""
        small, large = self.steps
        values = tuple(self._value(value, other, batch_size) for value, other in zip(small.graph.values, self.large))
        ops = []
        for op, number in zip(small.graph.ops, self.large_op):
            other = large.graph.ops[number]
            ops.append(dataclasses.replace(op, seconds=max(0.0, self._between(op.seconds, other.seconds, batch_size)),
                                           scratch_bytes=max(0, round(self._between(op.scratch_bytes, other.scratch_bytes, batch_size))),
                                           reuses=_still_equal(op, values)))
        batch = self._whole(small.residents.batch, large.residents.batch, batch_size)
        others = max(0, self._whole(small.residents.other_variables, large.residents.other_variables, batch_size))
        residents = dataclasses.replace(small.residents, batch=batch, other_variables=others)
        graph = verify_graph(dataclasses.replace(small.graph, ops=tuple(ops), values=values, resident_bytes=residents.total))
        traced = self._traced(batch_size)
        places = Places(traced, graph, on_device=False)
        return dataclasses.replace(small, traced=traced, graph=graph, residents=residents, base=keep_all_timeline(graph),
                                   places=places)

    def _between(self, small: float, large: float, batch_size: int) -> float:
        first, second = self.sizes
        return small + (large - small) * (batch_size - first) / (second - first)

    def _whole(self, small: int, large: int, batch_size: int) -> int:
        first, second = self.sizes
        return small + (large - small) * (batch_size - first) // (second - first)

    def _value(self, value: Value, other: Value, batch_size: int) -> Value:
        shape = tuple(self._whole(*pair, batch_size) for pair in zip(value.shape, other.shape))
        if value.bytes == 0:  # a read of a variable, or what has no size
            return dataclasses.replace(value, shape=shape)
        elements = tf.TensorShape(shape).num_elements()
        size = in_granules(elements * tf.as_dtype(value.dtype).size)
        return dataclasses.replace(value, shape=shape, bytes=size)

    def _traced(self, batch_size: int) -> Traced:
        """The first trace with the batch's specs as they would be: what a placement asks for."""
        small, large = (step.traced for step in self.steps)
        arguments = tuple((name, tf.TensorSpec([self._whole(*pair, batch_size) for pair in zip(spec.shape, other.shape)], spec.dtype))
                          for (name, spec), (_, other) in zip(small.arguments, large.arguments))
        return dataclasses.replace(small, arguments=arguments)


def _is_straight(sizes: tuple[int, int], small: int, large: int) -> bool:
    return (large - small) % (sizes[1] - sizes[0]) == 0


def _still_equal(op, values) -> tuple[int, ...]:
    sizes = [values[value].bytes for value in op.outputs]
    return tuple(value for value in op.reuses if sizes.count(values[value].bytes) == 1 and values[value].bytes == values[op.reuses[0]].bytes)
