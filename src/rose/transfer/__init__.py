"""The weight transfer engine: sparse, shard-cut, verified deltas over a relay."""
