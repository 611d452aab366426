"""Runs each distinct op of a step alone on this device, for its time and its scratch bytes.

An op becomes a function of some copies of it in a chain of control edges, outputs dropped at once, so that starting
the function costs little against the copies. What it asks of the allocator is what the profiler hears while it runs
once, up to the allocation of a mark. Inputs that say shapes or axes get their true values, other integers zero, floats
random numbers (a kernel may be faster on zeros). The gradient of a pooling runs with that pooling before it, whose workspace it needs.

Ops that move little and compute little are modelled, as are ops on resources, whose effects must not happen.
"""

import collections
import contextlib
import dataclasses
import functools
import itertools
import math
import os
import pathlib
import platform
import time
import warnings
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import tensorflow as tf

from checkmate_tf.bridge import private
from checkmate_tf.bridge.extract import POOLED_RESULT, inside_of, pooling_of
from checkmate_tf.bridge.loops import LOOPS
from checkmate_tf.bridge.price import computing, flops, moved_bytes, op_key, static_value, tensor_bytes
from checkmate_tf.bridge.shapes import LEAST_TURNS
from checkmate_tf.bridge.trace import GraphDef, Traced, import_function
from checkmate_tf.ir.graph import Graph
from checkmate_tf.ir.units import in_granules
from checkmate_tf.profiles import OpCost, OpKey, Profile

SMALL_BYTES = 1 << 17
SMALL_FLOPS = 1 << 22
_UNFEEDABLE = (tf.resource, tf.variant, tf.string)
_REUSED_BYTES = 1 << 16
_TINY_BYTES = 1 << 14
_MARK_BYTES = 1 << 19
_ONEDNN_SMALL_BYTES = 1 << 18
_CHAIN_SECONDS = 0.004
_MOST_COPIES = 16
_TIMED_AGAIN, _TIMED_ALIKE = 3, 0.2               # how often at most; but for the first time, what differed by more than this share
_peaks_before: list[int] = []
_MOST_ADDED, _LEAST_ADDED = 1 << 24, 1 << 16   # numbers in the sum that tells a device's bytes per second,
_ADDED_SHARE = 32                              # one for so many bytes that are free
_CACHES_FOLDER = "/sys/devices/system/cpu/cpu0/cache"
_CACHE_PARTS, _CACHES_APART = 32, 4             # the share of the cache that each sum touches half of, and how many caches all touch
_MARK, _INPUT, _FIRST_COPY = "mark", "input_", "copy_0"


def device_name() -> str:
    """The device that TensorFlow computes on: "GPU:0" where there is one, else "CPU:0"."""
    return "GPU:0" if tf.config.list_logical_devices("GPU") else "CPU:0"


def device_description() -> str:
    """The device in words that tell two machines apart."""
    if device_name().startswith("GPU"):
        details = tf.config.experimental.get_device_details(tf.config.list_physical_devices("GPU")[0])
        return f"GPU {details.get('device_name', 'unknown')}"
    threads = tf.config.threading.get_intra_op_parallelism_threads()
    return f"CPU {_cpu_model()}, {len(tf.config.list_logical_devices('CPU'))} device, {threads or _cores()} threads{', BFC' if _is_best_fit() else ''}"


def measured_memory() -> tuple[int, int] | None:
    """(current, peak) bytes of the device's allocator, or None where it keeps no statistics."""
    try:
        info = tf.config.experimental.get_memory_info(device_name())
    except ValueError:
        return None
    return int(info["current"]), int(info["peak"])


def reset_peak() -> None:
    """Lets the allocator's peak start anew from what is held now; nothing where it keeps no statistics."""
    if measured_memory() is not None:
        _peaks_before[:] = [highest_peak()]
        tf.config.experimental.reset_memory_stats(device_name())


def highest_peak() -> int:
    """The allocator's peak in bytes, whether it has started anew since or not; 0 where it keeps no statistics."""
    memory = measured_memory()
    return max([*_peaks_before, memory[1]]) if memory is not None else 0


