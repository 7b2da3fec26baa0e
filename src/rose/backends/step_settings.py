"""Settings of an engine that takes turns on a device: the table ``rose`` of its options. Imports no engine library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import attrs
from attrs import validators as v

from rose.backends.cuda import CudaDevice
from rose.backends.gang import GangDevice
from rose.backends.host import HostDevice
from rose.backends.paced import PacedClock, PacedDevice
from rose.config import load
from rose.coserving.executor import GovernorConfig
from rose.errors import ConfigError
from rose.policies.admission import AdmissionConfig
from rose.policies.compute import ChunkConfig
from rose.policies.memory import MemoryConfig


@attrs.frozen(kw_only=True)
class DeviceSettings:
    """Which device an engine runs on.

    Attributes:
        kind: ``paced`` (needs ``clock`` and ``profile``), ``host`` or ``cuda``.
        path: The device's file; engines with the same path share the device. A list for an engine over several devices, as many
            as its tensor-parallel ranks.
        clock: The paced clock's file.
        profile: ``gpu:model``, see ``rose.backends.paced.PROFILES``; a first guess of step times on ``cuda``.
        memory: Of ``cuda``: how KV budgets move memory, see ``rose.backends.cuda.CudaDevice``.
        mps_percentage, stream_priority: Of ``cuda``, see there; nothing is set unless they are given.
        tokens_per_token: Modelled tokens that one token of the real engine stands for.
    """

    kind: Literal["paced", "host", "cuda"]
    path: str | tuple[str, ...]
    clock: str | None = None
    profile: str | None = None
    memory: Literal["kvcached", "sleep"] = "sleep"
    mps_percentage: int | None = attrs.field(default=None, validator=v.optional([v.ge(1), v.le(100)]))
    stream_priority: int | None = attrs.field(default=None, validator=v.optional(v.le(0)))
    tokens_per_token: int = attrs.field(default=1, validator=v.ge(1))


@attrs.frozen(kw_only=True)
class RoseSettings:
    """The table ``rose`` of an engine's options (vLLM: ``additional_config``; SGLang: ``ROSE_SGLANG_SETTINGS``, as JSON).

    Attributes:
        role: ``alone``: the device is this engine's; ``serving``: it owns a shared one; ``rollout``: it borrows it.
        device: Without one the engine is not paced, gated or shared; its KV budget can still be set.
        ledger: The shared device's ledger file; a list for an engine over several devices, in the order of their paths.
        admission: The SLO and how it is spent. The mode in force is the lender's, in the ledger.
        memory: How the device's KV memory is shared; without it budgets move only by ``set_kv_budget_tokens``.
        chunk: Bounds of prefill chunks of rollout and dedicated engines.
        timing: Timing of the step loop; the host gap of a paced device comes from its profile.
        log_steps: Keep a log of device turns.
    """

    role: Literal["alone", "serving", "rollout"] = "alone"
    device: DeviceSettings | None = None
    ledger: str | tuple[str, ...] | None = None
    admission: AdmissionConfig = attrs.field(factory=AdmissionConfig)
    memory: MemoryConfig | None = None
    chunk: ChunkConfig = attrs.field(factory=ChunkConfig)
    timing: GovernorConfig = attrs.field(factory=GovernorConfig)
    log_steps: bool = True


def read_settings(table: Mapping[str, Any]) -> RoseSettings:
    """Read the table strictly.

    Raises:
        ConfigError: Unknown keys, wrong types, or parts that do not go together.
    """
    settings = load(RoseSettings, table)
    device = settings.device
    if settings.role != "alone" and (device is None or settings.ledger is None):
        message = f"rose.role = {settings.role!r} shares a device: set rose.device and rose.ledger"
        raise ConfigError(message)
    if device is not None and settings.ledger is not None and len(many(device.path)) != len(many(settings.ledger)):
        message = (
            f"rose.device.path names {len(many(device.path))} devices and rose.ledger {len(many(settings.ledger))} "
            "ledgers; give each device its own ledger"
        )
        raise ConfigError(message)
    if device is not None and device.kind == "cuda" and len(many(device.path)) > 1:
        message = "rose.device: an engine over several CUDA devices cannot be shared yet; name one path"
        raise ConfigError(message)
    if device is not None and device.kind == "paced" and (device.clock is None or device.profile is None):
        message = f"rose.device {device.path} is paced: set rose.device.clock and rose.device.profile"
        raise ConfigError(message)
    return settings


def many(paths: str | Sequence[str]) -> tuple[str, ...]:
    """Return one path or several as a tuple."""
    return (paths,) if isinstance(paths, str) else tuple(paths)


def open_device(settings: DeviceSettings) -> PacedDevice | HostDevice | CudaDevice | GangDevice:
    """Open a device by its settings; a gang where it names several."""
    paths = many(settings.path)
    if settings.kind == "cuda":
        return CudaDevice(
            paths[0],
            memory=settings.memory,
            profile=settings.profile,
            mps_percentage=settings.mps_percentage,
            stream_priority=settings.stream_priority,
        )
    if settings.kind == "host":
        hosts = [HostDevice(path) for path in paths]
        return hosts[0] if len(hosts) == 1 else GangDevice(hosts)
    clock = PacedClock(settings.clock or "")
    paced = [PacedDevice(path, settings.profile or "", clock) for path in paths]
    return paced[0] if len(paced) == 1 else GangDevice(paced)
