"""LoRA adapts exactly what it is told to, starts as the base model, and merges into it."""

import copy

import pytest
import torch

from tests.cases import assert_near, draw_ids
from tests.support import tiny_config, wide_model

peft = pytest.importorskip("peft")
IDS = draw_ids(2, 17)
RANK = 3
LOCAL = [f"self_attn.local.{name}_proj" for name in "qkvo"]
MLP = [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
ROUTED = {"mosrah.qkv_proj": 4 * RANK * (32 + 24), "mosrah.out_proj": 4 * RANK * (8 + 32)}
ROUTER = {"router.weight": RANK * (32 + 4)}
LINEAR = {
    **dict.fromkeys(LOCAL[:3], RANK * (32 + 16)),
    LOCAL[3]: RANK * (16 + 32),
    **dict.fromkeys(MLP, RANK * (32 + 64)),
}
TARGETS = {
    "every linear layer": ({"target_modules": "all-linear"}, LINEAR),
    "the routed heads": ({"target_modules": [], "target_parameters": list(ROUTED)}, ROUTED),
    "local and routed": (
        {"target_modules": ["q_proj", "o_proj"], "target_parameters": list(ROUTED)},
        {**ROUTED, LOCAL[0]: LINEAR[LOCAL[0]], LOCAL[3]: LINEAR[LOCAL[3]]},
    ),
    "the router": ({"target_modules": [], "target_parameters": list(ROUTER)}, ROUTER),
}


@pytest.fixture
def base():
    return wide_model(tiny_config())


@pytest.fixture(params=TARGETS.values(), ids=TARGETS)
def adapted(request, base):
    """The adapted model, and its parameters per layer as they should be: place of the adapter and their number."""
    fields, expected = request.param
    config = peft.LoraConfig(r=RANK, lora_dropout=0.0, task_type="CAUSAL_LM", **fields)
    return peft.get_peft_model(copy.deepcopy(base), config).eval(), expected


def test_the_adapted_set_is_exact(adapted):
    model, expected = adapted
    trainable = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
    assert trainable and all("lora_" in name for name in trainable)
    assert sum(trainable.values()) == 2 * sum(expected.values())
    owners = {place for place in [*LOCAL, *MLP, "mosrah"] for name in trainable if f".{place}." in name}
    assert owners == {"mosrah" if place in {**ROUTED, **ROUTER} else place for place in expected}


def test_fresh_adapters_change_nothing(base, adapted):
    assert torch.equal(adapted[0](IDS).logits, base(IDS).logits)


def test_adapters_train_and_merge(base, adapted):
    model, _ = adapted
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    model(IDS, labels=IDS).loss.backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters() if p.requires_grad)
    logits = model(IDS).logits.detach()
    assert not torch.allclose(logits, base(IDS).logits, atol=1e-2)
    assert_near(model.merge_and_unload()(IDS).logits, logits)


def test_generation_uses_the_adapters_and_the_cache(adapted):
    model, _ = adapted
    settings = {"input_ids": IDS, "max_new_tokens": 9, "do_sample": False, "eos_token_id": 64, "pad_token_id": 0}
    assert torch.equal(model.generate(**settings), model.generate(**settings, use_cache=False))
