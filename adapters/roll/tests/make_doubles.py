"""Writes interface doubles of ROLL from a checkout: names, signatures and fields, read by ``ast``; no body is taken over.

    python tests/make_doubles.py ROLL_SRC [FOLDER] [--commit HASH]

Every function of a double raises ``NotImplementedError``; ``tests/behaviours.py`` gives some of them a behaviour of ours. Where
``ROLL_SRC`` is set a test compares the doubles with that checkout.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

COMMIT = "8eb27cc2dc34c4d1310b169d9b86d339004d811a"

# module -> names that the adapter stands on, or that tests compare with
WANTED: Mapping[str, Sequence[str]] = {
    "roll.configs.generating_args": ["GeneratingArguments"],
    "roll.configs.worker_config": ["WorkerConfig", "StrategyArguments"],
    "roll.distributed.executor.worker": ["RankInfo", "Worker"],
    "roll.distributed.scheduler.decorator": ["Dispatch", "register"],
    "roll.distributed.scheduler.generate_scheduler": ["DynamicSamplingScheduler", "RolloutContext"],
    "roll.distributed.scheduler.protocol": ["DataProto"],
    "roll.distributed.scheduler.router": ["EnvAffinityRouter", "PromptAffinityRouter", "Router", "RouterClient", "RouterManager"],
    "roll.distributed.scheduler.user_defined_rollout_loop": ["UserDefinedRolloutLoop"],
    "roll.models.model_providers": ["default_tokenizer_provider"],
    "roll.pipeline.agentic.agentic_actor_pg_worker": ["ActorWorker"],
    "roll.pipeline.agentic.agentic_actor_worker": ["ActorWorker"],
    "roll.pipeline.agentic.agentic_config": ["LLMProxyConfig"],
    "roll.pipeline.agentic.env_manager.base_env_manager": ["BaseEnvManager", "RolloutCache"],
    "roll.pipeline.agentic.env_manager.traj_env_manager": ["TrajEnvManager"],
    "roll.pipeline.agentic.llm_proxy.base_llm_proxy": ["BaseLLMProxy", "register_llm_proxy"],
    "roll.pipeline.base_worker": ["ActorWorker", "InferWorker"],
    "roll.pipeline.rlvr.actor_pg_worker": ["ActorPGWorker"],
    "roll.pipeline.rlvr.actor_worker": ["ActorWorker"],
    "roll.utils.collective.collective": ["broadcast", "init_collective_group"],
    "roll.utils.constants": ["GenerateStopReason"],
    "roll.utils.context_managers": ["state_offload_manger"],
    "roll.utils.cuda_ipc_utils": ["MultiprocessingSerializer"],
    "roll.utils.import_utils": ["safe_import_class"],
    "roll.utils.offload_states": ["OffloadStateType"],
    "roll.utils.send_recv_utils": ["monkey_patch_torch_reductions", "named_tensors_from_bucket"],
}  # fmt: skip
# packages that hand out names of a module below them
RE_EXPORTS: Mapping[str, str] = {
    "roll.pipeline.agentic.llm_proxy": "from roll.pipeline.agentic.llm_proxy.base_llm_proxy import BaseLLMProxy, register_llm_proxy",
    "roll.platforms": "current_platform = None",
    "roll.utils.collective": "",
}
# base classes whose doubles are there; others are left out
_BASES = {
    ("roll.pipeline.base_worker", "Worker"): "roll.distributed.executor.worker",
    ("roll.pipeline.agentic.env_manager.traj_env_manager", "BaseEnvManager"): "roll.pipeline.agentic.env_manager.base_env_manager",
    ("roll.pipeline.rlvr.actor_pg_worker", "ActorWorker"): "roll.pipeline.rlvr.actor_worker",
}  # fmt: skip


def make_doubles(source: Path, commit: str = COMMIT) -> dict[str, str]:
    """Return the text of each file, by its path."""
    files = {}
    for module, names in WANTED.items():
        path = source / Path(*module.split(".")).with_suffix(".py")
        files[_file(module)] = _header(commit) + "".join(_module(module, path, names))
    for package in sorted({*RE_EXPORTS, *_packages(WANTED)}):
        text = RE_EXPORTS.get(package, "")
        files[_file(package, is_package=True)] = _header(commit) + (f"\n{text}\n" if text else "")
    return files


def _module(module: str, path: Path, names: Sequence[str]) -> Iterator[str]:
    found = {node.name: node for node in ast.parse(path.read_text()).body if hasattr(node, "name")}
    missing = [name for name in names if name not in found]
    if missing:
        message = f"{path} has no {', '.join(missing)}; is this another release of ROLL?"
        raise SystemExit(message)
    bases = {base: home for (where, base), home in _BASES.items() if where == module}
    yield "".join(f"\nfrom {home} import {base}" for base, home in bases.items()) + ("\n" if bases else "")
    for name in names:
        node = found[name]
        yield f"\n\n{_class(node, bases) if isinstance(node, ast.ClassDef) else _function(node, '')}"


def _class(node: ast.ClassDef, bases: Mapping[str, str]) -> str:
    own = [base.id for base in node.bases if isinstance(base, ast.Name) and base.id in bases]
    if any((isinstance(base, ast.Name) and "Enum" in base.id) or _name(base) == "enum.Enum" for base in node.bases):
        members = [target.id for item in node.body if isinstance(item, ast.Assign) for target in item.targets]
        return f"import enum\n\n\nclass {node.name}(enum.Enum):\n" + "".join(
            f"    {one} = {one!r}\n" for one in members
        )
    lines = [_field(item) for item in node.body if isinstance(item, ast.AnnAssign)]
    lines += [_function(item, "    ") for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)]
    head = f"class {node.name}({', '.join(own)}):\n" if own else f"class {node.name}:\n"
    return head + ("\n".join(lines).rstrip() + "\n" if lines else "    pass\n")


def _field(item: ast.AnnAssign) -> str:
    """Return a dataclass's field with its default, where that is plain."""
    default = item.value
    if isinstance(default, ast.Call) and _name(default.func) == "field":
        default = next((one.value for one in default.keywords if one.arg == "default"), None)
    return f"    {ast.unparse(item.target)} = {ast.unparse(default) if isinstance(default, ast.Constant) else None}"


