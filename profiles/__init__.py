"""Profiles: what ops cost on a device. Data and its reader; TensorFlow is never imported here."""

if __name__ != "checkmate_tf.profiles":
    raise ImportError("Import this package as checkmate_tf.profiles, not by its folder's name. "
                      f"Received: import {__name__}")

from checkmate_tf.profiles.profile import OpCost, OpKey, Profile, get, names

__all__ = ["OpCost", "OpKey", "Profile", "get", "names"]
