"""Products of a vision transformer's blocks in 8-bit floating point."""
