"""The scheduling problem: values that take bytes, ops that take seconds, and who needs what.

A `Graph` is what a training step looks like once TensorFlow has left the room. It is frozen; passes return new
graphs. Meanings that are not obvious from the names:

- An op's `inputs` are the values it reads, each once. Values that are always there (weights, the batch,
  constants) are no values here: their bytes are in `Graph.resident_bytes`.
- `after` are control edges: the first run of the op comes after the first run of each of those. Copies made for
  recomputation carry none of them.
- `once` is None, or the reason why the op must run exactly once (a variable write, a stateful draw, ...).
- `overwrites` are values that stop being valid when the op runs: a read of a variable that this op updates. No
  run may use them afterwards.
- `reuses` are inputs whose memory an output of the op can take over, as element-wise kernels do: in a run with which
  such an input dies, that output costs nothing on top. At most one is taken; all are as large as one output, and no other is (`taker`).
- `requests` are what a run asks of the allocator, in order: so many bytes, or, if negative, the return of a request
  before, the first being -1; what is not returned are the outputs. Where there are none, the op asks for its outputs, then
  for all of its scratch at once.
- `backward` says whether the op is part of the gradient computation or comes after it; only the
  literature's baselines, which keep or drop forward values, ask for it.
- `results` are values that must be live at the end.
"""

import dataclasses
import functools
import hashlib
import itertools
import json
import math
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from checkmate_tf.ir.errors import GraphError


@dataclasses.dataclass(frozen=True, slots=True)
class Value:
    """Bytes that an op makes: output `port` of op `producer`; in one stretch of memory, or in equal `pieces`."""

    index: int
    producer: int
    port: int
    bytes: int
    shape: tuple[int, ...] = ()
    dtype: str = ""
    pieces: int = 1


@dataclasses.dataclass(frozen=True, slots=True)
class Op:
    """A computation: reads `inputs`, makes `outputs` (value indices), takes `seconds` and `scratch_bytes`."""

    index: int
    name: str
    kind: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    after: tuple[int, ...] = ()
    seconds: float = 0.0
    scratch_bytes: int = 0
    once: str | None = None
    overwrites: tuple[int, ...] = ()
    backward: bool = False
    reuses: tuple[int, ...] = ()
    requests: tuple[int, ...] = ()


def taker(values: Sequence[Value], op: Op) -> int | None:
    """The output that takes over the memory of what the op reuses; None where that is nothing."""
    return next(value for value in op.outputs if values[value].bytes == values[op.reuses[0]].bytes) if op.reuses else None


@dataclasses.dataclass(frozen=True)
class Graph:
    """Ops in a topological order, the values they make, and what stays."""

    ops: tuple[Op, ...]
    values: tuple[Value, ...]
    results: tuple[int, ...] = ()
    resident_bytes: int = 0

    @functools.cached_property
    def consumers(self) -> tuple[tuple[int, ...], ...]:
        """For each value the ops that read it, in ascending order."""
        readers: list[list[int]] = [[] for _ in self.values]
        for op in self.ops:
            for value in op.inputs:
                readers[value].append(op.index)
        return tuple(tuple(ops) for ops in readers)

    @functools.cached_property
    def writers(self) -> tuple[tuple[int, ...], ...]:
        """For each value the ops that overwrite it."""
        found: list[list[int]] = [[] for _ in self.values]
        for op in self.ops:
            for value in op.overwrites:
                found[value].append(op.index)
        return tuple(tuple(ops) for ops in found)

    @functools.cached_property
    def predecessors(self) -> tuple[tuple[int, ...], ...]:
        """For each op the ops whose values it reads, ascending, without control edges."""
        return tuple(tuple(sorted({self.values[value].producer for value in op.inputs})) for op in self.ops)

    @functools.cached_property
    def key(self) -> str:
        """A fingerprint of everything but prices: a plan made for one graph is refused by any other."""
        digest = hashlib.sha256()
        for op in self.ops:
            digest.update(repr((op.name, op.kind, op.inputs, op.outputs, op.after, op.once, op.overwrites)).encode())
        for value in self.values:
            digest.update(repr((value.producer, value.port, value.bytes)).encode())
        digest.update(repr(self.results).encode())
        return digest.hexdigest()[:32]

    @property
    def order(self) -> tuple[int, ...]:
        """Every op once, in the given order."""
        return tuple(range(len(self.ops)))

    @property
    def seconds(self) -> float:
        """The time of running every op once."""
        return math.fsum(op.seconds for op in self.ops)


