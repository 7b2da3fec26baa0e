"""KV budgets of a GPU through kvcached, which maps and unmaps 2 MiB pages under vLLM's block pool.

Used in the engine's own process, where kvcached keeps its pools. Its interface: ``control.set_instance_memory_limit(bytes,
revision=)`` answers with a status; ``deferred`` means that requests use more than the limit for now.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Mapping
from typing import Any

from rose.errors import BackendUnavailableError, EngineError

_INSTALL = "pip install 'kvcached>=0.1.6' beside vLLM and start the engine with ENABLE_KVCACHED=true, or give the device memory='sleep'"


class KvLimiter:
    """Sets the memory limit of this process's KV pools; every call is a newer revision."""

    def __init__(self, set_limit: Callable[..., Mapping[str, Any]], version: str) -> None:
        """Wrap ``kvcached.control.set_instance_memory_limit`` of a version."""
        self._set_limit = set_limit
        self._version = version
        self._revision = 0

    @classmethod
    def open(cls) -> KvLimiter:
        """Find kvcached.

        Raises:
            BackendUnavailableError: It is not installed, or is too old to move limits while it runs.
        """
        try:
            control = importlib.import_module("kvcached.control")
            version = importlib.metadata.version("kvcached")
        except (ImportError, importlib.metadata.PackageNotFoundError) as error:
            message = f"KV memory of a GPU moves by kvcached, which does not import here ({error}); {_INSTALL}"
            raise BackendUnavailableError(message) from error
        set_limit = getattr(control, "set_instance_memory_limit", None)
        if set_limit is None:
            message = (
                f"kvcached {version} cannot change a limit while it runs (no set_instance_memory_limit); {_INSTALL}"
            )
            raise BackendUnavailableError(message)
        return cls(set_limit, version)

    def limit(self, num_bytes: int) -> int:
        """Set the limit of the KV memory over all pools and layers.

        Returns:
            Bytes that requests use beyond it: they must end before the rest can leave. 0 when it is in force.

        Raises:
            EngineError: kvcached has no pool here, or refused.
        """
        self._revision += 1
        answer = self._set_limit(num_bytes, revision=self._revision)
        status = answer.get("status")
        if status == "applied":
            return 0
        if status == "deferred":
            return max(1, int(answer.get("overage_bytes", 0)))
        reason = answer.get("reason") or "no reason given"
        message = f"kvcached {self._version} answered {status!r} ({reason}) to a limit of {num_bytes} bytes; {_INSTALL}"
        raise EngineError(message)


class LimitedBlocks:
    """The part of a block pool that the engine may not use, as kvcached keeps it. The face of ``HeldBlocks``."""

    def __init__(self, pool: Any, limiter: KvLimiter, block_bytes: int) -> None:
        """Start with nothing held.

        Args:
            pool: vLLM's block pool, or what kvcached puts in its place.
            limiter: Moves the limit.
            block_bytes: Bytes of a block over all layers.
        """
        self._pool = pool
        self._limiter = limiter
        self._block_bytes = block_bytes
        self.num_held = 0

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool."""
        return int(self._pool.num_gpu_blocks) - 1

    @property
    def num_used(self) -> int:
        """Blocks in use by requests: kvcached counts free blocks within the limit."""
        return max(0, self.num_blocks - self.num_held - int(self._pool.get_num_free_blocks()))

    @property
    def num_bytes_given(self) -> int:
        """Bytes that are not the engine's now."""
        return self.num_held * self._block_bytes

    def resize(self, num_to_hold: int) -> int:
        """Hold ``num_to_hold`` blocks back; returns how many are missing because requests use them."""
        overage = self._limiter.limit((self.num_blocks - num_to_hold) * self._block_bytes)
        num_missing = -(-overage // self._block_bytes)
        self.num_held = num_to_hold - num_missing
        return num_missing

    def settle(self) -> None:
        """Do nothing: kvcached moves pages by itself."""

    def attach(self, hold_pages: Callable[[Any], int], *, group_blocks: int = 1) -> None:
        """Do nothing: there are no pages of the host."""

    def hold_every_page(self) -> None:
        """Set the limit to nothing."""
        self.resize(self.num_blocks)
