"""What adapters to RL frameworks stand on: where the pool is, and the way of a trainer's weights to it.

A framework's processes need one thing of the user, the address of a pool (``rose pool job.toml``). Turns go to
``PoolPlace.connect()``, or over a ``HeldPool``, under a ``WeightsWatch``; each trainer rank has a ``WeightPush``.
"""

from rose.backends.sharded import ShardedTrainer
from rose.backends.streamed import StreamedTrainer
from rose.frameworks.held_pool import HeldPool
from rose.frameworks.neutral import NEUTRAL, TEXT_ONLY, is_neutral
from rose.frameworks.place import PoolPlace
from rose.frameworks.push import STORE_ADVICE, PushReport, WeightPush
from rose.frameworks.watch import WeightsWatch
from rose.pool import PoolSnapshot

__all__ = [
    "NEUTRAL",
    "STORE_ADVICE",
    "TEXT_ONLY",
    "HeldPool",
    "PoolPlace",
    "PoolSnapshot",
    "PushReport",
    "ShardedTrainer",
    "StreamedTrainer",
    "WeightPush",
    "WeightsWatch",
    "is_neutral",
]
