"""Prices: keys that tell work apart, arithmetic by hand, measured costs, the cache."""

import json
import warnings

import pytest
import tensorflow as tf

from checkmate_tf import device_profile, profiles
from checkmate_tf.bridge import measure, private
from checkmate_tf.bridge.extract import extract
from checkmate_tf.bridge.price import flops, moved_bytes, op_key, price
from checkmate_tf.bridge.trace import trace
from checkmate_tf.ir.errors import ProfileError
from checkmate_tf.profiles import OpCost, Profile


def _operation(step, kind, *specs):
    traced = trace(step, specs[0] if len(specs) == 1 else specs)
    return traced, next(op for op in traced.function.graph.get_operations() if op.type == kind)


def test_a_convolution_counts_two_flops_for_each_multiply_add():
    weights = tf.Variable(tf.ones([3, 3, 8, 16]))
    _, operation = _operation(lambda x: tf.nn.conv2d(x, weights, 1, "SAME"), "Conv2D", tf.TensorSpec([2, 10, 10, 8]))
    assert flops(operation) == 2 * (2 * 10 * 10 * 16) * (3 * 3 * 8)
    assert moved_bytes(operation) == 4 * (2 * 10 * 10 * 8 + 3 * 3 * 8 * 16 + 2 * 10 * 10 * 16)


def test_the_gradients_of_a_convolution_cost_as_much_as_the_convolution():
    weights = tf.Variable(tf.ones([3, 3, 8, 16]))

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(tf.nn.conv2d(x, weights, 1, "SAME") ** 2)
        return tape.gradient(loss, [x, weights])
    for kind in ("Conv2DBackpropInput", "Conv2DBackpropFilter"):
        _, operation = _operation(step, kind, tf.TensorSpec([2, 10, 10, 8]))
        assert flops(operation) == 2 * (2 * 10 * 10 * 16) * (3 * 3 * 8)


def test_a_product_counts_its_inner_dimension():
    _, operation = _operation(lambda d: tf.matmul(d[0], d[1], transpose_a=True), "MatMul", tf.TensorSpec([7, 5]), tf.TensorSpec([7, 3]))
    assert flops(operation) == 2 * 5 * 3 * 7


def test_equal_work_has_equal_keys_and_other_shapes_or_axes_have_others():
    def step(x):
        return tf.exp(x), tf.exp(x[:, :2] + 1), tf.reduce_sum(tf.sin(x), 0), tf.reduce_sum(tf.cos(x), 1)
    traced = trace(step, tf.TensorSpec([4, 4]))
    keys = {}
    for operation in traced.function.graph.get_operations():
        keys.setdefault(operation.type, []).append(op_key(traced, operation))
    assert len(set(keys["Exp"])) == 2 and len(set(keys["Sum"])) == 2
    again = trace(step, tf.TensorSpec([4, 4]))
    assert keys["Exp"] == [op_key(again, op) for op in again.function.graph.get_operations() if op.type == "Exp"]


def test_a_loop_has_the_same_key_in_every_trace():
    def step(x):
        return tf.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, tf.tanh(y)), (0, x))[1]
    assert op_key(*_operation(step, "StatelessWhile", tf.TensorSpec([4]))) == op_key(
        *_operation(step, "StatelessWhile", tf.TensorSpec([4])))


@pytest.mark.parametrize("rooms", [(), (1.5,), (1.9,), (1.5, 1.9)])
def test_measured_scratch_is_nothing_for_element_wise_ops_and_what_a_loop_holds_inside(rooms):
    made = [tf.raw_ops.Empty(shape=[int(room * (32 << 20))], dtype=tf.uint8) for room in rooms for _ in range(2)]
    fences = made[::2]          # what lies between is free, and handed out whole for less
    del made

    def step(x):
        return tf.while_loop(lambda i, y: i < 2, lambda i, y: (i + 1, tf.reduce_sum(tf.tile(y[None], [64, 1]), 0)), (0, tf.tanh(x)))[1]
    traced = trace(step, tf.TensorSpec([1 << 17]))
    graph = extract(traced)
    known = measure.empty_profile()
    costs = measure.measure(traced, measure.missing(traced, graph, known))
    by_kind = {key.split()[0]: cost for key, cost in costs.items()}
    assert by_kind["Tanh"].scratch_bytes < 64 << 10
    assert 31 << 20 < by_kind["StatelessWhile"].scratch_bytes < 40 << 20      # 64 copies of half a MiB
    assert all(cost.seconds > 0 and cost.measured for cost in costs.values())
    priced = price(traced, graph, known.with_costs(costs))
    assert priced.key == graph.key
    assert not measure.missing(traced, graph, known.with_costs(costs))
    del fences


