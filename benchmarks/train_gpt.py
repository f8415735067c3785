"""Trains a GPT on the bytes of Python's language reference.

    python -m benchmarks.train_gpt
    python -m benchmarks.train_gpt --attention=reference --steps=50
    python -m benchmarks.train_gpt --preset=gpt2_small --attention=cudnn
    python -m benchmarks.train_gpt --seq_len=65536 --batch_size=1 --context=4 --remat

Without flags: the preset `cpu`, or `gpt2_small` where JAX has a GPU. Prints a
table, writes a plot and the loss of every step to `--output_dir`, and prints a
sample of the model's own text. Two runs that differ in `--attention` alone see the
same batches and the same initial parameters, so their losses can be compared step
by step. So can those of `--context=N`, which divides every sequence over N devices, and
of `--data=N`, which divides every batch; both take as many as their product. `--remat`
takes less memory and more time, and changes no loss but by rounding.
"""

import dataclasses
import functools
import statistics
import time
from pathlib import Path

import flax
import jax
import jax.numpy as jnp
import optax
from absl import app, flags, logging
from flax import nnx
from tqdm import tqdm

from benchmarks import gpt, report, text
from benchmarks.parallel import Parallel

# Losses are fetched once in so many steps: fetching waits for the device.
FETCH_EVERY = 10
PROMPT = b"The following "
SAMPLE_BYTES = 200


@dataclasses.dataclass(frozen=True)
class Preset:
    """A model, and how it is trained.

    Attributes:
      model: sizes and dtype of the model.
      batch_size: B, sequences a step.
      seq_len: T, tokens a sequence.
      steps: number of updates.
      learning_rate: the highest of the schedule.
      eval_every: steps between two measurements of the validation loss.
    """

    model: gpt.GPTConfig
    batch_size: int
    seq_len: int
    steps: int
    learning_rate: float
    eval_every: int


PRESETS = {
    "tiny": Preset(
        gpt.GPTConfig(num_layers=2, num_heads=2, width=32),
        batch_size=4,
        seq_len=64,
        steps=8,
        learning_rate=1e-2,
        eval_every=8,
    ),
    "cpu": Preset(
        gpt.GPTConfig(num_layers=4, num_heads=4, width=128),
        batch_size=4,
        seq_len=256,
        steps=1000,
        learning_rate=4e-3,
        eval_every=200,
    ),
    "gpt2_small": Preset(
        gpt.GPTConfig(num_layers=12, num_heads=12, width=768, dtype="bfloat16"),
        batch_size=32,
        seq_len=1024,
        steps=200,
        learning_rate=6e-4,
        eval_every=50,
    ),
    # The model of the FlashAttention-2 paper's table 1, with GPT-3's vocabulary, of
    # which the text's bytes are a part: for speed, not for its loss.
    "gpt_1b3": Preset(
        gpt.GPTConfig(
            num_layers=24, num_heads=16, width=2048, vocab_size=50304, dtype="bfloat16"
        ),
        batch_size=8,
        seq_len=2048,
        steps=30,
        learning_rate=2e-4,
        eval_every=30,
    ),
}


@dataclasses.dataclass(frozen=True)
class Result:
    """What a training run leaves behind.

    Attributes:
      model: the trained model.
      losses: training loss of every step, in nats a byte, before its update.
      validation: `(steps done, validation loss)`, the last one at the end.
      step_seconds: median time of a step, compilation not counted; None where
        there was but one step.
      num_params: number of parameters.
    """

    model: gpt.GPT
    losses: list[float]
    validation: list[tuple[int, float]]
    step_seconds: float | None
    num_params: int


