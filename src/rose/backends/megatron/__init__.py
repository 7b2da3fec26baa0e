"""Megatron-Core as a source of weights. Needs torch and megatron-core (``pip install 'rose-rl[megatron]'``)."""

from rose.backends.megatron.trainer import MegatronTrainer

__all__ = ["MegatronTrainer"]
