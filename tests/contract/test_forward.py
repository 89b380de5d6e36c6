"""The forward call as the library and its users make it: names, outputs, logits_to_keep, labels, refusals."""

import pytest
import torch
from transformers import AutoModel, DynamicCache

from tests.contract.remote import cache_of, load, prompt

IDS = prompt(2, 17)
NAMES = ("cache", "past_key_values")


@pytest.fixture(scope="module")
def model(checkpoint):
    return load(checkpoint)


@pytest.fixture(scope="module")
def logits(model):
    return model(IDS, use_cache=False).logits


def assert_near(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_the_cache_is_taken_and_returned_under_both_names(model, logits, name):
    cache = model.new_cache()
    first = model(IDS[:, :9], **{name: cache}, use_cache=True)
    assert cache_of(first) is cache and cache.get_seq_length() == 9
    assert first.past_key_values is cache
    second = model(IDS[:, 9:], **{name: cache})
    assert_near(torch.cat([first.logits, second.logits], dim=1), logits)


def test_a_forward_makes_its_own_cache_when_asked(model, logits):
    cache = cache_of(model(IDS[:, :9], use_cache=True))
    assert cache.is_shram_cache and cache.get_seq_length() == 9
    assert_near(model(IDS[:, 9:], past_key_values=cache).logits, logits[:, 9:])
    assert cache_of(model(IDS)).get_seq_length() == 17, "config.use_cache is True"


def test_no_cache_is_made_when_unwanted(model):
    assert cache_of(model(IDS, use_cache=False)) is None


def test_a_filled_cache_is_never_ignored_without_a_word(model):
    cache = model.new_cache()
    model(IDS[:, :9], past_key_values=cache)
    with pytest.raises(ValueError, match="use_cache"):
        model(IDS[:, 9:], past_key_values=cache, use_cache=False)
    assert cache.get_seq_length() == 9


@pytest.mark.parametrize("use_cache", [True, False])
def test_tuples_hold_the_standard_fields_first(model, logits, use_cache):
    output = model(IDS, return_dict=False, use_cache=use_cache)
    assert_near(output[0], logits)
    assert (getattr(output[1], "is_shram_cache", False)) is use_cache
    assert model(IDS, labels=IDS, return_dict=False, use_cache=use_cache)[0].ndim == 0
    hidden, *rest = model.model(IDS, return_dict=False, use_cache=use_cache)
    assert_near(model.lm_head(hidden), logits)
    assert (getattr(rest[0], "is_shram_cache", False)) is use_cache


def test_outputs_carry_the_load_of_the_routed_heads(model):
    output = model(IDS, use_cache=False)
    assert output.load_balance_loss.ndim == output.max_vio.ndim == 0
    assert not output.max_vio.requires_grad and output.router_logits is None
    assert [scores.shape for scores in model(IDS, output_router_logits=True).router_logits] == 2 * [(2, 17, 4)]


@pytest.mark.parametrize("keep", [0, 1, 3, 17, torch.tensor([16]), torch.tensor([2, 0, 5])], ids=str)
def test_logits_to_keep_selects_rows_of_the_full_logits(model, logits, keep):
    kept = logits[:, keep] if torch.is_tensor(keep) else logits[:, -keep:]
    output = model(IDS, logits_to_keep=keep, use_cache=False)
    assert_near(output.logits, kept)


def test_the_loss_does_not_depend_on_logits_to_keep(model):
    expected = model(IDS, labels=IDS, use_cache=False).loss
    assert_near(model(IDS, labels=IDS, logits_to_keep=3, use_cache=False).loss, expected)


def test_prefill_computes_logits_of_the_last_token_alone(model):
    shapes = []
    hook = model.lm_head.register_forward_hook(lambda module, args, output: shapes.append(tuple(output.shape)))
    model.generate(IDS, max_new_tokens=2, do_sample=False, pad_token_id=0)
    hook.remove()
    assert shapes[0] == (2, 1, 64)


def test_input_embeds_equal_input_ids(model, logits):
    assert_near(model(inputs_embeds=model.get_input_embeddings()(IDS), use_cache=False).logits, logits)


@pytest.mark.parametrize("mask", [torch.ones_like(IDS), torch.ones_like(IDS).bool(), torch.ones(2, 17)], ids=str)
def test_a_full_mask_of_any_kind_equals_none(model, logits, mask):
    assert_near(model(IDS, attention_mask=mask, use_cache=False).logits, logits)


def test_labels_are_shifted_inside_and_ignored_at_minus_100(model, logits):
    labels = IDS.clone()
    labels[0, :11] = -100
    chosen = torch.cat([logits[0, 10:-1], logits[1, :-1]])
    targets = torch.cat([IDS[0, 11:], IDS[1, 1:]])
    expected = torch.nn.functional.cross_entropy(chosen, targets)
    assert_near(model(IDS, labels=labels, use_cache=False).loss, expected)


@pytest.mark.parametrize("training", [True, False])
def test_nothing_to_predict_costs_exactly_nothing(checkpoint, training):
    model = load(checkpoint).train(training)
    model.config.load_balance_coef = 0.0
    loss = model(IDS, labels=torch.full_like(IDS, -100), use_cache=False).loss
    assert loss.item() == 0.0
    loss.backward()
    assert not any(p.grad.any() for p in model.parameters() if p.grad is not None)


def test_unknown_keywords_are_named(model):
    for body in (model, model.model):
        with pytest.raises(TypeError, match="attention_maks"):
            body(IDS, attention_maks=torch.ones_like(IDS))


def test_two_caches_are_refused(model):
    with pytest.raises(ValueError, match=r"(?s)cache.*past_key_values"):
        model(IDS, cache=model.new_cache(), past_key_values=model.new_cache())


@pytest.mark.parametrize("name", NAMES)
def test_a_foreign_cache_is_refused_by_name(model, name):
    with pytest.raises(TypeError, match="SHRAM needs a ShramCache, got DynamicCache"):
        model(IDS, **{name: DynamicCache()})


@pytest.mark.parametrize("shape", [(2, 16), (2, 18), (1, 17), (3, 17), (17,), (2, 1, 17, 17)], ids=str)
def test_masks_of_a_wrong_shape_are_refused(model, shape):
    with pytest.raises(ValueError, match="attention_mask"):
        model(IDS, attention_mask=torch.ones(shape, dtype=torch.long))


@pytest.mark.parametrize(
    "call", [{}, {"input_ids": IDS, "inputs_embeds": torch.zeros(2, 17, 32)}], ids=["none", "both"]
)
def test_exactly_one_kind_of_input_is_wanted(model, call):
    with pytest.raises(ValueError, match=r"input_ids.*inputs_embeds"):
        model(**call)


def test_the_base_model_alone_gives_the_same_hidden_states(checkpoint, model, logits):
    base = load(checkpoint, AutoModel)
    assert_near(model.lm_head(base(IDS).last_hidden_state), logits)


def test_an_eager_model_returns_both_kinds_of_maps(checkpoint):
    model = load(checkpoint, attn_implementation="eager")
    output = model(IDS, output_attentions=True, use_cache=False)
    for maps, heads in ((output.attentions, 2), (output.routed_attentions, 4)):
        assert [m.shape for m in maps] == 2 * [(2, heads, 17, 17)]
    total = output.routed_attentions[0].sum(dim=-1)
    assert_near(total.sum(dim=1), torch.full((2, 17), 2.0))
