"""Numba with a cache on disk that can be trusted, or none.

Compiled code runs without Python's lock, so that searches and bounds run side by side in threads.

Compiling the search takes some ten seconds, so its machine code is kept next to the sources or, where that is
read-only, in the user's cache folder. Numba throws it away when the file of a function changes, but not when a
function that it calls from another file does: then old code would run on. Here all files of compiled code in a folder count for
each of them.

Numba tells functions of one name apart by numbers that start at 1 in every process. Where one process has compiled a part and
cached it, and another one the rest, two functions can have the same number, and one is called for the other: such a cache
crashed every process that read it. So here the numbers start anywhere.
"""

import functools
import hashlib
import itertools
import pathlib
import secrets

import numba
from numba.core.bytecode import FunctionIdentity
from numba.core.registry import cpu_target

_FILES = ("chunks.py", "repair.py", "slots.py", "drops.py", "moves.py", "fastsa.py")
_NUMBER_BITS = 48


@functools.lru_cache(maxsize=None)
def _stamp(folder: pathlib.Path) -> str:
    files = [pathlib.Path(__file__), *(folder / name for name in _FILES if (folder / name).exists())]
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


FunctionIdentity._unique_ids = itertools.count(secrets.randbits(_NUMBER_BITS))      # Numba offers no public way to say this


def compiled(function):
    """`numba.njit` with a cache that is stale as soon as any of the files changes."""
    return _cached(function)


def leaf(function):
    """The same, twice as fast, for functions that neither make nor return arrays: their references are not counted."""
    return _cached(function, _nrt=False)


def cache_folder() -> pathlib.Path | None:
    """Where machine code is kept; None where there is no folder to write to."""
    try:
        dispatcher = numba.njit(cache=True)(_nothing)
    except RuntimeError:
        return None
    folder = pathlib.Path(dispatcher._cache.cache_path)     # nor to ask this
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def made_for(*folders: pathlib.Path) -> tuple:
    """What machine code in the cache is good for: the sources in these folders and here, this Numba, this processor."""
    return *map(_stamp, (pathlib.Path(__file__).parent, *folders)), numba.__version__, cpu_target.target_context.codegen().magic_tuple()


def _nothing():
    """What is never compiled."""


def _cached(function, **options):
    try:
        dispatcher = numba.njit(cache=True, nogil=True, **options)(function)
    except RuntimeError:  # there is no folder to write to
        return numba.njit(nogil=True, **options)(function)
    dispatcher._cache._cache_file._source_stamp = _stamp(pathlib.Path(function.__code__.co_filename).parent)       # nor to say this
    return dispatcher
