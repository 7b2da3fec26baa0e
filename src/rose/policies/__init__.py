"""Pure decisions: a frozen snapshot in, a typed plan out; no clock, I/O, event loop or randomness."""
