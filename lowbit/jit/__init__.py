"""From generated kernel text to a running kernel: compile, cache, load, launch.

Importing this package or its modules starts nothing: no CUDA, no compiler, no process, no torch.
"""
