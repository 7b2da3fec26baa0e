"""Rollouts on SGLang servers."""
