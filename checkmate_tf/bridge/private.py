"""The one door to what TensorFlow does not export, with the reason for each; nothing else imports such names.

| function | needs | because |
|---|---|---|
| optimize | grappler.tf_optimizer, rewriter_config_pb2 | Grappler must run *before* a plan is made and never after |
| export_graphs | eager.context | what the runtime really executes is not to be had through any public call |
| device_memory_limit | client.device_lib | a GPU's limit is not in its public details |
| handle_bytes, handle_dtype, handle_shape | ops.handle_data_util | what the variable is that a resource handle points to |
| is_stateful | framework.op_def_registry | whether a loop may run again hangs on the ops in its body |
| function_graph | framework.function_def_to_graph | what a loop holds inside is in its body only |
| uses_onednn | util._pywrap_util_port | its kernels hand memory to one another that no graph shows |
| call | eager.execute | `StatefulPartitionedCall` called eagerly runs a function's ops one by one, on one thread |
| memory_events | tsl.profiler.protobuf | the profiler writes who asks the allocator for what to files of its own format |
"""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import tensorflow as tf
from tensorflow.core.protobuf import rewriter_config_pb2
from tensorflow.python.client import device_lib
from tensorflow.python.eager import context, execute
from tensorflow.python.framework import function_def_to_graph, op_def_registry
from tensorflow.python.grappler import tf_optimizer
from tensorflow.python.ops import handle_data_util
from tensorflow.python.util import _pywrap_util_port
from tensorflow.tsl.profiler.protobuf import xplane_pb2

_PROFILING = threading.Lock()               # a process profiles once at a time
_PROFILES = "ram://checkmate_tf"


def optimize(graph_def: tf.compat.v1.GraphDef, keep: Sequence[str], passes: Sequence[str] = ()) -> tf.compat.v1.GraphDef:
    """The nodes after Grappler, its usual passes but for the ones that trade memory by themselves.

    graph_def: the nodes, with their functions; keep: names of the nodes that must survive: inputs, outputs, control
    outputs; passes: names of those to make in place of the usual ones
    """
    meta_graph = tf.compat.v1.MetaGraphDef(graph_def=graph_def)
    meta_graph.collection_def["train_op"].node_list.value.extend(keep)
    config = tf.compat.v1.ConfigProto()
    rewrite = config.graph_options.rewrite_options
    # The default turns AddN into a stateful TemporaryVariable, which could not be recomputed.
    rewrite.memory_optimization = rewriter_config_pb2.RewriterConfig.NO_MEM_OPT
    rewrite.optimizers.extend(passes)
    rewrite.min_graph_nodes = -1
    # A second round takes as long as the first one and removes some 2 % of the nodes.
    rewrite.meta_optimizer_iterations = rewriter_config_pb2.RewriterConfig.ONE
    rewrite.fail_on_optimizer_errors = False
    return tf_optimizer.OptimizeGraph(config, meta_graph, verbose=False)


def config_without_optimizers() -> bytes:
    """A ConfigProto, serialized, under which a function runs exactly as it was written."""
    config = tf.compat.v1.ConfigProto()
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    config.graph_options.optimizer_options.opt_level = tf.compat.v1.OptimizerOptions.L0
    return config.SerializeToString()


def call(function, inputs: Sequence[tf.Tensor], config: bytes) -> list[tf.Tensor]:
    """Runs a concrete function under a serialized ConfigProto, as `tf.function` does: what can run at once does.

    inputs: its arguments, then what it captures
    """
    return execute.execute(function.name, len(function.outputs), inputs=list(inputs),
                           attrs=("executor_type", "", "config_proto", config), ctx=context.context())


@contextlib.contextmanager
def export_graphs():
    """Within it, functions called for the first time leave the graphs that TensorFlow will execute in the list."""
    graphs: list = []
    eager = context.context()
    eager.enable_graph_collection()
    try:
        yield graphs
        metadata = eager.export_run_metadata()
        if metadata is not None:
            graphs.extend(metadata.function_graphs)
    finally:
        eager.disable_graph_collection()


def handle_bytes(handle: tf.Tensor) -> int:
    """The bytes of the variable behind a resource handle; 0 for other resources (tables, generators)."""
    return sum(tf.TensorShape(entry.shape).num_elements() * tf.as_dtype(entry.dtype).size
               for entry in _behind(handle) if tf.TensorShape(entry.shape).is_fully_defined())


