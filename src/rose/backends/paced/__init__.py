"""Paced devices: real engines whose steps take a named GPU's time, on a machine without GPUs."""

from rose.backends.paced.clock import PacedClock
from rose.backends.paced.device import PacedDevice
from rose.backends.paced.profiles import PROFILES, Profile, kv_pool_bytes, profile_named

__all__ = ["PROFILES", "PacedClock", "PacedDevice", "Profile", "kv_pool_bytes", "profile_named"]