def _function(node: ast.FunctionDef | ast.AsyncFunctionDef, indent: str) -> str:
    arguments = node.args
    for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg):
        if one is not None:
            one.annotation = None
    arguments.defaults = [_plain(one) for one in arguments.defaults]
    arguments.kw_defaults = [None if one is None else _plain(one) for one in arguments.kw_defaults]
    decorators = [_name(one) for one in node.decorator_list]
    kept = [one for one in decorators if one in {"property", "staticmethod", "classmethod"} or one.endswith(".setter")]
    lines = [f"@{one}" for one in kept]
    prefix = "async " if isinstance(node, ast.AsyncFunctionDef) else ""
    lines += [f"{prefix}def {node.name}({ast.unparse(arguments)}):", f"    raise NotImplementedError({node.name!r})"]
    return "".join(f"{indent}{line}\n" for line in lines)


def _plain(default: ast.expr) -> ast.expr:
    return default if isinstance(default, ast.Constant) else ast.Constant(value=None)


def _name(node: ast.expr) -> str:
    return ast.unparse(node.func if isinstance(node, ast.Call) else node)


def _packages(modules: Mapping[str, object]) -> Iterator[str]:
    for module in modules:
        parts = module.split(".")
        yield from (".".join(parts[:end]) for end in range(1, len(parts)))


def _file(module: str, *, is_package: bool = False) -> str:
    path = module.replace(".", "/")
    return f"{path}/__init__.py" if is_package else f"{path}.py"


def _header(commit: str) -> str:
    return f'"""Double: signatures and field names of ROLL at {commit[:12]}, by tests/make_doubles.py. Do not edit."""\n# ruff: noqa\n# fmt: off\n# mypy: ignore-errors\n'


def main() -> None:
    """Write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("folder", type=Path, nargs="?", default=Path(__file__).parent / "doubles")
    parser.add_argument("--commit", default=COMMIT)
    arguments = parser.parse_args()
    for name, text in make_doubles(arguments.source, arguments.commit).items():
        path = arguments.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


if __name__ == "__main__":
    main()