def software() -> str:
    """The TensorFlow that costs are measured with."""
    return f"TensorFlow {tf.__version__}" + (", oneDNN" if private.uses_onednn() else "")


def empty_profile() -> Profile:
    """This device's rates, measured in a moment on a matrix product and a sum; no op yet."""
    side = 1024
    matrix = tf.random.stateless_uniform([side, side], [1, 2])
    length = int(min(_MOST_ADDED, max(_LEAST_ADDED, free_bytes() / _ADDED_SHARE)))
    vector = tf.random.stateless_uniform([length], [1, 2])
    multiply_seconds = _best_of(lambda: tf.matmul(matrix, matrix), 3)
    add_seconds = _best_of(lambda: tf.add(vector, 1.0), 3)
    source = "measured when the profile was made"
    cache_bytes = _last_cache_bytes()
    return Profile(device_description(), 2.0 * side ** 3 / multiply_seconds, 2 * 4 * length / add_seconds,
                   launch_seconds=2e-6, software=software(), cache_bytes=cache_bytes // 2,
                   miss_seconds_per_byte=_miss_seconds(cache_bytes),
                   sources={"flops_per_second": source, "bytes_per_second": source, "miss_seconds_per_byte": source,
                            "launch_seconds": "an executor's time for an op without work, rounded",
                            "cache_bytes": "half of what the operating system says: up to that, what is used in turn stays"})


def _last_cache_bytes() -> int:
    """The size of the processor's last cache by the operating system; 0 where it tells none, and for a GPU, whose cache is small."""
    if device_name().startswith("GPU"):
        return 0
    sizes = [0]
    for path in pathlib.Path(_CACHES_FOLDER).glob("index*/size"):
        with contextlib.suppress(OSError, ValueError):
            sizes.append(int(path.read_text().strip().removesuffix("K")) << 10)
    return max(sizes)


