"""Workspaces over a ShramCache: history is borrowed, chunks are composed beside it, each row commits its own length."""

import copy
import gc
import weakref

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM

from shram.predictor_shram import MASK, ShramPredictor
from shram.rollout_shram import PredictorWorkspace, assert_clean_history_extent, committed_extent, fork_layer
from tests.cases import contents, draw_ids, feed
from tests.support import ROOT, tiny_config, wide_model

LAYERS, CURRENT, PROMPT = (0, 2), 4, 13
EXACT = 1e-11  # largest difference of float64 logits


@pytest.fixture(scope="module")
def model():
    config = tiny_config(num_hidden_layers=3, window_size=5, mosrah_overallocation_factor=99.0)
    return wide_model(config, 0, torch.float64)


@pytest.fixture(params=[True, False], ids=["growing", "fixed"])
def growing(request):
    return request.param


@pytest.fixture
def cache(model, growing):
    cache = model.new_cache(growing=growing)
    with torch.no_grad():
        model(draw_ids(2, PROMPT), cache=cache)
    return cache


@pytest.fixture
def predictor(model):
    return make_predictor(model)


def make_predictor(model) -> ShramPredictor:
    predictor = ShramPredictor(model, source_layers=LAYERS, num_drafts=CURRENT)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for extra in (predictor.fusion.weight, predictor.mask_embedding, predictor.step_embedding):
            extra.add_(0.1 * torch.randn(extra.shape, generator=generator, dtype=extra.dtype))
    return predictor


def marks(cache) -> list:
    """Identity, address and version of every tensor of a cache, and its numbers."""
    found = []
    for layer in cache.layers:
        for part in layer.snapshot():
            for value in part.values():
                found.append((id(value), value.data_ptr(), value._version) if torch.is_tensor(value) else value)
    return found


def open_on(cache, **options):
    return PredictorWorkspace(cache, source_layers=LAYERS, current_tokens=CURRENT, **options)


def start_of(model, rows: int = 2, seed: int = 5):
    generator = torch.Generator().manual_seed(seed)
    feature = torch.randn(rows, model.config.hidden_size, dtype=model.dtype, generator=generator)
    return draw_ids(rows, 1, seed)[:, 0], feature


def assert_close(actual, expected) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=EXACT)


# ---------------------------------------------------------------------------------------------------- P-steps


@pytest.mark.parametrize("num_new", [1, CURRENT])
def test_running_on_a_fork_changes_nothing_and_gives_what_a_copy_gives(model, cache, num_new):
    before, value = marks(cache), copy.deepcopy(cache)
    chunk = draw_ids(2, num_new, 9)
    with torch.no_grad():
        first, second = (model(chunk, cache=cache.fork()).logits for _ in range(2))
        assert_close(first, model(chunk, cache=value).logits)
    assert torch.equal(first, second)
    assert marks(cache) == before


def test_p_steps_change_nothing_of_the_main_cache(model, cache, predictor):
    before = marks(cache)
    with open_on(cache) as workspace:
        logits = list(predictor.roll_out(*start_of(model), workspace, 3))
        assert workspace.step == 2
    sum(x.sum() for x in logits).backward()
    assert marks(cache) == before
    assert not any(layer.sliding_window_cache.keys.requires_grad for layer in cache.layers)
    predictor.zero_grad()


def test_nothing_leaks_from_one_step_to_the_next(model, cache, predictor):
    anchor, feature = start_of(model)
    chunk = torch.cat([anchor[:, None], torch.full((2, 3), MASK)], dim=1)
    feature = feature[:, None].expand(-1, 4, -1)
    with open_on(cache) as workspace, torch.no_grad():
        results = [predictor(chunk, feature, workspace)[0] for _ in workspace.steps(3)]
        workspace.rewind()
        results.append(predictor(chunk, feature, workspace)[0])
        copied = dict(enumerate(copy.deepcopy(cache).layers))
        assert_close(results[0], predictor(chunk, feature, copied)[0])
    assert all(torch.equal(result, results[0]) for result in results)


