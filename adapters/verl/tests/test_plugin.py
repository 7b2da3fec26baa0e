"""What veRL loads: cheap, loud, and no burden on jobs that want something else."""

import subprocess
import sys
import textwrap

import pytest

from rose_verl.plugin import version_problem


def run(code, **env):
    import os

    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
    )


@pytest.mark.parametrize("version", ["0.9.1", "0.9.2", "0.9.1.post1"])
def test_releases_that_are_worked_with(version):
    assert not version_problem(version, {})


@pytest.mark.parametrize("version", ["0.9.0", "0.8.0.dev", "0.10.0", "1.0", ""])
def test_others_are_refused_unless_the_user_insists(version):
    assert "verl==0.9.1" in version_problem(version, {})
    assert not version_problem(version, {"ROSE_VERL_ANY_VERSION": "1"})


def test_the_entry_point_registers_and_import_verl_stays_cheap():
    done = run(
        """
        import sys, verl
        assert "rose_verl.plugin" in sys.modules, "the entry point was not loaded"
        for heavy in ("verl.workers.rollout.replica", "verl.workers.engine", "rose_verl.replica"):
            assert heavy not in sys.modules, heavy
        from verl.workers.rollout.replica import RolloutReplica, get_rollout_replica_class
        from verl.workers.rollout.base import BaseRollout, get_rollout_class
        from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry
        assert issubclass(get_rollout_replica_class("rose"), RolloutReplica)
        assert issubclass(get_rollout_class("rose"), BaseRollout)
        engine = CheckpointEngineRegistry.new("rose", bucket_size=1 << 20, is_master=True)
        assert isinstance(engine, CheckpointEngine)
        assert engine.build_topology(2, 1, [{}] * 3) == ({}, {})
        """
    )
    assert done.returncode == 0, done.stderr
    assert "[rose]" not in done.stderr


def test_fsdp_engines_carry_themselves():
    done = run(
        """
        from verl.workers.engine.base import EngineRegistry
        from verl.workers.engine.fsdp import FSDPEngineWithLMHead
        import os
        from verl.utils.device import get_device_name
        os.environ["VERL_ENGINE_DEVICE"] = "cuda"
        found = EngineRegistry.get_engine_cls("language_model", "fsdp2")
        assert issubclass(found, FSDPEngineWithLMHead) and found.__name__.startswith("Rose"), found
        assert not EngineRegistry.get_engine_cls("value_model", "fsdp2").__name__.startswith("Rose")
        """
    )
    assert done.returncode == 0, done.stderr


def test_a_release_outside_is_told_at_error_and_only_rose_jobs_end():
    done = run(
        """
        import rose_verl.plugin as plugin
        import importlib, verl
        plugin.problems.clear()
        verl.__version__ = "0.10.0"
        importlib.reload(plugin)
        from verl.workers.rollout.replica import get_rollout_replica_class, RolloutReplicaRegistry
        assert "vllm" in RolloutReplicaRegistry._registry
        try:
            get_rollout_replica_class("rose")
        except ValueError as error:
            assert "verl==0.9.1" in str(error), error
        else:
            raise SystemExit("no complaint")
        """
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("[rose] ERROR") == 1
    assert "install verl==0.9.1" in done.stderr


def test_an_installation_that_is_broken_is_told_without_breaking_other_jobs():
    done = run(
        """
        import rose_verl.checkpoint as checkpoint
        def broken(base):
            raise RuntimeError("half installed")
        checkpoint.make_engine_class = broken
        import verl
        from verl.workers.rollout.replica import RolloutReplicaRegistry, get_rollout_replica_class
        import verl.checkpoint_engine
        try:
            get_rollout_replica_class("rose")
        except ValueError as error:
            assert "half installed" in str(error), error
        else:
            raise SystemExit("no complaint")
        """
    )
    assert done.returncode == 0, done.stderr
    assert "half installed" in done.stderr


def test_checkpoint_options_are_pointed_to_their_place():
    from rose.errors import ConfigError
    from rose_verl.checkpoint import refuse_options

    with pytest.raises(ConfigError, match=r"rollout\.engine_kwargs\.rose"):
        refuse_options({"pool": "http://h:1"})
    refuse_options({})
