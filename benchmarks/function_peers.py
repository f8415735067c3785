"""FlexAttention and FlashAttention-4, which `benchmarks.functions` times beside ours.

Both are torch's. Each gets the text of the example, its lists of blocks made before.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks import function_calls, programs
from benchmarks.function_calls import Example
from benchmarks.harness import Program
from jax_flash2.tune.problems import Shape

FLEX = "FlexAttention (torch)"
FLASH4 = "FlashAttention-4 (CuTe)"
FLASH4_WIDE = f"{FLASH4}, 192 queries"
BLOCK = 128  # queries and keys of a block of its lists


class Call(NamedTuple):
    """What a peer is asked for: `which` is of `function_rows.PASSES`."""

    shape: Shape
    name: str
    example: Example
    which: str
    operands: Sequence[jax.Array]


class _Tensors(NamedTuple):
    """Copies for torch; `nothing`: bytes that were in use before."""

    operands: list
    arrays: dict[str, Any]
    nothing: int


def started_by(names: Sequence[str], shape: Shape) -> dict[str, Callable]:
    """By label, functions that make a program of a `Call`; names: "flex", "flash4"."""
    found: dict[str, Callable] = {}
    if "flex" in names:
        found[FLEX] = _flex
    if "flash4" in names:
        found[FLASH4] = lambda call: _flash4(call, BLOCK)
        if shape.head_size <= 64:  # the tile that it chooses itself without lists
            found[FLASH4_WIDE] = lambda call: _flash4(call, 192)
    return found


def as_arrays(results: Sequence) -> dict[str, np.ndarray]:
    """Of [B, T, N, H]: the last sequence, so that what is compared stays small."""
    arrays = [np.asarray(x[-1:] if x.ndim == 4 else x, np.float32) for x in results]
    return {str(i): x for i, x in enumerate(arrays)}


def _tensors(call: Call, *, heads_first: bool) -> _Tensors:
    import torch

    nothing = torch.cuda.memory_allocated()

    def own(x):
        x = torch.from_dlpack(x)
        x = x.transpose(1, 2) if heads_first else x
        return x.clone(memory_format=torch.contiguous_format)

    arrays = {n: torch.from_numpy(x).cuda() for n, x in call.example.arrays.items()}
    return _Tensors([own(x) for x in call.operands], arrays, nothing)


def _program(call: Call, attention: Callable, tensors: _Tensors, *, heads_first: bool):
    """Of `attention`, of query, key and value; it compiles at a first call, made here.

    Results of it and of the program have the layout of the operands.
    """
    import torch

    *inputs, do = tensors.operands
    operand = call.example.operand
    wanted = [*inputs, *([tensors.arrays[operand]] if operand else [])]

    def forward():
        with torch.no_grad():
            return (attention(*inputs),)

    def both():
        out = attention(*inputs)
        return (out, *torch.autograd.grad(out, wanted, do))

    for x in wanted:
        x.requires_grad_(call.which != "forward")
    run = forward if call.which == "forward" else both
    run()

    def results(found) -> dict[str, np.ndarray]:
        last = [x.detach()[-1:] if x.ndim == 4 else x.detach() for x in found]
        if heads_first:
            last = [x.transpose(1, 2) if x.ndim == 4 else x for x in last]
        return as_arrays([x.float().cpu().numpy() for x in last])

    used = programs.torch_memory(torch, run, tensors.nothing)
    return Program(run, lambda _: torch.cuda.synchronize(), results, used)


def _flex(call: Call) -> Program:
    import torch
    from torch.nn.attention import flex_attention as flex

    torch._dynamo.reset()  # it gives up after a few functions in one process
    torch.cuda.empty_cache()
    tensors = _tensors(call, heads_first=True)
    score_mod, mask_mod = call.example.functions(torch, tensors.arrays)
    rows = call.shape.length, call.shape.length
    block_mask = flex.create_block_mask(mask_mod, None, None, *rows, device="cuda")
    compiled = torch.compile(flex.flex_attention, dynamic=False)

    def attention(q, k, v):
        return compiled(q, k, v, score_mod=score_mod, block_mask=block_mask)

    return _program(call, attention, tensors, heads_first=True)


def _flash4(call: Call, queries: int) -> Program:
    """With lists of blocks of so many queries and of `BLOCK` keys.

    The tile of its forward follows from the lists. Its backward has blocks of `BLOCK`
    queries, listed for each block of keys.
    """
    import torch
    from flash_attn.cute import flash_attn_func

    if call.example.operand and call.which != "forward":
        raise NotImplementedError("no gradients of arrays that functions read")
    tensors = _tensors(call, heads_first=False)
    score_mod, score_mod_bwd, mask_mod = _for_cute(call)
    of_torch = call.example.functions(torch, tensors.arrays)[1]
    options = {
        "score_mod": score_mod,
        "mask_mod": mask_mod,
        "aux_tensors": list(tensors.arrays.values()) or None,
        "block_sparse_tensors": _listed(call, of_torch, queries),
    }
    if call.which != "forward":
        options["score_mod_bwd"] = score_mod_bwd
        listed = _listed(call, of_torch, BLOCK, by_keys=True)
        options["block_sparse_tensors_bwd"] = listed

    def attention(q, k, v):
        return flash_attn_func(q, k, v, **options)[0]

    return _program(call, attention, tensors, heads_first=False)


def _listed(call: Call, mask_mod: Callable, queries: int, *, by_keys: bool = False):
    """Lists of FlashAttention-4 for all batch entries and heads."""
    import torch
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    with torch.device("cuda"):
        some, every = kept_blocks(torch, mask_mod, call.shape.length, queries, BLOCK)
    kinds = some & ~every, every
    lists = [x for kind in kinds for x in set_places(kind.T if by_keys else kind)]
    tensors = (torch.from_numpy(x[None, None]).cuda() for x in lists)
    return BlockSparseTensorsTorch(*tensors, block_size=(queries, BLOCK))


def kept_blocks(
    xp, mask_mod: Callable, length: int, queries: int, keys: int
) -> tuple[np.ndarray, np.ndarray]:
    """Blocks in which some pairs are kept, and all: [blocks of queries, of keys].

    The mask is that of all batch entries and heads; `keys` divides the length. One
    block of queries after the other, so that memory is linear in the length.
    """
    columns = xp.arange(length)
    some, every = [], []
    for first in range(0, length, queries):
        rows = xp.arange(first, min(first + queries, length))[:, None]
        kept = mask_mod(0, 0, rows, columns)
        some.append(kept.any(0).reshape(-1, keys).any(1))
        every.append(kept.all(0).reshape(-1, keys).all(1))
    some, every = (
        [np.asarray(x.cpu() if hasattr(x, "cpu") else x) for x in kind]
        for kind in (some, every)
    )
    return np.stack(some), np.stack(every)


def set_places(flags: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of each row: how many are set, and a row of places, those that are set first."""
    places = np.argsort(~flags, axis=-1, kind="stable")
    return flags.sum(-1, dtype=np.int32), np.ascontiguousarray(places, np.int32)


