"""From random seeds: a teacher learns a synthetic language, a Predictor is distilled, and its drafts pay."""

import copy
import json
import time

import pytest
import torch

from shram.modeling_shram import ShramForCausalLM
from shram.predictor_shram import decode_with_predictor
from tests.support import tiny_config
from training import train_predictor

VOCAB, ROW_TOKENS, PROMPT, NEW = 32, 96, 24, 47


def synthetic_rows(num_rows: int, seed: int) -> torch.Tensor:
    """Rows of runs that end at random: strides through the alphabet, a fixed cyclic chain, repeated words."""
    generator = torch.Generator().manual_seed(seed)
    chain = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(99))

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    def run() -> torch.Tensor:
        step, kind = torch.arange(draw(32, 64)), draw(0, 3)
        if kind == 0:
            return (draw(0, VOCAB) + draw(1, 4) * step) % VOCAB
        if kind == 1:
            return chain[(draw(0, VOCAB) + step) % VOCAB]
        return torch.randint(VOCAB, (draw(2, 5),), generator=generator).repeat(len(step))[: len(step)]

    return torch.stack([torch.cat([run() for _ in range(3)])[:ROW_TOKENS] for _ in range(num_rows)])


def train_teacher(steps: int = 900) -> ShramForCausalLM:
    torch.manual_seed(0)
    config = tiny_config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=6,
        window_size=16,
        num_mosrah_heads=8,
        head_dim=16,
        inference_sequence_length=128,
        training_sequence_length=128,
    )
    model = ShramForCausalLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps, pct_start=0.1)
    rows = synthetic_rows(2048, 0)
    for _ in range(steps):
        batch = rows[torch.randint(len(rows), (12,))]
        model(batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return model.eval()


def distil(teacher, recipe: dict, **settings):
    recipe = copy.deepcopy(recipe)
    recipe["predictor"] |= settings
    torch.manual_seed(1)
    return train_predictor.train(teacher, synthetic_rows(1024, 1), recipe)


def tokens_per_pass(model, predictor, prompts, num_steps: int) -> float:
    """Over prompts one by one, each equal to plain greedy."""
    tokens = passes = 0
    for ids in prompts.split(1):
        options = {"max_new_tokens": NEW, "do_sample": False, "attention_mask": torch.ones_like(ids)}
        plain = model.generate(ids, **options)
        options |= {"custom_generate": decode_with_predictor, "predictor": predictor, "predictor_steps": num_steps}
        assert torch.equal(model.generate(ids, **options), plain)
        tokens, passes = tokens + NEW, passes + predictor.num_full_passes
    return tokens / passes


@pytest.mark.slow
def test_a_predictor_distilled_from_scratch_pays_and_its_teachers_history_is_why():
    teacher = train_teacher()
    held_out = synthetic_rows(32, 2)
    with torch.no_grad():
        right = teacher(held_out).logits[:, :-1].argmax(dim=-1) == held_out[:, 1:]
    assert right.float().mean() >= 0.85

    recipe = json.loads(train_predictor.DEFAULT.read_text(encoding="utf-8"))
    recipe |= {"num_walks": 80, "first_tokens": 8, "step_shares": [0, 0, 1]}  # every rollout three steps long
    recipe["predictor"] |= {"num_drafts": 5}
    reading, blind = distil(teacher, recipe), distil(teacher, recipe, reads_history=False)
    model = teacher.double()
    for predictor in (reading, blind):
        predictor.double()
    prompts = synthetic_rows(10, 3)[:, :PROMPT]
    started = time.process_time()
    first, third = (tokens_per_pass(model, reading, prompts, n) for n in (1, 3))
    without = tokens_per_pass(model, blind, prompts, 1)
    print(f"P1 {first:.2f}, P3 {third:.2f}, no K/V {without:.2f}; {time.process_time() - started:.0f} s of CPU")
    assert first >= 2.0
    assert third > first
    assert without < first - 0.5
