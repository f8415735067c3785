"""The GPT example: its text, its training with each attention, its samples."""

import dataclasses
import functools
import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from absl import app, flags
from absl.testing import flagsaver
from flax import nnx

from benchmarks import generate, gpt, text, train_gpt
from benchmarks.parallel import Parallel
from tests.tiers import deep, deeply

# The losses of two correct attentions differ by rounding alone. A loss is a mean of
# logits that went through two blocks: a few eps. Adam then divides each gradient by
# its own size, so an entry that is all rounding still moves its parameter by up to
# the learning rate, and eight steps let that grow: a thousand eps in float32. In
# bfloat16, whose eps is 2**-7, the mean over 256 tokens keeps the difference below one.
RTOL = {"float32": 1000 * 2.0**-23, "bfloat16": 2.0**-7}


@pytest.fixture(autouse=True)
def true_float32():
    """A GPU's default for float32 is TF32, with an eps of its own."""
    with jax.default_matmul_precision("highest"):
        yield


@functools.cache
def losses(attention: str, dtype: str, segments: bool) -> np.ndarray:
    """Training loss of each step of the preset `tiny`."""
    tiny = train_gpt.PRESETS["tiny"]
    preset = dataclasses.replace(
        tiny, model=dataclasses.replace(tiny.model, dtype=dtype)
    )
    result = train_gpt.train(preset, attention=attention, segments=segments)
    return np.array(result.losses)


def test_documents_are_english_and_held_out():
    train, validation = text.documents()
    assert len(train) + len(validation) > 50
    assert len(validation) >= 5
    assert 3.0 < text.unigram_entropy(train) < 3.5

    def paragraphs(texts):
        return {b" ".join(p.split()) for t in texts for p in t.split(b"\n\n")}

    assert not paragraphs(train) & paragraphs(validation)


def test_unigram_entropy_of_known_texts():
    np.testing.assert_allclose(text.unigram_entropy([b"ab", b"ba"]), np.log(2))
    assert text.unigram_entropy([b"aaaa"]) == 0


@pytest.mark.parametrize("segments", [True, False])
def test_packing_by_hand(segments):
    packed = text.pack([b"abc", b"de"], 4, segments=segments)
    a, b, c, d, e = b"abcde"
    np.testing.assert_array_equal(packed.tokens, [[a, b, c, d], [e, 0, 0, 0]])
    np.testing.assert_array_equal(packed.targets, [[b, c, d, e], [0, 0, 0, 0]])
    if segments:
        np.testing.assert_array_equal(packed.segment_ids, [[1, 1, 1, 2], [2, 0, 0, 0]])
        np.testing.assert_array_equal(packed.weights, [[1, 1, 0, 1], [0, 0, 0, 0]])
    else:
        assert packed.segment_ids is None
        np.testing.assert_array_equal(packed.weights, [[1, 1, 1, 1], [0, 0, 0, 0]])


def test_packing_keeps_every_byte_once():
    train, _ = text.documents()
    packed = text.pack(train, 128, row_multiple=8)
    tokens, ids = packed.tokens.ravel(), packed.segment_ids.ravel()
    assert len(packed.tokens) % 8 == 0
    assert bytes(tokens[ids != text.PADDING].tolist()) == b"".join(train)

    # Segment ids change exactly at the ends of documents, the last one's included.
    size = sum(map(len, train))
    borders = np.cumsum([len(t) for t in train])
    changes = np.flatnonzero(np.diff(ids)) + 1
    np.testing.assert_array_equal(changes, borders[borders < len(ids)])
    assert (ids[:size] != text.PADDING).all()
    # Each document's first byte is the target of no token that counts.
    assert packed.weights.sum() == size - len(train)


def test_batches_go_through_the_whole_text():
    texts = [b"abcdefgh", b"ijkl", b"mnop"]
    source = text.batches(texts, 2, 4, seed=1)
    first = [next(source) for _ in range(2)]
    tokens = np.concatenate([batch.tokens for batch in first])
    assert sorted(tokens.ravel().tolist()) == sorted(b"".join(texts))
    again = text.batches(texts, 2, 4, seed=1)
    np.testing.assert_array_equal(next(again).tokens, first[0].tokens)


