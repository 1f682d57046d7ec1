"""Modules: `Linear`.

It must not know kernels or checkpoints.
"""
