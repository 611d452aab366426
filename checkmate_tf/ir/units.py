"""Bytes for people: "2GB" is 2e9, "2GiB" is 2**30 times two, and back again; and bytes as allocators count them."""

import math
import re

from checkmate_tf.ir.errors import BudgetError

GRANULE_BYTES = 256
_UNITS = {"B": 1}
_UNITS |= {prefix + "B": 1000 ** power for power, prefix in enumerate("KMGT", start=1)}
_UNITS |= {prefix + "iB": 1024 ** power for power, prefix in enumerate("KMGT", start=1)}
_BY_LOWER_CASE = {unit.lower(): factor for unit, factor in _UNITS.items()}


def parse_bytes(text: str) -> int:
    """The number of bytes that a text such as "2GB", "1.5 GiB" or "800MB" names.

    Raises BudgetError when the text is not a positive number followed by a known unit.
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z]+)\s*", text)
    if match is None:
        raise BudgetError('A size in bytes must be a positive number with a unit, such as "2GB" or "1.5GiB". '
                          f"Received: {text!r}")
    number, unit = float(match[1]), match[2]
    factor = _BY_LOWER_CASE.get(unit.lower())
    if factor is None:
        raise BudgetError(f"Unknown unit {unit!r}; known units are {', '.join(_UNITS)}. Received: {text!r}")
    total = number * factor
    if not math.isfinite(total) or int(total) <= 0:
        raise BudgetError(f"A size in bytes must be positive and finite. Received: {text!r}")
    return int(total)


def format_bytes(count: int | float) -> str:
    """Bytes in decimal units with three significant digits: 1536000000 becomes "1.54 GB"."""
    size = float(count)
    for unit in ("B", "KB", "MB", "GB"):
        if abs(size) < 999.5:
            digits = 0 if unit == "B" else 3 - len(str(int(abs(size))))
            return f"{size:.{max(digits, 0)}f} {unit}"
        size /= 1000
    return f"{size:.2f} TB"


def in_granules(size: int) -> int:
    """The bytes that an allocation of this size takes at least: whole granules, to which TensorFlow's allocators round up."""
    return -(-size // GRANULE_BYTES) * GRANULE_BYTES
