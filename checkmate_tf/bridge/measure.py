"""Runs each distinct op of a step alone on this device, for its time and its scratch bytes.

An op becomes a function of some copies of it in a chain of control edges, outputs dropped at once, so that starting
the function costs little against the copies. Its scratch is the allocator's peak less the peak of merely
allocating its outputs: the allocator may hand out more than is asked, and does so alike for both. Inputs that say
shapes or axes get their true values, other integers zero, floats random numbers (a kernel may be faster on zeros).
The gradient of a pooling runs with that pooling before it, whose workspace it needs.

Ops that move little and compute little are modelled, as are ops on resources, whose effects must not happen.
"""

import os
import platform
import time
import warnings
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from checkmate_tf.bridge import private
from checkmate_tf.bridge.extract import POOLED_RESULT, inside_of, pooling_of, workspace_bytes
from checkmate_tf.bridge.loops import LOOPS
from checkmate_tf.bridge.price import computing, flops, moved_bytes, op_key, static_value, tensor_bytes
from checkmate_tf.bridge.shapes import LEAST_TURNS
from checkmate_tf.bridge.trace import GraphDef, Traced, import_function
from checkmate_tf.ir.graph import Graph
from checkmate_tf.ir.units import GRANULE_BYTES, in_granules
from checkmate_tf.profiles import OpCost, OpKey, Profile

SMALL_BYTES = 1 << 19
SMALL_FLOPS = 1 << 22
_UNFEEDABLE = (tf.resource, tf.variant, tf.string)
_REUSED_BYTES = 1 << 16
_CHAIN_SECONDS = 0.004
_MOST_COPIES = 16
_TRIES = 6
_WORTH_TRYING_BYTES = 1 << 20


def device_name() -> str:
    """The device that TensorFlow computes on: "GPU:0" where there is one, else "CPU:0"."""
    return "GPU:0" if tf.config.list_logical_devices("GPU") else "CPU:0"


def device_description() -> str:
    """The device in words that tell two machines apart."""
    if device_name().startswith("GPU"):
        details = tf.config.experimental.get_device_details(tf.config.list_physical_devices("GPU")[0])
        return f"GPU {details.get('device_name', 'unknown')}"
    threads = tf.config.threading.get_intra_op_parallelism_threads()
    return f"CPU {_cpu_model()}, {len(tf.config.list_logical_devices('CPU'))} device, {threads or _cores()} threads"


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
        tf.config.experimental.reset_memory_stats(device_name())


def software() -> str:
    """The TensorFlow that costs are measured with."""
    return f"TensorFlow {tf.__version__}"


def empty_profile() -> Profile:
    """This device's rates, measured in a moment on a matrix product and a sum; no op yet."""
    side = 1024
    matrix = tf.random.stateless_uniform([side, side], [1, 2])
    vector = tf.random.stateless_uniform([1 << 24], [1, 2])
    multiply_seconds = _best_of(lambda: tf.matmul(matrix, matrix), 3)
    add_seconds = _best_of(lambda: tf.add(vector, 1.0), 3)
    source = "measured when the profile was made"
    return Profile(device_description(), 2.0 * side ** 3 / multiply_seconds, 2 * 4 * (1 << 24) / add_seconds,
                   launch_seconds=2e-6, software=software(),
                   sources={"flops_per_second": source, "bytes_per_second": source,
                            "launch_seconds": "an executor's time for an op without work, rounded"})


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
    """The cost of each of these ops; one whose kernel refuses made-up inputs is left out, with a warning."""
    costs = {}
    refused = []
    for done, (key, operation) in enumerate(operations.items()):
        progress(done, len(operations))
        try:
            costs[key] = _measure_one(traced, operation)
        except tf.errors.OpError as error:
            refused.append(f"{operation.name} ({operation.type}: {error.message[:60]})")
    progress(len(operations), len(operations))
    if refused:
        warnings.warn(f"{len(refused)} ops could not be run alone and are modelled instead: {', '.join(refused[:3])}",
                      stacklevel=2)
    return costs


