"""A short Trainer run on real English learns, balances its heads, and goes on from a checkpoint as if never stopped."""

import pydoc_data.topics

import pytest
import torch
from transformers import Trainer, TrainingArguments, set_seed

from shram.modeling_shram import ShramForCausalLM
from tests.support import tiny_config

NUM_STEPS, ROW_TOKENS, LEARNING_RATE = 50, 48, 5e-3


@pytest.fixture(scope="module")
def rows():
    """Real prose that every Python ships, as bytes."""
    text = "\n".join(pydoc_data.topics.topics[name] for name in ("assert", "class", "for", "import", "strings", "with"))
    data = torch.tensor(list(text.encode("ascii", "ignore")))
    return [
        {"input_ids": row, "labels": row} for row in data[: len(data) // ROW_TOKENS * ROW_TOKENS].view(-1, ROW_TOKENS)
    ]


def make_model():
    set_seed(0)
    return ShramForCausalLM(tiny_config(vocab_size=128, num_mosrah_heads=8, training_sequence_length=64))


def make_optimizer(model):
    """AdamW with slow routers and fast biases, as the model card advises."""
    scales = {"expert_bias": 3.0, "router.weight": 0.1}
    groups = [
        {"params": [parameter], "lr": LEARNING_RATE * next((s for part, s in scales.items() if part in name), 1.0)}
        for name, parameter in model.named_parameters()
    ]
    return torch.optim.AdamW(groups, weight_decay=0.0)


def train(rows, folder, resume=None):
    model = make_model()
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=NUM_STEPS,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        gradient_checkpointing=True,
        logging_steps=1,
        save_steps=25,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=rows, optimizers=(make_optimizer(model), None))
    trainer.train(resume_from_checkpoint=resume)
    return model, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@torch.no_grad()
def max_vio(model, rows) -> float:
    return model.eval()(torch.stack([row["input_ids"] for row in rows[:64]])).max_vio.item()


def test_fifty_steps_learn_balance_and_resume(rows, tmp_path):
    start = max_vio(make_model(), rows)
    model, losses = train(rows, tmp_path)
    assert sum(losses[-5:]) / 5 < 0.75 * losses[0]
    assert max_vio(model, rows) < start

    _, resumed = train(rows, tmp_path, resume=str(tmp_path / "checkpoint-25"))
    assert resumed == pytest.approx(losses, rel=1e-5)
