"""A CUDA device: real time, turns between processes, KV memory through kvcached.

Written and tested against stand-ins of torch and kvcached; it has not run on a GPU.
"""

from rose.backends.cuda.device import CudaDevice
from rose.backends.cuda.kv_limit import KvLimiter, LimitedBlocks

__all__ = ["CudaDevice", "KvLimiter", "LimitedBlocks"]
