"""Routing: who is chosen, the same on every path, and how load is measured and balanced."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shram.attention_shram import load_balance
from tests.cases import Case, assert_near, cases, draw_ids, set_routing
from tests.reference import load_balance_loss, max_vio, reference_forward
from tests.support import tiny_config, wide_model


def routers(model):
    return [layer.self_attn.mosrah.router for layer in model.model.layers]


def heads_lengths(cache):
    return torch.stack([layer.mosrah_cache.get_heads_lengths() for layer in cache.layers])


@given(case=cases())
def test_scores_and_load_equal_the_reference(case: Case):
    model = case.model()
    output = model(case.ids, attention_mask=case.mask, use_cache=False, output_router_logits=True)
    expected = reference_forward(model, case.ids, case.mask)
    for scores, reference in zip(output.router_logits, expected.router_scores, strict=True):
        assert_near(scores[case.real], reference[case.real])
    if case.real.any():
        assert_near(output.max_vio, max_vio(expected.shares), dtype=torch.float32)
        assert_near(output.load_balance_loss, load_balance_loss(expected.shares), dtype=torch.float32)
    assert output.max_vio.isfinite() and output.load_balance_loss.isfinite()


@given(
    shares=st.lists(st.integers(0, 9), min_size=1, max_size=7).filter(any),
    incoming=st.floats(-3, 3, allow_subnormal=False),
)
def test_balance_gradient_is_the_sign_of_the_excess_load(shares, incoming):
    counts = torch.tensor(shares, dtype=torch.float64)
    frequencies = (counts / counts.sum()).requires_grad_()
    bias = torch.zeros(len(shares), dtype=torch.float64, requires_grad=True)
    loss = load_balance(bias, frequencies)
    assert_near(loss, load_balance_loss([frequencies]))
    (incoming * loss).backward()
    # whole numbers decide the sign: the float share of a balanced head can miss 1/L by a rounding
    excess = (counts * len(shares) - counts.sum()).sign()
    balanced = excess == 0
    assert_near(bias.grad[~balanced], (excess * incoming)[~balanced])
    assert frequencies.grad is None or not frequencies.grad.any()


@given(case=cases())
def test_balance_loss_moves_nothing_but_the_bias(case: Case):
    model = case.model().train()
    model(case.ids, attention_mask=case.mask, use_cache=False).load_balance_loss.backward()
    shares = reference_forward(model, case.ids, case.mask).shares
    for router, share in zip(routers(model), shares, strict=True):
        excess = share - 1 / len(share)
        clear = excess.abs() > 1e-6
        expected = excess.sign() / case.config.num_hidden_layers
        if case.real.any():
            assert_near(router.expert_bias.grad[clear], expected[clear], dtype=torch.float32)
    moved = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    assert all(name.endswith("expert_bias") for name in moved)


def test_opposite_imbalances_of_two_layers_do_not_cancel():
    model = wide_model(tiny_config(num_mosrah_heads=4, num_selected_heads=2))
    with torch.no_grad():
        for router, favoured in zip(routers(model), ([0, 1], [2, 3]), strict=True):
            router.expert_bias[favoured] = 100
    output = model(draw_ids(2, 13), use_cache=False)
    assert output.max_vio.item() == pytest.approx(1.0)
    assert output.load_balance_loss.item() == pytest.approx(1.0)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("num_pads", [10, 100])
def test_padding_is_no_traffic(num_pads, side):
    model, ids = wide_model(tiny_config(inference_sequence_length=128), 0, torch.float64).train(), draw_ids(1, 8)
    pad = (num_pads, 0) if side == "left" else (0, num_pads)
    padded = torch.nn.functional.pad(ids, pad, value=3)
    mask = torch.nn.functional.pad(torch.ones_like(ids), pad)
    reports = []
    for inputs in ({"input_ids": ids}, {"input_ids": padded, "attention_mask": mask}):
        output = model(**inputs, use_cache=False)
        real = inputs.get("attention_mask", torch.ones_like(ids)).bool()
        loss = output.logits[real].square().sum() + output.load_balance_loss
        sources = [parameter for router in routers(model) for parameter in router.parameters()]
        reports.append([output.load_balance_loss, output.max_vio, *torch.autograd.grad(loss, sources)])
    for with_pads, alone in zip(*reports, strict=True):
        assert_near(with_pads, alone, dtype=torch.float32)


@pytest.mark.parametrize("chunk", [1, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_every_path_picks_the_same_heads(chunk, dtype):
    config = tiny_config(num_mosrah_heads=7, num_selected_heads=3)
    model, ids = wide_model(config, 0, dtype), draw_ids(2, 19)
    whole, parts = model.new_cache(), model.new_cache()
    scores = model(ids, cache=whole, use_cache=True, output_router_logits=True).router_logits
    for start in range(0, 19, chunk):
        output = model(ids[:, start : start + chunk], cache=parts, use_cache=True, output_router_logits=True)
        for part, full in zip(output.router_logits, scores, strict=True):
            assert_near(part, full[:, start : start + chunk])
        lengths = heads_lengths(parts)
        seen = min(start + chunk, 19)
        assert (lengths.sum(dim=-1) == 3 * seen).all() and (lengths <= seen).all()
    assert torch.equal(heads_lengths(parts), heads_lengths(whole))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_narrow_models_score_in_single_precision(dtype):
    model, seen = wide_model(tiny_config(), 0, dtype), []
    model.model.layers[0].input_layernorm.register_forward_hook(lambda module, args, output: seen.append(output))
    scores = model(draw_ids(2, 13), use_cache=False, output_router_logits=True).router_logits[0]
    assert scores.dtype == torch.float32
    assert_near(scores.double(), seen[0].double() @ routers(model)[0].weight.double().T, dtype=torch.float32)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_heads, num_selected", [(7, 3), (64, 16)])
def test_ties_go_to_the_lower_head(num_heads, num_selected, dtype):
    config = tiny_config(num_mosrah_heads=num_heads, num_selected_heads=num_selected)
    model, cache = set_routing(wide_model(config, 0, dtype), "tied"), None
    ids = draw_ids(2, 13)
    for chunk in (ids[:, :9], ids[:, 9:12], ids[:, 12:]):
        cache = cache or model.new_cache()
        model(chunk, cache=cache, use_cache=True)
    expected = torch.tensor([13] * num_selected + [0] * (num_heads - num_selected))
    assert torch.equal(heads_lengths(cache), expected.expand(2, 2, -1))


def test_the_bias_steers_the_choice_but_not_the_mixture():
    """A bias that changes no choice changes no logit."""
    model, ids = wide_model(tiny_config(num_mosrah_heads=5, num_selected_heads=5), 0, torch.float64), draw_ids(2, 13)
    before = model(ids, use_cache=False).logits
    with torch.no_grad():
        for router in routers(model):
            router.expert_bias.copy_(torch.tensor([7.0, -3.0, 0.5, 2.0, -9.0]))
    assert_near(model(ids, use_cache=False).logits, before)


def test_expert_bias_starts_at_zero_and_is_trained():
    from shram.modeling_shram import ShramForCausalLM

    for router in routers(ShramForCausalLM(tiny_config())):
        assert router.expert_bias.shape == (4,) and not router.expert_bias.any()
        assert router.expert_bias.requires_grad
