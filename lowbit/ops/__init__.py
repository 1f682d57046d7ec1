"""Operations on tensors: the matrix product.

It must not know modules or checkpoints.
"""
