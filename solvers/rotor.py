"""Optimal persistent checkpointing of a chain: rotor's dynamic programme.

Beaumont, Eyraud-Dubois, Herrmann, Joly and Shilova, "Optimal checkpointing for heterogeneous chains", arXiv 1911.13214.
The graph is cut into a chain of stages; `chains` says where, and writes the programme down. Each stage has the choice of
the paper's three forwards: keep nothing (F_n), keep what it reads (F_ck), keep all that its backward ops want (F_all).
Within that, and within the model's memory, the answer is optimal for stages of any sizes and times, where `chen` is
optimal for none and `griewank` for equal ones.

What it leaves on the table: nothing between keeping all of a stage and keeping none of it (see `rockmate`), no values
that are kept while others of their stage go, no checkpoint that is dropped and remade before it is used (schedules are
persistent). Where not even two borders are found, as in random graphs, there is no chain, and where skips bypass most
of it, as in a U-Net, no schedule of the chain may fit; the answer is then that of Chen's greedy heuristic with
articulation points, and `stats` says so.

The time grows with the cube of the number of stages; above `most_stages` neighbours are merged. No bound comes from
here: it would hold for persistent schedules alone. The tests compare the programme with an exhaustive search over
persistent schedules.
"""

import dataclasses
import time

from checkmate_tf.ir.graph import Graph
from checkmate_tf.ir.simulate import keep_all_timeline
from checkmate_tf.solvers import chains
from checkmate_tf.solvers.base import Answer, Limits, Progress, Report, StoppedBy
from checkmate_tf.solvers.chen import Greedy, articulation_points
from checkmate_tf.solvers.stages import chain_of

_FALLBACK = Greedy("chen_greedy", articulation_points)


@dataclasses.dataclass(frozen=True)
class Rotor:
    """Optimal for the chain model with at most so many stages."""

    most_stages: int = 100
    name: str = "rotor"

    def search(self, graph: Graph, budget_bytes: int, limits: Limits, report: Report) -> Answer:
        started = time.monotonic()
        if keep_all_timeline(graph).peak_bytes <= budget_bytes:
            return Answer(graph.order, StoppedBy.DONE)
        stages = chain_of(graph, self.most_stages)
        if len(stages) < 3:
            return fallback(graph, budget_bytes, limits, report, started, len(stages))
        options = [[chains.keeping_option(graph, stage)] for stage in stages]
        deadline = started + limits.seconds
        order, seconds, in_time = chains.first_fit(graph, stages, options, budget_bytes, deadline)
        if order is None:
            return fallback(graph, budget_bytes, limits, report, started, len(stages))
        report(Progress(seconds, graph.seconds, time.monotonic() - started))
        return Answer(order, StoppedBy.DONE if in_time else StoppedBy.TIME, stats={"stages": len(stages)})


def fallback(graph: Graph, budget_bytes: int, limits: Limits, report: Report, started: float, stages: int) -> Answer:
    """What to answer when the chain has none, in the time that is left."""
    left = dataclasses.replace(limits, seconds=max(started + limits.seconds - time.monotonic(), 0.0))
    answer = _FALLBACK.search(graph, budget_bytes, left, report)
    return dataclasses.replace(answer, stats={"stages": stages, "fallback": _FALLBACK.name})
