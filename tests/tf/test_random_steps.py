"""Random steps under random valid plans: every value as NumPy computes it, every peak as simulated.

A program is drawn as instructions and run twice: by TensorFlow, traced, emitted and executed, and by NumPy.
"""

import dataclasses
import itertools
import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from budgets import in_a_process_of_its_own
from checkmate_tf.bridge import measure
from checkmate_tf.bridge.audit import first_call
from checkmate_tf.bridge.emit import emit
from checkmate_tf.bridge.extract import extract
from checkmate_tf.bridge.price import price
from checkmate_tf.bridge.rehearse import Device, layout_of
from checkmate_tf.bridge.trace import trace
from checkmate_tf.ir.placement import Placer, place
from checkmate_tf.ir.plan import Plan, plan_from_order
from checkmate_tf.ir.simulate import simulate

MIB = 1 << 20
# Shrinking would take minutes: each example is traced and run.
RUN = {"deadline": None, "derandomize": True, "suppress_health_check": list(HealthCheck),
       "phases": (Phase.explicit, Phase.generate)}
_MOST_LOOKS = 5
SHAPES = ((256, 512), (512, 1024), (1024, 512), (1024, 256))


@dataclasses.dataclass(frozen=True)
class Kind:
    """An operation on matrices, by both libraries; fits: whether it can take matrices of these shapes."""

    tensorflow: Callable
    numpy: Callable
    inputs: int = 1
    fits: Callable = lambda *shapes: True


def _equal(first, second) -> bool:
    return first == second


KINDS = (
    Kind(tf.tanh, np.tanh),
    Kind(lambda a: tf.exp(-tf.abs(a)), lambda a: np.exp(-np.abs(a))),
    Kind(tf.sigmoid, lambda a: 1 / (1 + np.exp(-a))),
    Kind(lambda a: 0.5 * a, lambda a: 0.5 * a),
    Kind(lambda a, b: a + b, np.add, 2, _equal),
    Kind(lambda a, b: a * b, np.multiply, 2, _equal),
    Kind(tf.minimum, np.minimum, 2, _equal),
    Kind(lambda a, b: tf.linalg.matmul(a, b, transpose_b=True) / 1024, lambda a, b: a @ b.T / 1024, 2,
         lambda a, b: a[1] == b[1] and a[0] * b[0] <= MIB),
    Kind(lambda a: tf.split(a, 2, axis=0), lambda a: np.split(a, 2, axis=0), 1, lambda a: a[0] >= 256),
    Kind(lambda a: tf.split(a, 2, axis=1), lambda a: np.split(a, 2, axis=1), 1, lambda a: a[1] >= 256),
    Kind(lambda a, b: tf.concat([a, b], 0), lambda a, b: np.concatenate([a, b], 0), 2, lambda a, b: a[1] == b[1] and a[0] + b[0] <= 2048),
    Kind(lambda a: tf.reshape(a, [a.shape[0] * 2, -1]), lambda a: np.reshape(a, [a.shape[0] * 2, -1]), 1, lambda a: a[1] >= 256),
    Kind(tf.transpose, np.transpose),
    Kind(lambda a: a - tf.reduce_mean(a, 0, keepdims=True), lambda a: a - np.mean(a, 0, keepdims=True)),
    Kind(lambda a: a - tf.reduce_max(a, 1, keepdims=True), lambda a: a - np.max(a, 1, keepdims=True)),
)


class Program:
    """Instructions on a growing list of matrices, the first of which is given."""

    def __init__(self, size: int, choices: random.Random):
        self.shape = choices.choice(SHAPES)
        self._instructions: list[tuple[Kind, tuple[int, ...]]] = []
        shapes, unread = [self.shape], {0}
        for _ in range(size):
            kind = choices.choice(KINDS)
            fitting = [inputs for inputs in itertools.product(range(len(shapes)), repeat=kind.inputs)
                       if kind.fits(*(shapes[index] for index in inputs))]
            if not fitting:
                continue
            inputs = choices.choice(fitting)
            made = kind.numpy(*(np.zeros(shapes[index], np.float32) for index in inputs))
            unread -= set(inputs)
            for matrix in made if isinstance(made, list) else [made]:
                unread.add(len(shapes))
                shapes.append(matrix.shape)
            self._instructions.append((kind, inputs))
        self._whole = choices.choice(sorted(unread))
        self._summed = sorted(unread)

    def in_tensorflow(self, matrix: tf.Tensor) -> list[tf.Tensor]:
        """One of the matrices that nothing reads, and the mean of each."""
        matrices = self._run(matrix, lambda kind: kind.tensorflow)
        return [matrices[self._whole], *(tf.reduce_mean(matrices[index]) for index in self._summed)]

    def in_numpy(self, matrix: np.ndarray) -> list[np.ndarray]:
        """The same."""
        matrices = self._run(matrix.astype(np.float64), lambda kind: kind.numpy)
        return [matrices[self._whole], *(np.mean(matrices[index]) for index in self._summed)]

    def _run(self, matrix, function_of: Callable) -> Sequence:
        matrices = [matrix]
        for kind, inputs in self._instructions:
            made = function_of(kind)(*(matrices[index] for index in inputs))
            matrices += made if isinstance(made, list) else [made]
        return matrices


