"""What tests, the demo and benchmarks share: cases, tolerances, timing, the emulator's door.

Nothing in the package proper may need it.
"""
