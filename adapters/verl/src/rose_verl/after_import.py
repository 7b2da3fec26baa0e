"""Do something once a module has been imported, without importing it oneself.

veRL loads its plug-ins in every process of a job, at the end of ``import verl``. Most of these processes need no registry of rollouts,
and none may pay for one; so the plug-in waits until veRL imports a registry by itself.

Invariants: an action runs once, right after the module's code and before whoever imported it goes on; an action that raises fails
nobody's import: its error is handed to ``on_error``.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from types import ModuleType

Action = Callable[[ModuleType], None]
OnError = Callable[[str, Exception], None]


def after_import(actions: Mapping[str, Action], on_error: OnError) -> None:
    """Run each action after the module of its name was imported; at once where that has happened.

    Args:
        actions: By full name of the module.
        on_error: Gets the module's name and what its action raised.
    """
    waiting: dict[str, Action] = {}
    for name, action in actions.items():
        module = sys.modules.get(name)
        if module is None or getattr(getattr(module, "__spec__", None), "_initializing", False):
            waiting[name] = action
        else:
            _run(name, action, module, on_error)
    if waiting:
        sys.meta_path.insert(0, _Watcher(waiting, on_error))


def _run(name: str, action: Action, module: ModuleType, on_error: OnError) -> None:
    try:
        action(module)
    except Exception as error:  # noqa: BLE001 - another package's import must not fail for it
        on_error(name, error)


class _Watcher(MetaPathFinder):
    """Finds nothing itself: it asks the other finders, and has their loader call back."""

    def __init__(self, actions: dict[str, Action], on_error: OnError) -> None:
        self._actions, self._on_error = actions, on_error

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of a module that is waited for, with a loader that calls back; ``None`` for all others."""
        if fullname not in self._actions:
            return None
        action = self._actions.pop(fullname)
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec = None if find is None else find(fullname, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _CallingBack(spec.loader, lambda module: _run(fullname, action, module, self._on_error))
                return spec  # type: ignore[no-any-return] # getattr hides the finder's type
        self._actions[fullname] = action  # nobody has it, for now
        return None


class _CallingBack(Loader):
    """Another loader, with something to do behind it."""

    def __init__(self, loader: Loader, then: Action) -> None:
        self._loader, self._then = loader, then

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """Make the module as the loader does."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Run its code, give it its own loader back, then call."""
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._then(module)
