"""Small things."""

import uuid


def random_uuid() -> str:
    """Return a fresh name."""
    return uuid.uuid4().hex
