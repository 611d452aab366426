"""Options for every block from a solver, and rotor's programme over the chain of blocks.

Zhao et al., "Rockmate: an efficient, fast, automatic and generic tool for re-materialization in PyTorch", ICML 2023. A
chain's stages are coarse here: a transformer layer, a residual block. Inside one, keeping everything or nothing is a
poor choice. So each block becomes a small graph of its own, with options planned at a grid of budgets (see `blocks`); equal
blocks are solved once.

The paper's rk-Checkmate, an integer program, is here the greedy planner, which on such small graphs is nearly as good
in a thousandth of the time; any solver can be given as `inner`. Over the chain, `chains` is exact.

How fine the blocks are cut is tried three ways: few large ones leave more to the inner solver, which may keep part of a
block, many small ones more to the chain, which may run a part of it again and again.

What it leaves on the table: a block is passed over as a whole, and schedules are persistent. Where there is no chain of
blocks, the fallback is the hierarchical partition of `hiremate`. No bound comes from here. The tests make sure that an
option exists which none of rotor's equals, that equal blocks are solved once, and judge all plans with the simulator.
"""

import dataclasses
import time

from checkmate_tf.ir.graph import Graph
from checkmate_tf.ir.simulate import keep_all_timeline
from checkmate_tf.solvers import chains
from checkmate_tf.solvers.base import Answer, Limits, Progress, Report, Solver, StoppedBy
from checkmate_tf.solvers.blocks import block_options
from checkmate_tf.solvers.greedy import Greedy
from checkmate_tf.solvers.hiremate import HiRemate
from checkmate_tf.solvers.stages import chain_of

_FALLBACK = HiRemate()
_SHARE_OF_TIME = 0.5                                # for the options


@dataclasses.dataclass(frozen=True)
class Rockmate:
    """blocks: at most how many the chain is cut into, one attempt each; inner: the solver for the options, and its
    seconds for each. Without any the greedy planner makes one attempt of fifty drops, the same on every machine."""

    blocks: tuple[int, ...] = (8, 16, 100)
    inner: Solver = Greedy(attempts=1)
    inner_seconds: float = 0.0
    name: str = "rockmate"

    def search(self, graph: Graph, budget_bytes: int, limits: Limits, report: Report) -> Answer:
        started = time.monotonic()
        deadline = started + limits.seconds
        if keep_all_timeline(graph).peak_bytes <= budget_bytes:
            return Answer(graph.order, StoppedBy.DONE)
        best, best_seconds, all_in_time, stats = None, float("inf"), True, {}
        for blocks in self.blocks:
            stages = chain_of(graph, blocks)
            if len(stages) < 3:
                continue
            options_deadline = time.monotonic() + _SHARE_OF_TIME * (deadline - time.monotonic()) / len(self.blocks)
            options, distinct = block_options(graph, stages, self.inner, options_deadline,
                                              dataclasses.replace(limits, seconds=self.inner_seconds))
            order, seconds, in_time = chains.first_fit(graph, stages, options, budget_bytes, deadline)
            all_in_time = all_in_time and in_time
            if seconds < best_seconds:
                best, best_seconds = order, seconds
                stats = {"stages": len(stages), "distinct_blocks": distinct, "options": sum(map(len, options))}
                report(Progress(seconds, graph.seconds, time.monotonic() - started))
        if best is None:
            left = dataclasses.replace(limits, seconds=max(deadline - time.monotonic(), 0.0))
            answer = _FALLBACK.search(graph, budget_bytes, left, report)
            stages = len(chain_of(graph, max(self.blocks)))
            return dataclasses.replace(answer, stats={**answer.stats, "stages": stages, "fallback": _FALLBACK.name})
        return Answer(best, StoppedBy.DONE if all_in_time else StoppedBy.TIME, stats=stats)
