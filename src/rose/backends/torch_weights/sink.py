"""The live parameters of one rank of an engine as a ``WeightSink``: writes go in place, through a ``SlicePlan``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import xxhash

from rose.backends.device_codec.pinned import patterns
from rose.backends.device_codec.way import DeviceWay
from rose.backends.torch_weights.slices import SlicePlan
from rose.errors import LayoutMismatchError
from rose.interfaces.trainer import ShardSpec, TensorSpec
from rose.transfer.delta import Bits
from rose.transfer.layout import bits_dtype, whole_box
from rose.transfer.sink import ViewSink


class ParameterSink(ViewSink):
    """Live parameters in this machine's memory.

    Args:
        plan: Where each checkpoint tensor lives.
    """

    def __init__(self, plan: SlicePlan) -> None:
        self._plan = plan

    @classmethod
    def over(cls, plan: SlicePlan) -> ParameterSink:
        """Return the sink for where the parameters are: memory of the machine, or of a device."""
        is_host = all(piece.live.device.type == "cpu" for held in plan.pieces.values() for piece in held)
        return ParameterSink(plan) if is_host else DeviceSink(plan)

    def tensors(self) -> Mapping[str, TensorSpec]:
        """Return every checkpoint tensor that the engine loads from."""
        return self._plan.tensors

    def boxes(self) -> Mapping[str, Sequence[ShardSpec]]:
        """Return the boxes that this rank holds, each once however many copies there are."""
        return {n: tuple(dict.fromkeys(piece.box for piece in held)) for n, held in self._plan.pieces.items() if held}

    def views(self, name: str, box: ShardSpec) -> Sequence[Bits]:
        """Return the live memory of every copy of a box."""
        dtype = bits_dtype(self._plan.tensors[name].dtype)
        return [live.numpy().view(dtype) for live in self.live(name, box)]

    def live(self, name: str, box: ShardSpec) -> list[torch.Tensor]:
        """Return the live views (integer, of the box's shape) of every copy of a box.

        Raises:
            LayoutMismatchError: This worker does not hold the box.
        """
        found = list(self._plan.find(name, box))
        if not found:
            message = f"this rank does not hold {name!r} at {box.offset}+{box.shape}"
            raise LayoutMismatchError(message)
        return found

    def checksums(self) -> dict[str, str]:
        """Return tensor name -> xxh3_128 of its bytes, for the tensors that this rank holds whole."""
        digests = {}
        for name, spec in self._plan.tensors.items():
            box = whole_box(spec.shape)
            if box in self.boxes().get(name, ()):
                digests[name] = xxhash.xxh3_128_hexdigest(np.ascontiguousarray(self.read(name, box)).tobytes())
        return digests


class DeviceSink(ParameterSink):
    """Live parameters in the memory of devices: torch moves what numpy cannot see, on each device one way for all.

    Writes are queued; ``flush`` says when they are done (``rose.transfer.sink.SupportsFlush``).

    Args:
        plan: Where each checkpoint tensor lives.
    """

    def __init__(self, plan: SlicePlan) -> None:
        super().__init__(plan)
        kinds: dict[torch.device, set[torch.dtype]] = {}
        for live in (piece.live for held in plan.pieces.values() for piece in held):
            kinds.setdefault(live.device, set()).add(live.dtype)
        self._ways = {device: DeviceWay(device) for device in kinds}
        for device, way in self._ways.items():
            way.warm_up(kinds[device])

    def write_dense(self, name: str, box: ShardSpec, bits: Bits) -> None:
        """Overwrite a box."""
        for device, lives in self._lives(name, box).items():
            self._ways[device].write_dense(lives, bits)

    def write_sparse(self, name: str, box: ShardSpec, positions: Bits, values: Bits) -> None:
        """Overwrite some elements of a box."""
        for device, lives in self._lives(name, box).items():
            self._ways[device].write_sparse(lives, positions, values)

    def flush(self) -> None:
        """Return once every write so far is in the live weights."""
        for way in self._ways.values():
            way.flush()

    def read(self, name: str, box: ShardSpec) -> Bits:
        """Return a copy of a box; of several live copies, the first."""
        live = self.live(name, box)[0]
        return np.array(patterns(self._ways[live.device].read(live)))

    def gather(self, name: str, box: ShardSpec, positions: Bits) -> Bits:
        """Return some elements of a box; of several live copies, the first."""
        live = self.live(name, box)[0]
        return patterns(self._ways[live.device].gather(live, positions))

    def _lives(self, name: str, box: ShardSpec) -> dict[torch.device, list[torch.Tensor]]:
        found: dict[torch.device, list[torch.Tensor]] = {}
        for live in self.live(name, box):
            found.setdefault(live.device, []).append(live)
        return found