@deep
def test_remat_keeps_less_and_changes_no_loss():
    tiny = train_gpt.PRESETS["tiny"]
    config = dataclasses.replace(tiny.model, remat=True)
    found = train_gpt.train(dataclasses.replace(tiny, model=config)).losses
    expected = losses("jax_flash2", "float32", True)
    np.testing.assert_allclose(found, expected, rtol=RTOL["float32"])

    def kept(config) -> int:
        """Bytes that the forward leaves to the backward."""
        model = gpt.GPT(config, gpt.ATTENTIONS["jax_flash2"], rngs=nnx.Rngs(0))
        graph, state = nnx.split(model)

        def logits(state):
            return nnx.merge(graph, state)(np.zeros((2, 512), np.int32))

        _, pull = jax.eval_shape(lambda x: jax.vjp(logits, x), state)
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pull))

    assert kept(config) < 0.5 * kept(tiny.model)


@pytest.mark.parametrize(
    ("attention", "dtype", "segments"),
    [
        ("jax_flash2", "float32", True),
        *deeply(
            ("jax_flash2", "float32", False),
            ("jax_flash2", "bfloat16", True),
            ("jax_nn", "float32", True),
        ),
    ],
)
def test_losses_agree_with_reference(attention, dtype, segments):
    actual = losses(attention, dtype, segments)
    expected = losses("reference", dtype, segments)
    assert len(actual) == train_gpt.PRESETS["tiny"].steps
    np.testing.assert_allclose(actual, expected, rtol=RTOL[dtype], atol=0)
    assert actual[-1] < actual[0]


def parallel(data: int, context: int, batch_size: int = 4) -> Parallel:
    """Over as many of these devices as there are; each has three stripes of rows."""
    data = min(data, jax.device_count())
    context = min(context, jax.device_count() // data)
    sizes = {"batch_size": batch_size, "seq_len": 48 * context}
    return Parallel(data=data, context=context, **sizes)


@deep
@pytest.mark.parametrize(
    ("data", "context", "method", "segments"),
    [
        (1, 2, "gather", True),
        (1, 4, "gather", False),
        (4, 1, None, False),
        (2, 2, "ring", True),
    ],
)
def test_losses_of_divided_batches(data, context, method, segments, monkeypatch):
    """They are those of one device."""
    if method == "ring":  # which so few rows would not take
        monkeypatch.setattr(
            "jax_flash2._context._rows", {"few_rows": 0, "many_rows": 1 << 17}.get
        )
    devices = parallel(data, context)
    preset = dataclasses.replace(
        train_gpt.PRESETS["tiny"], seq_len=48 * devices.context
    )
    assert devices.stripe == (16 if devices.context > 1 else None)
    actual = train_gpt.train(preset, segments=segments, parallel=devices)
    expected = train_gpt.train(preset, segments=segments)
    rtol = RTOL["float32"]
    np.testing.assert_allclose(actual.losses, expected.losses, rtol=rtol, atol=0)
    np.testing.assert_allclose(
        actual.validation, expected.validation, rtol=rtol, atol=0
    )


@pytest.mark.parametrize(("data", "context"), deeply((2, 2), (1, 2), (2, 1)))
def test_gradients_of_divided_batches(data, context):
    """Not the losses alone: Adam would hide a factor."""
    devices = parallel(data, context, batch_size=2)
    config = train_gpt.PRESETS["tiny"].model
    model = gpt.GPT(config, gpt.ATTENTIONS["jax_flash2"], rngs=nnx.Rngs(0))
    length = 48 * devices.context
    batch = text.pack([b"the first one" * 3, b"another" * 20], length, row_multiple=2)
    batch = text.take(batch, slice(0, 2))

    def loss_sum(model, batch, **options):
        losses = jax.numpy.square(model(batch.tokens, batch.segment_ids, **options))
        return (losses.mean(axis=-1) * batch.weights).sum()

    actual = jax.jit(nnx.grad(devices.total(loss_sum)))(model, devices.striped(batch))
    expected = jax.jit(nnx.grad(loss_sum))(model, batch)
    for a, b in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        atol = RTOL["float32"] * np.abs(b).max()
        np.testing.assert_allclose(a, b, rtol=0, atol=atol)


@pytest.mark.parametrize(
    ("rows", "stripe"), [(1024, 256), (128, 128), (96, 32), (272, 16), (16, 16)]
)
def test_stripes_are_as_long_as_they_can_be(rows, stripe):
    context = min(2, jax.device_count())
    found = Parallel(context=context, batch_size=1, seq_len=context * rows).stripe
    assert found == (stripe if context > 1 else None)


def test_a_striped_batch():
    devices = parallel(1, 2)
    length = 48 * devices.context
    packed = text.pack([b"abc" * 50, b"de" * 30], length)
    order = devices.striped(text.Batch(*(np.arange(length)[None],) * 4)).tokens[0]
    if devices.context == 2:
        assert order[::16].tolist() == [0, 32, 64, 16, 48, 80]
    for actual, expected in zip(devices.striped(packed), packed, strict=True):
        np.testing.assert_array_equal(actual, expected[:, order])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            ["--context=3"],
            "--data=1 --context=3: .* multiple of 16 . 3 = 48 rows, got 64",
        ),
        (["--context=4", "--seq_len=72"], "multiple of 16 . 4 = 64 rows, got 72"),
        (
            ["--context=1000", "--seq_len=16000"],
            f"JAX has {jax.device_count()} devices, not 1000",
        ),
        (
            ["--context=2", "--attention=reference"],
            "--context=2 needs --attention=jax_flash2, got reference",
        ),
        (["--data=3"], "--data=3 .* 3 devices do not divide a batch of 4 sequences"),
    ],
)
def test_wrong_divisions(given, message):
    with flagsaver.flagsaver(), pytest.raises(app.UsageError, match=message):
        train_gpt.main(flags.FLAGS(["train_gpt", "--preset=tiny", *given]))


