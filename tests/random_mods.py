"""Random functions of scores and masks, held to the error rule in both directions.

    python -m tests.random_mods --count 100 --implementation triton

A function is a tree of operations on the score, on indices and on captured arrays, made
from a seed. Each is compared with dense attention in float64: output, log-sum-exp,
gradients of query, key, value and of what the function captures. Without a GPU kernels
are interpreted, slowly; the interpreted Mosaic GPU kernels give no gradients of
captures. The exit code is 1 if a function breaks the rule.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash2 import Blocks, Config, attention, explain
from tests import (
    conftest,  # noqa: F401, settings that must be made before JAX starts
    mosaic_interpreter,
    tolerances,
)
from tests.cases import ON_GPU
from tests.lowering import on_gpu

B, N, K = 2, 4, 2
# Where what is exact is computed: XLA has made max(abs(x), -y) of integers wrong on a
# GPU (benchmarks/lab/123). What is plain has the functions of the device.
_CPU = jax.devices("cpu")[0]
SMALL = Blocks(16, 16, 4, 1)
_INTERPRETED = Config(SMALL, SMALL, dq=SMALL, dbias=SMALL, interpret=True)


@dataclasses.dataclass(frozen=True)
class Way:
    """How an implementation runs here.

    Attributes:
      options: of `attention`.
      rows: of queries and of keys.
      head_size: of all.
      dtypes: in turns.
      reads: what functions may read beside vectors: "pairs", "table".
    """

    options: dict
    rows: tuple[int, int] = (40, 45)
    head_size: int = 16
    dtypes: tuple[str, ...] = ("float32",)
    reads: tuple[str, ...] = ("pairs", "table")


WAYS = {
    "xla": Way({"config": Config(SMALL, SMALL)}),
    "triton": Way({"config": _INTERPRETED}, reads=("pairs",)),
    "mosaic_gpu": Way({}, (140, 150), 64, ("bfloat16",), ()),
}
if ON_GPU:
    WAYS = {
        "xla": Way({}, (300, 330), 64, ("float32", "bfloat16")),
        "triton": Way({}, (300, 330), 64, ("float32", "bfloat16"), ("pairs",)),
        "mosaic_gpu": Way({}, (300, 330), 64, ("bfloat16", "float16"), ()),
    }


def integer(rng, depth: int) -> Callable:
    """A random function (x, b, h, q, kv) that gives an int32; x has the arrays."""
    n = int(rng.integers(1, 9))
    if depth == 0 or rng.random() < 0.2:
        leaves = [
            *(lambda x, *at, i=i: at[i] for i in (1, 2, 3, 2, 3)),
            lambda x, b, h, q, kv: x["ids"][b, q],
            lambda x, b, h, q, kv: x["ids"][b, kv],
            lambda x, *at: jnp.int32(3 * n - 8),
        ]
        return leaves[rng.integers(len(leaves))]
    one, two = integer(rng, depth - 1), integer(rng, depth - 1)
    operations = [
        lambda a, b: a + b,
        lambda a, b: a - b,
        lambda a, b: a * (b % 5),
        lambda a, b: jnp.minimum(a, b),
        lambda a, b: jnp.maximum(a, -b),
        lambda a, b: abs(a - b),
        lambda a, b: a // n,
        lambda a, b: a % n,
        lambda a, b: jnp.where(a > b, a, n),
        lambda a, b: a ^ b,
        lambda a, b: a * 2**29 + b,
    ]
    operation = operations[rng.integers(len(operations))]
    return lambda *at: operation(one(*at), two(*at))


def boolean(rng, depth: int) -> Callable:
    """The same that gives a bool."""
    if depth == 0:
        one, two = integer(rng, 2), integer(rng, 2)
        bound = float(rng.standard_normal())
        leaves = [
            lambda *at: one(*at) <= two(*at),
            lambda *at: one(*at) > two(*at),
            lambda *at: one(*at) == two(*at),
            lambda *at: one(*at) != two(*at),
            lambda x, b, h, q, kv: x["flags"][kv],
            lambda x, b, h, q, kv: (
                x["fixed"][h, kv] * 2.0 + one(x, b, h, q, kv) >= bound
            ),
            lambda x, b, h, q, kv: jnp.sqrt(x["fixed"][h, q]) < bound,
        ]
        return leaves[rng.integers(len(leaves))]
    a, b = boolean(rng, depth - 1), boolean(rng, depth - 1)
    operations = [
        lambda *at: a(*at) & b(*at),
        lambda *at: a(*at) | b(*at),
        lambda *at: ~a(*at),
        lambda *at: jnp.where(a(*at), b(*at), ~b(*at)),
    ]
    return operations[rng.integers(len(operations))]


_READS = {
    "pairs": lambda x, s, b, h, q, kv: x["pairs"][q, kv],
    "table": lambda x, s, b, h, q, kv: x["table"][h, jnp.clip(abs(q - kv) // 4, 0, 7)],
}


def floating(rng, depth: int, reads: tuple[str, ...]) -> Callable:
    """A random function (x, score, b, h, q, kv) that gives a float of moderate size."""
    if depth == 0 or rng.random() < 0.15:
        number = float(rng.uniform(0.5, 2.0))
        leaves = [
            *[lambda x, s, *at: s] * 3,
            lambda x, s, b, h, q, kv: x["keys"][b, kv],
            lambda x, s, b, h, q, kv: x["rows"][h, q],
            lambda x, s, b, h, q, kv: x["gain"][h],
            lambda x, s, *at: x["number"],
            lambda x, s, b, h, q, kv: 0.02 * number * (q - kv),
            lambda x, s, *at: number + 0.0 * s,
            *(_READS[name] for name in reads),
        ]
        return leaves[rng.integers(len(leaves))]
    one, two = (floating(rng, depth - 1, reads) for _ in range(2))
    where = boolean(rng, 0)
    operations = [
        lambda a, b: a + b,
        lambda a, b: a - b,
        lambda a, b: a * jnp.tanh(b),
        lambda a, b: jnp.maximum(a, b),
        lambda a, b: jnp.minimum(a, -b),
        lambda a, b: a / (1.0 + abs(b)),
        lambda a, b: a * jax.nn.sigmoid(b),
        lambda a, b: jnp.sin(a) + jnp.cos(b),
        lambda a, b: jnp.exp(-abs(a)) - b,
        lambda a, b: jnp.log(1.0 + a * a) + b,
        lambda a, b: jnp.sqrt(1.0 + b * b),
    ]
    if rng.random() < 0.15:
        return lambda x, s, *at: jnp.where(
            where(x, *at), one(x, s, *at), two(x, s, *at)
        )
    operation = operations[rng.integers(len(operations))]
    return lambda *at: operation(one(*at), two(*at))


def arrays_of(rng, t: int, s: int) -> tuple[dict, dict]:
    """What functions capture: arrays with gradients, and others."""
    rows = max(t, s)
    shapes = {
        "keys": (B, rows),
        "rows": (N, rows),
        "gain": (N,),
        "number": (),
        "pairs": (rows, rows),
        "table": (N, 8),
    }
    floats = {
        name: jnp.asarray(rng.standard_normal(shape), jnp.float32)
        for name, shape in shapes.items()
    }
    ids = np.sort(rng.integers(0, 5, (B, rows)))
    others = {
        "ids": jnp.asarray(ids, jnp.int32),
        "flags": jnp.asarray(rng.random(rows) < 0.5),
        "fixed": jnp.asarray(rng.standard_normal((N, rows)), jnp.float32),
    }
    return floats, others


class Problem:
    """A call with a random score_mod, and mostly a random mask_mod.

    Args:
      seed: of all of it.
      way: how the implementation runs.
      score: a function (x, score, b, h, q, kv) of all pairs in place of what is random;
        x has the arrays.
    """

    def __init__(self, seed: int, way: Way, score: Callable | None = None):
        rng = np.random.default_rng(seed)
        self.dtype = jnp.dtype(way.dtypes[seed % len(way.dtypes)])
        self.captured, self.fixed = arrays_of(rng, *way.rows)
        self._score = floating(rng, 3, way.reads)
        self._part = float(rng.choice([0.0, 0.5, 1.0]))
        self._masks = boolean(rng, 1) if rng.random() < 0.2 else None
        self._kept = boolean(rng, 1) if rng.random() < 0.8 else None
        if score is not None:
            self._score, self._masks, self._kept = score, None, None
        (t, s), h = way.rows, way.head_size
        shapes = (B, t, N, h), (B, s, K, h), (B, s, K, h), (B, t, N, h), (B, t, N)
        made = [rng.standard_normal(shape) for shape in shapes]
        self.arrays = tuple(jnp.asarray(x, self.dtype) for x in made[:3])
        do, dlse = made[3:]
        self.cotangents = jnp.asarray(do, self.dtype), jnp.asarray(dlse, jnp.float32)
        self.indices = np.indices((B, N, t, s), dtype=np.int32)
        # Which pairs the mask keeps: some.
        self.kept = np.ones((B, N, t, s), bool)
        while self.mask_mod is not None:
            with jax.default_device(_CPU):
                self.kept = np.asarray(jax.jit(self.mask_mod)(*self.indices))
            if np.any(self.kept):
                break
            self._kept = boolean(rng, 1)

    def score_mod(self, captured) -> Callable:
        def mod(score, *at):
            x = {**self.fixed, **captured}
            found = self._score(x, score, *at) + self._part * score
            if self._masks is None:
                return found
            return jnp.where(self._masks(x, *at), found, -jnp.inf)

        return mod

    @property
    def mask_mod(self) -> Callable | None:
        kept = self._kept
        return None if kept is None else lambda *at: kept(self.fixed, *at)

    def results(self, call: Callable, arrays, captured) -> dict:
        """Of a function (query, key, value, captured) that gives output and lse."""
        (out, lse), pull = jax.vjp(call, *arrays, captured)
        do, dlse = self.cotangents
        *gradients, of_captured = pull((do.astype(out.dtype), dlse.astype(lse.dtype)))
        names = "query", "key", "value"
        found = {"out": out, "lse": lse, **dict(zip(names, gradients, strict=True))}
        return found | of_captured

    def found(self, options: dict) -> dict[str, np.ndarray]:
        def call(q, k, v, captured):
            return attention(
                *(q, k, v),
                score_mod=self.score_mod(captured),
                mask_mod=self.mask_mod,
                return_residual=True,
                precision="highest",
                **options,
            )

        run = jax.jit(functools.partial(self.results, call))
        return jax.tree.map(_wide, run(self.arrays, self.captured))

    def interpreted(self, monkeypatch) -> dict[str, np.ndarray]:
        """Of the Mosaic GPU kernels, which give no gradients of captures here."""
        mosaic_interpreter.install(monkeypatch)
        mods = {"score_mod": self.score_mod(self.captured), "mask_mod": self.mask_mod}
        found = mosaic_interpreter.evaluate(self.arrays, self.cotangents, mods)
        return {n: x for n, x in found.items() if not n.startswith("score_mod")}

    def dense(self, dtype, q, k, v, captured):
        """Output, log-sum-exp, scores and probabilities by whole matrices."""
        wide = jnp.promote_types(dtype, jnp.float32)
        k, v = (jnp.repeat(x, N // K, axis=2) for x in (k, v))
        product = functools.partial(
            jnp.einsum, precision="highest", preferred_element_type=wide
        )
        qk = product("btnh,bsnh->bnts", q, k) / np.sqrt(q.shape[-1])
        scores = self.score_mod(captured)(qk.astype(wide), *self.indices)
        scores = jnp.where(self.kept, scores, -jnp.inf)
        has_keys = jnp.any(scores > -jnp.inf, axis=-1, keepdims=True)
        safe = jnp.where(has_keys, scores, 0.0)
        p = jnp.where(has_keys, jax.nn.softmax(safe), 0.0)
        lse = jax.nn.logsumexp(safe, axis=-1, keepdims=True)
        lse = jnp.where(has_keys, lse, -jnp.inf)[..., 0].swapaxes(1, 2)
        out = product("bnts,bsnh->btnh", p.astype(dtype), v).astype(dtype)
        return out, lse, scores, p

    def by_matrices(self, dtype) -> dict[str, np.ndarray]:
        """All results, computed in a dtype."""

        def run(arrays, captured):
            call = functools.partial(self.dense, dtype)
            return self.results(lambda *x: call(*x)[:2], arrays, captured)

        captured = self.captured
        arrays = [x.astype(dtype) for x in self.arrays]
        if dtype == jnp.float64:
            captured = {n: x.astype(dtype) for n, x in captured.items()}
        # Not compiled as one: the next function has most of the same operations.
        return jax.tree.map(_wide, run(arrays, captured))

    def terms(self) -> dict[str, np.ndarray]:
        """The size of the terms of each result (`tolerances`), in float64.

        Of gradients that of sums with random signs, on the average.
        """

        def run(arrays, captured, signs):
            q, k, v = arrays
            out, _, scores, p = self.dense(jnp.float64, q, k, v, captured)
            do, dlse = (x.astype(jnp.float64) for x in self.cotangents)
            value = jnp.repeat(v, N // K, axis=2)
            dp = jnp.einsum("btnh,bsnh->bnts", do, value)
            delta = (jnp.sum(out * do, axis=-1) - dlse).swapaxes(1, 2)[..., None]
            size = jnp.linalg.norm(do, axis=-1) * jnp.max(jnp.linalg.norm(v, axis=-1))
            size = size / np.sqrt(v.shape[-1]) + abs(dlse)
            of_dp = size.swapaxes(1, 2)[..., None]
            dz = p * jnp.sqrt((dp - delta) ** 2 + of_dp**2)

            def of_scores(q, k, captured):
                made = self.dense(jnp.float64, q, k, v, captured)[2]
                return jnp.where(made > -jnp.inf, made, 0.0)

            _, pull = jax.vjp(of_scores, q, k, captured)
            dq, dk, of_captured = jax.vmap(lambda x: pull(x * dz))(signs)
            weights = jax.vmap(lambda x: x * p)(signs)
            kept = jnp.where(scores > -jnp.inf, scores, 0.0)
            products = jnp.einsum(
                "btnh,bsnh->bnts", q**2, jnp.repeat(k, N // K, axis=2) ** 2
            )
            kept = kept**2 + products / q.shape[-1]
            rows = jnp.sqrt(jnp.sum(p**2 * kept, axis=-1)).swapaxes(1, 2)
            dv = jnp.einsum("xbnts,btnh->xbsnh", weights, do)
            dv = dv.reshape(*dv.shape[:3], K, N // K, -1).sum(4)
            logs = p * jnp.log(jnp.where(p > 0, p, 1.0))
            squares = {"out": p**2, "out exponent": logs**2}
            outs = {
                n: jnp.sqrt(jnp.einsum("bnts,bsnh->btnh", x, value**2))
                for n, x in squares.items()
            }
            mean = {"query": dq, "key": dk, "value": dv, **of_captured}
            mean = {n: jnp.sqrt(jnp.mean(x**2, axis=0)) for n, x in mean.items()}
            return {"lse": rows, **outs, **mean}

        rng = np.random.default_rng(0)
        signs = rng.choice([-1.0, 1.0], (6, *self.indices.shape[1:]))
        arrays = [x.astype(jnp.float64) for x in self.arrays]
        captured = {n: x.astype(jnp.float64) for n, x in self.captured.items()}
        found = run(arrays, captured, jnp.asarray(signs))
        return {f"{name} terms": _wide(x) for name, x in found.items()}

    def check(self, found: dict[str, np.ndarray]) -> float:
        """Asserts the error rule; returns the worst share of the allowed error."""
        plain = self.by_matrices(self.dtype)
        with jax.default_device(_CPU), jax.enable_x64(True):
            exact = self.by_matrices(jnp.dtype(jnp.float64)) | self.terms()
        exact = {n: x for n, x in exact.items() if n.split(" ")[0] in found}
        unit = tolerances.unit_roundoff(self.dtype, "highest")
        return float(max(tolerances.check(found, exact, plain, unit).values()))


def _wide(x) -> np.ndarray:
    return np.asarray(x, np.float64)


def check(seed: int, implementation: str, monkeypatch) -> float | None:
    """Asserts the error rule of a random function; None where it is declined by name.

    Args:
      monkeypatch: pytest's, for kernels that are interpreted.
    """
    return checked(Problem(seed, WAYS[implementation]), implementation, monkeypatch)


def checked(problem: Problem, implementation: str, monkeypatch) -> float | None:
    """`check` of a problem."""
    is_interpreted = implementation == "mosaic_gpu" and not ON_GPU
    options = {**WAYS[implementation].options, "implementation": implementation}
    mods = {
        "score_mod": problem.score_mod(problem.captured),
        "mask_mod": problem.mask_mod,
    }
    with on_gpu() if is_interpreted else contextlib.nullcontext():
        text = explain(*problem.arrays, **mods, **options)
    # The interpreter runs a forward without gradients, too.
    runs = is_interpreted and "no kernel makes its gradients" in text
    if text.startswith("error") and not runs:
        assert "its kernels lack" in text or "an array with" in text, text
        return None
    if is_interpreted:
        return problem.check(problem.interpreted(monkeypatch))
    return problem.check(problem.found(options))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--implementation", choices=[*WAYS], default="xla")
    given = parser.parse_args()
    start, wrong, declined, worst = time.perf_counter(), [], 0, 0.0
    for seed in range(given.first, given.first + given.count):
        with pytest.MonkeyPatch.context() as monkeypatch:
            try:
                share = check(seed, given.implementation, monkeypatch)
            except AssertionError as error:
                wrong.append(seed)
                print(f"seed {seed}: {error}", flush=True)
                continue
        declined += share is None
        worst = max(worst, share or 0.0)
        print(
            f"seed {seed}: {'declined' if share is None else f'{share:.2f}'}",
            flush=True,
        )
        if seed % 20 == 0:
            jax.clear_caches()
    print(
        f"{given.implementation}: {given.count} functions, {declined} declined, "
        f"{len(wrong)} beyond the error rule {wrong or ''}, worst {worst:.2f} of the "
        f"allowed error, {time.perf_counter() - start:.0f} s"
    )
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
