"""Metrics, timeline and report."""
