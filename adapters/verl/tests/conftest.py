"""Helpers lie beside the tests."""

import logging
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def told():
    """What the user is told meanwhile: levels and texts."""
    from rose_verl.say import logger

    found = []

    class Listening(logging.Handler):
        def emit(self, record):
            found.append((record.levelname, record.getMessage()))

    listening = Listening()
    logger().addHandler(listening)
    yield found
    logger().removeHandler(listening)
