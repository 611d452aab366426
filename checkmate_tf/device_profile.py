"""Which profile prices a step, and where this device's measured one is kept between runs.

What is not known yet of the step's ops is measured and added. With the costs it keeps, step by step, what was measured beyond
the planned peak.
"""

import contextlib
import hashlib
import os
import pathlib
import warnings
from collections.abc import Callable
from typing import Any

from checkmate_tf import profiles
from checkmate_tf.bridge import measure
from checkmate_tf.bridge.trace import Traced
from checkmate_tf.bridge.variables import evacuated
from checkmate_tf.bridge.writes import movable
from checkmate_tf.ir.errors import ProfileError
from checkmate_tf.ir.graph import Graph
from checkmate_tf.profiles import Profile


def check(profile: Any) -> None:
    """Raises ProfileError for what is neither "auto", a known name, nor a Profile."""
    if not isinstance(profile, (Profile, str)):
        raise ProfileError(f'A profile is "auto", one of {", ".join(profiles.names())}, or a Profile. Received: {profile!r}')
    if isinstance(profile, str) and profile != "auto":
        profiles.get(profile)


def cache_path(device: str) -> pathlib.Path:
    """Where this device's measured profile is kept between runs; one of another TensorFlow is found there, too, and told of."""
    root = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
    name = hashlib.sha256(device.encode()).hexdigest()[:16]
    return root / "checkmate_tf" / f"profile-{name}.json"


def remember_surplus(profile: Profile, graph_key: str, surplus_bytes: int) -> None:
    """Keeps with this device's cached profile what a step took beyond its planned peak, for the next plan of it."""
    if profile.surplus.get(graph_key, 0) == surplus_bytes:
        return
    path = cache_path(profile.device)
    with contextlib.suppress(OSError, ProfileError):         # without a cache there is nothing to keep it in
        Profile.load(path).with_surplus(graph_key, surplus_bytes).save(path)


def known(profile: Profile | str, traced: Traced, graph: Graph, narrate: Callable[[str], None], may_move: bool) -> Profile:
    """The profile that is meant: itself, one that ships, or for "auto" this device's, which knows every op of the step.

    may_move: whether variables may lie elsewhere afterwards, so that ops can be measured in their place where memory is limited
    """
    if isinstance(profile, Profile):
        return profile
    if profile != "auto":
        return profiles.get(profile)
    path = cache_path(measure.device_description())
    found = cached(path)
    todo = measure.missing(traced, graph, found)
    if not todo:
        return found
    narrate(f"measuring {len(todo)} distinct ops on this device")
    in_the_way = movable(handle for _, handle in traced.captures) if may_move and measure.is_limited() else ()
    with evacuated(in_the_way):
        found = found.with_costs(measure.measure(traced, todo, lambda done, total: narrate(
            f"measuring {total} distinct ops on this device: {done} done")))
    try:
        found.save(path)
    except OSError as error:
        warnings.warn(f"The measured profile could not be cached and will be measured again next time ({error}).", stacklevel=2)
    return found


def cached(path: pathlib.Path) -> Profile:
    """The cached profile if it is one and of this device and TensorFlow; otherwise an empty one."""
    if path.exists():
        try:
            profile = Profile.load(path)
            if (profile.device, profile.software) == (measure.device_description(), measure.software()):
                return profile
            warnings.warn(f"The cached profile {path} is of {profile.device} with {profile.software}; measuring anew.",
                          stacklevel=2)
        except ProfileError as error:
            warnings.warn(f"The cached profile is not usable; measuring anew. {error}", stacklevel=2)
    return measure.empty_profile()
