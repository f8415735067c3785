"""The tuner: finds the fastest blocks of every kernel on a GPU, and who is faster when.

    python -m jax_flash2.tune --quick     five minutes: what most calls have
    python -m jax_flash2.tune             everything

It times blocks that fit the GPU, kernel by kernel, for each head size and kind of call
(a regime of the tables), each on a few calls side by side. On Hopper it also times the
same calls by the Mosaic GPU and by the Triton kernels, and finds from how many keys on
the first are the faster ones. What it finds goes into a table in the user's folder
(`pallas_kernels.user_tables`), which later processes use; `explain` names it.
"""
