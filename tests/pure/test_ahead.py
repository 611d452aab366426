"""The search is compiled ahead, in a process of its own, once."""

import os
import subprocess
import sys
import time

import pytest

from checkmate_tf import solvers
from checkmate_tf.ir.graph import graph_from_instance
from checkmate_tf.solvers import ahead
from checkmate_tf.solvers.layered import layered_instance

_BEGIN = "from checkmate_tf.solvers import ahead; ahead.start(); print(ahead._process.pid if ahead._process else 0)"


def _begins(**environment) -> int:
    """The process in which another one begins to compile, 0 where it does not."""
    told = subprocess.run([sys.executable, "-c", _BEGIN], check=True, capture_output=True, text=True, timeout=100,
                          env=dict(os.environ, PYTHONPATH=os.pathsep.join(entry for entry in sys.path if entry), **environment))
    return int(told.stdout)


def test_what_is_compiled_is_not_compiled_again():
    ahead.compile_all()
    assert not _begins()
    ahead.start()
    told = []
    ahead.wait(told.append)
    assert told == []


def test_where_nothing_is_compiled_it_is_begun_and_ends_with_who_began_it(tmp_path):
    process = _begins(NUMBA_CACHE_DIR=str(tmp_path))
    assert process > 0
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)
    assert not list(tmp_path.rglob("compiled-*"))


def test_what_a_search_waits_for_first_is_not_on_its_clock(monkeypatch):
    """On a fresh machine the time was over before a search had begun."""
    now = [0.0]
    with monkeypatch.context() as patched:
        patched.setattr(ahead, "start", lambda: None)
        patched.setattr(ahead, "wait", lambda: now.append(1000.0))
        patched.setattr(time, "monotonic", lambda: now[-1])
        solution = solvers.solve(graph_from_instance(layered_instance(5)), 1 << 40, solvers.get("keep_all"))
    assert now == [0.0, 1000.0] and solution.stats["solve_seconds"] == 0


def test_without_a_folder_for_machine_code_nothing_is_begun(monkeypatch):
    monkeypatch.setattr(ahead, "cache_folder", lambda: None)
    monkeypatch.setattr(ahead.subprocess, "Popen", None)
    ahead.start()


def test_it_is_waited_for_and_told(monkeypatch):
    monkeypatch.setattr(ahead, "_process", subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.5)"]))
    told = []
    ahead.wait(told.append)
    assert told == ["compiling the search, once on this machine"] and ahead._process.poll() == 0