def _optimizer(preset: Preset) -> optax.GradientTransformation:
    """AdamW on a linear warm-up and a cosine, gradients clipped to norm 1."""
    warmup = max(preset.steps // 20, 1)
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=preset.learning_rate / warmup,
        peak_value=preset.learning_rate,
        warmup_steps=warmup,
        decay_steps=max(preset.steps, warmup + 1),
        end_value=preset.learning_rate / 20,
    )

    def matrices(params):
        return jax.tree.map(lambda p: p.ndim > 1, params)

    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(schedule, b2=0.95, weight_decay=0.1, mask=matrices),
    )


def _loss_sum(model: gpt.GPT, batch: text.Batch, **options) -> jax.Array:
    """Sum over the batch of weight times cross-entropy, in nats.

    `options` are for the model: see `gpt.GPT.__call__`.
    """
    logits = model(batch.tokens, batch.segment_ids, **options)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.targets)
    return (losses * batch.weights).sum()


def train(
    preset: Preset,
    *,
    attention: str = "jax_flash2",
    segments: bool = True,
    seed: int = 0,
    parallel: Parallel | None = None,
    progress: bool = False,
) -> Result:
    """Trains a GPT from scratch.

    Args:
      preset: the model and its training.
      attention: a name in `gpt.ATTENTIONS`.
      segments: True keeps attention inside a document and leaves out of the loss
        the targets in another document than their token; False trains on the
        stream of all documents, with plain causal attention.
      seed: of the initial parameters and of the order of the text.
      parallel: how devices divide every batch, for the attention "jax_flash2"; None
        trains on one device.
      progress: True shows a progress bar.

    Returns:
      A `Result`; the same one for the same arguments on the same machine.
    """
    train_texts, validation_texts = text.documents()
    shape = (preset.batch_size, preset.seq_len)
    source = text.batches(train_texts, *shape, segments=segments, seed=seed)
    held_out = text.pack(
        validation_texts,
        preset.seq_len,
        segments=segments,
        row_multiple=preset.batch_size,
    )

    model = gpt.GPT(preset.model, gpt.ATTENTIONS[attention], rngs=nnx.Rngs(seed))
    optimizer = nnx.Optimizer(model, _optimizer(preset), wrt=nnx.Param)
    num_params = sum(p.size for p in jax.tree.leaves(nnx.state(model, nnx.Param)))
    # A jax.jit over the split state: nnx.jit would walk both objects every step.
    graph, state = nnx.split((model, optimizer))
    loss_sum = _loss_sum
    if parallel is not None:
        source, held_out = map(parallel.striped, source), parallel.striped(held_out)
        state, loss_sum = parallel.replicated(state), parallel.total(_loss_sum)

    @functools.partial(jax.jit, donate_argnums=0)
    def train_step(state, batch):
        model, optimizer = nnx.merge(graph, state)

        def mean_loss(model):
            return loss_sum(model, batch) / jnp.maximum(batch.weights.sum(), 1)

        loss, gradients = nnx.value_and_grad(mean_loss)(model)
        optimizer.update(model, gradients)
        return nnx.state((model, optimizer)), loss

    @jax.jit
    def evaluate_batch(state, batch):
        model, _ = nnx.merge(graph, state)
        return loss_sum(model, batch)

    def evaluate(state) -> float:
        starts = range(0, len(held_out.tokens), preset.batch_size)
        sums = [
            evaluate_batch(
                state, text.take(held_out, slice(start, start + preset.batch_size))
            )
            for start in starts
        ]
        return float(sum(jax.device_get(sums)) / held_out.weights.sum())

    losses, pending, validation, step_seconds = [], [], [], []
    with tqdm(total=preset.steps, unit="step", disable=not progress) as bar:
        bar.set_description("compiling")
        began = time.perf_counter()
        for step in range(1, preset.steps + 1):
            state, loss = train_step(state, next(source))
            pending.append(loss)
            evaluated = step % preset.eval_every == 0 or step == preset.steps
            # The first step compiles: it is fetched, and so timed, by itself.
            if step == 1 or step % FETCH_EVERY == 0 or evaluated:
                losses += [float(x) for x in jax.device_get(pending)]
                if step > 1:
                    elapsed = time.perf_counter() - began
                    step_seconds.append(elapsed / len(pending))
                bar.set_description("training", refresh=False)
                bar.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
                bar.update(len(pending))
                pending = []
                if evaluated:
                    validation.append((step, evaluate(state)))
                began = time.perf_counter()

    model, _ = nnx.merge(graph, state)
    return Result(
        model=model,
        losses=losses,
        validation=validation,
        step_seconds=statistics.median(step_seconds) if step_seconds else None,
        num_params=num_params,
    )


