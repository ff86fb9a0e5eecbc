"""The operators' Triton kernels for NVIDIA GPUs, one operator a file; importing any of them imports triton.

`ops.kernels.kernels` decides where they are used. Each file lists its kernels in the block shapes they are launched
with (`variants`), so that `nlr bench kernels` and the tests compile exactly those.
"""
