"""Real English text for the GPT example, with nothing to download.

Every CPython carries the language reference that ``help()`` prints, as the
module ``pydoc_data.topics``: some 80 documents, half a megabyte. Tokens are the
bytes of its UTF-8, so a loss in nats a token is in nats a byte and can be held
against the entropy of the bytes themselves.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

VOCAB_SIZE = 256
# Every tenth document, in order of title, is held out.
HOLD_OUT_EVERY = 10
# The segment id of what fills the last row; documents are numbered from 1.
PADDING = 0


class Batch(NamedTuple):
    """Packed sequences; R is the number of rows (or the batch), T their length.

    Attributes:
      tokens: int32 `[R, T]`, the bytes of the documents, one after the other.
      targets: int32 `[R, T]`, the byte after each token.
      segment_ids: int32 `[R, T]`, the number of the token's document, or None when
        attention may look across documents.
      weights: float32 `[R, T]`, 1 where the target counts in the loss, else 0.
    """

    tokens: np.ndarray
    targets: np.ndarray
    segment_ids: np.ndarray | None
    weights: np.ndarray


def _paragraphs(document: str) -> list[str]:
    return document.split("\n\n")


def _words(paragraph: str) -> str:
    """The paragraph without its indentation and line breaks."""
    return " ".join(paragraph.split())


def documents() -> tuple[list[bytes], list[bytes]]:
    """The documents as `(train, validation)`, each a list of byte strings.

    Some topics quote others at length, so a paragraph that a validation document
    holds is taken out of the training documents (about 1 % of them): the model is
    never tested on a text that it was trained on.
    """
    # Imported here: half a megabyte of strings that only this function needs.
    from pydoc_data.topics import topics

    texts = [topics[title] for title in sorted(topics)]
    validation = texts[::HOLD_OUT_EVERY]
    held_out = {_words(p) for text in validation for p in _paragraphs(text)}
    train = [
        "\n\n".join(p for p in _paragraphs(text) if _words(p) not in held_out)
        for i, text in enumerate(texts)
        if i % HOLD_OUT_EVERY
    ]
    return (
        [text.encode() for text in train if text],
        [text.encode() for text in validation],
    )


def unigram_entropy(texts: Sequence[bytes]) -> float:
    """Entropy of single bytes, in nats: the loss of a model that only counts them.

    H = -sum_b p(b) log p(b), with p(b) the share of byte b in `texts`.
    """
    counts = np.bincount(np.frombuffer(b"".join(texts), np.uint8))
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum())


def pack(
    texts: Sequence[bytes],
    seq_len: int,
    *,
    segments: bool = True,
    row_multiple: int = 1,
) -> Batch:
    """Lays the documents end to end and cuts them into rows of `seq_len`.

    Every byte is a token exactly once. A document that is longer than what is left
    of a row continues in the next one.

    Args:
      texts: the documents, in the order in which they are packed.
      seq_len: T, the length of a row.
      segments: True numbers the documents in `segment_ids` and gives no weight to
        a target in another document than its token. False is one stream: no
        segment ids, and the next document's first byte is a target like any other.
      row_multiple: rows of padding, of weight 0, are added up to a multiple of it.

    Returns:
      A `Batch` of R rows.
    """
    lengths = [len(text) for text in texts]
    size = sum(lengths)
    row_size = seq_len * row_multiple
    padded = -(-size // row_size) * row_size

    # One more than the tokens, so that the last of them has a target.
    stream = np.zeros(padded + 1, np.int32)
    stream[:size] = np.frombuffer(b"".join(texts), np.uint8)
    ids = np.full(padded + 1, PADDING, np.int32)
    ids[:size] = np.repeat(np.arange(1, len(texts) + 1), lengths)
    counted = ids[1:] != PADDING
    if segments:
        counted &= ids[1:] == ids[:-1]

    def rows(x):
        return x.reshape(-1, seq_len)

    return Batch(
        tokens=rows(stream[:-1]),
        targets=rows(stream[1:]),
        segment_ids=rows(ids[:-1]) if segments else None,
        weights=rows(counted.astype(np.float32)),
    )


def batches(
    texts: Sequence[bytes],
    batch_size: int,
    seq_len: int,
    *,
    segments: bool = True,
    seed: int = 0,
) -> Iterator[Batch]:
    """Yields training batches `[batch_size, seq_len]` for ever.

    Each pass packs the documents in a new order, which moves the cuts between rows,
    and shuffles the rows. A batch may begin in one pass and end in the next.
    """
    rng = np.random.default_rng(seed)

    def rows():
        while True:
            order = rng.permutation(len(texts))
            packed = pack([texts[i] for i in order], seq_len, segments=segments)
            for row in rng.permutation(len(packed.tokens)):
                yield take(packed, row)

    source = rows()
    while True:
        chosen = zip(*itertools.islice(source, batch_size), strict=True)
        yield Batch(*(None if x[0] is None else np.stack(x) for x in chosen))


def take(packed: Batch, index) -> Batch:
    """The rows of a packed batch at `index`: an int, a slice or an array."""
    return Batch(*(None if x is None else x[index] for x in packed))
