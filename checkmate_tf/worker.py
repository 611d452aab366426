"""A process that solves: requests come in on standard input, answers go out on standard output.

Started by `sweep`, several at a time, so that solvers run side by side; TensorFlow is never imported here. A request is
a pickled (graph, budget in bytes, solver, limits), an answer a pickled Solution or a text that says what went wrong, each
behind its length.
"""

import os
import pickle
import struct
import sys

from checkmate_tf.ir.errors import CheckmateError
from checkmate_tf.solvers import solve

LENGTH = struct.Struct("<Q")


def main() -> None:
    """Answers requests until standard input ends."""
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a solver prints must not get into the answers
    while header := requests.read(LENGTH.size):
        answer = pickle.dumps(_answer(requests.read(*LENGTH.unpack(header))))
        answers.write(LENGTH.pack(len(answer)) + answer)
        answers.flush()


def _answer(request: bytes):
    try:
        graph, budget_bytes, solver, limits = pickle.loads(request)
    except (AttributeError, ImportError) as error:
        return f"a solver object must be of a class that another process can import ({error})"
    try:
        return solve(graph, budget_bytes, solver, limits)
    except CheckmateError as error:
        return " ".join(str(error).split())


if __name__ == "__main__":
    main()
