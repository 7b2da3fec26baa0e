"""A CPU as a platform of veRL, for tests alone: veRL trains on devices only, and this machine has none.

``VERL_USE_EXTERNAL_MODULES=cpu_platform VERL_PLATFORM=rosecpu VERL_ENGINE_DEVICE=cuda`` puts it in, in every process.
"""

import contextlib
import types

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry

_init_process_group = torch.distributed.init_process_group


def _once_per_device(*args, **kwargs):
    """veRL names the backend of the CPU and that of the device, which here are one; torch takes each device once."""
    if kwargs.get("backend") == "cpu:gloo,cpu:gloo":
        kwargs["backend"] = "cpu:gloo"
    elif args and args[0] == "cpu:gloo,cpu:gloo":
        args = ("cpu:gloo", *args[1:])
    return _init_process_group(*args, **kwargs)


torch.distributed.init_process_group = _once_per_device


class _Device(types.ModuleType):
    """What ``torch.cuda`` is to veRL."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if hasattr(torch.cpu, name):
            return getattr(torch.cpu, name)
        if "memory_allocated" in name or "memory_reserved" in name:
            return lambda *_, **__: 0
        return {
            "mem_get_info": lambda *_, **__: (1 << 34, 1 << 34),
            "get_rng_state": lambda *_, **__: torch.get_rng_state(),
            "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
            "get_device_name": lambda *_, **__: "cpu",
        }.get(name, lambda *_, **__: None)


_device = _Device("rose_test_cpu")
_device.is_available = lambda: True
_device.device_count = lambda: 8
_device.current_device = lambda: "cpu"
_device.set_device = lambda *_, **__: None


@PlatformRegistry.register(platform="rosecpu")
class CpuPlatform(PlatformBase):
    device_name, vendor_name, device_module = "cpu", "rose", _device

    def is_available(self):
        return True

    def current_device(self):
        return "cpu"

    def device_count(self):
        return 8

    def set_device(self, index):
        pass

    def synchronize(self, index=None):
        pass

    def manual_seed(self, seed):
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def set_allocator_settings(self, settings):
        pass

    def empty_cache(self):
        pass

    def get_device_capability(self, index=0):
        return (None, None)

    def communication_backend_name(self):
        return "gloo"

    def visible_devices_envvar(self):
        return "CUDA_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, message):
        yield

    def profiler_start(self):
        pass

    def profiler_stop(self):
        pass

    def ray_resource_name(self):
        return "GPU"

    def ray_noset_envvars(self):
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self):
        return False

    def cudart(self):
        return None
