"""Keep everything: run each op once, in the given order. What plain training does, and the cost to compare with."""

import dataclasses

from checkmate_tf.ir.graph import Graph
from checkmate_tf.ir.simulate import keep_all_timeline
from checkmate_tf.solvers.base import Answer, Limits, Report, StoppedBy


@dataclasses.dataclass(frozen=True)
class KeepAll:
    """Fits, or not; never recomputes."""

    name: str = "keep_all"

    def search(self, graph: Graph, budget_bytes: int, limits: Limits, report: Report) -> Answer:
        fits = keep_all_timeline(graph).peak_bytes <= budget_bytes
        return Answer(graph.order if fits else None, StoppedBy.DONE)
