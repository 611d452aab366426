"""Reads back what TensorFlow will really run, and holds it against the plan.

A copied op that is merged with its original, or has lost the edge that holds it back, saves nothing, and nobody would
notice from the results. So the graph that the runtime hands to its executor, after all of its own passes, is
asked: is every computation of the plan there, once, and does each wait for the one before?
"""

from collections.abc import Iterable

from checkmate_tf.bridge import private
from checkmate_tf.bridge.emit import FREE, RECOMPUTED, Emitted
from checkmate_tf.bridge.trace import tensor_name
from checkmate_tf.ir.errors import PlanError


def first_call(emitted: Emitted, data):
    """Runs the step for the first time, and checks the executed graph. Returns (outputs, runs by op name).

    Raises PlanError when the graph that was executed does not run the plan.
    """
    with private.export_graphs() as graphs:
        outputs = emitted(data)
    return outputs, executed_runs(emitted, graphs)


def executed_runs(emitted: Emitted, function_graphs: Iterable) -> dict[str, int]:
    """How often each op runs in the executed graphs, by the name of its first run; PlanError where the plan is not
    kept."""
    nodes = {}
    for graphs in function_graphs:
        for node in graphs.post_optimization_graph.node:
            nodes[_own_name(node.name)] = [_own_name(tensor_name(name.lstrip("^"))[0]) for name in node.input]
    runs: dict[str, int] = {}
    before: str | None = None
    for name in emitted.nodes:
        if name not in nodes:
            raise PlanError(f"TensorFlow removed or merged the planned computation {name!r}; its memory would not be what was "
                            "planned. Please report this with the model and the TensorFlow version.")
        if before is not None and not _waits_for(nodes, name, before):
            raise PlanError(f"TensorFlow lost the order between the planned computations {before!r} and {name!r}. Please "
                            "report this with the model and the TensorFlow version.")
        original = name.partition(RECOMPUTED)[0]
        runs[original] = runs.get(original, 0) + 1
        before = name
    return runs


def _waits_for(nodes: dict[str, list[str]], name: str, before: str) -> bool:
    """Directly, or through frees."""
    return any(other == before or (other.startswith(FREE) and _waits_for(nodes, other, before)) for other in nodes.get(name, ()))


def _own_name(name: str) -> str:
    """A node's name without the prefix that calling the function put before it."""
    return name.removeprefix("StatefulPartitionedCall/")
