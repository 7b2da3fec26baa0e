"""Fan-out to the RL cluster's own dedicated engines over a process group. Needs torch (``pip install 'rose-rl[collective]'``)."""

from rose.backends.collective.cache import FanOutCounts
from rose.backends.collective.member import CollectiveMember, member_address
from rose.backends.collective.mirror import CollectiveMirror

__all__ = ["CollectiveMember", "CollectiveMirror", "FanOutCounts", "member_address"]
