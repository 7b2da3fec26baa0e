"""The co-serving executor: everything an engine's step loop needs to share a device, for any engine library."""

from rose.coserving.governor import GovernorConfig, StepClock, StepGovernor, SupportsReleaseHint
from rose.coserving.rollout_governor import RolloutGovernor
from rose.coserving.serving_governor import ServingGovernor, ServingLoad

__all__ = [
    "GovernorConfig",
    "RolloutGovernor",
    "ServingGovernor",
    "ServingLoad",
    "StepClock",
    "StepGovernor",
    "SupportsReleaseHint",
]
