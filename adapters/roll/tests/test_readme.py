"""What the README says is so: its configurations are the examples', its messages the code's, its commands run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import rose_roll

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()


def blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", TEXT, flags=re.DOTALL)


@pytest.mark.parametrize(("number", "example"), [(0, "grpo_frozen_lake.yaml"), (1, "dapo_math.yaml")])
def test_the_lines_to_change_are_those_of_the_example(number: int, example: str) -> None:
    whole = yaml.safe_load(_plain((ROOT / "examples" / example).read_text()))
    for path, value in _leaves(yaml.safe_load(blocks("yaml")[number])):
        found: Any = whole
        for key in path:
            found = found[key]
        assert found == value, ".".join(path)


def test_every_class_that_is_named_is_there() -> None:
    named = set(re.findall(r"rose_roll\.(Rose\w+)", TEXT)) | set(re.findall(r"`(Rose\w+)`", TEXT))
    assert named <= set(rose_roll.__all__), named - set(rose_roll.__all__)
    assert set(rose_roll.__all__) - {"RoseOptions"} <= named
    for name in rose_roll.__all__:
        assert getattr(rose_roll, name) is not None


def test_every_option_is_described() -> None:
    from rose_roll.options import RoseOptions

    table = TEXT[TEXT.index("## Options") : TEXT.index("| class | for |")]
    for attribute in RoseOptions.__attrs_attrs__:
        assert f"`{attribute.name}`" in table, attribute.name


def test_what_one_is_told_is_what_the_code_says() -> None:
    code = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    told = TEXT[TEXT.index("you are told |") : TEXT.index("## Versions tested")]
    for phrase in ("there is no top_k; set top_k: -1", "say which; set temperature: 0 for greedy", "a stop string must be one token",
                   "multi_modal_data: a ROSE pool takes token ids only", "asks workers for whole batches; set generate_opt_level: 1",
                   "a front is one process; set tensor_parallel_size: 1", "RoseEnvManager goes with managers that make one",
                   "adapters of LoRA cannot be published shard by shard", "leaves no room in the pool's engines"):  # fmt: skip
        assert phrase in told
        assert phrase in code, phrase


def test_the_first_commands_run() -> None:
    command = next(line for line in blocks("console")[0].splitlines() if "import rose_roll" in line).removeprefix("$ ")
    words = ["bash", "-c", command.replace("python -c", f"{sys.executable} -c", 1)]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == rose_roll.__version__


def test_importing_it_loads_neither_roll_nor_torch() -> None:
    code = "import sys, rose_roll; print(sorted({'roll', 'torch', 'ray'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


@pytest.mark.real
@pytest.mark.parametrize(
    ("example", "config", "defaults"),
    [
        ("grpo_frozen_lake.yaml", "roll.pipeline.agentic.agentic_config.AgenticConfig", "qwen2.5-0.5B-agentic"),
        ("dapo_math.yaml", "roll.pipeline.rlvr.rlvr_config.RLVRConfig", "qwen3-8B-rlvr_fsdp2"),
    ],
)
def test_roll_reads_the_examples(example: str, config: str, defaults: str, tmp_path: Path) -> None:
    """As its start scripts read them: hydra, dacite, and the configuration's own checks; with eight GPUs claimed."""
    source = Path(os.environ["ROLL_SRC"], "examples")
    folder = tmp_path / "examples" / defaults
    folder.mkdir(parents=True)
    (tmp_path / "examples" / "config").symlink_to(source / "config")
    (folder / example).write_text((ROOT / "examples" / example).read_text())
    code = f"""
import sys
sys.path[:0] = [{os.environ["ROLL_SRC"]!r}, {str(ROOT / "tests")!r}]
from roll.platforms import current_platform
type(current_platform).device_count = classmethod(lambda cls: 16)
from dacite import from_dict
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from roll.utils.import_utils import safe_import_class
initialize_config_dir({str(folder)!r}, job_name="app", version_base=None)
cfg = compose(config_name={Path(example).stem!r})
config = from_dict(data_class=safe_import_class({config!r}), data=OmegaConf.to_container(cfg, resolve=True))
assert config.actor_infer.system_envs["ROSE_POOL"] == config.actor_train.system_envs["ROSE_POOL"]
assert safe_import_class(config.actor_train.worker_cls) and safe_import_class(config.actor_infer.worker_cls)
print("READ", config.actor_train.worker_cls)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=tmp_path, check=False
    )
    assert "READ rose_roll." in done.stdout, done.stderr[-2000:]


def _plain(text: str) -> str:
    """Leave out what only hydra reads."""
    return text.replace("    ${custom_env.FrozenLake}", "    {}")


def _leaves(value: Any, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    if isinstance(value, dict) and value:
        return [leaf for key, below in value.items() for leaf in _leaves(below, (*path, key))]
    return [(path, value)]


def test_the_way_without_an_accelerator_is_that_of_the_real_tests() -> None:
    """They run the same script, and make the same policy."""
    (block,) = blocks("sh")
    made, ran = block.splitlines()[1:]
    assert "real_tools.make_policy(pathlib.Path(" in made
    assert "def make_policy(path: Path, " in (ROOT / "tests" / "real_tools.py").read_text()
    script, url, model, steps = ran.split()[1:]
    assert (ROOT / script).name == "real_pipeline.py"
    assert "python tests/real_pipeline.py POOL_URL MODEL [STEPS]" in (ROOT / script).read_text()
    assert (url, model, steps) == ("http://127.0.0.1:7100", "$PWD/policy", "2")
