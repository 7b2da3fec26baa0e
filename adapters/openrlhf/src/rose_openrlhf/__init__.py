"""OpenRLHF with its rollouts on a ROSE pool: ``python -m rose_openrlhf`` in place of ``python -m openrlhf.cli.train_ppo_ray``."""

__version__ = "0.1.0"
