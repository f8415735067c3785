"""Reading what ptxas says of the Mosaic GPU kernels (`tests.ptxas`)."""

from tests import ptxas
from tests.tiers import deep

LOG = """
ptxas info    : (C7519) warpgroup.arrive is injected in around line 514 by compiler
ptxas warning : Registers are spilled, 12 bytes spill stores, 32 bytes spill loads
ptxas info    : Function properties for flash2_forward_mosaic_gpu_kernel
    8 bytes stack frame, 12 bytes spill stores, 32 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers
ptxas info    : Compile time = 330.145 ms

ptxas info    : (C7512) Potential Performance Loss: wgmma.mma_async instructions are
ptxas info    : Function properties for flash2_backward_mosaic_gpu_kernel
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 128 registers, used 16 barriers
ptxas info    : Compile time = 127.581 ms
"""


def test_reports():
    forward, backward = ptxas.reports(LOG)
    assert forward == ptxas.Report("flash2_forward", 168, 12, 32, ())
    assert backward == ptxas.Report("flash2_backward", 128, 0, 0, ("C7512",))
    assert str(forward).endswith("spills 12 and 32 bytes, none in sequence")
    assert str(backward).endswith("C7512")


@deep
def test_variants_have_kernels():
    variants = ptxas.variants()
    for name in ("head size 128, causal", "head size 64, causal, 2 key heads"):
        modules = ptxas.kernels(*variants[name])
        assert len(modules) == 2 and all(len(module) > 10_000 for module in modules)