def test_drafts_may_grow_token_by_token(model, cache):
    """Whole forks: one token after the other gives what the chunk at once gives."""
    chunk = draw_ids(2, CURRENT, 9)
    options = {"source_layers": (0, 1, 2), "current_tokens": CURRENT}
    with torch.no_grad(), PredictorWorkspace(cache, **options) as workspace:
        workspace.begin_step(tokens=CURRENT)
        whole = model(chunk, cache=workspace.as_cache()).logits
        for p in range(CURRENT):
            workspace.begin_step(tokens=1, keep_tokens=p)
            assert_close(model(chunk[:, p : p + 1], cache=workspace.as_cache()).logits, whole[:, p : p + 1])
        with pytest.raises(ValueError, match=r"tokens must lie in \[1, 1\].*got 2"):
            workspace.begin_step(tokens=2, keep_tokens=3)


def test_a_workspace_opened_before_the_first_write_sees_the_chunk_alone(model, growing, predictor):
    cache, (anchor, feature) = model.new_cache(growing=growing), start_of(model)
    with open_on(cache) as workspace, torch.no_grad():
        assert workspace.history_tokens == 0
        alone = list(predictor.roll_out(anchor, feature, workspace, 2))[-1]
    with torch.no_grad():
        model(draw_ids(2, PROMPT), cache=cache)
        with open_on(cache, history_tokens=0) as workspace:
            assert_close(list(predictor.roll_out(anchor, feature, workspace, 2))[-1], alone)


def test_a_shorter_history_is_served_where_the_window_still_holds_it(model, cache):
    with pytest.raises(RuntimeError, match="activate_past_recording"):
        open_on(cache, history_tokens=PROMPT - 2)
    with pytest.raises(RuntimeError, match=f"ends before committed history: block 0 holds {PROMPT} tokens"):
        open_on(cache, history_tokens=PROMPT + 1)
    chunk = draw_ids(2, 3, 9)
    with torch.no_grad():
        expected = model(chunk, cache=cache.fork()).logits
        cache.activate_past_recording()
        model(draw_ids(2, 3, 8), cache=cache)  # a noisy pass: provisional
        assert committed_extent(cache.layers[0]).total == PROMPT
        options = {"source_layers": (0, 1, 2), "current_tokens": CURRENT}
        with PredictorWorkspace(cache, **options) as workspace:
            assert workspace.history_tokens == PROMPT
            assert_close(model(chunk, cache=workspace.as_cache()).logits, expected)


def test_left_padding_reaches_neither_drafts_nor_slots(model, growing, predictor):
    """The padded row of a batch drafts as it does alone."""
    ids, mask = draw_ids(2, PROMPT), torch.ones(2, PROMPT, dtype=torch.long)
    mask[1, :6] = 0
    anchor, feature = start_of(model)
    with torch.no_grad():
        cache, alone = model.new_cache(growing=growing), model.new_cache(growing=growing)
        model(ids, attention_mask=mask, cache=cache)
        model(ids[1:, 6:], cache=alone)
        with open_on(cache) as workspace:
            together = list(predictor.roll_out(anchor, feature, workspace, 2))[-1]
        with open_on(alone) as workspace:
            assert_close(together[1:], list(predictor.roll_out(anchor[1:], feature[1:], workspace, 2))[-1])


# ---------------------------------------------------------------------------------------------------- gradients


def chunk_loss(predictor, cache, seed: int):
    with open_on(cache) as workspace:
        return sum(
            x.square().mean() for x in predictor.roll_out(*start_of(predictor.teacher[0], 2, seed), workspace, 3)
        )


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_one_backward_over_steps_and_chunks_equals_one_per_chunk(model, cache, predictor, frozen):
    for name, parameter in predictor.named_parameters():
        if frozen and ("k_proj" in name or "v_proj" in name or "qkv_proj" in name):
            parameter.requires_grad_(False)

    def run(at_once: bool) -> dict:
        main, losses = copy.deepcopy(cache), []
        for i in range(2):
            losses.append(chunk_loss(predictor, main, i))
            if not at_once:
                losses[-1].backward()
            with torch.no_grad():
                model(draw_ids(2, 3, i), cache=main)  # the Full pass, before the last backward
        if at_once:
            main.reset()
            sum(losses).backward()
        found = {name: p.grad.clone() for name, p in predictor.named_parameters() if p.grad is not None}
        predictor.zero_grad()
        return found

    actual, expected = run(at_once=True), run(at_once=False)
    assert actual.keys() == expected.keys() and expected
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, rtol=1e-12, atol=1e-12)


