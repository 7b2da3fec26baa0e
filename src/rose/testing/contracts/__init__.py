"""Contract suites: what every backend of a role must do, as tests that a backend's author subclasses.

    class TestMyEngine(EngineContract):
        async def make_engine(self):
            return MyEngine(...)

The suites need pytest; those of asynchronous roles need pytest-asyncio in its ``auto`` mode (or an ``asyncio`` mark on
the subclass). A test's docstring says what to look at when it fails. The engine's suite runs without pytest as well:
``rose.testing.conformance`` does that for ``rose check``.
"""

from __future__ import annotations

import sys

if "pytest" in sys.modules:
    import pytest

    for _module in ("clock", "device", "engine", "streams", "trainer", "transport", "updates"):
        pytest.register_assert_rewrite(f"{__name__}.{_module}")