def _pooled(data):
    with tf.GradientTape() as tape:
        tape.watch(data)
        loss = tf.reduce_sum(tf.nn.max_pool2d(tf.tanh(data), 2, 2, "SAME") ** 2)
    return tape.gradient(loss, data)


@pytest.mark.skipif(not private.uses_onednn(), reason="only oneDNN's pooling leaves a workspace")
@pytest.mark.parametrize("room", [None, 1.9])
def test_a_pooling_leaves_a_workspace_for_its_gradient_and_neither_has_scratch_on_top(room):
    traced = trace(_pooled, tf.TensorSpec([8, 64, 64, 64]))
    made = [tf.zeros([int(room * (size << 10))], tf.uint8) for size in (512, 2048, 8192) for _ in range(20)] if room else []
    fences = made[::2]          # what lies between is free, and handed out whole for less
    del made
    graph = extract(traced)
    pooling, gradient = (next(op for op in graph.ops if op.kind == kind) for kind in ("MaxPool", "MaxPoolGrad"))
    workspace = graph.values[pooling.outputs[1]]
    assert workspace.bytes == 8 * 32 * 32 * 64 and workspace.index in gradient.inputs      # a byte for each result
    profile = measure.empty_profile()
    profile = profile.with_costs(measure.measure(traced, measure.missing(traced, graph, profile)))
    priced = price(traced, graph, profile)
    for op in (pooling, gradient):
        assert priced.ops[op.index].scratch_bytes < 64 << 10
        assert priced.ops[op.index].reuses == ()
    del fences


def test_which_inputs_an_op_writes_into_is_measured():
    def step(x, y):
        return tf.exp(x) + y, tf.linalg.matmul(x, y), x * x, tf.reverse(x, [0])
    traced = trace(lambda data: step(*data), (tf.TensorSpec([256, 256]), tf.TensorSpec([256, 256])))
    graph = extract(traced)
    costs = measure.measure(traced, measure.missing(traced, graph, measure.empty_profile()))
    assert {key.split()[0]: cost.reuses for key, cost in costs.items()} == {
        "Exp": (0,), "AddV2": (0, 1), "MatMul": (), "Square": (0,), "ReverseV2": ()}


def test_what_an_op_asks_for_is_heard_in_order():
    """A product of tensors whose axes must be swapped first: copies of both come before its result, and go after it."""
    traced = trace(lambda data: tf.einsum("abcd,acbe->abde", *data), (tf.TensorSpec([4, 32, 32, 64]), tf.TensorSpec([4, 32, 32, 64])))
    graph = extract(traced)
    costs = measure.measure(traced, measure.missing(traced, graph, measure.empty_profile()))
    (requests, scratch_bytes), = [(cost.requests, cost.scratch_bytes) for key, cost in costs.items() if key.startswith("Einsum")]
    copy_bytes, result_bytes = 4 * 32 * 32 * 64 * 4, 4 * 32 * 64 * 64 * 4
    assert requests[0] == copy_bytes and -1 in requests and requests.count(result_bytes) >= 1
    assert scratch_bytes >= copy_bytes
    priced = price(traced, graph, measure.empty_profile().with_costs(costs))
    assert next(op.requests for op in priced.ops if op.kind == "Einsum") == requests


