"""What is saved can be loaded again: weights, code, ties, resized vocabularies, shards; remote and local classes."""

import json

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModel, AutoModelForCausalLM

from tests.contract.remote import AUTO_MAP, CODE, load, prompt
from tests.support import tiny_config, wide_model

IDS = prompt(2, 17)


@pytest.mark.parametrize("keywords", [{}, {"max_shard_size": "20KB"}], ids=["one file", "shards"])
def test_two_generations_of_copies_are_equal(checkpoint, tmp_path, keywords):
    first = load(checkpoint)
    first.save_pretrained(tmp_path / "one", **keywords)
    load(tmp_path / "one").save_pretrained(tmp_path / "two", **keywords)
    assert torch.equal(load(tmp_path / "two")(IDS).logits, first(IDS).logits)
    for copy in ("one", "two"):
        assert {file.name for file in CODE if "rollout" not in file.name} <= {
            file.name for file in (tmp_path / copy).iterdir()
        }
        assert json.loads((tmp_path / copy / "config.json").read_text())["auto_map"] == AUTO_MAP


def test_weights_are_stored_under_their_module_names(checkpoint, tmp_path):
    load(checkpoint).save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        names = set(file.keys())
    attention = "model.layers.1.self_attn"
    assert {f"{attention}.local.{p}_proj.weight" for p in "qkvo"} <= names
    assert {f"{attention}.mosrah.{n}" for n in ("qkv_proj", "out_proj", "router.weight", "router.expert_bias")} <= names
    assert {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"} <= names


def test_a_model_of_local_classes_takes_its_code_along(tmp_path):
    model = wide_model(tiny_config())
    model.save_pretrained(tmp_path)
    assert torch.equal(load(tmp_path)(IDS).logits, model(IDS).logits)


def test_sixteen_bit_copies_keep_the_router_wide(checkpoint, tmp_path):
    model = load(checkpoint, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    again = load(tmp_path, dtype=torch.bfloat16)
    assert {p.dtype for n, p in again.named_parameters() if ".router." in n} == {torch.float32}
    assert torch.equal(again(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("tied", [True, False])
def test_a_resized_vocabulary_is_one_everywhere(make_checkpoint, tmp_path, tied):
    model = load(make_checkpoint(tie_word_embeddings=tied))
    old = model.get_input_embeddings().weight.detach().clone()
    before = model(IDS).logits
    model.resize_token_embeddings(70, mean_resizing=False)
    output = model(torch.cat([IDS, torch.tensor([[69], [64]])], dim=1), labels=torch.full((2, 18), 69))
    assert model.config.vocab_size == model.get_input_embeddings().weight.shape[0] == output.logits.shape[-1] == 70
    assert torch.equal(model.get_input_embeddings().weight[:64], old)
    assert (model.lm_head.weight is model.get_input_embeddings().weight) is tied
    assert output.loss.isfinite()
    torch.testing.assert_close(model(IDS).logits[..., :64], before, rtol=1e-5, atol=1e-5)
    model.save_pretrained(tmp_path / "resized")
    again, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "resized", trust_remote_code=True, output_loading_info=True
    )
    assert not info["missing_keys"] and again.config.vocab_size == 70
    assert torch.equal(again(IDS).logits, model(IDS).logits)


def test_a_new_context_length_is_saved(checkpoint, tmp_path):
    model = load(checkpoint)
    model.config.set_inference_context(128)
    model.save_pretrained(tmp_path)
    again = load(tmp_path)
    assert again.config.inference_sequence_length == again.config.max_position_embeddings == 128
    assert torch.equal(again(IDS).logits, model(IDS).logits)
    assert not torch.equal(again(IDS).logits, load(checkpoint)(IDS).logits)


def test_the_base_model_saves_and_loads_alone(checkpoint, tmp_path):
    base = load(checkpoint, AutoModel)
    base.save_pretrained(tmp_path)
    again = load(tmp_path, AutoModel)
    assert torch.equal(again(IDS).last_hidden_state, base(IDS).last_hidden_state)


def test_generation_defaults_are_saved(checkpoint, tmp_path):
    model = load(checkpoint)
    model.generation_config.max_new_tokens, model.generation_config.pad_token_id = 5, 0
    model.save_pretrained(tmp_path)
    assert load(tmp_path).generate(IDS, do_sample=False).shape == (2, 22)
