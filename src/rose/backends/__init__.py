"""Backends by name; found only through entry points."""
