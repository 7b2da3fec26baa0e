"""Measurements that ship with the library: ``rose bench transfer`` and what its parts share."""
