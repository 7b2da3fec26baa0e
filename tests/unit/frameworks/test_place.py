"""Where the pool is: from a framework's configuration or the environment, and what is said when nobody knows."""

from __future__ import annotations

import asyncio
import hashlib
import http.server
import threading
from pathlib import Path

import pytest

from rose import RolloutPool
from rose.errors import ConfigError, TransportError
from rose.frameworks import PoolPlace
from rose.hosts.http.auth import TokenConfig
from rose.hosts.http.pool_service import PoolService, serve_pool
from rose.testing import FakeEngine

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


def test_where_no_pool_answers_it_says_what_to_do() -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server:
        port = server.server_address[1]
        threading.Thread(target=server.serve_forever, daemon=True).start()  # a service, but of something else
        with pytest.raises(TransportError, match=rf"no pool answers at http://127.0.0.1:{port}.*rose pool job\.toml"):
            PoolPlace(url=f"http://127.0.0.1:{port}").check()
        server.shutdown()
    with pytest.raises(TransportError, match=r"no pool answers at .*Cannot connect.*rose pool job\.toml"):
        PoolPlace(url=f"http://127.0.0.1:{port}").check()


async def test_a_pool_that_lets_nobody_in_without_a_token_says_where_it_goes(tmp_path: Path) -> None:
    tokens = [TokenConfig(name="job", sha256=hashlib.sha256(b"secret").hexdigest())]
    (tmp_path / "token").write_text("secret\n")
    async with RolloutPool([FakeEngine()]) as pool, serve_pool(PoolService(pool, name="p", tokens=tokens)) as url:
        with pytest.raises(
            ConfigError,
            match=rf"{url} does not let this process in .*the file with its token .*, or in ROSE_POOL_TOKEN",
        ):
            await asyncio.to_thread(PoolPlace(url=url).check)
        assert await asyncio.to_thread(PoolPlace.of(url, tmp_path / "token").check)
