"""New weights of an SGLang server, as its engine sees them. What carries them is ``rose.backends.sglang.updates``."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from rose.backends.sglang.client import SglangClient
from rose.errors import EngineUnsupportedError
from rose.transfer.kernels import Sum
from rose.transfer.layout import TargetLayout
from rose.types import Activation, WeightUpdate, WeightVersion

_UPDATES = "rose.backends.sglang.updates"


class UpdateState(Protocol):
    """Where a server's weights are."""

    @property
    def version(self) -> WeightVersion | None:
        """Return their version, ``None`` when they are none."""

    @property
    def is_fenced(self) -> bool:
        """Return whether they are not known to be any version."""


class WeightUpdates(Protocol):
    """Updates of one server. ``begin`` comes first; it is harmless on a server that was begun with."""

    async def begin(self, version_label: str | None) -> UpdateState:
        """Prepare the server; the label is the version that the loaded checkpoint is, if it is one.

        Raises:
            EngineUnsupportedError: The server has no ROSE package.
        """

    async def stage(self, update: WeightUpdate) -> None:
        """Fetch, verify and decode an update while the server generates."""

    async def activate(self) -> Activation:
        """Write the staged update and set the server's label to its version."""

    async def state(self) -> UpdateState:
        """Return where the weights are, over all ranks."""

    async def fence(self) -> None:
        """Let the weights count as lost."""

    async def target_layout(self) -> TargetLayout:
        """Return what each rank holds."""

    async def weight_sums(self) -> Mapping[str, Sum]:
        """Return the sum of every checkpoint tensor over all ranks."""

    async def weight_checksums(self) -> Mapping[str, str]:
        """Return checkpoint tensor name -> xxh3_128 of its bytes."""

    async def server_checksums(self) -> Sequence[Mapping[str, str]]:
        """Return SGLang's own digests of the live parameters, one mapping a rank."""


class PatientHttp:
    """The server's routes for updates, which may wait for the model.

    Args:
        client: The connections.
        timeout_s: How long one call may take.
    """

    def __init__(self, client: SglangClient, timeout_s: float) -> None:
        self._client, self._timeout_s = client, timeout_s

    async def post(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Send a command; see ``SglangClient.post``."""
        return await self._client.post(path, body, timeout_s=self._timeout_s)

    async def get(self, path: str) -> Mapping[str, Any]:
        """Read something; see ``SglangClient.post``."""
        return await self._client.get(path, timeout_s=self._timeout_s)


def open_updates(http: PatientHttp, num_ranks: int) -> WeightUpdates:
    """Return what carries updates to a server of so many ranks.

    Raises:
        EngineUnsupportedError: This installation of ROSE has none.
    """
    try:
        module = importlib.import_module(_UPDATES)
    except ModuleNotFoundError as error:
        if error.name != _UPDATES:
            raise
        message = "this installation of ROSE cannot update SGLang servers; install a complete one"
        raise EngineUnsupportedError(message) from error
    updates: WeightUpdates = module.SglangUpdates(http, num_ranks)
    return updates
