"""Where a job's weights go, as the job's pool tells its trainers: the store, and the engines to cut the weights for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import attrs

from rose import checks
from rose.errors import TransportError
from rose.interfaces.trainer import TensorSpec
from rose.registry import read_address
from rose.transfer.engine_tables import table_layout
from rose.transfer.layout import TargetLayout
from rose.types import TransportAddress


@attrs.frozen(kw_only=True)
class TargetShape:
    """How engines of one kind hold the model.

    Attributes:
        engine: Whose rules: ``vllm`` or ``sglang``.
        tp: Ranks of an engine.
        ep: Groups of ranks that share out whole experts.
    """

    engine: str = attrs.field(validator=checks.text("vllm|sglang"))
    tp: int = attrs.field(validator=checks.integer(1))
    ep: int = attrs.field(default=1, validator=checks.integer(1))


@attrs.frozen(kw_only=True)
class StoreOffer:
    """What ``GET /v1/store`` answers.

    Attributes:
        address: The store; trainers must be able to reach it.
        targets: The engines to cut for; without any, cells are the trainer's own shards.
        model: Numbers of the model, as its ``config.json`` has them; needed with targets only.
    """

    address: TransportAddress = attrs.field(repr=False)  # it may hold the store's token
    targets: Sequence[TargetShape] = ()
    model: Mapping[str, Any] = attrs.field(factory=dict, repr=False)

    def layouts(self, tensors: Sequence[TensorSpec]) -> list[TargetLayout]:
        """Return the layouts to cut for.

        Raises:
            LayoutMismatchError: An engine cannot hold the model so, or there is no rule for some names; names them.
        """
        return [
            table_layout(tensors, self.model, engine=shape.engine, tp=shape.tp, ep=shape.ep) for shape in self.targets
        ]

    def to_wire(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "address": {"name": self.address.name, **dict(self.address.options)},
            "targets": [attrs.asdict(shape) for shape in self.targets],
            "model": dict(self.model),
        }

    @classmethod
    def from_wire(cls, data: Any) -> Self:
        """Read plain data back.

        Raises:
            TransportError: It is no offer.
        """
        try:
            if "token_file" in data["address"]:  # a file of the other machine; nothing is read here on its word
                message = "it names a token's file"
                raise ValueError(message)  # noqa: TRY301 - one message for all that is wrong
            targets = tuple(TargetShape(**shape) for shape in data["targets"])
            return cls(address=read_address(data["address"]), targets=targets, model=dict(data["model"]))
        except (TypeError, ValueError, KeyError) as error:
            message = f"the pool answered no offer of a store ({type(error).__name__}: {error}); do both run the same release of rose?"
            raise TransportError(message) from error
