"""SGLang servers that must not start: wrong settings, and a ledger that is not there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sglang_site import sglang_server

from rose.backends.paced import PacedClock
from rose.coserving.ledger import Ledger
from rose.errors import EngineLostError
from rose.testing.models import make_qwen3

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.timeout(300),
]


def settings_for(root: Path) -> dict[str, Any]:
    device = {
        "kind": "paced",
        "path": str(root / "device"),
        "clock": PacedClock.create(root / "clock").path,
        "profile": "h100:qwen3-8b",
    }
    return {"role": "rollout", "device": device, "ledger": Ledger.create(root / "ledger").path}


@pytest.mark.parametrize(
    ("change", "message"),
    [({"rolle": "rollout"}, "ROSE: .*rolle"), ({"ledger": "/nowhere/ledger"}, "/nowhere/ledger")],
    ids=["settings", "ledger"],
)
async def test_a_server_that_cannot_share_its_device_does_not_start(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    model = make_qwen3(tmp_path / "model", max_positions=1024)
    settings = settings_for(tmp_path) | change
    with pytest.raises(EngineLostError, match=message):
        async with sglang_server(tmp_path, model, settings, "--max-total-tokens", "1024"):
            pass
