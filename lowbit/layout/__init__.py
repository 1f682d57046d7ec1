"""How weights lie in memory: canonical bits, MMA fragments, and the packed buffers of the kernels.

Nothing in this package knows about checkpoints, plans or launches.
"""
