"""FSDP2 as a source of weights. Needs torch (``pip install 'rose-rl[fsdp]'``)."""

from rose.backends.fsdp.bits import bits_of
from rose.backends.fsdp.trainer import FsdpTrainer

__all__ = ["FsdpTrainer", "bits_of"]