def device_memory_limit(name: str) -> int | None:
    """The limit of a device's allocator, such as of "GPU:0"."""
    return next((device.memory_limit for device in device_lib.list_local_devices() if device.name.endswith(name)), None)


def handle_dtype(handle: tf.Tensor) -> tf.DType | None:
    """The dtype of the variable behind a resource handle; None for other resources and other tensors."""
    return next((tf.as_dtype(entry.dtype) for entry in _behind(handle)), None)


def handle_shape(handle: tf.Tensor) -> tf.TensorShape | None:
    """The shape of the variable behind a resource handle; None for other resources and other tensors."""
    return next((tf.TensorShape(entry.shape) for entry in _behind(handle)), None)


def _behind(handle: tf.Tensor) -> Sequence:
    """The shape and dtype of the variable behind a handle, eager or of a graph; nothing where none is known."""
    data = handle_data_util.get_handle_data(handle) if handle.dtype == tf.resource else None
    return data.shape_and_type if data is not None and data.is_set else ()


def function_graph(function, shapes: Sequence[tf.TensorShape]) -> tf.Graph:
    """A FunctionDef as a graph with `inputs` and `outputs`, for inputs of these shapes; what it calls comes from the present
    graph."""
    return function_def_to_graph.function_def_to_graph(function, input_shapes=list(shapes))


def is_stateful(kind: str) -> bool:
    """Whether ops of this kind have state; calls of functions by their name are taken to have."""
    definition = op_def_registry.get(kind)
    return definition is None or definition.is_stateful


def uses_onednn() -> bool:
    """Whether TensorFlow puts oneDNN's kernels in the place of its own on the CPU."""
    return _pywrap_util_port.IsMklEnabled()


class MemoryEvent(NamedTuple):
    """A chunk that the allocator gave or got back: what op asked ("" where it does not say), where the chunk lies, and the
    bytes asked for, 0 when it comes back."""

    op: str
    address: int
    bytes: int


@contextlib.contextmanager
def memory_events() -> Iterator[list[MemoryEvent]]:
    """Within it, the profiler listens; afterwards the list holds what allocators did on the device, in order of time.

    oneDNN's allocator on the CPU tells nothing of requests below 256 KiB. Raises AlreadyExistsError where somebody else is
    profiling.
    """
    events: list[MemoryEvent] = []
    with _PROFILING:
        yield from _listen(events)


def _listen(events: list[MemoryEvent]) -> Iterator[list[MemoryEvent]]:
    options = tf.profiler.experimental.ProfilerOptions(host_tracer_level=3, python_tracer_level=0, device_tracer_level=0)
    tf.profiler.experimental.start(_PROFILES, options)
    try:
        yield events
    finally:
        tf.profiler.experimental.stop()
        found = []
        for path in tf.io.gfile.glob(_PROFILES + "/plugins/profile/*/*.xplane.pb"):
            with tf.io.gfile.GFile(path, "rb") as file:
                found += _memory_events(xplane_pb2.XSpace.FromString(file.read()))
        tf.io.gfile.rmtree(_PROFILES)
        events += [event for _, event in sorted(found)]


def _memory_events(space) -> Iterator[tuple[int, MemoryEvent]]:
    """(picoseconds, event) of what a profile holds of allocators, but for those of memory that a GPU shares with its host."""
    for plane in space.planes:
        kinds = {index: metadata.name for index, metadata in plane.event_metadata.items()}
        names = {index: metadata.name for index, metadata in plane.stat_metadata.items()}
        for line in plane.lines:
            for event in line.events:
                if kinds[event.metadata_id] not in ("MemoryAllocation", "MemoryDeallocation"):
                    continue
                stats = {names[stat.metadata_id]: _stat(stat, names) for stat in event.stats}
                if "host" in stats.get("allocator_name", ""):
                    continue
                given = kinds[event.metadata_id] == "MemoryAllocation"
                yield (line.timestamp_ns * 1000 + event.offset_ps,
                       MemoryEvent(stats.get("tf_op", ""), stats["addr"], stats["requested_bytes"] if given else 0))


def _stat(stat, names: dict[int, str]):
    kind = stat.WhichOneof("value")
    value = getattr(stat, kind)
    return names[value] if kind == "ref_value" else value
