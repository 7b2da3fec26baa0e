"""A CUDA device: real time, turns between processes, KV memory through kvcached.

Written from the sources of torch, vLLM and kvcached, and tested against doubles that have their signatures; it has not run on a GPU.
"""

from rose.backends.cuda.device import CudaDevice
from rose.backends.cuda.kv_limit import KvAnswer, KvLimiter
from rose.backends.cuda.kv_pool import LimitedBlocks

__all__ = ["CudaDevice", "KvAnswer", "KvLimiter", "LimitedBlocks"]