def _measure_one(traced: Traced, operation: tf.Operation) -> OpCost:
    feeds = _feeds(operation)
    single = _chain(traced, operation, 1)
    single(feeds)
    started = time.perf_counter()
    used_bytes = _peak_bytes(lambda: single(feeds))
    seconds = time.perf_counter() - started
    scratch_bytes, reuses = 0, ()
    if used_bytes > 0:
        empty = _allocate(operation)
        empty()
        output_bytes = _peak_bytes(empty)
        beyond_bytes = _least(lambda: max(0, _peak_bytes(lambda: single(feeds)) - output_bytes),
                              max(0, used_bytes - output_bytes), used_bytes)
        scratch_bytes = beyond_bytes + in_granules(workspace_bytes(operation))
        reuses = tuple(position for position in _reusable(operation)
                       if _is_reused(traced, operation, position))
    copies = int(min(_MOST_COPIES, _CHAIN_SECONDS / max(seconds, 1e-6)))
    if pooling_of(operation) is not None:
        copies = max(1, copies)
        longer = _chain(traced, operation, 1 + copies)
        seconds = max(0.0, _best_of(lambda: longer(feeds), 3) - _best_of(lambda: single(feeds), 3)) / copies
    elif copies >= 2:
        chain = _chain(traced, operation, copies)
        chain(feeds)
        seconds = _best_of(lambda: chain(feeds), 2) / copies
    return OpCost(seconds, scratch_bytes, True, reuses)