def test_scratch_dies_with_the_workspace(cache, predictor, model):
    with open_on(cache) as workspace:
        logits = list(predictor.roll_out(*start_of(model), workspace, 2))
        held = [weakref.ref(part.keys) for layer in workspace.values() for part in layer.parts]
    del logits
    gc.collect()
    assert all(reference() is None for reference in held)
    with pytest.raises(RuntimeError, match="workspace is closed"):
        workspace[0]


# ---------------------------------------------------------------------------------------------------- commit


def continued(model, ids, cache, new):
    """Cached logits of `new` behind `ids`, and what the uncached model says."""
    whole = torch.cat([ids, new], dim=1)
    return model(new, cache=cache).logits, model(whole, use_cache=False).logits[:, -new.shape[1] :]


@pytest.mark.parametrize("chunk_tokens", [2, 9])
@pytest.mark.parametrize("prompt_tokens", [0, 2, PROMPT])
def test_any_commit_is_as_if_the_rest_never_came(model, growing, prompt_tokens, chunk_tokens):
    ids, chunk, new = draw_ids(2, prompt_tokens), draw_ids(2, chunk_tokens, 1), draw_ids(2, 7, 2)
    with torch.no_grad():
        for n in range(chunk_tokens + 1):
            cache = model.new_cache(growing=growing)
            if prompt_tokens:
                model(ids, cache=cache)
            cache.activate_past_recording()
            for part in chunk.split(4, dim=1):  # several forwards before one commit
                model(part, cache=cache)
            cache.commit(n)
            assert cache.extent()[0] == cache.get_seq_length() == prompt_tokens + n
            if prompt_tokens + n:
                assert_clean_history_extent(cache, expected_tokens=prompt_tokens + n)
                seen = torch.cat([ids, chunk[:, :n]], dim=1)
                assert_close(*continued(model, seen, cache, new))


def test_discard_gives_back_what_was_there(model, cache):
    before = contents(cache)
    cache.activate_past_recording()
    with torch.no_grad():
        model(draw_ids(2, 7, 1), cache=cache)
    cache.discard()
    assert all(torch.equal(a, b) for a, b in zip(contents(cache), before, strict=True))


@pytest.mark.parametrize("routing", ["collapsed", "spread"])
def test_every_row_commits_its_own_length(growing, routing):
    """Seven rounds, a left-padded row among three: each row equals its own uncached run."""
    config = tiny_config(num_hidden_layers=2, window_size=5, mosrah_overallocation_factor=99.0)
    model = wide_model(config, 1, torch.float64)
    if routing == "collapsed":  # one head gets every token, some get none
        for layer in model.model.layers:
            layer.self_attn.mosrah.router.expert_bias.data[-1] = 100
    generator, tokens = torch.Generator().manual_seed(1), 4
    ids, mask = draw_ids(3, 9), torch.ones(3, 9, dtype=torch.long)
    mask[1, :4] = 0
    rows = [row[kept.bool()] for row, kept in zip(ids, mask, strict=True)]
    cache = model.new_cache(growing=growing)
    with torch.no_grad():
        model(ids, attention_mask=mask, cache=cache)
        cache.activate_past_recording()
        for _ in range(7):
            chunk = torch.randint(64, (3, tokens), generator=generator)
            logits = model(chunk, cache=cache).logits
            for i, row in enumerate(rows):
                alone = model(torch.cat([row, chunk[i]])[None], use_cache=False).logits[0, -tokens:]
                assert_close(logits[i], alone)
            n = torch.randint(tokens + 1, (3,), generator=generator)
            cache.commit(n)
            rows = [torch.cat([row, new[:kept]]) for row, new, kept in zip(rows, chunk, n, strict=True)]
            assert cache.num_real_tokens.tolist() == [len(row) for row in rows]
    # no gaps are left: places count as far as the longest row needs
    assert cache.get_seq_length() == max(len(row) + pad for row, pad in zip(rows, (0, 4, 0), strict=True))


