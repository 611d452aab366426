"""checkmate_tf: makes a Keras model train inside a memory budget, by optimal recomputation.

    checkmate_tf.compile(model, budget="2GB")     # before model.fit

Public names are loaded when first asked for, so that `checkmate_tf.solvers` and `checkmate_tf.profiles` work
without TensorFlow.
"""

import importlib
import pathlib

_HERE = pathlib.Path(__file__).parent
if not (_HERE / "solvers").exists():
    # In a checkout `solvers/` and `profiles/` stand beside this folder; installed, they stand inside.
    __path__.append(str(_HERE.parent))

__version__ = "0.1.0"

_HOMES = {
    "api": ("BatchSearch", "MemoryEstimate", "compile", "estimate", "max_batch_size", "plan", "rematerialize", "restore",
            "tradeoff"),
    "ir.errors": ("BudgetError", "CheckmateError", "GraphError", "InfeasibleBudgetError", "NotCompiledError",
                  "PlanError", "ProfileError", "SolverError", "UnsupportedError"),
    "profiles": ("Profile",),
    "callbacks": ("MemoryUsage",),
    "layerwise": ("by_layer",),
    "plots": ("plot_batches", "plot_estimate", "plot_memory", "plot_schedule", "plot_tradeoff"),
    "solvers": ("Limits", "Solution", "Status"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME_OF)


def __getattr__(name: str):
    if name in ("solvers", "profiles"):
        return importlib.import_module(f"checkmate_tf.{name}")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'checkmate_tf' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"checkmate_tf.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__():
    return sorted({*globals(), *__all__, "solvers", "profiles"})
