"""Token files, the endless mixture of training rows, and held-out windows."""

import hashlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from training import text

END_ID = 0


def load_tokens(source: str, split: str, tokenizer: PreTrainedTokenizerFast, data: Path = text.DATA) -> np.ndarray:
    """One source's tokens as a memory-mapped vector, END_ID before every document; tokenised on first use."""
    state = tokenizer.backend_tokenizer.to_str().encode() + text.prepare(source, data).read_bytes()
    target = data / "tokens" / f"{source}-{split}-{hashlib.sha256(state).hexdigest()[:12]}.npy"
    if not target.exists():
        texts = [item["text"] for item in text.documents(source, data) if item["split"] == split]
        ids = [[END_ID, *tokenizer(item)["input_ids"]] for item in tqdm(texts, desc=target.stem, unit="document")]
        target.parent.mkdir(parents=True, exist_ok=True)
        np.save(target, np.concatenate(ids).astype(np.int32))
    return np.load(target, mmap_mode="r")


def split_documents(tokens: np.ndarray) -> list[np.ndarray]:
    return np.split(tokens, np.flatnonzero(tokens == END_ID)[1:])


class RowStream:
    """One source as an endless series of packed rows; every pass shuffles the documents, then the rows.

    Row i depends on the seed and on i alone, so a run can stop and go on anywhere.
    """

    def __init__(self, tokens: np.ndarray, row_tokens: int, seed: int):
        self.documents = split_documents(tokens)
        self.row_tokens, self.seed = row_tokens, seed
        self.rows_per_pass, self.rest = divmod(len(tokens), row_tokens)
        if self.rows_per_pass == 0:
            raise ValueError(f"a source of {len(tokens)} tokens does not fill a row of {row_tokens}")
        self.loaded: tuple[int, np.ndarray] = (-1, np.empty(0))

    def shuffled_pass(self, number: int) -> np.ndarray:
        """Rows (rows_per_pass, row_tokens) of one pass over the source."""
        generator = np.random.default_rng([self.seed, number])
        order = generator.permutation(len(self.documents))
        start = generator.integers(self.rest + 1)  # the tokens that fill no row differ from pass to pass
        stream = np.concatenate([self.documents[i] for i in order])[start:]
        rows = stream[: self.rows_per_pass * self.row_tokens].reshape(self.rows_per_pass, self.row_tokens)
        return generator.permutation(rows)

    def __getitem__(self, index: int) -> np.ndarray:
        number, place = divmod(index, self.rows_per_pass)
        if self.loaded[0] != number:
            self.loaded = (number, self.shuffled_pass(number))
        return self.loaded[1][place]


class MixedRows(Dataset):
    """Rows drawn from several streams; weights count passes: weight 5 is seen five times as often as weight 1."""

    def __init__(self, streams: dict[str, RowStream], weights: dict[str, float], num_rows: int, seed: int):
        self.streams = list(streams.values())
        shares = np.array([weights[name] * stream.rows_per_pass for name, stream in streams.items()])
        self.stream_of = np.random.default_rng(seed).choice(len(shares), size=num_rows, p=shares / shares.sum())
        drawn = self.stream_of[:, None] == np.arange(len(shares))
        # index_of[i]: how many earlier rows came from the stream of row i
        self.index_of = drawn.cumsum(axis=0)[np.arange(num_rows), self.stream_of] - 1

    def __len__(self) -> int:
        return len(self.stream_of)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        row = self.streams[self.stream_of[i]][int(self.index_of[i])]
        ids = torch.from_numpy(row.astype(np.int64))
        return {"input_ids": ids, "labels": ids}


def held_out_windows(tokens: np.ndarray, length: int) -> list[Tensor]:
    """Cut documents into windows of at most `length` tokens, each starting with the last token of the one before.

    So every token but END_ID is predicted exactly once.
    """
    return [
        torch.from_numpy(document[start : start + length].astype(np.int64))
        for document in split_documents(tokens)
        for start in range(0, len(document) - 1, length - 1)
    ]


def spread(windows: list[Tensor], limit: int) -> list[Tensor]:
    """At most `limit` of the windows, evenly spread."""
    limit = min(limit, len(windows))
    return [windows[i * len(windows) // limit] for i in range(limit)]


def byte_lengths(tokenizer: PreTrainedTokenizerFast) -> Tensor:
    """Bytes that each id stands for (V,): a byte-level token has one character per byte, a special token none."""
    tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    special = set(tokenizer.all_special_tokens)
    return torch.tensor([0 if token in special else len(token) for token in tokens])
