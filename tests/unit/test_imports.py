"""Importing ROSE stays light, and every public name is there."""

from __future__ import annotations

import subprocess
import sys

import pytest

import rose
import rose.testing

HEAVY = ("torch", "vllm", "ray", "sglang", "mooncake", "transformers", "matplotlib", "gymnasium", "megatron", "pytest")
LIGHT = (
    "rose",
    "rose.config",
    "rose.registry",
    "rose.clocks",
    "rose.interfaces",
    "rose.policies",
    "rose.transfer",
    "rose.coserving",
    "rose.pool",
    "rose.testing",
    "rose.backends.memory",
)


def test_nothing_heavy_is_imported():
    code = (
        "import sys, importlib\n"
        f"for name in {LIGHT!r}: importlib.import_module(name)\n"
        "import rose\n"
        "for name in rose.__all__: getattr(rose, name)\n"
        f"loaded = [name for name in {HEAVY!r} if name in sys.modules]\n"
        "assert not loaded, loaded\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("module", [rose, rose.testing], ids=lambda module: module.__name__)
def test_every_public_name_exists(module):
    for name in module.__all__:
        assert getattr(module, name) is not None, name
    with pytest.raises(AttributeError, match=f"module '{module.__name__}' has no attribute 'nothing'"):
        module.nothing  # noqa: B018 - the lookup is what is tested
