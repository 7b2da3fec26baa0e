"""Stand-ins for libraries that OpenRLHF imports and that a trainer over a pool does not need. See ``rose_openrlhf.workers``."""
