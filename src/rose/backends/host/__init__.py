"""The host device: real time, real pages, no model of a GPU."""

from rose.backends.host.device import HostClock, HostDevice

__all__ = ["HostClock", "HostDevice"]