class GraphBuilder:
    """Builds graphs by hand, for tests and for formats other than TensorFlow's.

    >>> builder = GraphBuilder()
    >>> a = builder.op("a", bytes=4, seconds=1.0)
    >>> b = builder.op("b", [a], bytes=2, seconds=1.0)
    >>> len(builder.build().ops)
    2
    """

    def __init__(self, resident_bytes: int = 0):
        self._ops: list[Op] = []
        self._values: list[Value] = []
        self._resident_bytes = resident_bytes

    def op(self, name: str, inputs: Sequence[int] = (), *, bytes: int | Sequence[int] = 0, seconds: float = 0.0,
           scratch_bytes: int = 0, after: Sequence[int] = (), once: str | None = None,
           overwrites: Sequence[int] = (), backward: bool = False, kind: str | None = None,
           reuses: Sequence[int] = (), requests: Sequence[int] = ()) -> int:
        """Adds an op. With one size the answer is the index of its value, otherwise use `outputs_of`."""
        index = len(self._ops)
        outputs = []
        for port, size in enumerate([bytes] if isinstance(bytes, int) else bytes):
            outputs.append(len(self._values))
            self._values.append(Value(len(self._values), index, port, size))
        self._ops.append(Op(index, name, kind or name, tuple(dict.fromkeys(inputs)), tuple(outputs), tuple(after),
                            seconds, scratch_bytes, once, tuple(overwrites), backward, tuple(reuses), tuple(requests)))
        return outputs[0] if outputs else -1

    def outputs_of(self, name: str) -> tuple[int, ...]:
        """The values that the op of this name makes."""
        return next(op.outputs for op in self._ops if op.name == name)

    def index_of(self, name: str) -> int:
        """The index of the op of this name."""
        return next(op.index for op in self._ops if op.name == name)

    def build(self, results: Iterable[int] = ()) -> Graph:
        """The graph, unverified: see `verify_graph`."""
        return Graph(tuple(self._ops), tuple(self._values), tuple(results), self._resident_bytes)


def graph_from_instance(instance: Mapping) -> Graph:
    """A bare rematerialization instance: {"ops": [{"name", "cost", "bytes", "backward"}], "edges": [[u, v]]}.

    Op u makes one value, which an edge [u, v] has op v read; costs are taken as seconds whatever their unit. What
    else a graph holds may be left out. A value is named [op, port]:

    - "bytes" of an op may be a list, for several outputs or none; an edge [u, v, port] reads one that is not the first
    - an op may have "kind", "scratch_bytes", "requests", "once", "after" (op indices), "overwrites" and "reuses" (values)
    - the instance may have "results" (values) and "resident_bytes"

    Raises GraphError when a field is missing, an edge is doubled, or an edge does not lead from an earlier op to a
    later one (a cycle included).
    """
    try:
        entries = instance["ops"]
        sizes = [_sizes(entry["bytes"], entry["name"]) for entry in entries]
        outputs = [tuple(range(end - len(row), end)) for row, end in zip(sizes, itertools.accumulate(map(len, sizes)))]
        inputs: list[dict[int, None]] = [{} for _ in entries]
        for u, v, *port in instance["edges"]:
            if not 0 <= u < v < len(entries):
                raise GraphError("Edges must lead from an earlier op to a later one, within the list of ops; a cycle or "
                                 f"an unsorted graph breaks this. Received: edge [{u}, {v}] of {len(entries)} ops")
            value = _value_at(outputs, u, *port)
            if value in inputs[v]:
                raise GraphError(f"An edge may stand only once. Received: edge {[u, v, *port]} twice")
            inputs[v][value] = None
        ops = tuple(_op_from(i, entry, tuple(inputs[i]), outputs) for i, entry in enumerate(entries))
        values = tuple(Value(outputs[i][port], i, port, size) for i, row in enumerate(sizes) for port, size in enumerate(row))
        results = tuple(_value_at(outputs, *name) for name in instance.get("results", ()))
        resident_bytes = _sizes(instance.get("resident_bytes", 0), "resident_bytes")[0]
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, GraphError):
            raise
        raise GraphError('An instance needs "ops" with "name", "cost", "bytes" each, and "edges" as pairs of op '
                         f"indices. Received one where {type(error).__name__}: {error}") from error
    return Graph(ops, values, results, resident_bytes)


