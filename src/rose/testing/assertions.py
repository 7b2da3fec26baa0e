"""What a plain assertion that failed says, without pytest's rewriting: its source, and the values that it compared."""

from __future__ import annotations

import ast
import linecache
import reprlib
import traceback
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

_SIGNS: Mapping[type[ast.cmpop], str] = {
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Is: "is",
    ast.IsNot: "is not",
}
_MAX_LINES = 4
_TESTS = "contracts"


def told(error: AssertionError) -> str:
    """Return what an assertion says: its message, its source and the two values that it compared, as far as there are any."""
    frames = list(traceback.walk_tb(error.__traceback__))
    frame, line = frames[-1]
    text = "".join(linecache.getlines(frame.f_code.co_filename)[line - 1 : line - 1 + _MAX_LINES])
    found = _assertion(text)
    parts = [str(error)] if error.args else []
    if found is not None:
        parts.append(ast.unparse(found))
        values = _values(found, frame.f_globals, frame.f_locals)
        parts += [values] if values else []
    return "; ".join(parts) or type(error).__name__


def _assertion(text: str) -> ast.expr | None:
    """Return the condition of the assertion that begins a text, over as many lines as it has."""
    lines = text.splitlines()
    for num_lines in range(1, len(lines) + 1):
        with suppress(SyntaxError):
            tree = ast.parse("\n".join(lines[:num_lines]).strip())
            if tree.body and isinstance(tree.body[0], ast.Assert):
                return tree.body[0].test
    return None


def _values(condition: ast.expr, names: Mapping[str, Any], local: Mapping[str, Any]) -> str:
    """Return what the two sides of a comparison were, seen again; nothing where that would not be the same."""
    if not isinstance(condition, ast.Compare) or any(isinstance(node, ast.Await) for node in ast.walk(condition)):
        return ""
    sides = [condition.left, *condition.comparators]
    try:
        shown = [reprlib.repr(eval(ast.unparse(side), {**names, **local})) for side in sides]  # noqa: S307 - our own source
    except Exception:  # noqa: BLE001 - a value that cannot be seen again is no finding
        return ""
    signs = [_SIGNS.get(type(sign), "against") for sign in condition.ops]
    return " ".join([shown[0], *(part for pair in zip(signs, shown[1:], strict=True) for part in pair)])


def waited_at(error: BaseException) -> str:
    """Return the line of a contract's own source at which what became a timeout was cancelled."""
    cause: BaseException | None = error
    found = "a place outside the contract"
    while cause is not None:
        frames = [frame for frame in traceback.extract_tb(cause.__traceback__) if _TESTS in frame.filename]
        found = frames[-1].line or frames[-1].name if frames else found
        cause = cause.__cause__ or cause.__context__
    return found