def _miss_seconds(cache_bytes: int) -> float:
    """What a byte takes that an op does not find in the cache: sums of numbers that lie apart against sums of the same ones.
    0 where memory does not suffice to tell."""
    each_bytes, apart_bytes = cache_bytes // _CACHE_PARTS, _CACHES_APART * cache_bytes
    if each_bytes < _REUSED_BYTES or apart_bytes > free_bytes() / 2:
        return 0.0
    inputs = [tf.random.stateless_uniform([each_bytes // 4], [1, number]) for number in range(apart_bytes // (2 * each_bytes))]

    def add(ring: Sequence[tf.Tensor]) -> Callable[[], object]:
        outputs = collections.deque(maxlen=len(ring))
        return lambda: outputs.extend(tf.add(ring[number % len(ring)], 1.0) for number in range(len(inputs)))
    apart, same = (_best_of(add(ring), 10) for ring in (inputs, inputs[:1]))
    return max(0.0, apart - same) / (2 * each_bytes * len(inputs))


def missing(traced: Traced, graph: Graph, profile: Profile) -> dict[OpKey, tf.Operation]:
    """The distinct ops that are worth measuring and that the profile does not know, by key; those in loops and branches, too."""
    found: dict[OpKey, tf.Operation] = {}
    inside = inside_of(traced)
    operations = [traced.function.graph.get_operation_by_name(op.name) for op in graph.ops]
    for operation in operations:
        operations += [part for body in inside.bodies(operation) for part in computing(body)]
        if operation.op_def.is_stateful or any(tensor.dtype in _UNFEEDABLE for tensor in (*operation.inputs, *operation.outputs)):
            continue
        if moved_bytes(operation) < SMALL_BYTES and flops(operation) < SMALL_FLOPS:
            continue
        key = op_key(traced, operation)
        if key not in profile.costs:
            found.setdefault(key, operation)
    return found


def measure(traced: Traced, operations: dict[OpKey, tf.Operation],
            progress: Callable[[int, int], None] = lambda done, total: None) -> dict[OpKey, OpCost]:
    """The cost of each of these ops; one whose kernel refuses made-up inputs is left out, with a warning.

    Each is timed twice, with all others in between, and up to four times where these differ: others may use the machine for a while.
    """
    costs: dict[OpKey, OpCost] = {}
    timers: dict[OpKey, Callable[[], float]] = {}
    refused = []
    for done, (key, operation) in enumerate(operations.items()):
        progress(done, len(operations))
        if _alone_bytes(operation) > free_bytes():
            refused.append(f"{operation.name} ({operation.type}: too large for what is free now)")
            continue
        try:
            costs[key], timers[key] = _measure_one(traced, operation)
            if pooling_of(operation) is not None:       # a difference of times, the least of which is no better
                del timers[key]
        except tf.errors.AlreadyExistsError:
            warnings.warn("Somebody else is profiling, so what ops take could not be measured: it is modelled this time.", stacklevel=2)
            return {}
        except tf.errors.OpError as error:
            refused.append(f"{operation.name} ({operation.type}: {error.message[:60]})")
    for _ in range(_TIMED_AGAIN):
        timers = {key: timer for key, timer in timers.items() if _is_told_apart(costs, key, timer)}
    progress(len(operations), len(operations))
    if refused:
        warnings.warn(f"{len(refused)} ops could not be run alone and are modelled instead: {', '.join(refused[:3])}",
                      stacklevel=2)
    return costs


def _is_told_apart(costs: dict[OpKey, OpCost], key: OpKey, timer: Callable[[], float]) -> bool:
    """Times an op once more and keeps the lesser time; whether it differs much from the one before."""
    before = costs[key].seconds
    try:
        seconds = timer()
    except tf.errors.OpError:       # it has run before: what has come since may take the memory
        return False
    costs[key] = dataclasses.replace(costs[key], seconds=min(before, seconds))
    return max(before, seconds) > (1 + _TIMED_ALIKE) * min(before, seconds)


def _alone_bytes(operation: tf.Operation) -> int:
    """What running the op alone holds at least: what it reads and makes, and twice the largest input while that is made up."""
    read = list(map(tensor_bytes, operation.inputs))
    return sum(read) + 2 * max(read, default=0) + sum(map(tensor_bytes, operation.outputs))


def _measure_one(traced: Traced, operation: tf.Operation) -> tuple[OpCost, Callable[[], float]]:
    """The cost of the op, and what times it anew."""
    feeds = _feeds(operation)
    seconds, asked = _watch(traced, operation, feeds)
    most_bytes, left_bytes = _held_bytes(asked)
    scratch_bytes = most_bytes - min(left_bytes, sum(in_granules(tensor_bytes(tensor)) for tensor in operation.outputs))
    requests = asked if most_bytes > left_bytes and not _holds_functions(operation) else ()
    reuses = tuple(position for position in _reusable(operation)
                   if left_bytes - _held_bytes(_watch(traced, operation, feeds, position)[1])[1]
                   == in_granules(tensor_bytes(operation.inputs[position])))
    copies = max(1, int(min(_MOST_COPIES, _CHAIN_SECONDS / max(seconds, 1e-6))))
    # The gradient of a pooling is timed with its pooling before it, which does not count.
    single = _chain(traced, operation, 1) if pooling_of(operation) is not None else None
    chain = _chain(traced, operation, copies + (single is not None))

    runs = 1 if single is None else 3

    def time_with(feeds: Mapping[int, tf.Tensor]) -> float:
        before_seconds = _best_of(functools.partial(single, feeds), runs) if single is not None else 0.0
        return max(0.0, _best_of(functools.partial(chain, feeds), runs) - before_seconds) / copies
    return OpCost(time_with(feeds), scratch_bytes, True, reuses, requests), lambda: time_with(_feeds(operation))


def _feeds(operation: tf.Operation) -> dict[int, tf.Tensor]:
    """Inputs for the op by position, where they are not known beforehand."""
    return {position: _made_up(tensor) for position, tensor in enumerate(operation.inputs) if static_value(tensor) is None}


def _reusable(operation: tf.Operation) -> list[int]:
    """Positions of the inputs that are as large as just one of the op's outputs, and not tiny; none for a contraction, which
    reads every element many times."""
    if flops(operation) > 0:
        return []
    made = collections.Counter(map(tensor_bytes, operation.outputs))
    return [position for position, tensor in enumerate(operation.inputs)
            if tensor_bytes(tensor) >= max(_REUSED_BYTES, least_told_bytes()) and made[tensor_bytes(tensor)] == 1
            and static_value(tensor) is None]


def _watch(traced: Traced, operation: tf.Operation, feeds: Mapping[int, tf.Tensor],
           made_inside: int | None = None) -> tuple[float, tuple[int, ...]]:
    """(seconds, requests) of a run of the op, as `Op.requests` has them, but for tiny ones; no requests where the device's
    allocator keeps no statistics.

    made_inside: the position of an input that nobody else needs
    """
    run = functools.partial(_chain(traced, operation, 1, made_inside, watched=True), feeds)
    whole = _holds_functions(operation)
    run()
    with private.memory_events() if measured_memory() is not None else contextlib.nullcontext([]) as events:
        started = time.perf_counter()
        run()
        seconds = time.perf_counter() - started
    requests: list[int] = []
    number_at: dict[int, int] = {}
    made = 0
    for event in events:
        # Names begin with that of the call, and are its alone where the kernel has not said its own.
        node = event.op.partition("/")[2]
        if node == _MARK:
            break
        if event.bytes >= _TINY_BYTES and (node in ("", _FIRST_COPY) or whole and not node.startswith(_INPUT)):
            requests.append(event.bytes)
            made += 1
            number_at[event.address] = made
        elif event.bytes == 0 and event.address in number_at:
            requests.append(-number_at.pop(event.address))
    return seconds, tuple(requests)


def _held_bytes(requests: Sequence[int]) -> tuple[int, int]:
    """The bytes that are out at most and at the end."""
    sizes = [in_granules(request) for request in requests if request > 0]
    changes = [in_granules(request) if request > 0 else -sizes[-request - 1] for request in requests]
    return max(itertools.accumulate(changes, initial=0)), sum(changes)


def _holds_functions(operation: tf.Operation) -> bool:
    return any(attribute.WhichOneof("value") == "func" for attribute in operation.node_def.attr.values())


def _chain(traced: Traced, operation: tf.Operation, copies: int, made_inside: int | None = None,
           watched: bool = False) -> Callable[[Mapping[int, tf.Tensor]], object]:
    """A function that runs the op so often, one after the other, and returns nothing.

    It takes what the op reads, by the position of the input, where that is neither known beforehand nor made in the chain: by the
    pooling of which the op is the gradient, or as follows
    made_inside: the position of an input that the function allocates (zeros), in place of taking it as an argument
    watched: whether the allocation of a mark follows on the last run, while its outputs are still held
    """
    graph_def = GraphDef(library=traced.graph_def.library, versions=traced.graph_def.versions)
    inputs, arguments, fed = [], [], []
    pooling = pooling_of(operation)
    for position, tensor in enumerate(operation.inputs):
        name = f"{_INPUT}{position}"
        value = static_value(tensor)
        if pooling is not None and position == POOLED_RESULT:
            node = graph_def.node.add()
            node.CopyFrom(pooling.node_def)
            node.name = name
            node.attr.pop("_class", None)
            node.input[:] = inputs[:1]
        elif position == made_inside:
            _add_const(graph_def, f"shape_{position}", np.array(tensor.shape.as_list(), np.int32))
            node = graph_def.node.add(name=name, op="Empty", input=[f"shape_{position}"])
            node.attr["dtype"].type = tensor.dtype.as_datatype_enum
            node.attr["init"].b = True
        elif value is None:
            arguments.append((name, tf.TensorSpec(tensor.shape, tensor.dtype)))
            fed.append(position)
        else:
            _add_const(graph_def, name, value)
        inputs.append(f"{name}:0")
    for copy in range(copies):
        node = graph_def.node.add()
        node.CopyFrom(operation.node_def)
        node.name = f"copy_{copy}"
        node.attr.pop("_class", None)           # of an op in a body: what that names is not here
        if node.op in LOOPS:
            node.attr["parallel_iterations"].i = LEAST_TURNS
        del node.input[:]
        node.input.extend(inputs + ([f"^copy_{copy - 1}"] if copy else []))
    ends = [f"copy_{copies - 1}"]
    if watched:
        _add_const(graph_def, "mark_shape", np.array([_MARK_BYTES], np.int32)).input.append("^" + ends[0])
        mark = graph_def.node.add(name=_MARK, op="Empty", input=["mark_shape"])
        mark.attr["dtype"].type = tf.uint8.as_datatype_enum
        for port, tensor in enumerate(operation.outputs):
            node = graph_def.node.add(name=f"held_{port}", op="StopGradient", input=[f"{ends[0]}:{port}", "^" + _MARK])
            node.attr["T"].type = tensor.dtype.as_datatype_enum
        ends = [f"held_{port}" for port in range(len(operation.outputs))] or [_MARK]
    function = import_function(graph_def, arguments, (), (), ends)
    config = private.config_without_optimizers()
    return lambda feeds: tf.raw_ops.StatefulPartitionedCall(
        args=[feeds[position] for position in fed], Tout=[tf.int32], f=function, config_proto=config)


def _add_const(graph_def: tf.compat.v1.GraphDef, name: str, value: np.ndarray):
    node = graph_def.node.add(name=name, op="Const")
    node.attr["dtype"].type = tf.as_dtype(value.dtype).as_datatype_enum
    node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value, shape=value.shape))
    return node


def _made_up(tensor: tf.Tensor) -> tf.Tensor:
    if tensor.dtype.is_floating or tensor.dtype.is_complex:
        return tf.cast(tf.random.stateless_uniform(tensor.shape, [3, 4], 0.5, 1.5), tensor.dtype)
    return tf.zeros(tensor.shape, tensor.dtype)


def _best_of(run: Callable[[], object], times: int) -> float:
    seconds = []
    for _ in range(times + 1):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return float(np.min(seconds[1:]))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            fields = dict(line.split(":", 1) for line in file.read().split("\n\n")[0].splitlines() if ":" in line)
        fields = {name.strip(): value.strip() for name, value in fields.items()}
        return f"{fields['model name']} family {fields['cpu family']} model {fields['model']}"
    except (OSError, KeyError):
        return platform.processor() or platform.machine()


def least_told_bytes() -> int:
    """The least request that the device's allocator tells of: oneDNN's has another one for small requests, which tells nothing."""
    on_cpu = device_name().startswith("CPU")
    return _ONEDNN_SMALL_BYTES if on_cpu and private.uses_onednn() and not _is_best_fit() else 0


def _has_own_limit() -> bool:
    return _is_best_fit() and "TF_CPU_BFC_MEM_LIMIT_IN_MB" in os.environ


def _is_best_fit() -> bool:
    """Whether the CPU's allocator is the one that a GPU has, by the variable that TensorFlow reads when it makes it."""
    return os.environ.get("TF_CPU_ALLOCATOR_USE_BFC", "").lower() in ("1", "true")


def is_limited() -> bool:
    """Whether the device's allocator is given a limit and may take all memory up to that: it waits for what goes beyond."""
    if device_name().startswith("GPU"):
        return not tf.config.experimental.get_memory_growth(tf.config.list_physical_devices("GPU")[0])
    return _has_own_limit()


def free_bytes() -> float:
    """What is left of the limit of the device's allocator; infinite where it has none of its own."""
    return memory_limit() - measured_memory()[0] if is_limited() else math.inf


def memory_limit() -> int | None:
    """The bytes that TensorFlow's allocator on this device may hand out, or the machine's memory on an unlimited
    CPU."""
    if device_name().startswith("GPU"):
        return private.device_memory_limit(device_name())
    if _has_own_limit():
        return int(os.environ["TF_CPU_BFC_MEM_LIMIT_IN_MB"]) << 20
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
