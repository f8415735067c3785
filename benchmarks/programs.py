"""How a pass of an attention function becomes a program: jitted JAX, or torch."""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Executor

import jax
import numpy as np

from benchmarks.harness import Program, checked_heads, is_gpu
from benchmarks.shapes import PASSES, Shape

# A program that needs more than this part of the memory that JAX may use is not run:
# the operands of what is measured beside it need some too.
_MEMORY_PART = 0.9


def lower(function: Callable, *arguments) -> jax.stages.Lowered:
    """`function` lowered for `arguments` (arrays or structs), jitted."""
    with warnings.catch_warnings():
        # A peer whose kernels upstream deprecates is a peer nevertheless.
        warnings.simplefilter("ignore", DeprecationWarning)
        return jax.jit(function).lower(*arguments)


def memory(compiled: jax.stages.Compiled) -> dict[str, int | None]:
    """Bytes a compiled program needs: beyond operands and results, and in all."""
    stats = compiled.memory_analysis()
    if stats is None:
        return {"temp": None, "total": None}
    temp = stats.temp_size_in_bytes
    operands = stats.argument_size_in_bytes + stats.output_size_in_bytes
    return {"temp": temp, "total": operands + temp - stats.alias_size_in_bytes}


@dataclasses.dataclass(frozen=True)
class JaxPeer:
    """An attention function of JAX arrays [B, T, N, H].

    Attributes:
      name: what flags and rows call it.
      label: what tables and plots call it.
      load: imports what is needed; returns a function of query, key, value, `causal`.
      gqa: whether it takes fewer key/value heads than query heads.
      same_forward: whether its forward is another peer's, and not timed again.
    """

    name: str
    label: str
    load: Callable[[], Callable]
    gqa: bool = True
    same_forward: bool = False

    def function(self, shape: Shape) -> Callable:
        """Attention of query, key and value of this shape.

        Raises:
          ImportError: if a package that it needs is not there.
          NotImplementedError: if it has no such attention.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            attention = self.load()
        if shape.group > 1 and not self.gqa:
            raise NotImplementedError("no grouped-query attention")
        return functools.partial(attention, causal=shape.causal)

    def passes(self, shape: Shape) -> dict[str, Callable]:
        """Functions to compile; `backward` is made by `start`, from `saving`."""
        attention = self.function(shape)

        def both(q, k, v, do):
            out, vjp = jax.vjp(attention, q, k, v)
            return (out, *vjp(do))

        return {
            "forward": lambda q, k, v: (attention(q, k, v),),
            "saving": lambda q, k, v: jax.vjp(attention, q, k, v)[1],
            "forward_backward": both,
        }

    def start(
        self, shape: Shape, operands: Sequence[jax.Array], which: str, pool: Executor
    ) -> Callable[[], Program]:
        """Lowers a pass now and compiles it in `pool`.

        Returns:
          A function that waits for the compiler and returns the program. For the
          backward it first runs the forward, which keeps what the backward takes.
        """
        functions = self.passes(shape)
        *inputs, do = operands
        if which == "forward":
            arguments = [*inputs]
        elif which == "forward_backward":
            arguments = [*inputs, do]
        else:
            saving = lower(functions["saving"], *inputs)
            saved, tree = jax.tree.flatten(saving.out_info)
            saved = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in saved]
            functions["backward"] = lambda saved, do: tree.unflatten(saved)(do)
            arguments = [saved, do]
            saving = pool.submit(saving.compile)
        compiling = pool.submit(lower(functions[which], *arguments).compile)

        def finish() -> Program:
            compiled = compiling.result()
            if which != "backward":
                return _jax_program(shape, which, compiled, arguments)
            saved = jax.tree.leaves(check_fits(saving.result())(*inputs))
            return _jax_program(shape, which, compiled, [saved, do])

        return finish


def check_fits(compiled: jax.stages.Compiled) -> jax.stages.Compiled:
    """The program itself.

    Raises:
      MemoryError: if it needs more of the GPU's memory than a peer may take.
    """
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
    need = memory(compiled)["total"]
    if limit and need and need > _MEMORY_PART * limit:
        raise MemoryError(
            f"not run: needs {need / 2**30:.1f} GiB of {limit / 2**30:.1f}"
        )
    return compiled


def _jax_program(shape, which, compiled, arguments) -> Program:
    check_fits(compiled)

    def call():
        results = compiled(*arguments)
        # A CPU may run calls that were only dispatched side by side.
        return results if is_gpu() else jax.block_until_ready(results)

    def results(results) -> dict[str, np.ndarray]:
        named = zip(PASSES[which], results, strict=True)
        return {
            name: np.asarray(x[-1, :, -checked_heads(shape, name) :], np.float32)
            for name, x in named
        }

    return Program(call, jax.block_until_ready, results, memory(compiled))


@dataclasses.dataclass(frozen=True)
class TorchPeer:
    """An attention function of torch tensors, on the GPU that JAX uses.

    Attributes:
      name, label: as of `JaxPeer`.
      load: imports what is needed; returns a function of query, key, value, `causal`.
      heads_first: whether tensors are [B, N, T, H] instead of [B, T, N, H]; they are
        laid out so before anything is timed.
      gqa: whether it takes fewer key/value heads than query heads. If not, they are
        repeated before anything is timed.
      same_forward: as of `JaxPeer`.
    """

    name: str
    label: str
    load: Callable[[], Callable]
    heads_first: bool = True
    gqa: bool = True
    same_forward: bool = False

    def start(
        self, shape: Shape, operands: Sequence[jax.Array], which: str, pool: Executor
    ) -> Callable[[], Program]:
        """As `JaxPeer.start`. Torch compiles at a first call, which is made here."""
        del pool
        attention = functools.partial(self.load(), causal=shape.causal)
        program = self._program(attention, shape, operands, which)
        return lambda: program

    def _program(self, attention, shape, operands, which) -> Program:
        import torch

        axis = 1 if self.heads_first else 2
        repeated = shape.group > 1 and not self.gqa
        before = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0

        def own(x):
            x = torch.from_dlpack(x)
            x = x.transpose(1, 2) if self.heads_first else x
            if repeated:
                x = x.repeat_interleave(shape.heads // x.shape[axis], axis)
            return x.clone(memory_format=torch.contiguous_format)

        *inputs, do = map(own, operands)
        if which == "forward":

            def call():
                with torch.no_grad():
                    return (attention(*inputs),)

        elif which == "forward_backward":

            def call():
                out = attention(*inputs)
                return (out, *torch.autograd.grad(out, inputs, do))

        else:

            def call():
                return torch.autograd.grad(saved, inputs, do, retain_graph=True)

        for x in inputs:
            x.requires_grad_(which != "forward")
        saved = attention(*inputs) if which == "backward" else None

        def results(results) -> dict[str, np.ndarray]:
            named = zip(PASSES[which], results, strict=True)
            return {name: self._checked(shape, name, x) for name, x in named}

        def wait(results):
            if torch.cuda.is_available():
                torch.cuda.synchronize()

        note = "key/value heads are repeated before the timing" if repeated else ""
        return Program(call, wait, results, torch_memory(torch, call, before), note)

    def _checked(self, shape: Shape, name: str, x) -> np.ndarray:
        """What `reference` gives, of one result."""
        x = x[-1].detach().float().cpu()
        x = np.asarray(x.transpose(0, 1) if self.heads_first else x)
        if self.gqa or name in ("out", "dq"):
            return x[:, -checked_heads(shape, name) :]
        return x[:, -shape.group :].sum(1, keepdims=True)  # of the repeated head


def torch_memory(torch, call, nothing: int) -> dict[str, int | None]:
    """As `memory`, of a call made here; `nothing`: bytes before there were operands."""
    if not torch.cuda.is_available():
        return {"temp": None, "total": None}
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = call()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    size = sum(x.numel() * x.element_size() for x in results)
    return {"temp": peak - before - size, "total": peak - nothing}
