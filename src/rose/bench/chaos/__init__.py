"""Kills parts of a small co-serving site at random, under load, and checks that nothing but the killed part is hurt."""
