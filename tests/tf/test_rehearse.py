"""Plans' requests on the device itself: what they take there, on paper, and in the step that then runs."""

import dataclasses
import random
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import checkmate_tf
from budgets import in_a_process_of_its_own
from checkmate_tf import planning, rounds
from checkmate_tf.bridge import measure
from checkmate_tf.bridge.emit import emit
from checkmate_tf.bridge.extract import extract
from checkmate_tf.bridge.rehearse import Device, Places, address_of, layout_of
from checkmate_tf.bridge.trace import trace
from checkmate_tf.ir.graph import GraphBuilder
from checkmate_tf.ir.placement import Layout, joined, place
from checkmate_tf.ir.plan import plan_from_order
from checkmate_tf.solvers import Limits, get, ignore_progress, solve

pytestmark = pytest.mark.skipif(measure.measured_memory() is None, reason="the device keeps no allocator statistics")
MIB = 1 << 20


def _prepared():
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Input((64, 64, 3))]
    for filters in (16, 32, 64):
        layers += [keras.layers.Conv2D(filters, 3, padding="same", activation="relu"), keras.layers.BatchNormalization(),
                   keras.layers.MaxPooling2D()]
    model = keras.Sequential([*layers, keras.layers.Flatten(), keras.layers.Dense(10)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    batch = tf.random.stateless_normal([32, 64, 64, 3], [1, 2]), tf.zeros([32], tf.int32)
    planning.build(model, batch)
    return planning.prepare(model, batch, "auto", lambda text: None, batch_is_there=True), batch


def test_the_step_takes_what_its_rehearsal_took():
    prepared, batch = _prepared()
    keep = prepared.base.peak_bytes - prepared.residents.total
    solution = solve(prepared.graph, prepared.residents.total + int(0.6 * keep), get("greedy"), Limits(seconds=5), ignore_progress)
    run = emit(prepared.traced, prepared.graph, solution.plan)
    run(batch)
    for _ in range(2):
        held = measure.measured_memory()[0]
        rehearsed = held + Device(prepared.graph).peak_bytes(solution.plan)
        measure.reset_peak()
        run(batch)
        assert measure.measured_memory()[1] == pytest.approx(rehearsed, rel=0.005, abs=MIB)


def test_placed_on_paper_every_plan_takes_what_it_takes_on_the_device():
    prepared, _ = _prepared()
    graph, device = prepared.graph, Device(prepared.graph)
    keep = plan_from_order(graph, graph.order)
    layout = layout_of(device.stretches(keep))
    choices = random.Random(0)
    for share in (0.9, 0.8, 0.7):
        budget = prepared.residents.total + int(share * (prepared.base.peak_bytes - prepared.residents.total))
        plan = solve(graph, budget, get("greedy"), Limits(seconds=5, seed=choices.randrange(100)), ignore_progress).plan
        on_paper = place(graph, plan, layout).peak_bytes - graph.resident_bytes
        assert device.peak_bytes(plan) == pytest.approx(on_paper, abs=MIB)


@pytest.mark.slow
def test_batches_made_later_lie_in_rooms_that_nothing_else_is_in():
    # Where the smallest free memory is a room, a small request is served from there.
    in_a_process_of_its_own(__name__, "batches_lie_in_rooms")


def batches_lie_in_rooms():
    prepared, batch = _prepared()
    size = batch[0].shape.num_elements() * 4
    held = measure.measured_memory()[0]
    later = [tf.raw_ops.Empty(shape=batch[0].shape, dtype=tf.float32) for _ in range(3)]
    assert measure.measured_memory()[0] - held == 3 * size
    addresses = [np.from_dlpack(tensor).__array_interface__["data"][0] for tensor in later]
    keep = plan_from_order(prepared.graph, prepared.graph.order)
    del later
    free = Device(prepared.graph).stretches(keep)
    for address in addresses:       # each is a stretch by itself, or in none
        around = [stretch for stretch in free if stretch[0] < address + size and address < sum(stretch)]
        assert around in ([], [(address, size)])


def test_where_the_device_is_not_asked_the_layout_is_guessed():
    prepared, _ = _prepared()
    plan = plan_from_order(prepared.graph, prepared.graph.order)
    places = Places(prepared.traced, prepared.graph, on_device=False)
    guessed = place(prepared.graph, plan, Layout(prepared.traced.resident_sizes)).peak_bytes
    assert places.placed_bytes(plan, guessed) == guessed


def test_stretches_that_touch_or_overlap_are_one():
    assert joined([(100, 50), (0, 10), (150, 10), (10, 5), (120, 5)]) == ((0, 15), (100, 60))


def test_looking_again_finds_what_has_been_taken_since():
    prepared, _ = _prepared()
    places, graph = prepared.places, prepared.graph
    keep = plan_from_order(graph, graph.order)
    everything = 1 << 60
    taken = [tf.raw_ops.Empty(shape=[size], dtype=tf.uint8) for _, size in Device(graph).stretches(keep) if size >= MIB]
    places.look_again(keep)
    on_paper = max(place(graph, keep, layout).peak_bytes for layout in places._layouts)
    assert places.placed_bytes(keep, everything) == pytest.approx(on_paper, rel=0.002)
    del taken


def a_small_stretch_is_known_to_its_end():
    size = 1280 << 10
    builder = GraphBuilder()
    builder.op("small", bytes=300 << 10, seconds=1.0)
    builder.op("large", bytes=5 * MIB, seconds=1.0)
    graph = builder.build()
    device, plan, found = Device(graph), plan_from_order(graph, graph.order), ()
    pieces = sorted((tf.raw_ops.Empty(shape=[size], dtype=tf.uint8) for _ in range(60)), key=address_of)
    starts = [address_of(piece) for piece in pieces]
    middle = next(middle for middle in range(1, 59) if starts[middle + 1] - starts[middle - 1] == 2 * size)
    hole = starts[middle]
    del pieces[middle]
    served = tf.raw_ops.Empty(shape=[300 << 10], dtype=tf.uint8)
    assert address_of(served) == hole       # else this is no test: something smaller was free
    del served
    for _ in range(2):
        found = device.stretches(plan, found)
    assert (hole, size) in found


def test_a_small_stretch_is_known_to_its_end():
    """Only its beginning serves what the plan asks for."""
    in_a_process_of_its_own(__name__, "a_small_stretch_is_known_to_its_end")


def small_values_lie_in_pockets():
    builder = GraphBuilder()
    builder.op("large", bytes=64 * MIB, seconds=1.0)
    for name in "abc":
        builder.op(name, bytes=40 << 10, seconds=1.0)
    graph = builder.build(results=[0, 1, 2, 3])
    size = 64 << 10
    crumbs = [tf.raw_ops.Empty(shape=[8 << 10], dtype=tf.uint8) for _ in range(1000)]
    fences = Device(graph).pockets()
    assert len(fences) == 1 + 3                         # of 40 KiB, each takes one of 64
    for number in range(1, 4):
        held_bytes = measure.measured_memory()[0]
        values = [tf.raw_ops.Empty(shape=[40 << 10], dtype=tf.uint8) for _ in range(number)]
        assert measure.measured_memory()[0] - held_bytes == number * size
        ends = {address_of(value) + size for value in values}
        assert ends <= {address_of(fence) for fence in fences}      # what is before the first may be as small
        del values
    del crumbs


def test_a_plan_that_does_not_fit_without_has_fillers():
    """10 MiB are free in one piece. Of 4, 4 and 2 MiB the second would be handed 6, and the third come from a new region."""
    builder = GraphBuilder()
    builder.op("end", [builder.op(name, bytes=size * MIB) for name, size in zip("abc", (4, 4, 2))])
    graph = builder.build()
    places, keep = Places(types.SimpleNamespace(resident_sizes=()), graph, on_device=False), plan_from_order(graph, graph.order)
    places._layouts = [Layout(stretches=((0, 10 * MIB),))]
    assert places.placed(keep, 12 * MIB) == (keep, 12 * MIB)
    assert places.placed(keep, 11 * MIB) == (dataclasses.replace(keep, fillers=((1, 2 * MIB),)), 10 * MIB)


def test_small_values_lie_in_pockets():
    """Else one of them may come to lie in the middle of a large stretch, where no other has been at its rehearsal."""
    in_a_process_of_its_own(__name__, "small_values_lie_in_pockets")


def looking_often():
    prepared, _ = _prepared()
    device, keep = Device(prepared.graph), plan_from_order(prepared.graph, prepared.graph.order)
    found, reserved = (), []
    for _ in range(16):
        measure.reset_peak()
        found = device.stretches(keep, found)
        reserved.append(measure.measured_memory()[1])
    assert reserved[-1] <= 2 * reserved[3], reserved


@pytest.mark.slow
def test_looking_often_takes_no_more_than_looking_once():
    in_a_process_of_its_own(__name__, "looking_often")


@pytest.mark.slow
def test_a_plan_leaves_a_reserve_where_it_can():
    # Where other tests have left free memory in pieces of all sizes, there may be no plan that does.
    in_a_process_of_its_own(__name__, "a_plan_leaves_a_reserve")


def a_plan_leaves_a_reserve():
    prepared, _ = _prepared()
    spread = prepared.base.peak_bytes - prepared.residents.total
    budget = prepared.residents.total + int(0.8 * spread)
    solution = rounds.solve_within(prepared, budget, get("auto"), Limits(seconds=20), ignore_progress)
    assert solution.placed_peak_bytes <= budget - 0.01 * 0.8 * spread + 1


def test_the_constants_of_a_step_have_their_place_while_it_is_planned():
    in_a_process_of_its_own(__name__, "constants_have_their_place")


def constants_have_their_place():
    """What lies where they will is held while plans are placed, makes way for them when the step runs first, and is as large."""
    constants = [np.random.default_rng(number).normal(size=(number << 17)).astype(np.float32) for number in (3, 4)]

    def step(x):
        made = [tf.tanh(tf.tile(x, [factor])) for factor in (3, 4)]
        return tf.add_n([tf.reduce_sum(value * constant) for value, constant in zip(made, constants)])
    x = tf.random.stateless_normal([1 << 17], [1, 2])
    traced = trace(step, tf.TensorSpec(x.shape))
    graph = extract(traced)
    keep = plan_from_order(graph, graph.order)
    before_bytes = measure.measured_memory()[0]
    places = Places(traced, graph, on_device=True)
    placed_bytes = places.placed_bytes(keep, 1 << 60) - graph.resident_bytes
    held_bytes = measure.measured_memory()[0]
    assert held_bytes - before_bytes >= sum(constant.nbytes for constant in constants)
    run = emit(traced, graph, keep)
    places.give_way()
    assert measure.measured_memory()[0] - before_bytes < MIB // 4
    run(x)
    assert measure.measured_memory()[0] == pytest.approx(held_bytes, abs=MIB // 16)
    measure.reset_peak()
    run(x)
    assert measure.measured_memory()[1] - held_bytes <= placed_bytes + MIB // 16       # not priced, so written into in place


def test_a_trained_step_has_its_constants_once():
    in_a_process_of_its_own(__name__, "constants_are_there_once")


def constants_are_there_once():
    """The model's is of 4 MiB. After training nothing is left of what lay in its place while the step was planned."""
    constant = np.random.default_rng(0).normal(size=(1024, 1024)).astype(np.float32)
    model = keras.Sequential([keras.layers.Input((1024,)), keras.layers.Lambda(lambda x: tf.matmul(x, constant)), keras.layers.Dense(4)])
    model.compile("sgd", "mse")
    checkmate_tf.compile(model, "1GB", verbose=0)
    x, y = np.zeros((8, 1024), np.float32), np.zeros((8, 4), np.float32)
    before_bytes = measure.measured_memory()[0]
    model.fit(x, y, batch_size=8, verbose=0)
    assert constant.nbytes <= measure.measured_memory()[0] - before_bytes < 1.5 * constant.nbytes
