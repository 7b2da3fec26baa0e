"""The Mooncake Store as the relay of a cluster. Needs ``pip install 'rose-rl[mooncake]'`` and libibverbs1."""

from rose.backends.mooncake.master import MooncakeMaster
from rose.backends.mooncake.transport import MooncakeTransport

__all__ = ["MooncakeMaster", "MooncakeTransport"]