@pytest.mark.deep
def test_the_command(tmp_path):
    devices = min(2, jax.device_count())
    command = [sys.executable, "-W", "error", "-m", "benchmarks.train_gpt"]
    given = ["--preset=tiny", f"--context={devices}", f"--output_dir={tmp_path}"]
    done = subprocess.run(
        [*command, *given],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "sample, after 'The following '" in done.stdout
    (record,) = (json.loads(p.read_text()) for p in tmp_path.glob("*.json"))
    found = record["setting"]["devices"]
    several = "2: sequences on 1, rows on 2, stripes of 32"
    assert found == (several if devices == 2 else "1")
    assert found in done.stdout
    assert len(record["losses"]) == train_gpt.PRESETS["tiny"].steps


@pytest.mark.parametrize("attention", deeply("jax_flash2", "reference", "jax_nn"))
def test_documents_do_not_see_each_other(attention):
    config = train_gpt.PRESETS["tiny"].model
    model = gpt.GPT(config, gpt.ATTENTIONS[attention], rngs=nnx.Rngs(0))
    packed = text.pack([b"the first one", b"another"], 20)
    alone = text.pack([b"another"], 7)
    # A document packed after another one stands at other positions, but rotary
    # scores depend on differences of positions alone.
    actual = model(packed.tokens, packed.segment_ids)[:, 13:]
    expected = model(alone.tokens, alone.segment_ids)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=RTOL["float32"])
    assert np.abs(model(packed.tokens)[:, 13:] - expected).max() > 1e-2


def test_model_flops():
    preset = train_gpt.PRESETS["tiny"]
    assert train_gpt.model_flops(preset, 1000) == 256 * (6 * 1000 + 12 * 2 * 32 * 64)


@pytest.mark.parametrize("temperature", [0.0, *deeply(1.0)])
def test_generate(temperature):
    config = train_gpt.PRESETS["tiny"].model
    model = gpt.GPT(config, gpt.ATTENTIONS["jax_flash2"], rngs=nnx.Rngs(0))
    make = functools.partial(gpt.generate, model, temperature=temperature)
    sample = make(b"The ", 20)
    assert isinstance(sample, bytes)
    assert len(sample) == 20
    # A longer buffer changes nothing in what comes before: attention is causal.
    assert make(b"The ", 30)[:20] == sample


@deep
def test_every_cache_gives_the_same_bytes():
    """Of a model that was not trained; int8 moves logits that lie close together."""
    config = dataclasses.replace(train_gpt.PRESETS["tiny"].model, width=64)
    model = gpt.GPT(config, gpt.ATTENTIONS["jax_flash2"], rngs=nnx.Rngs(0))
    prompts, common = generate.prompts_of(3)
    assert common == 64 and (prompts[:, :common] == prompts[0, :common]).all()
    found = {name: x for name, x, _ in generate.samples(model, prompts, common, 20)}
    assert len(np.unique(found["dense"])) > 2
    for name in ("pages", "shared"):
        np.testing.assert_array_equal(found[name], found["dense"])
    assert np.mean(found["int8"] == found["dense"]) > 0.5