def _random_plan(graph, choices: random.Random) -> Plan:
    """A random order that respects dependencies, with any op computed again at any time after its first run."""
    order, done = [], set()
    while len(done) < len(graph.ops):
        ready = [op.index for op in graph.ops if op.index not in done
                 and all(graph.values[value].producer in done for value in op.inputs) and done.issuperset(op.after)]
        again = [index for index in done if graph.ops[index].once is None]
        chosen = choices.choice(again if again and choices.random() < 0.25 else ready)
        order.append(chosen)
        done.add(chosen)
    return plan_from_order(graph, order)


class RandomSteps:
    known = None

    def check(self, size: int, choices: random.Random):
        program = Program(size, choices)
        traced = trace(program.in_tensorflow, tf.TensorSpec(program.shape))
        graph = self._priced(traced, extract(traced))
        plan = _random_plan(graph, choices)
        if measure.measured_memory() is not None and choices.random() < 0.5:
            plan = Placer(graph).filled(plan, layout_of(Device(graph).stretches(plan)))
        matrix = np.random.default_rng(choices.randrange(1 << 30)).uniform(-1, 1, program.shape).astype(np.float32)
        batch = tf.constant(matrix)
        run = emit(traced, graph, plan)
        outputs, runs = first_call(run, batch)
        assert runs == {op.name: count for op, count in zip(graph.ops, simulate(graph, plan).runs)}
        for output, expected in zip(outputs, program.in_numpy(matrix), strict=True):
            np.testing.assert_allclose(output, expected, rtol=1e-4, atol=1e-4 * max(0.1, np.max(np.abs(expected))))
        del output, outputs
        if measure.measured_memory() is not None:
            self._check_peak(graph, plan, run, batch)

    def _check_peak(self, graph, plan, run, batch):
        device = Device(graph)
        stretches = device.stretches(plan)
        for _ in range(_MOST_LOOKS):        # looking may itself have made the allocator take a new region
            known, stretches = stretches, device.stretches(plan, stretches)
            if known == stretches:
                break
        placed_bytes = place(graph, plan, layout_of(stretches)).peak_bytes
        rehearsed_bytes = graph.resident_bytes + device.peak_bytes(plan)
        held_bytes = measure.measured_memory()[0]
        measure.reset_peak()
        run(batch)
        measured_bytes = graph.resident_bytes + measure.measured_memory()[1] - held_bytes
        assert measured_bytes == pytest.approx(rehearsed_bytes, rel=0.01, abs=MIB)
        assert placed_bytes >= 0.99 * measured_bytes - MIB

    def _priced(self, traced, graph):
        cls = type(self)
        cls.known = cls.known or measure.empty_profile()
        cls.known = cls.known.with_costs(measure.measure(traced, measure.missing(traced, graph, cls.known)))
        return price(traced, graph, cls.known)

    @settings(max_examples=20, **RUN)
    @given(st.integers(3, 30), st.randoms(use_true_random=False))
    def values_and_peaks(self, size, choices):
        self.check(size, choices)

    @settings(max_examples=200, **RUN)
    @given(st.integers(3, 30), st.randoms(use_true_random=False))
    def values_and_peaks_in_many_cases(self, size, choices):
        self.check(size, choices)


def some_steps():
    RandomSteps().values_and_peaks()


def many_steps():
    RandomSteps().values_and_peaks_in_many_cases()


def test_values_and_peaks_are_as_simulated():
    """Where others have left memory in pieces, the paper may know only the part of a long stretch that served something, and think
    that another serves best; so plans are judged by a rehearsal, too."""
    in_a_process_of_its_own(__name__, "some_steps")


@pytest.mark.slow
def test_values_and_peaks_are_as_simulated_in_many_cases():
    in_a_process_of_its_own(__name__, "many_steps")