def test_while_somebody_else_is_profiling_nothing_is_measured_and_that_is_said(tmp_path):
    traced = trace(tf.tanh, tf.TensorSpec([1 << 18]))
    todo = measure.missing(traced, extract(traced), measure.empty_profile())
    assert todo
    tf.profiler.experimental.start(str(tmp_path))
    try:
        with pytest.warns(UserWarning, match="Somebody else is profiling"):
            assert measure.measure(traced, todo) == {}
    finally:
        tf.profiler.experimental.stop()
    assert measure.measure(traced, todo).keys() == todo.keys()


def test_without_statistics_an_op_has_seconds_and_no_more(monkeypatch):
    monkeypatch.setattr(measure, "measured_memory", lambda: None)
    traced = trace(tf.tanh, tf.TensorSpec([1 << 18]))
    cost, = measure.measure(traced, measure.missing(traced, extract(traced), measure.empty_profile())).values()
    assert cost.seconds > 0 and (cost.scratch_bytes, cost.reuses, cost.requests) == (0, (), ())


def test_a_value_that_an_op_reads_twice_is_not_written_into():
    def step(x):
        y = tf.exp(x)
        return tf.reduce_sum(y / tf.reshape(y, [512, 512]))
    traced = trace(step, tf.TensorSpec([512, 512]))
    graph = extract(traced)
    costs = measure.measure(traced, measure.missing(traced, graph, measure.empty_profile()))
    priced = price(traced, graph, measure.empty_profile().with_costs(costs))
    assert next(cost for key, cost in costs.items() if key.startswith("RealDiv")).reuses == (0, 1)
    assert [op.reuses for op in priced.ops if op.kind == "RealDiv"] == [()]


def test_a_filter_gradient_is_measured_with_its_true_filter_sizes():
    weights = tf.Variable(tf.ones([3, 3, 32, 32]))

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.nn.conv2d(x, weights, 1, "SAME") ** 2)
        return tape.gradient(loss, weights)
    traced = trace(step, tf.TensorSpec([8, 32, 32, 32]))
    graph = extract(traced)
    costs = measure.measure(traced, measure.missing(traced, graph, measure.empty_profile()))
    by_kind = {key.split()[0]: cost for key, cost in costs.items()}
    assert by_kind["Conv2DBackpropFilter"].seconds > 0.1 * by_kind["Conv2D"].seconds


def test_an_op_that_refuses_made_up_inputs_is_modelled_with_a_warning():
    def step(x):
        return tf.strings.to_number(tf.strings.as_string(x)) + tf.gather(x, tf.cast(x, tf.int32) + tf.size(x))
    traced = trace(step, tf.TensorSpec([1 << 18]))

    def refused(traced, operation):
        raise tf.errors.InvalidArgumentError(None, None, "no such thing")
    original, measure._measure_one = measure._measure_one, refused
    try:
        with pytest.warns(UserWarning, match="modelled instead"):
            costs = measure.measure(traced, measure.missing(traced, extract(traced), measure.empty_profile()))
    finally:
        measure._measure_one = original
    assert costs == {}


@pytest.mark.parametrize("name", profiles.names())
def test_every_shipped_profile_prices_a_step_without_running_it(name):
    weights = tf.Variable(tf.ones([256, 256]))
    traced = trace(lambda x: tf.tanh(x @ weights), tf.TensorSpec([64, 256]))
    graph = price(traced, extract(traced), profiles.get(name))
    assert graph.seconds > 0
    assert {"flops_per_second", "bytes_per_second", "launch_seconds"} <= set(profiles.get(name).sources)


def test_the_roofline_is_the_longer_of_arithmetic_and_traffic():
    profile = Profile("a device", flops_per_second=1e9, bytes_per_second=1e6, launch_seconds=0.5)
    assert profile.cost("?", flops=3e9, moved_bytes=1e6) == OpCost(3.5, 0, False)
    assert profile.cost("?", flops=1e9, moved_bytes=2e6) == OpCost(2.5, 0, False)
    assert profile.with_costs({"?": OpCost(1.0, 7, True)}).cost("?", 3e9, 1e6) == OpCost(1.0, 7, True)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", json.dumps({"format": "checkmate_tf profile 3"}),
                                  json.dumps({"format": "something else"})])
