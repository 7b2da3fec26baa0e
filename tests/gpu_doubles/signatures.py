"""Reads signatures out of a library's source text, without importing it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gpu_doubles.touched import TOUCHED, Source

MISSING = "missing"
ATTRIBUTE = "attribute"
PROPERTY = "property"
BOUND = "bound"


def read_library(name: str, package: Path) -> dict[str, Any]:
    """Return what is recorded of a library: every name that is used, with its parameters or its value."""
    recorded: dict[str, Any] = {}
    for source in TOUCHED[name]:
        path = package / source.path
        text = path.read_text() if path.is_file() else ""
        recorded[source.path] = _read(source, text)
    return recorded


def differences(recorded: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """Return one line for each name that is not what was recorded."""
    ours, theirs = dict(_flat(recorded)), dict(_flat(found))
    return [
        f"{name}: recorded {ours.get(name, 'nothing')!r}, found {theirs.get(name, 'nothing')!r}"
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name) != theirs.get(name)
    ]


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key} ")
        else:
            yield f"{prefix}{key}", value


def _read(source: Source, text: str) -> dict[str, Any]:
    recorded: dict[str, Any] = {}
    if source.bindings:
        for cls, names in source.bindings.items():
            bound = _bound_names(text, cls)
            recorded[cls] = {name: BOUND if name in bound else MISSING for name in names}
        return recorded
    tree = ast.parse(text)
    for name in source.functions:
        functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
        recorded[name] = _parameters(functions[0]) if functions else MISSING
    for name in source.constants:
        recorded[name] = _constant(tree, name)
    for cls, members in source.classes.items():
        nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == cls]
        recorded[cls] = {member: _member(nodes[0], member) if nodes else MISSING for member in members}
    if source.has_statuses:
        recorded["statuses"] = sorted(_statuses(tree))
        recorded["answer keys"] = sorted(_answer_keys(tree))
    return recorded


def _member(cls: ast.ClassDef, name: str) -> Any:
    for node in cls.body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            is_property = any(isinstance(each, ast.Name) and each.id == "property" for each in node.decorator_list)
            return PROPERTY if is_property else _parameters(node)
        if isinstance(node, ast.AnnAssign | ast.Assign) and name in _targets(node):
            return ATTRIBUTE
    inits = [node for node in cls.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
    is_set = any(f"self.{name}" in _targets(node) for init in inits for node in ast.walk(init))
    return ATTRIBUTE if is_set else MISSING


def _targets(node: ast.AST) -> set[str]:
    if isinstance(node, ast.Assign):
        return {ast.unparse(target) for target in node.targets}
    return {ast.unparse(node.target)} if isinstance(node, ast.AnnAssign) else set()


def _parameters(node: ast.FunctionDef) -> list[str]:
    """Return the parameters in order: ``name``, ``name=`` with a default, ``*``, ``*args``, ``**kwargs``."""
    args = node.args
    positional = [*args.posonlyargs, *args.args]
    num_required = len(positional) - len(args.defaults)
    names = [arg.arg + ("=" if i >= num_required else "") for i, arg in enumerate(positional)]
    if args.vararg or args.kwonlyargs:
        names.append("*" + (args.vararg.arg if args.vararg else ""))
    pairs = zip(args.kwonlyargs, args.kw_defaults, strict=True)
    names += [arg.arg + ("" if default is None else "=") for arg, default in pairs]
    return names + ([f"**{args.kwarg.arg}"] if args.kwarg else [])


def _constant(tree: ast.Module, name: str) -> str:
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and name in _targets(node) and node.value is not None:
            return ast.unparse(node.value)
    return MISSING


def _statuses(tree: ast.AST) -> set[str]:
    """Return every word that is given as a status."""
    words: set[str] = set()
    for node in ast.walk(tree):
        if (isinstance(node, ast.Assign) and "status" in _targets(node)) or (
            isinstance(node, ast.keyword) and node.arg == "status"
        ):
            words |= _words(node.value)
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and key.value == "status":
                    words |= _words(value)
    return words


def _words(node: ast.expr) -> set[str]:
    if isinstance(node, ast.IfExp):
        return _words(node.body) | _words(node.orelse)
    return {node.value} if isinstance(node, ast.Constant) and isinstance(node.value, str) else set()


def _answer_keys(tree: ast.AST) -> set[str]:
    """Return the keys of the answers that have a status."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            keys = {key.value for key in node.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)}
            found |= keys if "status" in keys else set()
    return found


def _bound_names(text: str, cls: str) -> set[str]:
    """Return the names that pybind11 gives to a class."""
    start = re.search(rf'py::class_<[^;]*?>\s*\(\s*m,\s*"{cls}"', text)
    if start is None:
        return set()
    end = text.find("py::class_<", start.end())
    return set(re.findall(r'\.def(?:_static|_readonly|_property_readonly)?\(\s*"(\w+)"', text[start.end() : end]))
