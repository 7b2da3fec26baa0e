"""The delta codec on a device: compare, cut and code there, and let only the coded bytes leave it. Needs torch; Triton where it is.

``DeviceBits`` is a shard on a device (``rose.transfer.resident`` has the seam to the encoder), ``DeviceComparer`` compares, the
torch way or Triton's; ``streams`` codes, ``keys`` sums, ``pinned`` brings bytes to the host, ``way`` writes into live weights. Everything runs on the device ``cpu`` too, which
is how it is proven to make the CPU kernels' bytes; docs/gpu.md says what has run on a GPU.
"""

from rose.backends.device_codec.bits import BasePlace, DeviceBase, DeviceBits, DeviceHeldBits
from rose.backends.device_codec.comparer import DeviceComparer, comparer_of

__all__ = ["BasePlace", "DeviceBase", "DeviceBits", "DeviceComparer", "DeviceHeldBits", "comparer_of"]