class _InRegisters:
    """What examples need of `jax.numpy`, of values that CuTe holds in registers."""

    @staticmethod
    def tanh(x):
        from cutlass import cute

        return cute.math.tanh(x, fastmath=True)  # as its own soft cap

    @staticmethod
    def clip(x, low, high):
        from cutlass import cute

        x = cute.where(x < low, cute.full_like(x, low), x)
        return cute.where(x > high, cute.full_like(x, high), x)


class _Loaded:
    """An array of a kernel, indexed by values in registers, one at a time."""

    def __init__(self, tensor):
        self._tensor = tensor

    def __getitem__(self, at):
        from flash_attn.cute.utils import scalar_to_ssa

        at = at if isinstance(at, tuple) else (at,)
        found = self._tensor[tuple(x[0] for x in at)]
        return scalar_to_ssa(found, self._tensor.element_type)


def _for_cute(call: Call) -> tuple[Callable | None, Callable | None, Callable]:
    """score_mod, score_mod_bwd and mask_mod, by the names of arguments it calls with.

    It keeps kernels by hashes of the functions' own text, or of `__cute_hash__`. The
    text here is that of all examples.
    """
    example = call.example
    has_scores = example.functions(_InRegisters, example.arrays)[0] is not None

    def functions(aux_tensors):
        loaded = map(_Loaded, aux_tensors or ())
        arrays = dict(zip(example.arrays, loaded, strict=True))
        return example.functions(_InRegisters, arrays)

    def score_mod(score, b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
        return functions(aux_tensors)[0](score, b, h, q_idx, kv_idx)

    def score_mod_bwd(gradient, score, b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
        if example.slope is None:
            return gradient
        return gradient * example.slope(_InRegisters, score)

    def mask_mod(b, h, q, kv, seqlen_info, aux_tensors):
        return functions(aux_tensors)[1](b, h, q, kv)

    text = inspect.getsource(function_calls)
    for function in (score_mod, score_mod_bwd, mask_mod):
        name = f"{function.__name__} of {call.name}, {call.shape}"
        function.__cute_hash__ = f"{name}\n{text}"
    if not has_scores:
        return None, None, mask_mod
    return score_mod, score_mod_bwd, mask_mod