def model_flops(preset: Preset, num_params: int) -> float:
    """Floating-point operations of one training step, forward and backward.

    `6 params tokens + 12 layers width T tokens`, with attention counted whole, as
    if it were not causal: the formula of the FlashAttention papers (Dao 2023,
    section 4.2), after Megatron-LM.
    """
    tokens = preset.batch_size * preset.seq_len
    model = preset.model
    attention = 12 * model.num_layers * model.width * preset.seq_len
    return tokens * (6.0 * num_params + attention)


_PRESET = flags.DEFINE_enum(
    "preset", None, sorted(PRESETS), "Sizes; default: gpt2_small on a GPU, else cpu."
)
_ATTENTION = flags.DEFINE_enum(
    "attention", "jax_flash2", sorted(gpt.ATTENTIONS), "Who computes attention."
)
_PACKING = flags.DEFINE_enum(
    "packing",
    "segments",
    ["segments", "stream"],
    "segments: attention stays inside a document; stream: plain causal attention.",
)
_CONTEXT = flags.DEFINE_integer(
    "context", 1, "Devices that divide the rows of every sequence.", lower_bound=1
)
_DATA = flags.DEFINE_integer(
    "data", 1, "Devices that divide the sequences of every batch.", lower_bound=1
)
_DTYPE = flags.DEFINE_enum(
    "dtype",
    None,
    ["float32", "bfloat16"],
    "Dtype of the activations, instead of the preset's; parameters stay float32.",
)
_REMAT = flags.DEFINE_bool(
    "remat", False, "Keep less for the backward and compute it again: long sequences."
)
_STEPS = flags.DEFINE_integer(
    "steps", None, "Updates, instead of the preset's.", lower_bound=1
)
_BATCH_SIZE = flags.DEFINE_integer(
    "batch_size", None, "Sequences a step, instead of the preset's.", lower_bound=1
)
_SEQ_LEN = flags.DEFINE_integer(
    "seq_len", None, "Bytes a sequence, instead of the preset's.", lower_bound=2
)
_LEARNING_RATE = flags.DEFINE_float(
    "learning_rate", None, "Highest rate, instead of the preset's.", lower_bound=0.0
)
_SAMPLE = flags.DEFINE_bool("sample", True, "Print what the model writes at the end.")
_SEED = flags.DEFINE_integer("seed", 0, "Of the parameters, the text's order, sample.")
_OUTPUT_DIR = flags.DEFINE_string(
    "output_dir", "benchmarks/out", "Where the plot and the losses are written."
)


def _chosen_preset(name: str) -> Preset:
    """The preset `name` with what the flags change in it."""
    preset = PRESETS[name]
    changes = {
        "steps": _STEPS.value,
        "batch_size": _BATCH_SIZE.value,
        "seq_len": _SEQ_LEN.value,
        "learning_rate": _LEARNING_RATE.value,
    }
    model = dataclasses.replace(preset.model, remat=_REMAT.value)
    if _DTYPE.value is not None:
        model = dataclasses.replace(model, dtype=_DTYPE.value)
    given = {key: value for key, value in changes.items() if value is not None}
    return dataclasses.replace(preset, model=model, **given)


