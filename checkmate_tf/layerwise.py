"""Plans at the granularity of Keras layers: any solver, on a graph in which each layer is one op forward and some backward.

    checkmate_tf.tradeoff(model, x, y, solvers=("auto", checkmate_tf.by_layer(model, "ilp")))

It is a solver like any other: it groups the traced step's ops by the layers whose names stand in theirs, asks the solver
inside for an order of the groups, and hands back the order of their ops. So plans of both granularities are judged on the
same graph. A bound for groups holds for no plan that takes them apart, and is not handed on.
"""

import dataclasses
import re

from checkmate_tf import solvers
from checkmate_tf.ir.errors import UnsupportedError
from checkmate_tf.ir.graph import Graph
from checkmate_tf.ir.grouping import group_by_label
from checkmate_tf.solvers import Answer, Limits, Solver
from checkmate_tf.solvers.base import Report


@dataclasses.dataclass(frozen=True)
class ByLayer:
    """The solver inside, on groups of ops of the layers with these names."""

    solver: Solver
    layers: frozenset[str]

    @property
    def name(self) -> str:
        """The solver's, and that it works on layers."""
        return f"{self.solver.name} by layer"

    def search(self, graph: Graph, budget_bytes: int, limits: Limits, report: Report) -> Answer:
        """As `Solver.search`."""
        small, lift = group_by_label(graph, [self.label(op.name, op.backward) for op in graph.ops])

        def without_bound(progress) -> None:
            order = None if progress.order is None else lift(progress.order)
            report(dataclasses.replace(progress, bound_seconds=graph.seconds, order=order))

        answer = self.solver.search(small, budget_bytes, limits, without_bound)
        order = None if answer.order is None else lift(answer.order)
        return Answer(order, answer.stopped_by, stats={**answer.stats, "groups": len(small.ops)})

    def label(self, name: str, backward: bool) -> str | None:
        """The scope of the innermost layer in an op's name, and the side of the step; None for an op of no layer.

        TensorFlow makes a layer's scope unique by a number at its end, so scopes are labels and names only tell which are."""
        scopes = name.split("/")[:-1]
        known = [position for position, scope in enumerate(scopes)
                 if scope in self.layers or re.sub(r"_[0-9]+$", "", scope) in self.layers]
        if not known:
            return None
        return "/".join(scopes[:known[-1] + 1]) + (" backward" if backward else "")


def by_layer(model, solver: str | Solver = "auto") -> ByLayer:
    """A solver that plans a model's step at the granularity of its layers; `solver` is a name or an object.

    Raises UnsupportedError for what has no layers, SolverError for an unknown name.
    """
    if not hasattr(model, "layers"):
        raise UnsupportedError(f"A keras.Model, whose layers have names, is needed. Received: {type(model).__name__}")
    inside = solvers.get(solver) if isinstance(solver, str) else solver
    return ByLayer(inside, frozenset(_names(model)))


def _names(model):
    for layer in model.layers:
        yield layer.name
        if hasattr(layer, "layers"):
            yield from _names(layer)
