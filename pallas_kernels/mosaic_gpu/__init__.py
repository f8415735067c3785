"""What kernels that lower to Mosaic GPU share, whatever the GPU's architecture.

A folder has the kernels of an architecture: `hopper` those that multiply by wgmma,
`ampere` by mma.sync, `blackwell` by tcgen05. Its files import those of this folder,
which import none of an architecture's: `plan` has what every kernel is made of,
`forward_program` the work tiles of forward kernels. Those of the last two have not run
on a card and run only by name (`by_name`).
"""