def test_a_corrupted_profile_is_refused(tmp_path, text):
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(ProfileError, match="Received"):
        Profile.load(path)


def test_a_profile_survives_the_disk(tmp_path):
    profile = Profile("a device", 1e9, 1e6, 0.5, "TensorFlow x", {"flops_per_second": "a guess"},
                      {"Exp": OpCost(0.25, 12, True, (0, 2))})
    profile.save(tmp_path / "deep" / "profile.json")
    assert Profile.load(tmp_path / "deep" / "profile.json") == profile


def test_a_cached_profile_that_is_broken_or_of_another_device_is_measured_anew(tmp_path):
    path = tmp_path / "profile.json"
    path.write_text("{")
    with pytest.warns(UserWarning, match="measuring anew"):
        assert device_profile.cached(path).costs == {}
    Profile("another machine", 1e9, 1e6, 0.5, "TensorFlow 1.15", {}, {"Exp": OpCost(0.25, 12, True)}).save(path)
    with pytest.warns(UserWarning, match="another machine"):
        assert device_profile.cached(path).costs == {}
    Profile(measure.device_description(), 1e9, 1e6, 0.5, measure.software(), {}, {"Exp": OpCost(0.25, 12, True)}).save(path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert device_profile.cached(path).costs == {"Exp": OpCost(0.25, 12, True)}


def test_unknown_profiles_are_refused_with_the_known_ones():
    with pytest.raises(ProfileError, match="v100.*Received: 'gtx'"):
        profiles.get("gtx")


def test_who_disturbs_the_first_time_an_op_is_timed_does_not_set_its_price(monkeypatch):
    traced = trace(lambda x: tf.tanh(x) * tf.exp(x), tf.TensorSpec([1 << 16]))
    todo = measure.missing(traced, extract(traced), measure.empty_profile())
    timed, best_of = [], measure._best_of

    def disturbed(run, times):
        timed.append(best_of(run, times))
        return timed[-1] + (1.0 if len(timed) <= len(todo) else 0.0)
    monkeypatch.setattr(measure, "_best_of", disturbed)
    costs = measure.measure(traced, todo)
    assert all(cost.seconds < 0.1 for cost in costs.values())
    assert 3 * len(todo) <= len(timed) <= 4 * len(todo)        # what has differed that much is timed a third time


def test_an_op_that_runs_out_of_memory_when_timed_again_keeps_its_price(monkeypatch):
    traced = trace(tf.tanh, tf.TensorSpec([1 << 16]))
    todo = measure.missing(traced, extract(traced), measure.empty_profile())
    left, made_up = [1], measure._made_up

    def lacking(tensor):
        if not left:
            raise tf.errors.ResourceExhaustedError(None, None, "no room")
        return made_up(left.pop() and tensor)
    monkeypatch.setattr(measure, "_made_up", lacking)
    cost, = measure.measure(traced, todo).values()
    assert cost.measured and cost.seconds > 0


@pytest.mark.parametrize("sizes, expected_bytes", [(["32K", "1024K", "32768K"], 32 << 20), (["32K", "what"], 32 << 10), ([], 0)])
def test_the_last_cache_is_the_largest_that_the_system_tells_of(monkeypatch, tmp_path, sizes, expected_bytes):
    for number, size in enumerate(sizes):
        (tmp_path / f"index{number}").mkdir()
        (tmp_path / f"index{number}" / "size").write_text(size + "\n")
    monkeypatch.setattr(measure, "_CACHES_FOLDER", str(tmp_path))
    profile = measure.empty_profile()
    assert profile.cache_bytes == expected_bytes // 2
    if expected_bytes < 1 << 20:
        assert profile.miss_seconds_per_byte == 0


def test_what_a_miss_takes_is_not_told_where_memory_does_not_suffice(monkeypatch):
    monkeypatch.setattr(measure, "free_bytes", lambda: 64 << 20)
    assert measure._miss_seconds(32 << 20) == 0
