"""Faults of real engines under recorded trajectories: what a pool gives must be what it gives undisturbed."""
