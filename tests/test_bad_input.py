"""Wrong calls and broken files are refused in words, before anything is changed."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from shram.modeling_shram import ShramForCausalLM
from tests.cases import contents, draw_ids, feed, set_routing
from tests.support import tiny_config, wide_model

IDS = draw_ids(2, 9)


@pytest.fixture(scope="module")
def model():
    return wide_model(tiny_config(pad_token_id=0))


BAD_CALLS = {
    "no rows": ({"input_ids": IDS[:0]}, r"\(0, 9\)"),
    "no tokens": ({"input_ids": IDS[:, :0]}, r"\(2, 0\)"),
    "one dimension": ({"input_ids": IDS[0]}, r"input_ids.*\(9,\)"),
    "floats": ({"input_ids": IDS.float()}, r"input_ids.*float32"),
    "negative id": ({"input_ids": IDS - 64}, r"input_ids.*64"),
    "id beyond the vocabulary": ({"input_ids": IDS + 64}, r"input_ids.*64"),
    "narrow embeddings": ({"inputs_embeds": torch.zeros(2, 9, 31)}, r"inputs_embeds.*32"),
    "flat embeddings": ({"inputs_embeds": torch.zeros(9, 32)}, "inputs_embeds"),
    "narrow mask": ({"input_ids": IDS, "attention_mask": torch.ones(2, 8)}, r"attention_mask.*\(2, 8\)"),
    "mask of other rows": ({"input_ids": IDS, "attention_mask": torch.ones(3, 9)}, r"attention_mask.*\(3, 9\)"),
    "mask of four dimensions": ({"input_ids": IDS, "attention_mask": torch.ones(2, 1, 9, 9)}, "attention_mask"),
    "mask by kind": ({"input_ids": IDS, "attention_mask": {"full_attention": torch.ones(2, 9)}}, "attention_mask"),
    "short positions": ({"input_ids": IDS, "position_ids": torch.zeros(2, 8).long()}, "position_ids"),
    "too long for a cache": ({"input_ids": draw_ids(2, 65)}, r"64.*(65|70)"),
}


@pytest.mark.parametrize("filled", [True, False], ids=["filled cache", "empty cache"])
@pytest.mark.parametrize("call, message", BAD_CALLS.values(), ids=BAD_CALLS)
def test_bad_calls_are_refused_and_leave_the_cache_alone(model, call, message, filled):
    cache = model.new_cache()
    if filled:
        feed(model, draw_ids(2, 5), cache=cache)
    before = contents(cache)
    with pytest.raises(ValueError, match=message):
        model(**call, cache=cache, use_cache=True)
    assert all(torch.equal(a, b) for a, b in zip(contents(cache), before, strict=True))


def test_only_a_cache_limits_the_length(model):
    assert model(draw_ids(1, 81), use_cache=False).logits.isfinite().all()
    cache = model.new_cache()
    feed(model, draw_ids(1, 63), cache=cache)
    feed(model, draw_ids(1, 1), cache=cache)
    with pytest.raises(ValueError, match="64"):
        feed(model, draw_ids(1, 1), cache=cache)
    assert cache.get_seq_length() == 64


@pytest.mark.parametrize("ids", [torch.zeros(1, 0, dtype=torch.long), torch.tensor([[3, 64]])], ids=["empty", "range"])
def test_generate_refuses_what_forward_refuses(model, ids):
    with pytest.raises(ValueError):
        model.generate(ids, max_new_tokens=2, do_sample=False)


def test_static_generation_reports_the_head_that_overflows():
    model = set_routing(wide_model(tiny_config(pad_token_id=0, mosrah_overallocation_factor=1.0)), "collapsed")
    with pytest.raises(ValueError, match=r"(?i)layer.*head.*capacity"):
        model.generate(IDS, max_new_tokens=40, do_sample=False, cache_implementation="static", eos_token_id=64)
    assert model.generate(IDS, max_new_tokens=40, do_sample=False, eos_token_id=64).shape == (2, 49)


def test_a_static_cache_no_longer_than_its_slots_cannot_overflow():
    model = set_routing(wide_model(tiny_config(pad_token_id=0, mosrah_overallocation_factor=1.0)), "collapsed")
    greedy = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": 64}
    assert torch.equal(model.generate(IDS, **greedy, cache_implementation="static"), model.generate(IDS, **greedy))


@pytest.mark.parametrize(
    "arguments",
    [
        {"labels": IDS[:, :5]},
        {"labels": IDS + 1000},
        {"labels": IDS.float()},
        {"logits_to_keep": torch.tensor([99])},
        {"logits_to_keep": -1},
        {"position_ids": torch.full_like(IDS, -3)},
        {"position_ids": torch.arange(9.0)[None]},
        {"attention_mask": torch.zeros(2, 9).masked_fill(IDS > 30, -torch.inf)},
    ],
    ids=lambda arguments: str(next(iter(arguments))),
)
def test_arguments_are_refused_before_the_cache_is_written(model, arguments):
    cache = model.new_cache()
    with pytest.raises(ValueError, match=next(iter(arguments))):
        model(IDS, cache=cache, **arguments)
    assert cache.get_seq_length() == 0


def test_a_longer_context_asks_for_a_new_cache():
    model = wide_model(tiny_config())
    cache = model.new_cache()
    model(IDS, cache=cache)
    model.config.set_inference_context(128)
    with pytest.raises(ValueError, match=r"64.*128"):
        model(IDS[:, :1], cache=cache)
    assert model(IDS, cache=model.new_cache()).logits.isfinite().all()


@pytest.mark.parametrize("growing", [True, False])
def test_a_cache_filled_in_inference_mode_serves_outside_it(model, growing):
    with torch.inference_mode():
        cache = model.new_cache(2, growing=growing)
        model(IDS[:, :8], cache=cache)
    logits = model(IDS[:, 8:], cache=cache).logits
    torch.testing.assert_close(logits, model(IDS).logits[:, 8:], rtol=1e-4, atol=1e-4)


@pytest.fixture
def saved(model, tmp_path):
    model.save_pretrained(tmp_path)
    return tmp_path


def rewrite(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def test_a_truncated_weight_file_is_refused(saved):
    file = saved / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(Exception, match=r"(?i)header|incomplete|invalid"):
        ShramForCausalLM.from_pretrained(saved)


@pytest.mark.parametrize(
    "key", ["lm_head.weight", "model.layers.1.self_attn.mosrah.qkv_proj", "model.layers.0.mlp.up_proj.weight"]
)
def test_missing_weights_are_reported_and_made_anew(saved, key):
    rewrite(saved, lambda weights: weights.pop(key))
    model, info = ShramForCausalLM.from_pretrained(saved, output_loading_info=True)
    assert set(info["missing_keys"]) == {key}
    assert 0 < model.get_parameter(key).std() < 2 * model.config.initializer_range


def test_unexpected_weights_are_reported(saved, model):
    rewrite(saved, lambda weights: weights.update({"model.layers.0.self_attn.gate": torch.ones(3)}))
    again, info = ShramForCausalLM.from_pretrained(saved, output_loading_info=True)
    assert set(info["unexpected_keys"]) == {"model.layers.0.self_attn.gate"}
    assert torch.equal(again(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("key", ["model.layers.1.self_attn.mosrah.out_proj", "model.embed_tokens.weight"])
def test_weights_of_another_shape_are_refused(saved, key):
    rewrite(saved, lambda weights: weights.update({key: weights[key][:-1].clone()}))
    with pytest.raises(RuntimeError, match=r"(?i)mismatch|size"):
        ShramForCausalLM.from_pretrained(saved)


def test_no_weight_file_is_an_error(saved):
    (saved / "model.safetensors").unlink()
    with pytest.raises(OSError, match=r"model\.safetensors"):
        ShramForCausalLM.from_pretrained(saved)
