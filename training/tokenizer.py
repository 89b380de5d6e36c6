"""Train the byte-level BPE tokenizer on the training split and write the two files that AutoTokenizer loads.

python -m training.tokenizer
"""

import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from training import ROOT, recipe
from training.text import DATA, PACKAGES, documents

END, PAD = "<|endoftext|>", "<|pad|>"  # ids 0 and 1
# By hand, since what transformers 5 saves names a class that 4.57 lacks.
TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": END,
    "eos_token": END,
    "pad_token": PAD,
    "padding_side": "left",
    "clean_up_tokenization_spaces": False,
    "model_max_length": 1_000_000,
    "model_input_names": ["input_ids", "attention_mask"],
}
# Wording of the retrieval tasks, so that a small vocabulary has their words whole.
TASK_SENTENCES = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize it.",
    "I will quiz you about the important information there.",
    "The pass key is 7. Remember it. 7 is the pass key. What is the pass key? The pass key is 7.",
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.",
    "One of the special magic numbers for the city is: 7. Remember the magic number.",
    "What is the special magic number for the city mentioned in the provided text?",
    "Question: What is the value of the key? Answer: The value of the key is 7.",
)
TASK_REPEATS = 1000


def training_text(data: Path) -> Iterator[str]:
    for source in PACKAGES:
        yield from (item["text"] for item in documents(source, data) if item["split"] == "train")
    yield from TASK_SENTENCES * TASK_REPEATS


def train(vocab_size: int, texts: Iterator[str]) -> Tokenizer:
    """Byte-level BPE; every digit is a token of its own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(tqdm(texts, desc="tokenizer", unit="text"), trainer)
    return tokenizer


def prepare(vocab_size: int, folder: Path = ROOT, data: Path = DATA) -> PreTrainedTokenizerFast:
    """Load the tokenizer of `folder`, trained first if it is missing."""
    if not (folder / "tokenizer.json").exists():
        train(vocab_size, training_text(data)).save(str(folder / "tokenizer.json"))
        config = json.dumps(TOKENIZER_CONFIG, indent=2) + "\n"
        (folder / "tokenizer_config.json").write_text(config, encoding="utf-8")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    if len(tokenizer) != vocab_size:
        raise ValueError(f"{folder / 'tokenizer.json'} has {len(tokenizer)} tokens, the recipe asks for {vocab_size}.")
    return tokenizer


def main() -> None:
    tokenizer = prepare(recipe.load()["model"]["vocab_size"])
    for source in PACKAGES:
        text = "".join(item["text"] for item in documents(source) if item["split"] == "held_out")
        ids = tokenizer(text)["input_ids"]
        exact = tokenizer.decode(ids) == text
        print(f"{source:7} held out: {len(text.encode()) / len(ids):.2f} bytes per token, round trip exact: {exact}")


if __name__ == "__main__":
    main()
