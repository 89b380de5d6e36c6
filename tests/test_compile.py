"""Compiled and exported: one graph, the same numbers, and no recompilation while decoding."""

import pytest
import torch
from torch._dynamo.utils import counters

from tests.cases import assert_near, draw_ids
from tests.support import tiny_config, wide_model


@pytest.fixture(params=["main_sequence", "semantic_sequence"])
def model(request):
    torch.compiler.reset()
    return wide_model(tiny_config(rope_mode=request.param, inference_sequence_length=128))


def compiled(model):
    # the graph is what is promised; which code a backend makes of it is the backend's affair
    return torch.compile(model, fullgraph=True, backend="aot_eager")


@torch.no_grad()
def test_a_compiled_forward_equals_the_eager_one(model):
    ids = draw_ids(2, 23)
    mask = torch.ones_like(ids)
    mask[0, :5] = mask[1, 7] = 0
    run = compiled(model)
    assert_near(run(ids, use_cache=False).logits, model(ids, use_cache=False).logits)
    actual = run(ids, attention_mask=mask, use_cache=False).logits
    expected = model(ids, attention_mask=mask, use_cache=False).logits
    assert_near(actual[mask.bool()], expected[mask.bool()])


def test_a_compiled_training_step_equals_the_eager_one(model):
    ids, found = draw_ids(2, 23), []
    for run in (model.train(), compiled(model)):
        loss = run(ids, labels=ids).loss
        loss.backward()
        found.append((loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}))
        model.zero_grad()
    assert_near(found[1][0], found[0][0])
    for name, gradient in found[0][1].items():
        assert_near(found[1][1][name], gradient, name)


@torch.no_grad()
def test_decoding_with_a_fixed_cache_recompiles_nothing(model):
    run = compiled(model)
    fixed, growing = model.new_cache(2, growing=False), model.new_cache(2)
    prompt = draw_ids(2, 17)
    assert_near(run(prompt, cache=fixed).logits, model(prompt, cache=growing).logits)
    tokens = draw_ids(2, 67, seed=1)
    for step, token in enumerate(tokens.split(1, dim=1)):
        assert_near(run(token, cache=fixed).logits, model(token, cache=growing).logits)
        if step == 2:  # the counter of tokens has turned symbolic
            num_graphs = counters["stats"]["unique_graphs"]
    assert counters["stats"]["unique_graphs"] == num_graphs
    assert torch.equal(fixed.layers[1].mosrah_cache.counts, growing.layers[1].mosrah_cache.counts)


@torch.no_grad()
def test_a_compiled_program_stops_where_a_fixed_cache_overflows():
    model = wide_model(tiny_config(mosrah_overallocation_factor=1.0, inference_sequence_length=32))
    with torch.no_grad():
        model.model.layers[1].self_attn.mosrah.router.expert_bias[0] = 100
    with pytest.raises(RuntimeError, match="cache of layer 1 is full"):
        compiled(model)(draw_ids(1, 20), cache=model.new_cache(1, growing=False))


@torch.no_grad()
def test_a_growing_mask_recompiles_nothing(model):
    run = compiled(model)
    fixed, growing = model.new_cache(2, growing=False), model.new_cache(2)
    ids, mask = draw_ids(2, 48), torch.ones(2, 48, dtype=torch.long)
    mask[0, :4] = 0
    for step, end in enumerate([12, *range(13, 49)]):
        new = slice(0 if step == 0 else end - 1, end)
        arguments = {"attention_mask": mask[:, :end].clone(), "use_cache": True}
        actual, expected = (
            f(ids[:, new].clone(), cache=c, **arguments).logits for f, c in ((run, fixed), (model, growing))
        )
        assert_near(actual[:, -1], expected[:, -1])
        if step == 3:
            num_graphs = counters["stats"]["unique_graphs"]
    assert counters["stats"]["unique_graphs"] == num_graphs


@torch.no_grad()
def test_an_eager_append_after_compiled_ones_still_sees_the_overflow():
    model = wide_model(tiny_config(mosrah_overallocation_factor=1.0, inference_sequence_length=32))
    for layer in model.model.layers:
        layer.self_attn.mosrah.router.expert_bias[0] = 100
    cache, ids = model.new_cache(1, growing=False), draw_ids(1, 20)
    compiled(model)(ids[:, :16], cache=cache)
    with pytest.raises(ValueError, match="layer 0 is full"):
        model(ids[:, 16:17], cache=cache)
    assert cache.get_seq_length() == 16


@torch.no_grad()
def test_packed_documents_stop_a_compiled_program(model):
    positions = torch.cat([torch.arange(6), torch.arange(7)])[None]
    with pytest.raises(RuntimeError, match="position_ids restart"):
        compiled(model)(draw_ids(1, 13), position_ids=positions, use_cache=False)


def test_a_growing_cache_says_that_it_cannot_be_compiled(model):
    with torch.no_grad(), pytest.raises(Exception, match="growing=False"):
        compiled(model)(draw_ids(1, 5), cache=model.new_cache(1))


@torch.no_grad()
def test_an_exported_program_serves_other_lengths(model):
    length = torch.export.Dim("length", min=2, max=64)
    program = torch.export.export(
        model, (draw_ids(2, 9),), {"use_cache": False}, dynamic_shapes={"input_ids": {1: length}, "use_cache": None}
    )
    for num_tokens in (9, 31):
        ids = draw_ids(2, num_tokens)
        assert_near(program.module()(ids, use_cache=False).logits, model(ids, use_cache=False).logits)
