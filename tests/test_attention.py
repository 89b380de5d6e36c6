"""The model equals the slow oracle, in values and gradients; no token, pad or row sees what it must not."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cases import (
    IMPLEMENTATIONS,
    Case,
    assert_near,
    cases,
    chosen_implementation,
    draw_ids,
    feed,
    keep_path,
    set_routing,
)
from tests.reference import reference_forward, reference_logits
from tests.support import tiny_config, wide_model

ROPE_MODES = ("main_sequence", "semantic_sequence")


@pytest.fixture(params=IMPLEMENTATIONS, scope="module")
def implementation(request):
    with chosen_implementation(request.param) as name:
        yield name


def gradients(logits, real, sources):
    """Gradients of a random projection of the logits at real tokens."""
    probe = torch.randn(logits.shape, generator=torch.Generator().manual_seed(0), dtype=logits.dtype)
    # the two graphs that are compared share the embedding lookup
    keep = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
    return torch.autograd.grad((logits * probe)[real].sum(), sources, **keep)


@pytest.mark.parametrize("path", ["both", "local", "routed"])
@given(case=cases())
@settings(max_examples=25)
def test_values_and_gradients_equal_the_reference(path, implementation, case: Case):
    assert_values_and_gradients_equal_the_reference(case.model(path, implementation), case)


def assert_values_and_gradients_equal_the_reference(model, case: Case):
    embeds = model.get_input_embeddings()(case.ids)
    names, parameters = zip(*model.named_parameters(), strict=True)
    sources = [embeds, *parameters]
    actual = model(inputs_embeds=embeds, attention_mask=case.mask, use_cache=False).logits
    expected = reference_forward(model, attention_mask=case.mask, inputs_embeds=embeds).logits
    assert_near(actual[case.real], expected[case.real], "logits")
    pairs = zip(gradients(actual, case.real, sources), gradients(expected, case.real, sources), strict=True)
    for name, (grad, expected_grad) in zip(["inputs_embeds", *names], pairs, strict=True):
        assert_near(grad, expected_grad, name)


@pytest.mark.parametrize("rope_mode", ROPE_MODES)
@pytest.mark.parametrize("num_selected", [1, 3, 7])
def test_long_input_equals_the_reference(num_selected, rope_mode, implementation):
    config = tiny_config(num_mosrah_heads=7, num_selected_heads=num_selected, rope_mode=rope_mode, window_size=5)
    model = wide_model(config, 1, torch.float64)
    model.set_attn_implementation(implementation)
    ids = draw_ids(2, 61, 1)
    assert_near(model(ids, use_cache=False).logits, reference_logits(model, ids))


@pytest.mark.parametrize("window", [3, 37])
def test_gradients_over_many_windows_equal_the_reference(implementation, window):
    config = tiny_config(num_hidden_layers=1, num_mosrah_heads=3, num_selected_heads=2, window_size=window)
    mask = torch.ones(2, 79, dtype=torch.long)
    mask[0, :7] = mask[1, 40:50] = 0
    case = Case(config, "spread", draw_ids(2, 79), mask, 0)
    assert_values_and_gradients_equal_the_reference(case.model(implementation=implementation), case)


@given(case=cases(max_tokens=9), start=st.integers(0, 2000), stride=st.integers(1, 5))
def test_given_position_ids_equal_the_reference(case: Case, start, stride):
    model = case.model()
    position_ids = (start + stride * torch.arange(case.ids.shape[1])).expand_as(case.ids)
    actual = model(case.ids, attention_mask=case.mask, position_ids=position_ids, use_cache=False).logits
    expected = reference_forward(model, case.ids, case.mask, position_ids=position_ids).logits
    assert_near(actual[case.real], expected[case.real])


@given(case=cases(max_tokens=9))
def test_single_precision_equals_the_reference(case: Case):
    model = case.model().float()
    actual = model(case.ids, attention_mask=case.mask, use_cache=False).logits
    assert_near(
        actual[case.real].double(), reference_logits(model, case.ids, case.mask)[case.real], dtype=torch.float32
    )


@given(case=cases(max_tokens=11))
def test_eager_maps_equal_the_reference_probabilities(case: Case):
    model = case.model(implementation="eager")
    output = model(case.ids, attention_mask=case.mask, use_cache=False, output_attentions=True)
    expected = reference_forward(model, case.ids, case.mask)
    assert len(output.attentions) == len(output.routed_attentions) == case.config.num_hidden_layers
    for maps, reference_maps in (
        (output.attentions, expected.local_maps),
        (output.routed_attentions, expected.routed_maps),
    ):
        for actual, reference in zip(maps, reference_maps, strict=True):
            real_queries = case.real[:, None, :, None]
            assert actual.shape == reference.shape
            assert_near(actual.where(real_queries, 0.0), reference.where(real_queries, 0.0))


@given(case=cases(max_tokens=11, mosrah_overallocation_factor=99.0), data=st.data())
def test_maps_on_a_warm_cache_are_the_last_rows_of_the_full_maps(case: Case, data):
    model, tokens = case.model(implementation="eager"), case.ids.shape[1]
    cut, full = data.draw(st.integers(0, tokens - 1)), {"use_cache": False, "output_attentions": True}
    cache = model.new_cache(growing=data.draw(st.booleans()))
    if cut:
        feed(model, case.ids[:, :cut], case.mask, cache=cache)
    output = model(case.ids[:, cut:], attention_mask=case.mask, cache=cache, use_cache=True, output_attentions=True)
    whole = model(case.ids, attention_mask=case.mask, **full)
    for name in ("attentions", "routed_attentions"):
        for actual, expected in zip(output[name], whole[name], strict=True):
            assert_near(
                actual.transpose(1, 2)[case.real[:, cut:]], expected[:, :, cut:].transpose(1, 2)[case.real[:, cut:]]
            )


def test_maps_are_refused_where_they_are_never_computed():
    with pytest.raises(ValueError, match="output_attentions"):
        wide_model(tiny_config())(draw_ids(1, 5), output_attentions=True)


def test_hidden_states_lead_from_the_embedding_to_the_final_norm(implementation):
    model = wide_model(tiny_config(), 0, torch.float64)
    model.set_attn_implementation(implementation)
    ids = draw_ids(2, 13)
    states = model(ids, use_cache=False, output_hidden_states=True).hidden_states
    assert len(states) == model.config.num_hidden_layers + 1
    assert_near(states[0], model.get_input_embeddings()(ids))
    assert_near(model.lm_head(states[-1]), reference_logits(model, ids))


@pytest.fixture
def traced_attention():
    """Run a model and hand back what goes into and comes out of its first attention layer."""

    def run(model, ids):
        seen = {}
        layer = model.model.layers[0]
        hooks = [
            layer.input_layernorm.register_forward_hook(lambda module, args, output: seen.update(x=output)),
            layer.self_attn.register_forward_hook(lambda module, args, output: seen.update(y=output)),
        ]
        model(ids, use_cache=False)
        for hook in hooks:
            hook.remove()
        return seen["x"], seen["y"][0] if isinstance(seen["y"], tuple) else seen["y"]

    return run


def test_dense_limit_is_plain_multi_head_attention(traced_attention, implementation):
    """With every head chosen and equal scores, the routed path is multi-head attention divided by the head count."""
    heads, width = 5, 8
    config = tiny_config(num_mosrah_heads=heads, num_selected_heads=heads, inference_sequence_length=32)
    model = keep_path(set_routing(wide_model(config, 0, torch.float64), "tied"), "routed")
    model.set_attn_implementation(implementation)
    x, actual = traced_attention(model, draw_ids(2, 31))
    mosrah = model.model.layers[0].self_attn.mosrah
    q, k, v = torch.einsum("btd,lda->blta", x, mosrah.qkv_proj).chunk(3, dim=-1)
    angles = torch.arange(31.0)[:, None].double() * 10000.0 ** (-torch.arange(0, width, 2).double() / width)
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    q, k = (t * cos + torch.cat([-t[..., width // 2 :], t[..., : width // 2]], dim=-1) * sin for t in (q, k))
    attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert_near(actual, torch.einsum("blta,lad->btd", attended, mosrah.out_proj) / heads)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@given(case=cases(), data=st.data())
def test_no_token_sees_the_future(training, case: Case, data):
    model, cut = case.model().train(training), data.draw(st.integers(1, case.ids.shape[1]))
    changed = case.ids.clone()
    changed[:, cut:] = (changed[:, cut:] + 1) % case.config.vocab_size
    before, after = (
        model(ids, attention_mask=case.mask, use_cache=False, output_router_logits=True) for ids in (case.ids, changed)
    )
    known = case.real[:, :cut]
    assert_near(after.logits[:, :cut][known], before.logits[:, :cut][known])
    for new, old in zip(after.router_logits, before.router_logits, strict=True):
        assert_near(new[:, :cut][known], old[:, :cut][known])


@given(case=cases())
def test_each_row_equals_its_own_unpadded_run(case: Case):
    model = case.model()
    together = model(case.ids, attention_mask=case.mask, use_cache=False).logits
    for row, real, logits in zip(case.ids, case.real, together, strict=True):
        if real.any():
            assert_near(logits[real], model(row[real][None], use_cache=False).logits[0])


@given(case=cases())
def test_pads_change_nothing_and_get_no_gradient(case: Case):
    model, pad = case.model(), ~case.real
    embeds = model.get_input_embeddings()(case.ids).detach()
    noisy = torch.where(pad[..., None], 1e3 * torch.ones_like(embeds), embeds).requires_grad_()
    clean_logits, noisy_logits = (
        model(inputs_embeds=x, attention_mask=case.mask, use_cache=False).logits for x in (embeds, noisy)
    )
    assert_near(noisy_logits[case.real], clean_logits[case.real])
    (grad,) = gradients(noisy_logits, case.real, [noisy])
    assert grad.isfinite().all()
    assert not grad[pad].any()


def test_the_mask_alone_tells_pads_from_tokens():
    model, ids = wide_model(tiny_config(pad_token_id=5), 0, torch.float64), draw_ids(2, 9)
    ids[0, 1] = ids[1, 3] = 5
    right_padded = torch.tensor([[1] * 4 + [0] * 5, [1] * 9])
    padded = torch.where(right_padded.bool(), ids, 5)
    logits = model(padded, attention_mask=right_padded, use_cache=False).logits
    assert_near(logits[0, :4], model(ids[:1, :4], use_cache=False).logits[0])
    assert_near(logits[1], model(ids[1:], use_cache=False).logits[0])


@pytest.fixture(params=["full forward", "one-token decode", "chunk on a warm cache"])
def last_logits(request):
    """The logits of the last token, reached in three ways."""

    def run(model, embeds):
        if request.param == "full forward":
            return model(inputs_embeds=embeds, use_cache=False).logits[:, -1]
        cut = embeds.shape[1] - (1 if request.param == "one-token decode" else 3)
        cache = model.new_cache()
        model(inputs_embeds=embeds[:, :cut], cache=cache, use_cache=True)
        return model(inputs_embeds=embeds[:, cut:], cache=cache, use_cache=True).logits[:, -1]

    return run


@pytest.mark.parametrize("window", [1, 2, 4])
def test_window_hides_the_token_at_distance_w_and_shows_the_one_before(last_logits, window):
    model = keep_path(wide_model(tiny_config(num_hidden_layers=1, window_size=window), 0, torch.float64), "local")
    embeds = model.get_input_embeddings()(draw_ids(1, 17)).detach()
    before = last_logits(model, embeds)
    for distance, seen in ((window, False), (window - 1, True)):
        changed = embeds.clone()
        changed[:, -1 - distance] += 1
        assert (last_logits(model, changed) != before).any().item() is seen


def test_dropout_acts_in_training_only():
    dropping, plain = (wide_model(tiny_config(attention_dropout=rate), 0, torch.float64) for rate in (0.5, 0.0))
    ids = draw_ids(2, 13)
    assert_near(dropping(ids, use_cache=False).logits, plain(ids, use_cache=False).logits)
    torch.manual_seed(0)
    first, second = (dropping.train()(ids, use_cache=False).logits for _ in range(2))
    assert not torch.allclose(first, second)


def test_one_forward_leaves_the_random_state_alone(implementation):
    model = wide_model(tiny_config())
    model.set_attn_implementation(implementation)
    state = torch.get_rng_state()
    model(draw_ids(2, 13))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("gradients", [True, False], ids=["gradients", "no gradients"])
@pytest.mark.parametrize("watched", ["", "mlp", "mlp.gate_proj", "post_attention_layernorm", "self_attn.local.k_proj"])
def test_hooks_see_whole_tensors_of_inputs_that_run_in_blocks(watched, gradients):
    with chosen_implementation("sdpa for long inputs"):
        model, ids, widths = wide_model(tiny_config(), 0, torch.float64), draw_ids(2, 17), []
        expected = reference_logits(model, ids)
        if watched:
            module = model.model.layers[0].get_submodule(watched)
            module.register_forward_hook(lambda module, args, output: widths.append(output.shape[:2]))
        with torch.set_grad_enabled(gradients):
            assert_near(model(ids).logits, expected)
    assert widths == ([ids.shape] if watched else [])
