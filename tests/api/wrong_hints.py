"""Wrong calls, as users of other libraries make them: part of `wrong_calls`."""

import numpy as np

VALUE = ValueError
HINTS = {
    "mask_of_keys": (
        {"mask": np.ones((2, 5), bool)},
        VALUE,
        ["(2, 4, 6, 5)", "got shape (2, 5)", "mask[:, None, None, :]", "key_value_seq"],
    ),
    "mask_of_entries": (
        {"mask": np.ones((2, 6, 5), bool)},
        VALUE,
        ["(2, 4, 6, 5)", "(2, 6, 5)", "for all heads", "mask[:, None, :, :]"],
    ),
    "implementation_case": ({"implementation": "XLA"}, VALUE, ["'XLA'", "mean 'xla'?"]),
    "implementation_half": ({"implementation": "mosaic"}, VALUE, ["'mosaic_gpu'?"]),
    "implementation_cudnn": (
        {"implementation": "cudnn"},
        VALUE,
        ["'xla', 'reference'", "'cudnn'", "jax_flash2.nn.dot_product_attention"],
    ),
}
