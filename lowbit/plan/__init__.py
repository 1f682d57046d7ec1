"""How a problem is computed: plans, their legality, their cost, the choice.

It must not know tensors, compilers or devices.
"""
