"""Compiles the search before there is anything to search for, in a process of its own, once on a machine.

Numba takes half a minute for it, more than many a search may take. So `solve` has it done before its clock runs. Who has other work
to do first, such as tracing, begins with it by `start`, and calls `wait` before anything is measured. Afterwards the machine code
comes from the cache (`compiled` says where that is), and neither does anything.
"""

import atexit
import hashlib
import os
import pathlib
import platform
import subprocess
import sys
import threading
from collections.abc import Callable

from checkmate_tf.ir.compiled import cache_folder, made_for
from checkmate_tf.ir.graph import graph_from_instance
from checkmate_tf.ir.placement import UNLIMITED_BYTES, Layout, Placer
from checkmate_tf.ir.plan import plan_from_order
from checkmate_tf.ir.repair import repaired, rules_for
from checkmate_tf.ir.simulate import keep_all_timeline, structural_floor
from checkmate_tf.solvers.layered import layered_instance

_OPS = 40
_SECONDS = 300.0                # after that it is given up
_REPAIR_SECONDS = 0.1
_COMPILE = "from checkmate_tf.solvers import ahead; ahead.compile_all()"
_lock = threading.Lock()
_process: subprocess.Popen | None = None


def start() -> None:
    """Begins to compile, unless that is done already."""
    global _process
    with _lock:
        mark = _mark()
        if _process is None and mark is not None and not mark.exists():
            path = os.pathsep.join(entry for entry in sys.path if entry)
            _process = subprocess.Popen([sys.executable, "-c", _COMPILE], stdin=subprocess.DEVNULL,
                                        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                                        env=dict(os.environ, PYTHONPATH=path), start_new_session=True)
            atexit.register(_end, _process)


def wait(narrate: Callable[[str], None] = lambda text: None) -> None:
    """Returns when what `start` began has ended, well or not: what is not in the cache is compiled when it is first used."""
    with _lock:
        if _process is not None and _process.poll() is None:
            narrate("compiling the search, once on this machine")
            try:
                _process.wait(_SECONDS)
            except subprocess.TimeoutExpired:
                _process.kill()


def compile_all() -> None:
    """Calls all that `auto` and placing compile, on a small graph, and leaves a mark in the cache."""
    from checkmate_tf.solvers import anneal, greedy, rebuild        # they need `base`, which needs this module
    from checkmate_tf.solvers.base import Deadline
    graph = graph_from_instance(layered_instance(_OPS))
    budget_bytes = (structural_floor(graph)[0] + keep_all_timeline(graph).peak_bytes) // 2
    placer = Placer(graph)
    placer.place(plan_from_order(graph, graph.order))
    repaired(placer, rules_for(graph), graph.order, [(Layout(), UNLIMITED_BYTES)], 0, 0, _REPAIR_SECONDS)
    first = next(greedy.attempts(graph, budget_bytes, Deadline(_SECONDS), 0))
    next(rebuild.rebuilds(graph, budget_bytes, first, Deadline(1.0), 0), None)
    for is_free in (False, True):
        next(anneal.walks(graph, budget_bytes, first, Deadline(1.0), 0, is_free), None)
    mark = _mark()
    if mark is not None:
        mark.touch()


def _mark() -> pathlib.Path | None:
    """The file that says all is compiled for this Python, Numba and processor; None where there is no cache."""
    folder = cache_folder()
    if folder is None:
        return None
    return folder / f"compiled-{hashlib.sha256(repr((platform.python_version(), made_for(pathlib.Path(__file__).parent))).encode()).hexdigest()[:16]}"


def _end(process: subprocess.Popen) -> None:
    if process.poll() is None:
        process.kill()
        process.wait()
