"""An export over the checkpoint that its configuration comes from."""

from __future__ import annotations

import pytest

from rose.backends.memory import MemoryTransport
from rose.errors import ConfigError
from rose.transfer.export import export_version


def test_the_checkpoint_itself_is_no_place_for_an_export(tmp_path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="choose another one"):
        export_version(MemoryTransport(), tmp_path, config_from=tmp_path / "." / "")
    assert (tmp_path / "config.json").read_text() == "{}"
