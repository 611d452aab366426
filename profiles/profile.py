"""A Profile: what each distinct op costs on a device, measured or modelled.

Costs are looked up by `OpKey`, a text that spells out an op's kind, attributes, input shapes and dtypes: equal keys
are the same work. What is not in the table is modelled by a roofline: the time to do the arithmetic or to move
the bytes, whichever is longer, plus the time to start an op at all.

Files are JSON. A device profile that ships with the package holds no measured op, only the device's rates with the
source of each number. The profile measured on a user's machine is cached between runs; it says which device,
which TensorFlow, and is refused for any other.
"""

import dataclasses
import json
import math
import os
import pathlib
import tempfile
from collections.abc import Mapping

from checkmate_tf.ir.errors import ProfileError

OpKey = str
_FORMAT = "checkmate_tf profile 6"
_FOLDER = pathlib.Path(__file__).parent


@dataclasses.dataclass(frozen=True, slots=True)
class OpCost:
    """What one run of an op costs.

    seconds, scratch_bytes: the time, and the bytes needed beyond inputs and outputs
    measured: whether both were
    reuses: positions of the inputs whose memory its output takes over when nobody else needs them
    requests: what it asks of the allocator, as `Op.requests` has it
    """

    seconds: float
    scratch_bytes: int
    measured: bool
    reuses: tuple[int, ...] = ()
    requests: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Profile:
    """Costs of ops on one device.

    device: what it is, in words, specific enough to tell two machines apart
    software: the TensorFlow version that measured ops were run with; "" where nothing was measured
    flops_per_second, bytes_per_second: the roofline, as reached in practice
    launch_seconds: what any op costs at least
    sources: where each number is from
    costs: OpKey -> OpCost
    surplus: key of a graph -> the bytes that its step was last measured to take beyond its planned peak
    cache_bytes, miss_seconds_per_byte: what the processor's last cache holds of what is used in turn, and what a byte takes
        beyond an op's price that is not there; 0 where it is not known
    """

    device: str
    flops_per_second: float
    bytes_per_second: float
    launch_seconds: float
    software: str = ""
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict)
    costs: Mapping[OpKey, OpCost] = dataclasses.field(default_factory=dict)
    surplus: Mapping[str, int] = dataclasses.field(default_factory=dict)
    cache_bytes: int = 0
    miss_seconds_per_byte: float = 0.0

    def cost(self, key: OpKey, flops: float, moved_bytes: float) -> OpCost:
        """The measured cost of this op, or what the roofline gives for so much arithmetic and traffic."""
        known = self.costs.get(key)
        if known is not None:
            return known
        seconds = self.launch_seconds + max(flops / self.flops_per_second, moved_bytes / self.bytes_per_second)
        return OpCost(seconds, 0, measured=False)

    def with_costs(self, costs: Mapping[OpKey, OpCost]) -> "Profile":
        """The same profile knowing more ops."""
        return dataclasses.replace(self, costs={**self.costs, **costs})

    def with_surplus(self, graph_key: str, bytes: int) -> "Profile":
        """The same profile, knowing what a step takes beyond its plan."""
        return dataclasses.replace(self, surplus={**self.surplus, graph_key: bytes})

    def save(self, path: str | pathlib.Path) -> None:
        """Writes the profile as JSON, in one move: a reader sees the old file or the new one, never half of it."""
        path = pathlib.Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        fields = {"format": _FORMAT, **{name: getattr(self, name) for name in _PLAIN_FIELDS}, "sources": dict(self.sources),
                  "surplus": dict(self.surplus),
                  "costs": {key: [cost.seconds, cost.scratch_bytes, cost.reuses, cost.requests]
                            for key, cost in self.costs.items() if cost.measured}}
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
        with os.fdopen(handle, "w") as file:
            json.dump(fields, file, indent=1)
        os.replace(temporary, path)

    @classmethod
    def load(cls, path: str | pathlib.Path) -> "Profile":
        """Reads what `save` wrote. Raises ProfileError when the file is anything else."""
        try:
            fields = json.loads(pathlib.Path(path).read_text())
            if fields["format"] != _FORMAT:
                raise ValueError(f"format {fields['format']!r} instead of {_FORMAT!r}")
            costs = {key: OpCost(_rate(seconds, zero=True), int(scratch_bytes), True, tuple(map(int, reuses)), tuple(map(int, requests)))
                     for key, (seconds, scratch_bytes, reuses, requests) in fields["costs"].items()}
            return cls(device=str(fields["device"]), software=str(fields["software"]), sources=dict(fields["sources"]),
                       flops_per_second=_rate(fields["flops_per_second"]), bytes_per_second=_rate(fields["bytes_per_second"]),
                       launch_seconds=_rate(fields["launch_seconds"], zero=True), costs=costs,
                       cache_bytes=int(_rate(fields["cache_bytes"], zero=True)),
                       miss_seconds_per_byte=_rate(fields["miss_seconds_per_byte"], zero=True),
                       surplus={str(key): int(_rate(bytes, zero=True)) for key, bytes in fields.get("surplus", {}).items()})
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ProfileError(f"A profile must be a file that Profile.save wrote. Received: {path} "
                               f"({type(error).__name__}: {error})") from error


_PLAIN_FIELDS = ("device", "software", "flops_per_second", "bytes_per_second", "launch_seconds",
                 "cache_bytes", "miss_seconds_per_byte")


def names() -> tuple[str, ...]:
    """The names of the profiles that come with the package."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.json")))


def get(name: str) -> Profile:
    """The profile of this name that comes with the package. Raises ProfileError for an unknown one."""
    if name not in names():
        raise ProfileError(f'A profile is "auto" (measure this device), one of {", ".join(names())}, or a Profile. '
                           f"Received: {name!r}")
    return Profile.load(_FOLDER / f"{name}.json")


def _rate(number, zero: bool = False) -> float:
    rate = float(number)
    if not math.isfinite(rate) or rate < 0 or (rate == 0 and not zero):
        raise ValueError(f"not a usable rate or time: {number!r}")
    return rate
