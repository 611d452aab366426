"""Reads back what TensorFlow will really run, and holds it against the plan.

A copied op that is merged with its original, or has lost the edge that holds it back, saves nothing, and nobody would
notice from the results. So the graph that the runtime hands to its executor, after all of its own passes, is
asked: is every computation of the plan there, once, and does each wait for those that it must come after?

Loops and branches run taken apart, in nodes whose names TensorFlow makes of theirs. Those with which they begin must each
wait for what comes before, and what comes next must wait for each of those with which they end.
"""

from collections.abc import Iterable, Mapping, Sequence

from checkmate_tf.bridge import private
from checkmate_tf.bridge.emit import RECOMPUTED, Emitted
from checkmate_tf.bridge.trace import tensor_name
from checkmate_tf.ir.errors import PlanError

_BEGINS = {"Enter": "/enter/_", "Switch": "/switch_pred/_"}
_ENDS = {"Exit": "/exit/_", "Merge": "/branch_executed/_"}


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
    executed = [node for graphs in function_graphs for node in graphs.post_optimization_graph.node]
    inputs = {_own_name(node.name): [_own_name(tensor_name(name.lstrip("^"))[0]) for name in node.input] for node in executed}
    begins, ends = _parts(executed, _BEGINS), _parts(executed, _ENDS)
    planned = {part for name in emitted.waits for part in ends.get(name, {name})}
    runs: dict[str, int] = {}
    for name, waits in emitted.waits.items():
        if not ends.get(name, {name}) <= inputs.keys():
            raise PlanError(f"TensorFlow removed or merged the planned computation {name!r}; its memory would not be what was "
                            "planned. Please report this with the model and the TensorFlow version.")
        before = {part for other in waits for part in ends.get(other, {other})}
        for begin in begins.get(name, {name}):
            if not (before <= _waited_for(inputs, begin, planned) or before <= _waited_for(inputs, begin, set())):
                raise PlanError(f"TensorFlow lost the order between the planned computation {name!r} and one before it, "
                                f"{min(before)!r}. Please report this with the model and the TensorFlow version.")
        original = name.partition(RECOMPUTED)[0]
        runs[original] = runs.get(original, 0) + 1
    return runs


def _parts(executed: Iterable, kinds: Mapping[str, str]) -> dict[str, set[str]]:
    """For each loop or branch that was taken apart, its nodes of these kinds, each of which has its own ending."""
    parts: dict[str, set[str]] = {}
    for node in executed:
        name = _own_name(node.name)
        if node.op in kinds and kinds[node.op] in name:
            parts.setdefault(name.rpartition(kinds[node.op])[0], set()).add(name)
    return parts


def _waited_for(inputs: Mapping[str, Sequence[str]], name: str, planned: set[str]) -> set[str]:
    """The nodes that have run before this one does, as far back as the next ones that were planned."""
    found, waiting = set(), [name]
    while waiting:
        for other in inputs.get(waiting.pop(), ()):
            if other not in found:
                found.add(other)
                if other not in planned:
                    waiting.append(other)
    return found


def _own_name(name: str) -> str:
    """A node's name without the prefix that calling the function put before it."""
    return name.removeprefix("StatefulPartitionedCall/")
