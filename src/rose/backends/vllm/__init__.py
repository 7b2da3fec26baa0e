"""Real vLLM engines as ROSE serving engines: drivers, plugin, scheduler and in-place weight updates.

Importing this package imports neither vllm nor torch; the drivers do when an engine starts. Written for vLLM 0.32.
"""

from rose.backends.vllm.engine import VllmEngine
from rose.backends.vllm.inprocess import InProcessVllmEngine
from rose.backends.vllm.options import VllmOptions

__all__ = ["InProcessVllmEngine", "VllmEngine", "VllmOptions"]