@pytest.mark.parametrize(
    ("n", "pattern"),
    [
        (-1, r"\[0, 3\].*got -1"),
        (4, r"\[0, 3\].*got 4"),
        (True, "got True"),
        (1.0, r"got 1\.0"),
        (torch.tensor([1, 4]), r"\[0, 3\].*\[1, 4\]"),
        (torch.tensor([1]), r"shape \(1,\)"),
        (torch.tensor([1.0, 2.0]), "float32"),
    ],
    ids=str,
)
def test_a_bad_commit_is_named_and_changes_nothing(model, cache, n, pattern):
    cache.activate_past_recording()
    with torch.no_grad():
        model(draw_ids(2, 3, 1), cache=cache)
    before = marks(cache)
    with pytest.raises(ValueError, match=pattern):
        cache.commit(n)
    assert marks(cache) == before


def test_the_parts_commit_alone_as_they_do_together(model, cache):
    whole = copy.deepcopy(cache)
    for each in (cache, whole):
        each.activate_past_recording()
        with torch.no_grad():
            model(draw_ids(2, 4, 1), cache=each)
    n = torch.tensor([1, 3])
    whole.commit(n)
    for layer in cache.layers:
        for part in layer.parts:
            part.commit(n)
    assert all(torch.equal(a, b) for a, b in zip(contents(cache), contents(whole), strict=True))
    for layer in cache.layers:
        assert layer.mosrah_cache.extent()[0] == layer.get_seq_length()
        for part in layer.parts:
            part.discard()


def test_a_full_head_refuses_before_anything_is_written():
    config = tiny_config(num_hidden_layers=1, mosrah_overallocation_factor=1.0, inference_sequence_length=16)
    model = wide_model(config, 0, torch.float64)
    model.model.layers[0].self_attn.mosrah.router.expert_bias.data[:2] = 100
    cache = model.new_cache(2, growing=False)
    with torch.no_grad():
        model(draw_ids(2, 7), cache=cache)
        before = marks(cache)
        with pytest.raises(ValueError, match="the fixed routed cache of layer 0 is full: head 0 has capacity 8"):
            model(draw_ids(2, 4), cache=cache.fork())
    assert marks(cache) == before


# ---------------------------------------------------------------------------------------------------- lifecycle


@pytest.mark.parametrize("change", ["reorder", "repeat", "select", "reset", "full pass", "crop"])
def test_a_main_cache_that_changes_meanwhile_is_noticed(model, cache, change):
    calls = {
        "reorder": lambda: cache.reorder_cache(torch.tensor([1, 0])),
        "repeat": lambda: cache.batch_repeat_interleave(2),
        "select": lambda: cache.batch_select_indices(torch.tensor([0])),
        "reset": cache.reset,
        "full pass": lambda: model(draw_ids(2, 2), cache=cache),
        "crop": lambda: cache.crop(-1),
    }
    if change == "crop":
        cache.activate_past_recording()
        model(draw_ids(2, 1), cache=cache)
    workspace = open_on(cache)
    calls[change]()
    with pytest.raises(RuntimeError, match="changed while a workspace was open"):
        workspace.begin_step()
    with open_on(cache) as fresh:
        fresh.begin_step()


def test_a_bfloat16_model_has_bfloat16_scratch():
    model = wide_model(tiny_config(num_hidden_layers=3), 0, torch.bfloat16)
    cache, predictor = model.new_cache(2), make_predictor(model)
    assert {layer.mosrah_cache.keys.dtype for layer in cache.layers} == {torch.bfloat16}
    with torch.no_grad():
        model(draw_ids(2, PROMPT), cache=cache)
        with open_on(cache) as workspace:
            logits = list(predictor.roll_out(*start_of(model), workspace, 2))[-1]
            assert logits.isfinite().all() and workspace[0].mosrah_cache.keys.dtype == torch.bfloat16
    for layer in cache.layers:
        assert layer.sliding_window_cache.keys.dtype == layer.mosrah_cache.keys.dtype == torch.bfloat16