def _least(again: Callable[[], int], beyond_bytes: int, used_bytes: int) -> int:
    """What a run takes beyond its outputs, where no chunk of nearly twice the size serves it.

    A tensor of the size that was found takes the chunk that had served, and the run is made again: some times, as far as
    there is room to spare.
    """
    least_bytes, fillers = beyond_bytes, []
    for _ in range(_TRIES):
        limit_bytes = memory_limit()
        if beyond_bytes < _WORTH_TRYING_BYTES or (
                limit_bytes is not None and measured_memory()[0] + 2 * (used_bytes + beyond_bytes) > limit_bytes):
            break
        fillers.append(tf.raw_ops.Empty(shape=[beyond_bytes // GRANULE_BYTES, GRANULE_BYTES], dtype=tf.uint8))
        beyond_bytes = again()
        least_bytes = min(least_bytes, beyond_bytes)
    return least_bytes


def _reusable(operation: tf.Operation) -> list[int]:
    """Positions of the inputs that are as large as the op's only output, and not tiny; none for a contraction, which
    reads every element many times."""
    if len(operation.outputs) != 1 or flops(operation) > 0:
        return []
    size = tensor_bytes(operation.outputs[0])
    return [position for position, tensor in enumerate(operation.inputs)
            if size >= _REUSED_BYTES and tensor_bytes(tensor) == size and static_value(tensor) is None]


def _is_reused(traced: Traced, operation: tf.Operation, position: int) -> bool:
    """Whether the op writes into this input if it is the last to need it, by the peaks when it is and when it is not."""
    feeds = _feeds(operation, position)
    runs = [_chain(traced, operation, 1, made_inside=position, held=held) for held in (False, True)]
    peaks = [[_peak_bytes(lambda run=run: run(feeds)) for run in runs] for _ in range(3)]
    # A chunk larger than asked may come up in any single run, hardly in all of them.
    last, held = np.min(peaks, axis=0)
    return bool(last <= held - tensor_bytes(operation.inputs[position]) // 2)


def _feeds(operation: tf.Operation, made_inside: int | None = None) -> list[tf.Tensor]:
    """What a chain of the op takes: every input that is neither known beforehand nor made in the chain."""
    made = {made_inside, POOLED_RESULT if pooling_of(operation) is not None else None}
    return [_made_up(tensor) for position, tensor in enumerate(operation.inputs)
            if static_value(tensor) is None and position not in made]


def _peak_bytes(run: Callable[[], object]) -> int:
    """What a run adds to the allocator's peak; 0 where it keeps no statistics."""
    before = measured_memory()
    if before is None:
        return 0
    reset_peak()
    run()
    return measured_memory()[1] - before[0]


def _allocate(operation: tf.Operation) -> Callable[[], object]:
    """A function that allocates, one after the other, what a pooling before the op leaves, the op's outputs, and what it
    leaves as a pooling; it computes nothing."""
    specs = []
    for made in filter(None, (pooling_of(operation), operation)):
        specs += [(tensor.shape.as_list(), tensor.dtype) for tensor in made.outputs]
        specs += [([workspace_bytes(made)], tf.uint8)] if workspace_bytes(made) else []

    def body():
        outputs = []
        for shape, dtype in specs:
            with tf.control_dependencies(outputs[-1:]):
                outputs.append(tf.raw_ops.Empty(shape=shape, dtype=dtype))
        with tf.control_dependencies(outputs):
            held = [tf.stop_gradient(tensor) for tensor in outputs]
        with tf.control_dependencies(held):
            return tf.constant(0)
    function = tf.compat.v1.wrap_function(body, [])
    config = private.config_without_optimizers()
    return lambda: tf.raw_ops.StatefulPartitionedCall(args=[], Tout=[tf.int32], f=function, config_proto=config)


def _chain(traced: Traced, operation: tf.Operation, copies: int,
           made_inside: int | None = None, held: bool = False) -> Callable[[Sequence[tf.Tensor]], object]:
    """A function that runs the op so often, one after the other, and returns nothing.

    made_inside: the position of an input that the function allocates (zeros), in place of taking it as an argument
    held: whether that input is still needed after the op has run
    """
    graph_def = GraphDef(library=traced.graph_def.library, versions=traced.graph_def.versions)
    inputs, arguments = [], []
    pooling = pooling_of(operation)
    for position, tensor in enumerate(operation.inputs):
        name = f"input_{position}"
        value = static_value(tensor)
        if pooling is not None and position == POOLED_RESULT:
            node = graph_def.node.add()
            node.CopyFrom(pooling.node_def)
            node.name = name
            node.input[:] = inputs[:1]
        elif position == made_inside:
            shape = graph_def.node.add(name=f"shape_{position}", op="Const")
            shape.attr["dtype"].type = tf.int32.as_datatype_enum
            shape.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(tensor.shape.as_list(), tf.int32, [tensor.shape.rank]))
            node = graph_def.node.add(name=name, op="Empty", input=[shape.name])
            node.attr["dtype"].type = tensor.dtype.as_datatype_enum
            node.attr["init"].b = True
        elif value is None:
            arguments.append((name, tf.TensorSpec(tensor.shape, tensor.dtype)))
        else:
            node = graph_def.node.add(name=name, op="Const")
            node.attr["dtype"].type = tensor.dtype.as_datatype_enum
            node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value, tensor.dtype))
        inputs.append(f"{name}:0")
    for copy in range(copies):
        node = graph_def.node.add()
        node.CopyFrom(operation.node_def)
        node.name = f"copy_{copy}"
        if node.op in LOOPS:
            node.attr["parallel_iterations"].i = LEAST_TURNS
        del node.input[:]
        node.input.extend(inputs + ([f"^copy_{copy - 1}"] if copy else []))
    last = f"copy_{copies - 1}"
    if held:
        node = graph_def.node.add(name="held", op="StopGradient", input=[inputs[made_inside], "^" + last])
        node.attr["T"].type = operation.inputs[made_inside].dtype.as_datatype_enum
        last = node.name
    function = import_function(graph_def, arguments, (), (), [last])
    config = private.config_without_optimizers()
    return lambda feeds: tf.raw_ops.StatefulPartitionedCall(args=list(feeds), Tout=[tf.int32], f=function,
                                                            config_proto=config)


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


def memory_limit() -> int | None:
    """The bytes that TensorFlow's allocator on this device may hand out, or the machine's memory on an unlimited
    CPU."""
    if device_name().startswith("GPU"):
        return private.device_memory_limit(device_name())
    if os.environ.get("TF_CPU_ALLOCATOR_USE_BFC", "").lower() in ("1", "true") and "TF_CPU_BFC_MEM_LIMIT_IN_MB" in os.environ:
        return int(os.environ["TF_CPU_BFC_MEM_LIMIT_IN_MB"]) << 20
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
