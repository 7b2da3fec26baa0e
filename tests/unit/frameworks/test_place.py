"""Where the pool is: from a framework's configuration or the environment, and what is said when nobody knows."""

from __future__ import annotations

from pathlib import Path

import pytest

from rose.errors import ConfigError
from rose.frameworks import PoolPlace

URL = "http://127.0.0.1:7100"


def test_the_configuration_goes_before_the_environment(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret\n")
    environ = {"ROSE_POOL": "http://other:1", "ROSE_POOL_TOKEN_FILE": str(tmp_path / "token")}
    assert PoolPlace.of(URL + "/", environ=environ) == PoolPlace(url=URL, token="secret")  # noqa: S106
    assert PoolPlace.of(environ=environ).url == "http://other:1"
    assert PoolPlace.of("", environ=environ).url == "http://other:1"
    assert PoolPlace.of(URL, environ={}).token is None
    assert "secret" not in repr(PoolPlace.of(URL, environ=environ))


def test_complaints_name_the_option_of_the_framework(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"set --rose\.pool to the address that `rose pool job\.toml` prints.*ROSE_POOL"
    ):
        PoolPlace.of(environ={}, option="--rose.pool")
    with pytest.raises(ConfigError, match="ROSE_POOL = 'localhost:7100' is no address of a pool"):
        PoolPlace.of(environ={"ROSE_POOL": "localhost:7100"})
    with pytest.raises(ConfigError, match="cannot read a token from"):
        PoolPlace.of(URL, tmp_path / "none", environ={})
