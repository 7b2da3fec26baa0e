"""Communicators."""
