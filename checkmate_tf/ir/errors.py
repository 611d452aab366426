"""Every error this package raises on purpose; each text says what was wrong, with what, and what to try."""

from collections.abc import Mapping


class CheckmateError(Exception):
    """The root: `except checkmate_tf.CheckmateError` catches whatever this package refuses."""


class BudgetError(CheckmateError, ValueError):
    """The budget itself is not a budget: negative, zero, not a number, or with an unknown unit."""


class GraphError(CheckmateError, ValueError):
    """A graph breaks an invariant: a cycle, a negative cost, a value nobody makes."""


class InfeasibleBudgetError(CheckmateError, ValueError):
    """No plan fits the budget.

    `budget_bytes` is what was asked, `minimum_bytes` the smallest budget known to work (proven to be the
    smallest where `minimum_is_proven`), `breakdown` maps what is held at the floor to its bytes.
    """

    def __init__(self, message: str, budget_bytes: int, minimum_bytes: int,
                 minimum_is_proven: bool, breakdown: Mapping[str, int]):
        super().__init__(message)
        self.budget_bytes = budget_bytes
        self.minimum_bytes = minimum_bytes
        self.minimum_is_proven = minimum_is_proven
        self.breakdown = dict(breakdown)


class NotCompiledError(CheckmateError, ValueError):
    """The model has not been compiled by Keras yet, so there is no training step to plan."""


class PlanError(CheckmateError, ValueError):
    """A plan breaks an invariant, or was made for another graph."""


class ProfileError(CheckmateError, ValueError):
    """A profile is unknown, malformed, or belongs to another device or TensorFlow version."""


class SolverError(CheckmateError):
    """A solver is unknown, cannot take this graph, or answered something the simulator refutes."""


class UnsupportedError(CheckmateError):
    """The model or its settings are outside of what can be planned; the text says which part and what to do."""
