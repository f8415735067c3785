"""Recipes: how to do common things with `jax_flash2.attention`.

Every section runs by itself after these lines:

    >>> import functools
    >>> import jax, jax.numpy as jnp
    >>> from jax_flash2 import attention
    >>> x = jax.random.normal(jax.random.key(0), (2, 32, 4, 16))
    >>> def same(a, b):  # float32 products on a GPU are TF32
    ...     return bool(jnp.allclose(a, b, atol=2e-2))

x stands for query, key and value: [batch, rows, heads, head size].

Packed documents
----------------
Several documents in one row, each attending to itself. Blocks without a common document
are skipped. Relative positions within a document are those within the row, so causal
masks, windows and ALiBi need nothing more.

    >>> ids = jnp.array([[0] * 10 + [1] * 22, [0] * 32])
    >>> out = attention(x, x, x, is_causal=True, query_segment_ids=ids)
    >>> second = x[:1, 10:]
    >>> same(out[:1, 10:], attention(second, second, second, is_causal=True))
    True

Where keys are others than queries, both sides have ids. A row of padding gets an id
that the other side lacks: its output is 0, and its gradients are.

    >>> memory = jax.random.normal(jax.random.key(1), (2, 20, 4, 16))
    >>> memory_ids = jnp.array([[0] * 12 + [1] * 8, [0] * 20])
    >>> ids = ids.at[:, -4:].set(-1)
    >>> out = attention(
    ...     x, memory, memory, query_segment_ids=ids, key_value_segment_ids=memory_ids
    ... )
    >>> bool(jnp.all(out[:, -4:] == 0))
    True

Sliding window
--------------
The last 8 keys of every query, its own among them: 7 to the left, none to the right.
With `is_causal=True`, `local_window_size=7` says the same.

    >>> out = attention(x, x, x, local_window_size=(7, 0))
    >>> distance = jnp.arange(32)[:, None] - jnp.arange(32)
    >>> same(out, attention(x, x, x, mask=(distance >= 0) & (distance < 8)))
    True

Prefill and decoding with a cache
---------------------------------
A chunk of new rows goes behind what each batch entry's cache holds. `query_offset` is
the position of the chunk's first row, `key_value_seq_lengths` how many rows of the
cache count; what lies behind them is not read into any result, NaN included.

    >>> def decode(q, k, v, cache, lengths):
    ...     def write(rows, new, at):
    ...         return jax.lax.dynamic_update_slice_in_dim(rows, new, at, axis=0)
    ...
    ...     keys, values = (
    ...         jax.vmap(write)(rows, new, lengths) for rows, new in zip(cache, (k, v))
    ...     )
    ...     after = lengths + q.shape[1]
    ...     out = attention(
    ...         q,
    ...         keys,
    ...         values,
    ...         is_causal=True,
    ...         query_offset=lengths,
    ...         key_value_seq_lengths=after,
    ...     )
    ...     return out, (keys, values), after
    >>> cache = (jnp.full((2, 64, 4, 16), jnp.nan),) * 2
    >>> lengths = jnp.zeros(2, jnp.int32)
    >>> step = jax.jit(decode)
    >>> chunks = []
    >>> for rows in (slice(0, 24), slice(24, 32)):
    ...     new = x[:, rows]
    ...     out, cache, lengths = step(new, new, new, cache, lengths)
    ...     chunks.append(out)
    >>> same(jnp.concatenate(chunks, 1), attention(x, x, x, is_causal=True))
    True

Prompts of unequal lengths, padded at their ends, are one call with
`query_seq_lengths` and `key_value_seq_lengths`; rows of padding come out 0.

Grouped queries (GQA, MQA)
--------------------------
Fewer heads of keys and values than of queries, without repeating them: query head n
reads head n // (N // K). With one head it is multi-query attention.

    >>> k = x[:, :, :2]
    >>> same(attention(x, k, k), attention(x, *[jnp.repeat(k, 2, axis=2)] * 2))
    True
    >>> attention(x, k[:, :, :1], k[:, :, :1]).shape
    (2, 32, 4, 16)

ALiBi
-----
The paper's slopes, for a number of heads that is a power of two. They may be learnt:
slopes have gradients.

    >>> slopes = 2.0 ** (-8.0 / 4 * jnp.arange(1, 5))
    >>> out = attention(x, x, x, is_causal=True, alibi_slopes=slopes)

Soft cap (Gemma 2)
------------------
`scale`, `logits_soft_cap` and the window are Python numbers, known when the program is
compiled.

    >>> gemma = functools.partial(
    ...     attention, is_causal=True, scale=256**-0.5, logits_soft_cap=50.0
    ... )
    >>> everywhere, nearby = gemma(x, x, x), gemma(x, x, x, local_window_size=15)

Attention sinks
---------------
A learnt logit for each head that takes part in the softmax and has no value. The output
is the plain one times the share of the softmax that the keys have.

    >>> sinks = jnp.array([0.0, 1.0, 2.0, 3.0])
    >>> plain, lse = attention(x, x, x, is_causal=True, return_residual=True)
    >>> share = jax.nn.sigmoid(lse - sinks)[..., None]
    >>> same(attention(x, x, x, is_causal=True, sinks=sinks), plain * share)
    True

A learnt bias
-------------
T5's relative positions: one number for each head and distance, here up to 31. The
gradient of the bias is summed over the batch inside the kernels, in memory of the
bias's own size.

    >>> table = jnp.zeros((4, 63))
    >>> distance = jnp.arange(32)[:, None] - jnp.arange(32)
    >>> def loss(table):
    ...     bias = table[:, distance + 31]  # [heads, rows, rows]
    ...     return jnp.sum(attention(x, x, x, bias) ** 2)
    >>> jax.grad(loss)(table).shape
    (4, 63)

Dropout
-------
Give a key, typed or not; split it for each layer and step. What is dropped follows from
the key and the pair: every implementation, block size and `jax.vmap` agrees.

    >>> dropout = functools.partial(
    ...     attention, is_causal=True, dropout_rate=0.1, dropout_rng=jax.random.key(1)
    ... )
    >>> same(dropout(x, x, x), dropout(x, x, x, implementation="reference"))
    True

Remat
-----
Under a plain `jax.checkpoint` the backward pass runs the forward kernel again. With
this policy the kernel's two results are kept, head size + 1 numbers for each row and
head, and the rest is computed again.

    >>> policy = jax.checkpoint_policies.save_only_these_names(
    ...     "flash2_output", "flash2_lse"
    ... )
    >>> def block(x):
    ...     return jnp.tanh(attention(x, x, x, is_causal=True))
    >>> def forward_passes(block):
    ...     gradient = jax.grad(lambda x: jnp.sum(block(x)))
    ...     return str(jax.make_jaxpr(gradient)(x)).count("flash2_forward[")
    >>> kept = forward_passes(jax.checkpoint(block, policy=policy))
    >>> kept < forward_passes(jax.checkpoint(block))
    True

The names are also `jax_flash2.OUTPUT_NAME` and `jax_flash2.LSE_NAME`.

A function of one head
----------------------
Arrays of rank 2 are a single head, [rows, head size]. `jax.vmap` turns it into all of
them, wherever heads and batch lie; no operand is transposed or repeated.

    >>> def head(q, k, v):
    ...     return attention(q, k, v, is_causal=True)
    >>> heads = jax.vmap(head, in_axes=1, out_axes=1)  # [rows, heads, head size]
    >>> same(jax.vmap(heads)(x, x, x), head(x, x, x))
    True

Keys and values that all heads share are not mapped: `in_axes=(1, None, None)`.

Second derivatives
------------------
A penalty on the gradient of the input (reverse over reverse) and a Hessian times a
vector (forward over reverse), in linear memory.

    >>> def energy(x):
    ...     return jnp.sum(jnp.sin(attention(x, x, x, is_causal=True)))
    >>> def penalty(x):
    ...     return jnp.sum(jax.grad(energy)(x) ** 2)
    >>> gradient = jax.jit(jax.grad(penalty))(x)
    >>> _, along = jax.jvp(jax.grad(energy), (x,), (jax.grad(energy)(x),))
    >>> same(gradient, 2 * along)
    True

Several devices, automatic
--------------------------
`jax.jit` divides batch entries and heads as its inputs are divided. Only gradients of
what several devices share are communicated.

    >>> import math
    >>> from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
    >>> devices = math.gcd(jax.device_count(), 4)  # they divide the heads
    >>> mesh = jax.make_mesh(
    ...     (devices,),
    ...     ("model",),
    ...     axis_types=(AxisType.Auto,),
    ...     devices=jax.devices()[:devices],
    ... )
    >>> by_heads = NamedSharding(mesh, P(None, None, "model"))
    >>> y = jax.device_put(x, by_heads)
    >>> out = jax.jit(attention)(y, y, y)
    >>> out.sharding.is_equivalent_to(by_heads, out.ndim)
    True

Key/value heads that the devices do not divide may be whole on all of them. Inputs
divided along rows are gathered: the result is right, but the devices of a mesh axis
that divides rows alone all do the same work. So does the GPU's kernel within a
`shard_map` over some axes, along those left automatic: name all axes there.

    >>> y = jax.device_put(x, NamedSharding(mesh, P(None, "model")))
    >>> same(jax.jit(attention)(y, y, y), attention(x, x, x))
    True

Several devices, explicit
-------------------------
On a mesh of explicit axes the type of the result says how it is divided. Rows and head
sizes must be whole: `jax.reshard` is yours to call.

    >>> import math
    >>> from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
    >>> devices = math.gcd(jax.device_count(), 4)
    >>> mesh = jax.make_mesh(
    ...     (devices,),
    ...     ("model",),
    ...     axis_types=(AxisType.Explicit,),
    ...     devices=jax.devices()[:devices],
    ... )
    >>> with jax.set_mesh(mesh):
    ...     y = jax.device_put(x, NamedSharding(mesh, P(None, "model")))
    ...     try:
    ...         attention(y, y, y)
    ...     except ValueError as error:
    ...         print(str(error)[:35])
    ...     y = jax.reshard(y, P(None, None, "model"))
    ...     out = jax.jit(attention)(y, y, y)
    query is sharded along its rows (me
    >>> jax.typeof(out).sharding.spec == P(None, None, "model", None)
    True

Inside `jax.shard_map`
----------------------
Each device calls attention on its part, as if it were alone: on a mesh of either kind,
with the checks of `shard_map` on.

    >>> import math
    >>> from jax.sharding import AxisType, PartitionSpec as P
    >>> devices = math.gcd(jax.device_count(), 4)
    >>> mesh = jax.make_mesh(
    ...     (devices,),
    ...     ("model",),
    ...     axis_types=(AxisType.Auto,),
    ...     devices=jax.devices()[:devices],
    ... )
    >>> heads = P(None, None, "model")
    >>> split = jax.shard_map(attention, mesh=mesh, in_specs=heads, out_specs=heads)
    >>> same(jax.jit(split)(x, x, x), attention(x, x, x))
    True

Flax
----
`flax_attention` is an `attention_fn` for Flax's attention modules. Linen says what is
masked by `mask`, nnx also by `is_causal`; other arguments are bound beforehand.

    >>> from flax import linen, nnx
    >>> from jax_flash2 import flax_attention
    >>> inputs = jnp.ones((2, 32, 64))
    >>> near = functools.partial(flax_attention, local_window_size=(7, 0))
    >>> layer = linen.MultiHeadDotProductAttention(num_heads=4, attention_fn=near)
    >>> variables = layer.init(jax.random.key(0), inputs)
    >>> layer.apply(variables, inputs).shape
    (2, 32, 64)
    >>> layer = nnx.MultiHeadAttention(
    ...     num_heads=4,
    ...     in_features=64,
    ...     dropout_rate=0.1,
    ...     decode=False,
    ...     attention_fn=flax_attention,
    ...     rngs=nnx.Rngs(0),
    ... )
    >>> layer(inputs, is_causal=True, deterministic=True).shape
    (2, 32, 64)

Flax with rotary positions
--------------------------
An `attention_fn` may turn query and key first. While nnx decodes with a cache, it hands
over one query and all keys, so pass the queries' positions to turn them by.
(`nnx.RoPE` of Flax 0.12.12 has the tables ready.)

    >>> from flax import nnx
    >>> from jax_flash2 import flax_attention
    >>> def rotated(x, positions):  # [batch, rows, heads, head size]
    ...     half = x.shape[-1] // 2
    ...     frequencies = 10_000 ** -(jnp.arange(half) / half)
    ...     angles = positions[:, None, None] * frequencies
    ...     a, b = x[..., :half], x[..., half:]
    ...     sin, cos = jnp.sin(angles), jnp.cos(angles)
    ...     turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
    ...     return turned.astype(x.dtype)
    >>> def rotary_attention(query, key, value, **arguments):
    ...     query = rotated(query, jnp.arange(query.shape[1]))
    ...     key = rotated(key, jnp.arange(key.shape[1]))
    ...     return flax_attention(query, key, value, **arguments)
    >>> layer = nnx.MultiHeadAttention(
    ...     num_heads=4,
    ...     in_features=64,
    ...     decode=False,
    ...     attention_fn=rotary_attention,
    ...     rngs=nnx.Rngs(0),
    ... )
    >>> layer(jnp.ones((2, 32, 64)), is_causal=True).shape
    (2, 32, 64)

A transformer block in plain functions
--------------------------------------
Parameters in a dictionary, the layers stacked and scanned.

    >>> import numpy as np
    >>> def norm(x):
    ...     return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)
    >>> def block(x, p):
    ...     q, k, v = jnp.einsum("btw,cwnh->cbtnh", norm(x), p["qkv"])
    ...     o = attention(q, k, v, is_causal=True)
    ...     x = x + jnp.einsum("btnh,nhw->btw", o, p["out"])
    ...     return x + jax.nn.gelu(norm(x) @ p["up"]) @ p["down"], None
    >>> shapes = {
    ...     "qkv": (3, 64, 4, 16),
    ...     "out": (4, 16, 64),
    ...     "up": (64, 128),
    ...     "down": (128, 64),
    ... }
    >>> layers = 2
    >>> rng = np.random.default_rng(0)
    >>> params = {
    ...     name: jnp.float32(0.02 * rng.standard_normal((layers, *shape)))
    ...     for name, shape in shapes.items()
    ... }
    >>> def loss(params, x):
    ...     return jnp.mean(jax.lax.scan(block, x, params)[0] ** 2)
    >>> gradients = jax.jit(jax.grad(loss))(params, jnp.ones((2, 32, 64)))
    >>> gradients["qkv"].shape
    (2, 3, 64, 4, 16)

A module that is a pytree
-------------------------
As in Equinox: a callable dataclass for one sequence, mapped over the batch.

    >>> import dataclasses
    >>> @jax.tree_util.register_dataclass
    ... @dataclasses.dataclass(frozen=True)
    ... class SelfAttention:
    ...     qkv: jax.Array  # [3, width, heads, head size]
    ...     out: jax.Array  # [heads, head size, width]
    ...     window: int = dataclasses.field(metadata={"static": True})
    ...
    ...     def __call__(self, x):
    ...         q, k, v = jnp.einsum("tw,cwnh->ctnh", x, self.qkv)
    ...         o = attention(q, k, v, is_causal=True, local_window_size=self.window)
    ...         return jnp.einsum("tnh,nhw->tw", o, self.out)
    >>> layer = SelfAttention(jnp.ones((3, 64, 4, 16)), jnp.ones((4, 16, 64)), window=7)
    >>> @jax.jit
    ... def gradients(layer, inputs):
    ...     return jax.grad(lambda layer: jnp.mean(jax.vmap(layer)(inputs)))(layer)
    >>> gradients(layer, jnp.ones((2, 32, 64))).out.shape
    (4, 16, 64)

Export
------
The "xla" backend exports for any platform, forward and backward; the batch, not the
rows, may be a symbol. Ask for it: if not, this machine's platform decides.
`exported.serialize(vjp_order=1)` makes bytes of it, for which JAX needs flatbuffers.
Programs that an automatic mesh divides export only with a `shard_map` around the call.

    >>> from jax import export
    >>> portable = functools.partial(attention, is_causal=True, implementation="xla")
    >>> (batch,) = export.symbolic_shape("batch")
    >>> rows = jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype)
    >>> exporter = export.export(jax.jit(portable), platforms=["cpu", "cuda", "tpu"])
    >>> exported = exporter(rows, rows, rows)
    >>> same(exported.call(x, x, x), portable(x, x, x))
    True

Which implementation serves
---------------------------
`explain` takes the arguments of `attention`, or shapes, and says why each can or cannot
serve; all but query, key and value by name. The jaxpr of a program says which it has.

    >>> from jax_flash2 import explain
    >>> shape = jax.ShapeDtypeStruct((2, 4096, 16, 128), jnp.bfloat16)
    >>> print(explain(shape, shape, shape, is_causal=True))  # doctest: +ELLIPSIS
    implementation: ...
      triton: ...
      xla: can serve this call
      reference: only when asked for (quadratic memory)
    >>> name = explain(x, x, x).split()[1]
    >>> f"backend='{name}'" in str(jax.make_jaxpr(attention)(x, x, x))
    True
"""
