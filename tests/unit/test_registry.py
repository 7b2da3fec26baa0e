"""Backends are found by name, and what is missing is said plainly."""

from __future__ import annotations

import json
import textwrap

import pytest

from rose import registry
from rose.errors import BackendUnavailableError, ConfigError
from rose.types import TransportAddress

_BACKENDS = """
from rose.errors import BackendUnavailableError
from rose.interfaces import Transport

class Dict(Transport):
    def __init__(self, *, size: int = 1, name: str = "x"):
        self.size, self.name, self.blobs = size, name, {}
    def put(self, key, payload): self.blobs[key] = payload
    def get(self, key): return self.blobs[key]
    def delete(self, keys): pass
    def read_pointer(self, name): return None
    def compare_and_set(self, name, expected, value): return False
    def address(self): raise NotImplementedError

class NotATransport: pass
"""


@pytest.fixture
def distribution(tmp_path, monkeypatch):
    """Install a distribution that offers some good and some bad transports."""
    info = tmp_path / "strange_store-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: strange-store\nVersion: 1.0\nProvides-Extra: cloud\n")
    (info / "entry_points.txt").write_text(
        textwrap.dedent("""\
        [rose.transports]
        strange = strange_store:Dict
        cloud-fast = strange_store_cloud:Cloud
        other = strange_store_cloud:Cloud
        unavailable = strange_store_says_no:Cloud
        broken = strange_store:Nothing
        buggy = strange_store.missing:Thing
        wrong = strange_store:NotATransport
        """)
    )
    (tmp_path / "strange_store.py").write_text(_BACKENDS)
    (tmp_path / "strange_store_cloud.py").write_text("import a_library_that_is_not_here\n")
    (tmp_path / "strange_store_says_no.py").write_text(
        "from rose.errors import BackendUnavailableError\nraise BackendUnavailableError('no libibverbs1')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    return info


def test_own_backends_are_listed_without_import():
    assert {"vllm", "vllm-inprocess"} <= set(registry.names("serving"))
    assert {"memory", "mooncake"} <= set(registry.names("transports"))


def test_a_backend_of_another_distribution_is_made_by_name(distribution):
    transport = registry.transport("strange", size=3)
    assert (transport.size, transport.name) == (3, "x")


def test_an_address_opens_its_transport(distribution):
    transport = registry.open_transport(TransportAddress(name="strange", options=(("size", 2), ("name", "y"))))
    assert (transport.size, transport.name) == (2, "y")


@pytest.mark.parametrize("is_text", [False, True])
def test_a_printed_address_opens_its_transport(distribution, tmp_path, is_text):
    (tmp_path / "token").write_text("secret\n")
    shown = {"name": "memory", "host": "127.0.0.1", "port": 7001, "token_file": str(tmp_path / "token")}
    transport = registry.open_transport(json.dumps(shown) if is_text else shown)
    options = (("host", "127.0.0.1"), ("port", 7001), ("token", "secret"))
    assert transport.address() == TransportAddress(name="memory", options=options)
    assert "token_file" in shown


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "is no JSON"),
        ("[1]", "it names no transport; it looks like"),
        ({"host": "h"}, "it names no transport"),
        ({"name": 3}, "it names no transport"),
        ({"name": "memory", "host": None}, "host must be text, numbers or booleans"),
        ({"name": "memory", "token_file": "/nowhere/token"}, "cannot read a token from /nowhere/token"),
        ({"name": "memory", "port": 1}, "takes nothing, or local"),
    ],
)
def test_what_is_no_printed_address(text, problem):
    with pytest.raises(ConfigError, match=problem):
        registry.open_transport(text)


def test_unknown_name_lists_what_is_installed(distribution):
    with pytest.raises(
        ConfigError,
        match=r"no transport backend is called 'strang'; did you mean 'strange'\? installed: .*memory, mooncake.*strange",
    ):
        registry.load("transports", "strang")


def test_unknown_role_is_refused():
    with pytest.raises(ConfigError, match="no backend role 'engines'; roles are serving, trainers"):
        registry.load("engines", "vllm")


def test_a_missing_library_names_the_extra(distribution):
    with pytest.raises(
        BackendUnavailableError, match=r"a_library_that_is_not_here.*pip install 'strange-store\[cloud\]'"
    ):
        registry.load("transports", "cloud-fast")


def test_a_missing_library_without_an_extra_names_the_distribution(distribution):
    with pytest.raises(BackendUnavailableError, match="install it beside strange-store"):
        registry.load("transports", "other")


def test_a_backend_may_say_itself_what_it_misses(distribution):
    with pytest.raises(BackendUnavailableError, match="no libibverbs1"):
        registry.load("transports", "unavailable")


def test_a_bug_in_a_backend_is_not_called_a_missing_library(distribution):
    with pytest.raises(ModuleNotFoundError, match="strange_store"):
        registry.load("transports", "buggy")


@pytest.mark.parametrize(("name", "what"), [("broken", "names nothing"), ("wrong", "not a subclass of Transport")])
def test_a_bad_entry_point_is_refused(distribution, name, what):
    with pytest.raises(ConfigError, match=what):
        registry.load("transports", name)


def test_a_name_offered_twice_is_refused(distribution):
    entry_points = distribution / "entry_points.txt"
    entry_points.write_text("[rose.transports]\nmemory = strange_store:Dict\n")
    with pytest.raises(ConfigError, match="offered more than once"):
        registry.load("transports", "memory")


def test_unknown_options_are_refused_with_what_it_takes(distribution):
    with pytest.raises(ConfigError, match=r"'colour'.*it takes \(\*, size: int = 1"):
        registry.transport("strange", colour=1)


def test_a_class_that_is_not_installed_is_named_by_its_module(distribution):
    assert registry.load_class("transports", "strange_store:Dict").__name__ == "Dict"


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("strange_shop:Dict", "cannot import 'strange_shop:Dict'"),
        ("strange_store:Nothing", "names nothing"),
        ("strange_store:NotATransport", "is not a subclass of Transport"),
        ("strange store", "names nothing"),
    ],
)
def test_a_class_that_is_none_of_the_role(distribution, path, problem):
    with pytest.raises(ConfigError, match=problem):
        registry.load_class("transports", path)


def test_a_class_may_lack_its_library(distribution):
    with pytest.raises(BackendUnavailableError, match="a_library_that_is_not_here"):
        registry.load_class("transports", "strange_store_cloud:Cloud")


def test_names_of_other_processes_never_import_a_module(distribution):
    with pytest.raises(ConfigError, match="no transport backend is called 'strange_store:Dict'"):
        registry.open_transport({"name": "strange_store:Dict"})