def instance_from_graph(graph: Graph, name: str, source: str = "") -> dict[str, Any]:
    """The graph as `graph_from_instance` reads it, up to shapes, dtypes and the numbers of values: for JSON."""
    def named(values: Iterable[int]) -> list[list[int]]:
        return [[graph.values[value].producer, graph.values[value].port] for value in values]

    entries, edges = [], []
    for op in graph.ops:
        sizes = [graph.values[value].bytes for value in op.outputs]
        entry = {"name": op.name, "cost": op.seconds, "bytes": sizes[0] if len(sizes) == 1 else sizes,
                 "backward": op.backward}
        more = {"kind": op.kind, "scratch_bytes": op.scratch_bytes, "once": op.once, "after": list(op.after),
                "overwrites": named(op.overwrites), "reuses": named(op.reuses), "requests": list(op.requests)}
        entries.append(entry | {field: content for field, content in more.items() if content})
        edges += [[u, op.index, port] if port else [u, op.index] for u, port in named(op.inputs)]
    return {"name": name, "source": source, "ops": entries, "edges": edges, "results": named(graph.results),
            "resident_bytes": graph.resident_bytes}


def load_instance(path: str | pathlib.Path) -> Graph:
    """The graph of an instance file; see `graph_from_instance`."""
    try:
        instance = json.loads(pathlib.Path(path).read_text())
    except (OSError, ValueError) as error:
        raise GraphError(f"An instance must be a readable JSON file. Received: {path} ({error})") from error
    if not isinstance(instance, dict):
        raise GraphError(f"An instance must be a JSON object. Received: {type(instance).__name__} in {path}")
    return graph_from_instance(instance)


def _op_from(index: int, entry: Mapping, inputs: tuple[int, ...], outputs: Sequence[tuple[int, ...]]) -> Op:
    overwrites, reuses = (tuple(_value_at(outputs, *name) for name in entry.get(field, ())) for field in ("overwrites", "reuses"))
    return Op(index, str(entry["name"]), str(entry.get("kind", "instance")), inputs, outputs[index],
              tuple(entry.get("after", ())), float(entry["cost"]), _sizes(entry.get("scratch_bytes", 0), entry["name"])[0],
              entry.get("once"), overwrites, bool(entry.get("backward", False)), reuses, tuple(map(int, entry.get("requests", ()))))


def _value_at(outputs: Sequence[tuple[int, ...]], op: int, port: int = 0) -> int:
    if not 0 <= op < len(outputs) or not 0 <= port < len(outputs[op]):
        raise ValueError(f"there is no output {port} of op {op}")
    return outputs[op][port]


def _sizes(bytes: int | float | Sequence[int], name: str) -> list[int]:
    """One size or several, as whole numbers."""
    sizes = bytes if isinstance(bytes, list) else [bytes]
    for size in sizes:
        if not math.isfinite(size) or size != int(size):
            raise GraphError(f"Bytes must be whole numbers. Received: {size!r} for op {name!r}")
    return [int(size) for size in sizes]