@pytest.mark.parametrize("option", [{"window": 4}, {"capacity": 99}, {"window": 4, "sink_tokens": 2}], ids=str)
def test_options_of_dict_caches_are_refused(cache, option):
    with pytest.raises(ValueError, match="for dict caches"):
        open_on(cache, **option)


def test_what_cannot_be_forked_is_refused():
    with pytest.raises(TypeError, match="mapping or have extent"):
        fork_layer(object(), history_tokens=0, current_tokens=1)


@torch.no_grad()
def test_a_compiled_p_step_is_one_graph_from_chunk_to_chunk():
    torch.compiler.reset()
    counters.clear()
    model = wide_model(tiny_config(num_hidden_layers=3, mosrah_overallocation_factor=99.0), 0, torch.float64)
    cache, predictor = model.new_cache(2, growing=False), make_predictor(model)
    run = torch.compile(predictor, fullgraph=True, backend="aot_eager")
    model(draw_ids(2, PROMPT), cache=cache)
    num_graphs = []
    anchor, feature = start_of(model)
    chunk = torch.cat([anchor[:, None], torch.full((2, 3), MASK)], dim=1)
    feature = feature[:, None].repeat(1, 4, 1)
    for i in range(4):
        with open_on(cache) as workspace:
            for _ in workspace.steps(3):
                compiled = run(chunk, feature, workspace)[0]
            workspace.begin_step()
            torch.testing.assert_close(compiled, predictor(chunk, feature, workspace)[0], rtol=1e-5, atol=1e-5)
        model(draw_ids(2, 3, i), cache=cache)
        num_graphs.append(counters["stats"]["unique_graphs"])
    assert num_graphs[-1] == num_graphs[1] <= 2  # in the second chunk the token count turns symbolic


# ---------------------------------------------------------------------------------------------------- crop, delivery


@pytest.mark.parametrize("taken", [1, 3, 6])
def test_crop_over_several_updates_equals_a_cache_that_never_saw_the_tokens(model, growing, taken):
    ids, new = draw_ids(2, 15), draw_ids(2, 5, 2)
    with torch.no_grad():
        for argument in (-taken, 15 - taken):
            cache = model.new_cache(growing=growing)
            model(ids[:, :9], cache=cache)
            cache.activate_past_recording()
            feed(model, ids[:, 9:], chunks=[2, 1, 3], cache=cache)
            cache.crop(argument)
            cache.crop(0)
            assert_close(*continued(model, ids[:, : 15 - taken], cache, new))


def test_the_workspace_comes_with_the_loaded_model_and_travels_with_it(tmp_path):
    config = tiny_config(num_hidden_layers=3)
    model = wide_model(config)
    model.save_pretrained(tmp_path / "first")
    for file in ROOT.glob("*_shram.py"):
        (tmp_path / "first" / file.name).write_bytes(file.read_bytes())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "first", trust_remote_code=True)
    cache = loaded.new_cache()
    with torch.no_grad():
        loaded(draw_ids(1, 5), cache=cache)
    with loaded.predictor_workspace(cache, source_layers=(0, 2), current_tokens=2) as workspace:
        assert list(workspace) == [0, 2] and workspace.history_tokens == 5
    loaded.save_pretrained(tmp_path / "second")
    saved = {file.name for file in (tmp_path / "second").iterdir()}
    assert {"rollout_shram.py", "predictor_shram.py", "modeling_shram.py"} <= saved
    # with a folder of that name the library would let it replace `generate` in every mode
    assert not (ROOT / "custom_generate").exists() and "custom_generate" not in saved
    beams = loaded.generate(draw_ids(1, 5), num_beams=3, max_new_tokens=4, do_sample=False)
    assert beams.shape[1] == 9
