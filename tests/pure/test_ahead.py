"""The search is compiled ahead, in a process of its own, once."""

import os
import subprocess
import sys
import time

from checkmate_tf.solvers import ahead

_BEGIN = "from checkmate_tf.solvers import ahead; ahead.start(); print(ahead._process is not None)"


def _begins(**environment) -> bool:
    told = subprocess.run([sys.executable, "-c", _BEGIN], check=True, capture_output=True, text=True, timeout=100,
                          env=dict(os.environ, PYTHONPATH=os.pathsep.join(entry for entry in sys.path if entry), **environment))
    return told.stdout.split() == ["True"]


def test_what_is_compiled_is_not_compiled_again():
    ahead.compile_all()
    assert not _begins()
    ahead.start()
    told = []
    ahead.wait(told.append)
    assert told == []


def test_where_nothing_is_compiled_it_is_begun_and_ends_with_who_began_it(tmp_path):
    started = time.monotonic()
    assert _begins(NUMBA_CACHE_DIR=str(tmp_path))
    assert time.monotonic() - started < 60
    assert not list(tmp_path.rglob("compiled-*"))


def test_without_a_folder_for_machine_code_nothing_is_begun(monkeypatch):
    monkeypatch.setattr(ahead, "cache_folder", lambda: None)
    monkeypatch.setattr(ahead.subprocess, "Popen", None)
    ahead.start()


def test_it_is_waited_for_and_told(monkeypatch):
    monkeypatch.setattr(ahead, "_process", subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.5)"]))
    told = []
    ahead.wait(told.append)
    assert told == ["compiling the search, once on this machine"] and ahead._process.poll() == 0
