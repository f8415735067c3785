"""What kernels that lower to Mosaic GPU share, whatever the GPU's architecture.

A folder has the kernels of an architecture: `hopper` those that multiply by wgmma. Its
files import those of this folder, which import none of an architecture's.
"""
