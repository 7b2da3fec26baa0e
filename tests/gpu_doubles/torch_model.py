"""A model of one GPU's stream behind doubles with torch's signatures: kernels take time, events note when the stream reaches them."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from gpu_doubles import doubles


class Gpu:
    """Streams that compute in order. ``now_s`` is the host's time, ``busy_until_s`` when the stream is done with what is queued."""

    def __init__(self, num_devices: int = 1) -> None:
        self.num_devices = num_devices
        self.now_s = 100.0
        self.busy_until_s = 0.0
        self.side_until_s = 0.0
        self.priorities: list[int] = []
        self.log: list[str] = []

    def queue(self, kernel_s: float) -> None:
        """[ENGINE] Queue kernels, which start when those before them are done."""
        self.busy_until_s = max(self.busy_until_s, self.now_s) + kernel_s

    def wait_until(self, time_s: float) -> None:
        self.now_s = max(self.now_s, time_s)

    def now(self) -> float:
        return self.now_s

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        torch: Any = ModuleType("torch")
        torch.__version__ = "9.9"
        torch.cuda = self._cuda()
        monkeypatch.setitem(sys.modules, "torch", torch)

    def _cuda(self) -> Any:
        cuda: Any = ModuleType("torch.cuda")
        behaviours = {
            "is_available": lambda: self.num_devices > 0,
            "device_count": lambda: self.num_devices,
            "get_device_name": lambda _: "Double GPU",
            "current_stream": lambda index: f"stream of {index}",
            "set_stream": lambda _: self.log.append("set stream"),
            "synchronize": self._synchronize,
        }
        for name, behaviour in behaviours.items():
            setattr(cuda, name, doubles.function("torch", name, behaviour))
        cuda.Event, cuda.Stream = self._event_class(), self._stream_class()
        return cuda

    def _synchronize(self, index: int) -> None:
        self.wait_until(max(self.busy_until_s, self.side_until_s))
        self.log.append(f"synchronize {index}")

    def _event_class(self) -> type[Any]:
        def new(cls: type[Any], **options: Any) -> Any:
            event = object.__new__(cls)
            event.double_is_timed = options.get("enable_timing", False)
            return event

        def record(event: Any, stream: Any) -> None:
            assert stream == "stream of 0"
            event.double_at_s = max(self.now_s, self.busy_until_s)

        def elapsed_time(event: Any, end_event: Any) -> float:
            assert all((event.double_is_timed, end_event.double_is_timed)), "torch raises for events without timing"
            assert self.now_s >= end_event.double_at_s, "torch raises for events that are not reached"
            return float(end_event.double_at_s - event.double_at_s) * 1e3

        return doubles.make_class(
            "torch",
            "Event",
            {
                "__new__": new,
                "record": record,
                "synchronize": lambda event: self.wait_until(event.double_at_s),
                "elapsed_time": elapsed_time,
            },
        )

    def _stream_class(self) -> type[Any]:
        def new(cls: type[Any], device: int | None = None, priority: int = 0) -> Any:
            self.priorities.append(priority)
            return object.__new__(cls)

        return doubles.make_class("torch", "Stream", {"__new__": new})
