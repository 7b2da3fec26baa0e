"""What adapters to RL frameworks stand on: where the pool is, and the way of a trainer's weights to it.

A framework's processes need one thing of the user, the address of a pool (``rose pool job.toml``). Turns go to
``PoolPlace.connect()``; each trainer rank has a ``WeightPush``.
"""

from rose.backends.sharded import ShardedTrainer
from rose.backends.streamed import StreamedTrainer
from rose.frameworks.place import PoolPlace
from rose.frameworks.push import PushReport, WeightPush

__all__ = ["PoolPlace", "PushReport", "ShardedTrainer", "StreamedTrainer", "WeightPush"]
