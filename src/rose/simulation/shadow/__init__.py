"""Shadow mode: what could have been lent of a serving engine, from its metrics or a request trace, without lending anything."""