def _chosen_devices(preset: Preset) -> Parallel | None:
    """How devices divide a batch, by the flags; None on one device."""
    flag = f"--data={_DATA.value} --context={_CONTEXT.value}"
    if _DATA.value == _CONTEXT.value == 1:
        return None
    if _ATTENTION.value != "jax_flash2":
        raise app.UsageError(
            f"{flag} needs --attention=jax_flash2, got {_ATTENTION.value}."
        )
    try:
        return Parallel(
            data=_DATA.value,
            context=_CONTEXT.value,
            batch_size=preset.batch_size,
            seq_len=preset.seq_len,
        )
    except ValueError as error:
        raise app.UsageError(f"{flag}: {error}.") from error


def main(argv):
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {' '.join(argv[1:])}")
    # JAX logs each platform that it looks for in vain, at the level INFO.
    logging.set_verbosity(logging.WARNING)
    gpu = jax.default_backend() == "gpu"
    name = _PRESET.value or ("gpt2_small" if gpu else "cpu")
    preset = _chosen_preset(name)
    if _ATTENTION.value == "cudnn" and not gpu:
        raise app.UsageError(
            "--attention=cudnn needs an NVIDIA GPU that JAX can use; JAX runs on "
            f"{jax.default_backend()!r} here."
        )
    if _ATTENTION.value == "cudnn" and preset.model.dtype == "float32":
        raise app.UsageError("--attention=cudnn has no float32; use --dtype=bfloat16.")
    parallel = _chosen_devices(preset)

    device = jax.local_devices()[0]
    train_texts, _ = text.documents()
    entropy = text.unigram_entropy(train_texts)
    setting = {
        "preset": name,
        "attention": _ATTENTION.value,
        "packing": _PACKING.value,
        "dtype": preset.model.dtype,
        "remat": preset.model.remat,
        "device": device.device_kind,
        "devices": "1" if parallel is None else str(parallel),
        "batch": f"{preset.batch_size} x {preset.seq_len} bytes",
        "steps": preset.steps,
        "seed": _SEED.value,
        "versions": f"jax {jax.__version__}, flax {flax.__version__}",
    }
    report.print_table(setting)

    result = train(
        preset,
        attention=_ATTENTION.value,
        segments=_PACKING.value == "segments",
        seed=_SEED.value,
        parallel=parallel,
        progress=True,
    )

    recent = statistics.fmean(result.losses[-FETCH_EVERY:])
    best_step, best = min(result.validation, key=lambda point: point[1])
    outcome = {
        "parameters": f"{result.num_params:,}",
        "unigram entropy": f"{entropy:.3f} nats/byte (training text)",
        "training loss": f"{recent:.3f} nats/byte (mean of the last steps)",
        "validation loss": f"{result.validation[-1][1]:.3f} nats/byte (at the end)",
        "  its lowest": f"{best:.3f} nats/byte (after step {best_step})",
        **report.speed(
            result.step_seconds,
            tokens=preset.batch_size * preset.seq_len,
            flops=model_flops(preset, result.num_params),
        ),
        "peak memory": report.peak_memory(device),
    }
    print()
    report.print_table(outcome)

    parts = ["train_gpt", name, _ATTENTION.value, _PACKING.value, preset.model.dtype]
    if parallel is not None:
        parts.append(f"data{parallel.data}_context{parallel.context}")
    stem = Path(_OUTPUT_DIR.value) / "_".join(parts)
    losses = {"losses": result.losses, "validation": result.validation}
    record = {
        "setting": setting,
        "outcome": outcome,
        "step_seconds": result.step_seconds,
        "unigram_entropy": entropy,
        **losses,
    }
    print()
    print("losses", report.write_json(stem, record))
    print("plot  ", report.plot_losses(stem, **losses, unigram_entropy=entropy))

    if not _SAMPLE.value:
        return
    sample = gpt.generate(
        result.model, PROMPT, SAMPLE_BYTES, temperature=0.7, seed=_SEED.value
    )
    print("\nsample, after", repr(PROMPT.decode()))
    print(report.printable(sample))


if __name__ == "__main__":
    app.run(main)
