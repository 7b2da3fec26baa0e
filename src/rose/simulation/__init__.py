"""Workloads and trace readers shared by live replays and the simulator."""
