"""Limits of the KV memory of this process, as kvcached keeps them.

kvcached maps and unmaps pages of the device under an engine's block pool, in the engine's own process. Its control interface takes
a limit over all pools with a revision that only grows, and answers with a status for all pools together.

Invariants: one writer an engine. Every call has a newer revision than any that a pool has seen; one that was overtaken is made
once more, above what overtook it. A version whose source was not read is refused.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from rose.errors import BackendUnavailableError, EngineError

OLDEST = "0.1.6"
"""The first version of kvcached with limits that move while it runs."""

FIRST_UNKNOWN = "0.1.7"
"""The first version whose control interface was not compared with what is assumed here."""

INSTALL = "pip install 'kvcached==0.1.6' and start the engine with ENABLE_KVCACHED=true KVCACHED_AUTOPATCH=1, or give the device memory='sleep'"

_ATTEMPTS = 2


@attrs.frozen(kw_only=True)
class KvAnswer:
    """What became of a limit.

    Attributes:
        is_applied: The capacity is the limit now; otherwise it becomes it when enough pages are free.
        effective_bytes: The limit in whole pages.
    """

    is_applied: bool
    effective_bytes: int


class KvLimiter:
    """Sets the memory limit of this process's KV pools."""

    def __init__(
        self, set_limit: Callable[..., Mapping[str, Any]], list_pools: Callable[[], list[tuple[Any, Any]]], version: str
    ) -> None:
        """Wrap kvcached's functions; see ``open``.

        Args:
            set_limit: ``kvcached.control.set_instance_memory_limit``.
            list_pools: ``kvcached.pool_registry.get_registered_kv_cache_pools``.
            version: Of kvcached.
        """
        self._set_limit = set_limit
        self._list_pools = list_pools
        self._version = version
        self._revision: int | None = None

    @classmethod
    def open(cls) -> KvLimiter:
        """Find kvcached.

        Raises:
            BackendUnavailableError: It is not installed, or too old or too new; says what to do.
        """
        try:
            version = importlib.metadata.version("kvcached")
            control = importlib.import_module("kvcached.control")
            registry = importlib.import_module("kvcached.pool_registry")
        except (ImportError, importlib.metadata.PackageNotFoundError) as error:
            message = f"KV memory of a GPU moves by kvcached, which does not import here ({error}); {INSTALL}"
            raise BackendUnavailableError(message) from error
        set_limit: Any = getattr(control, "set_instance_memory_limit", None)
        _check_version(version, set_limit)
        return cls(set_limit, registry.get_registered_kv_cache_pools, version)

    def limit(self, num_bytes: int) -> KvAnswer:
        """Set the limit of the KV memory over all pools and layers.

        Raises:
            EngineError: kvcached has no pool here or refused, or another writer sets limits of this engine.
        """
        if self._revision is None:
            self._revision = max(
                (int(pool.memory_limit_state()["revision"]) for pool, _ in self._list_pools()), default=0
            )
        answer: Mapping[str, Any] = {}
        for _ in range(_ATTEMPTS):
            answer = self._ask(num_bytes)
            if answer["status"] in {"applied", "deferred"}:
                return KvAnswer(
                    is_applied=answer["status"] == "applied",
                    effective_bytes=int(answer["effective_limit_bytes"]),
                )
            if answer["status"] != "stale":
                break
            self._revision = max(int(pool["revision"]) for pool in answer["pools"])
        raise EngineError(self._refusal(answer, num_bytes))

    def _ask(self, num_bytes: int) -> Mapping[str, Any]:
        self._revision = max(self._revision or 0, 0) + 1
        try:
            return self._set_limit(num_bytes, revision=self._revision)
        except (ValueError, RuntimeError, AssertionError) as error:  # QuarantinedResizeError is a ValueError
            message = (
                f"kvcached {self._version} failed at a limit of {num_bytes} bytes: {type(error).__name__}: {error}"
            )
            raise EngineError(message) from error

    def _refusal(self, answer: Mapping[str, Any], num_bytes: int) -> str:
        status, reason = answer["status"], answer.get("reason") or "no reason given"
        what = f"kvcached {self._version} answered {status!r} ({reason}) to a limit of {num_bytes} bytes"
        if status in {"stale", "conflict"}:
            others = {(int(pool["revision"]), int(pool["limit_bytes"] or 0)) for pool in answer["pools"]}
            newest, limit = max(others)
            return (
                f"{what} at revision {self._revision}: another writer set {limit} bytes at revision {newest}. "
                "ROSE must be the only one that sets limits of an engine; stop the other one"
            )
        if status == "rejected":
            return f"{what}: pages of a failed mapping block the pool; restart the engine"
        return f"{what}; {INSTALL}"


def check_adapter(vllm_version: str) -> None:
    """Look whether the installed kvcached can run under this version of vLLM.

    Raises:
        BackendUnavailableError: It has no adapter: it would end the engine's start, or leave vLLM's own pool in place. Or it is not there.
    """
    try:
        adapted = importlib.import_module("kvcached.integration.vllm.patches").VLLM_MRV2_RANGE
        versions = importlib.import_module("kvcached.integration.version_utils")
    except (ImportError, AttributeError) as error:
        message = f"KV memory of a GPU moves by kvcached, whose adapters are not where they were ({error}); {INSTALL}"
        raise BackendUnavailableError(message) from error
    if not versions.VersionRange(adapted).contains(vllm_version):
        message = (
            f"kvcached {importlib.metadata.version('kvcached')} has no adapter for vLLM {vllm_version} (it has one for {adapted}); "
            "give the device memory='sleep', or take versions that go together"
        )
        raise BackendUnavailableError(message)


def _check_version(version: str, set_limit: Any) -> None:
    if _numbers(version) >= _numbers(FIRST_UNKNOWN):
        message = (
            f"kvcached {version} is newer than what ROSE knows ({OLDEST} up to but not {FIRST_UNKNOWN}), and its limits may mean "
            f"something else; {INSTALL}"
        )
        raise BackendUnavailableError(message)
    if set_limit is None or _numbers(version) < _numbers(OLDEST):
        message = f"kvcached {version} is too old: limits move while it runs from {OLDEST} on; {INSTALL}"
        raise BackendUnavailableError(message)
    names = list(inspect.signature(set_limit).parameters)
    if names != ["limit_bytes", "revision"]:
        message = f"kvcached {version} takes {', '.join(names)} where limit_bytes, revision were expected; {INSTALL}"
        raise BackendUnavailableError(message)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])
