"""Maths on torch tensors by this library's C++/CUDA kernels: reductions, casts, what reads several ranks' buffers.

All functions are local. On CUDA tensors they enqueue on the current stream of the tensors' device; on CPU tensors they
have run on return. Both run the same element functions.
"""

from hdpcomm.kernels.buffers import cast, collect, fold, put, reduce, scale

__all__ = ["cast", "collect", "fold", "put", "reduce", "scale"]
