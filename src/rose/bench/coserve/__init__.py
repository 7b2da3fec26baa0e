"""Co-serving bench: what sharing a device costs serving's users and brings rollouts, policy by policy on the same arrivals."""
