"""What stands in for vLLM and flash_attn, in processes as Ray's workers are."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest


def python(code, **variables):
    environment = {**os.environ, **variables}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_names_that_openrlhf_imports_are_there():
    assert "vllm" == python("""
        from rose_openrlhf import workers
        assert workers.set_up().vllm and workers.set_up().vllm  # twice
        import pickle, vllm
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt
        from vllm.utils import random_uuid
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
        from vllm.distributed.utils import StatelessProcessGroup
        assert pickle.loads(pickle.dumps(SamplingParams(max_tokens=None, min_tokens=1))).min_tokens == 1
        assert TokensPrompt(prompt_token_ids=[1])["prompt_token_ids"] == [1]
        assert random_uuid() != random_uuid()
        print(SamplingParams.__module__)
    """)


def test_other_names_say_why_they_are_missing():
    assert "vLLM is not installed here" in python("""
        from rose_openrlhf import workers
        workers.set_up()
        import vllm
        try:
            vllm.LLM
        except AttributeError as error:
            print(error)
    """)


@pytest.fixture
def installed(tmp_path: Path):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").write_text("IS_STAND_IN = False\n")
    return str(tmp_path)


def test_an_installed_vllm_goes_first_unless_the_stand_in_is_asked_for(installed):
    code = """
        from rose_openrlhf import workers
        setup = workers.set_up()
        import vllm
        print(setup.vllm, vllm.IS_STAND_IN)
    """
    assert python(code, PYTHONPATH=installed) == "False False"
    assert python(code, PYTHONPATH=installed, ROSE_OPENRLHF_VLLM="stand-in") == "True True"


def test_flash_attn_is_there_for_the_one_module_that_needs_it():
    said = python("""
        import importlib.util, sys
        from rose_openrlhf import workers
        assert workers.set_up().flash_attn
        from openrlhf.models import ring_attn_utils
        assert importlib.util.find_spec("flash_attn") is None and "flash_attn" not in sys.modules
        assert ring_attn_utils.rearrange is not None
        try:
            ring_attn_utils.unpad_input(1, 2)
        except RuntimeError as error:
            print(error)
    """)
    assert "flash_attn.bert_padding.unpad_input was called" in said
