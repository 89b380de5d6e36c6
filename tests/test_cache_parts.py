"""Each part of the cache keeps its own contract: window, histories, rollback, capacity, dtypes and attributes."""

import copy
import random
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.cache_utils import Cache, CacheLayerMixin

from shram.cache_shram import LocalSlidingWindowLayerCache, MoSRAHCache, ShramCache, ShramLayerCache
from tests.cases import assert_near, contents, draw_ids, feed, set_routing
from tests.reference import append_real
from tests.support import tiny_config, wide_model

HEADS, WIDTH = 2, 3


@pytest.fixture(params=[True, False], ids=["growing", "fixed"])
def growing(request):
    return request.param


@pytest.fixture
def model():
    return wide_model(tiny_config(mosrah_overallocation_factor=99.0), 0, torch.float64)


def assert_unchanged(cache, before):
    assert all(torch.equal(a, b) for a, b in zip(contents(cache), before, strict=True))


def stacked(entries, which):
    return torch.stack([entry[which] for entry in entries], dim=1)


@given(
    window=st.integers(1, 6),
    chunks=st.lists(st.tuples(st.integers(1, 7), st.booleans()), min_size=1, max_size=5),
    seed=st.integers(0, 2**20),
)
def test_window_hands_out_its_last_real_tokens_then_the_chunk(window, chunks, seed):
    generator = torch.Generator().manual_seed(seed)
    cache = LocalSlidingWindowLayerCache(window, HEADS, WIDTH, 2, "cpu", dtype=torch.float64)
    seen: list[list] = [[], []]
    for size, masked in chunks:
        k, v = torch.randn(2, 2, HEADS, size, WIDTH, generator=generator, dtype=torch.float64)
        mask = torch.rand(2, size, generator=generator) < 0.6 if masked else None
        keys, values, alive = cache.update(k, v, mask, None)
        real = torch.ones(2, size, dtype=torch.bool) if mask is None else mask
        assert keys.shape == values.shape == (2, HEADS, window - 1 + size, WIDTH)
        assert torch.equal(keys[:, :, window - 1 :], k) and torch.equal(values[:, :, window - 1 :], v)
        assert torch.equal(alive[:, window - 1 :], real)
        for row, past in enumerate(seen):
            past = past[len(past) - min(len(past), window - 1) :]
            assert alive[row, : window - 1].tolist() == [False] * (window - 1 - len(past)) + [True] * len(past)
            if past:
                assert torch.equal(keys[row, :, window - 1 - len(past) : window - 1], stacked(past, 0))
                assert torch.equal(values[row, :, window - 1 - len(past) : window - 1], stacked(past, 1))
        append_real(seen, k, v, real)
    assert cache.get_seq_length() == sum(size for size, _ in chunks)
    assert cache.num_real_tokens.tolist() == [len(row) for row in seen]


@pytest.mark.parametrize("seed", range(150))
def test_a_window_appended_to_in_place_holds_what_plain_lists_hold(seed):
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    kinds = draw.choices(["chunk", "chunk", "masked chunk", "commit", "commit rows", "crop"], k=20)
    steps = [("chunk", draw.randint(1, 9)), ("commit", 9), *((kind, draw.randint(0, 6)) for kind in kinds)]
    window = 1 + seed % 6
    cache = LocalSlidingWindowLayerCache(window, HEADS, WIDTH, 2, "cpu", dtype=torch.float64)
    held: list[list] = [[], []]  # of each row the real tokens: place, key
    num_committed = 0
    cache.record_past = seed % 5 > 0
    for step, n in steps:
        num_provisional = cache.num_tokens - num_committed
        if step in ("commit", "commit rows", "crop") and cache.record_past:
            keep = [min(n, num_provisional), min(n // 2 if step == "commit rows" else n, num_provisional)]
            ends = [max((place + 1 for place, _ in row if place < num_committed), default=0) for row in held]
            if step == "crop":
                cache.crop_to(num_committed + keep[0])
            else:
                cache.commit(torch.tensor(keep) if step == "commit rows" else keep[0])
            shifts = [num_committed - end if step == "commit rows" else 0 for end in ends]
            held = [
                [(place - shift * (place >= num_committed), k) for place, k in row if place < num_committed + kept]
                for row, kept, shift in zip(held, keep, shifts, strict=True)
            ]
            num_committed = cache.num_tokens
        elif "chunk" in step and n:
            k = torch.randn(2, HEADS, n, WIDTH, generator=generator, dtype=torch.float64)
            real = torch.rand(2, n, generator=generator) < (0.6 if step == "masked chunk" else 2)
            index = torch.arange(n).expand(2, -1) + cache.num_tokens
            before = [[k for _, k in row[len(row) - min(len(row), window - 1) :]] for row in held]
            with torch.no_grad():
                appended = cache.append(k, -k, index) if step == "chunk" else None
            if appended is None:
                cache.update(k, -k, real if step == "masked chunk" else None, index)
            else:
                for row, past in enumerate(before):
                    expected = torch.stack([*past, *k[row].unbind(1)], dim=1)
                    assert torch.equal(appended[0][row], expected) and torch.equal(appended[1][row], -expected)
            for row, tokens in enumerate(held):
                tokens += [(int(index[row, t]), k[row, :, t]) for t in range(n) if real[row, t]]
        for row, tokens in enumerate(held):
            assert cache.num_real_tokens[row] == len(tokens)
            alive = cache.alive[row].nonzero()[:, 0]
            kept = alive[len(alive) - min(len(tokens), window - 1) :]
            tokens = tokens[len(tokens) - len(kept) :]
            assert cache.positions[row, kept].tolist() == [place for place, _ in tokens]
            assert all(torch.equal(a, b) for a, (_, b) in zip(cache.keys[row][:, kept].unbind(1), tokens, strict=True))
        for stored in (cache._keys, cache._values):
            stored[:, :, cache._end :] = torch.nan


def test_a_graph_keeps_what_the_window_handed_out():
    cache = LocalSlidingWindowLayerCache(4, HEADS, WIDTH, 1, "cpu")
    k = torch.randn(1, HEADS, 5, WIDTH)
    cache.update(k, k, None, None)
    assert cache.append(k[:, :, :1], k[:, :, :1], torch.tensor([[5]])) is None
    with torch.no_grad():
        assert cache.append(k[:, :, :1], k[:, :, :1], torch.tensor([[5]])) is not None


@given(
    capacity=st.integers(1, 6),
    steps=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 4)), min_size=1, max_size=12),
    growing=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_short_chunks_and_commits_fill_a_head_to_its_last_slot_and_no_further(capacity, steps, growing, seed):
    """Room is counted on the host between looks; what every head holds is compared with plain lists."""
    generator = torch.Generator().manual_seed(seed)
    cache = MoSRAHCache(3, WIDTH, 2, "cpu", capacity, dtype=torch.float64, growing=growing)
    held = [[[] for _ in range(3)] for _ in range(2)]
    place = 0
    for num_tokens, num_kept in steps:
        heads = torch.rand(2, num_tokens, 3, generator=generator).argsort(dim=-1)[..., :2]
        k = torch.randn(2, num_tokens, 2, WIDTH, generator=generator, dtype=torch.float64)
        tried = copy.deepcopy(held)
        for row, token, choice in torch.cartesian_prod(*map(torch.arange, heads.shape)).tolist():
            tried[row][heads[row, token, choice]].append((place + token, k[row, token, choice]))
        if not growing and max(len(entries) for row in tried for entries in row) > capacity:
            with pytest.raises(ValueError, match=f"capacity {capacity}"):
                cache.place(heads, k)
            continue
        entries = cache.place(heads, k)
        index = (torch.arange(num_tokens) + place).expand(2, -1)
        keys, values = cache.append(k.flatten(0, 2), -k.flatten(0, 2), entries, index)
        seen = entries.first_slots + entries.num_keys - 1
        assert torch.equal(keys[seen], k.flatten(0, 2)) and torch.equal(values[seen], -keys[seen])
        cache.num_committed = place
        cache.commit(min(num_kept, num_tokens))
        place += min(num_kept, num_tokens)
        held = [[[e for e in entries if e[0] < place] for entries in row] for row in tried]
        for row in range(2):
            for head, expected in enumerate(held[row]):
                keys, _ = cache.history(row, head)
                assert all(torch.equal(a, b) for a, (_, b) in zip(keys, expected, strict=True))


def test_what_the_window_hands_out_is_not_its_state():
    cache = LocalSlidingWindowLayerCache(4, HEADS, WIDTH, 1, "cpu")
    k = torch.randn(1, HEADS, 5, WIDTH)
    keys, values, alive = cache.update(k, k, None, None)
    before = [t.clone() for t in (cache.keys, cache.values, cache.alive)]
    for given_away in (keys, values, k):
        given_away.fill_(torch.nan)
    alive.fill_(False)
    assert all(torch.equal(a, b) for a, b in zip((cache.keys, cache.values, cache.alive), before, strict=True))


def test_heads_lengths_are_a_value(model, growing):
    _, cache = feed(model, draw_ids(2, 9), cache=model.new_cache(growing=growing))
    heads = cache.layers[0].mosrah_cache
    lengths = heads.get_heads_lengths()
    kept = lengths.clone()
    assert lengths.dtype == torch.int64 and lengths.shape == (2, 4)
    feed(model, draw_ids(2, 3), cache=cache)
    assert torch.equal(lengths, kept)
    lengths.zero_()
    assert heads.get_heads_lengths().sum() == 2 * 2 * 12


def test_history_is_a_value(model, growing):
    _, cache = feed(model, draw_ids(2, 9), cache=model.new_cache(growing=growing))
    before = contents(cache)
    for tensor in contents(cache):
        tensor.zero_()
    assert_unchanged(cache, before)


def test_readers_change_nothing(model, growing):
    _, cache = feed(model, draw_ids(2, 9), cache=model.new_cache(growing=growing))
    before = contents(cache)
    for _ in range(2):
        for layer in cache.layers:
            layer.get_seq_length(), layer.get_max_length(), layer.get_max_cache_shape(), layer.get_mask_sizes(3)
            layer.lazy_initialization(torch.ones(1), torch.ones(1))
            layer.is_initialized, layer.mosrah_cache.get_heads_lengths()
        cache.get_seq_length(), cache.num_bytes()
    assert_unchanged(cache, before)


@pytest.mark.parametrize("back", [0, 1, 2, 5, 11])
@pytest.mark.parametrize("sign", ["keep", "take back"])
def test_recorded_past_comes_back_exactly(model, growing, back, sign):
    """Window entries that had left return; going on equals a cache that never saw what was taken back."""
    ids = draw_ids(2, 23)
    mask = torch.ones_like(ids)
    mask[0, [0, 1, 14, 15, 16]] = 0
    _, cache = feed(model, ids[:, :12], mask, [7, 5], model.new_cache(growing=growing))
    cache.activate_past_recording()
    feed(model, ids[:, 12:], mask, [3, 8], cache)
    cache.crop(torch.tensor(-back) if sign == "take back" else 23 - back)
    kept = 23 - back
    _, never_saw = feed(model, ids[:, :kept], mask[:, :kept], cache=model.new_cache(growing=growing))
    assert cache.get_seq_length() == kept
    for actual, expected in zip(contents(cache), contents(never_saw), strict=True):
        assert_near(actual, expected, dtype=torch.float64)
    again, more = draw_ids(2, 6, seed=5), torch.nn.functional.pad(mask[:, :kept], (0, 6), value=1)
    assert_near(feed(model, again, more, [4, 2], cache)[0], feed(model, again, more, [6], never_saw)[0])


def test_crop_then_refeed_repeats_itself(model, growing):
    ids = draw_ids(1, 21)
    cache = model.new_cache(growing=growing)
    cache.activate_past_recording()
    first, _ = feed(model, ids, cache=cache)
    for back in (5, 5, 2, 1):
        cache.crop(-back)
        cache.crop(0)
        again, _ = feed(model, ids[:, 21 - back :], cache=cache)
        assert_near(again, first[:, 21 - back :])


@pytest.mark.parametrize("back", [1, 2, 3])
def test_crop_inside_an_unfilled_window_needs_no_recording(model, growing, back):
    ids = draw_ids(2, 3)
    _, cache = feed(model, ids, cache=model.new_cache(growing=growing))
    cache.crop(-back)
    _, never_saw = feed(model, ids[:, : 3 - back], cache=model.new_cache(growing=growing)) if back < 3 else (0, None)
    more = draw_ids(2, 7, seed=2)
    expected = feed(model, more, cache=never_saw or model.new_cache(growing=growing))[0]
    assert_near(feed(model, more, cache=cache)[0], expected)


@pytest.mark.parametrize("amount", [-1, -5, -99, 3, 8])
def test_crop_beyond_what_is_held_is_refused_and_changes_nothing(model, growing, amount):
    _, cache = feed(model, draw_ids(2, 9), cache=model.new_cache(growing=growing))
    before = contents(cache)
    with pytest.raises(RuntimeError):
        cache.crop(amount)
    assert_unchanged(cache, before)


def test_crop_of_more_than_was_seen_is_refused_while_recording(model, growing):
    cache = model.new_cache(growing=growing)
    cache.activate_past_recording()
    feed(model, draw_ids(2, 9), cache=cache)
    before = contents(cache)
    with pytest.raises(RuntimeError):
        cache.crop(-10)
    assert_unchanged(cache, before)


@pytest.mark.parametrize("recording", [True, False])
def test_crop_of_nothing_changes_nothing(model, growing, recording):
    cache = model.new_cache(growing=growing)
    if recording:
        cache.activate_past_recording()
    feed(model, draw_ids(2, 9), cache=cache)
    before = contents(cache)
    for amount in (0, 9, 50):
        cache.crop(amount)
        assert_unchanged(cache, before)


@pytest.fixture(params=[0, 1], ids=["first layer overflows", "second layer overflows"])
def overflowing(request):
    """A model one layer of which sends every token to head 3, a fixed cache of 10 slots a head, and the layer."""
    config = tiny_config(inference_sequence_length=20, mosrah_overallocation_factor=1.0)
    model = wide_model(config, 0, torch.float64)
    with torch.no_grad():
        model.model.layers[request.param].self_attn.mosrah.router.expert_bias[3] = 100
    return model, model.new_cache(growing=False), request.param


def test_overflow_names_the_place_and_changes_nothing(overflowing):
    model, cache, layer = overflowing
    ids = draw_ids(2, 17)
    feed(model, ids[:, :8], cache=cache)
    before = contents(cache)
    with pytest.raises(ValueError, match=r"(?i)layer.*head.*capacity") as error:
        feed(model, ids[:, 8:12], cache=cache)
    assert {layer, 3, 10, 12} <= set(map(int, re.findall(r"\d+", str(error.value))))
    assert_unchanged(cache, before)
    growing = model.new_cache()
    feed(model, ids[:, :8], cache=growing)
    assert_near(feed(model, ids[:, 15:], cache=cache)[0], feed(model, ids[:, 15:], cache=growing)[0])


def test_overflow_of_the_whole_prompt_leaves_an_empty_cache(overflowing):
    model, cache, _ = overflowing
    with pytest.raises(ValueError, match="capacity"):
        feed(model, draw_ids(2, 11), cache=cache)
    assert cache.get_seq_length() == 0
    assert not any(layer.mosrah_cache.get_heads_lengths().any() for layer in cache.layers)
    feed(model, draw_ids(2, 10), cache=cache)


def test_a_growing_cache_serves_a_collapsed_router():
    config = tiny_config(mosrah_overallocation_factor=1.0)
    model = set_routing(wide_model(config, 0, torch.float64), "collapsed")
    ids = draw_ids(2, 61)
    logits, cache = feed(model, ids, None, [40] + [1] * 21)
    assert_near(logits, model(ids, use_cache=False).logits)
    assert (cache.layers[0].mosrah_cache.get_heads_lengths()[:, -1] == 61).all()


def test_a_growing_cache_holds_little_more_than_its_entries(model):
    ids = draw_ids(1, 60)
    _, cache = feed(model, ids, None, [20] + [1] * 40)
    layers, heads_per_token, width, keys_and_values, float64 = 2, 2, 8, 2, 8
    assert cache.num_bytes() < 2 * 60 * layers * heads_per_token * width * keys_and_values * float64


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_stored_dtype_follows_the_keys(growing, dtype):
    model = wide_model(tiny_config(), 0, dtype)
    _, cache = feed(model, draw_ids(2, 9), None, [5, 4], model.new_cache(growing=growing))
    for layer in cache.layers:
        for part in (layer.sliding_window_cache, layer.mosrah_cache):
            assert part.keys.dtype == part.values.dtype == dtype
            assert part.keys.nbytes == part.keys.numel() * dtype.itemsize


@pytest.fixture
def default_float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def test_default_dtype_does_not_leak(default_float64, growing):
    model = wide_model(tiny_config(), 0, torch.float32)
    cache = ShramCache(model.config, growing=growing)
    ids = draw_ids(2, 9)
    logits, _ = feed(model, ids, None, [5, 4], cache)
    assert logits.dtype == cache.layers[0].mosrah_cache.keys.dtype == torch.float32
    assert cache.layers[0].sliding_window_cache.keys.dtype == torch.float32
    assert_near(logits, model(ids, use_cache=False).logits)


def test_cached_equals_uncached_under_autocast(growing):
    model = wide_model(tiny_config(num_hidden_layers=1), 0, torch.float32)
    ids = draw_ids(2, 13)
    with torch.autocast("cpu", torch.bfloat16):
        logits, cache = feed(model, ids, None, [8, 1, 4], model.new_cache(growing=growing))
        expected = model(ids, use_cache=False).logits
    assert_near(logits.float(), expected.float(), dtype=torch.bfloat16)
    assert cache.layers[0].mosrah_cache.keys.is_floating_point()


def test_rows_come_from_the_first_write(model, growing):
    cache = ShramCache(model.config, 2, "cpu", growing=growing)
    ids = draw_ids(3, 9)
    assert_near(feed(model, ids, None, [5, 4], cache)[0], model(ids, use_cache=False).logits)


def test_other_rows_than_held_are_refused(model, growing):
    _, cache = feed(model, draw_ids(2, 9), cache=model.new_cache(growing=growing))
    before = contents(cache)
    with pytest.raises(ValueError, match=r"2.*3|3.*2"):
        feed(model, draw_ids(3, 1), cache=cache)
    assert_unchanged(cache, before)


def test_no_history_keeps_a_graph(model, growing):
    cache = model.new_cache(growing=growing)
    output = model(draw_ids(2, 9), cache=cache, use_cache=True)
    assert output.logits.requires_grad
    assert not any(tensor.requires_grad for tensor in contents(cache))


def test_gradients_through_a_cached_chunk_stop_at_the_history(model, growing):
    """A chunk on a warm cache backpropagates, twice in a row, through itself alone."""
    ids = draw_ids(2, 13)
    _, cache = feed(model, ids[:, :9], cache=model.new_cache(growing=growing))
    first = model(ids[:, 9:11], cache=cache, use_cache=True).logits
    second = model(ids[:, 11:], cache=cache, use_cache=True).logits
    (first.sum() + second.sum()).backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters() if parameter.grad is not None)


def test_a_layer_alone_has_the_fixed_layout_of_its_config():
    config = tiny_config()
    layer = ShramLayerCache(config, 3, "cpu", dtype=torch.float16)
    window, heads = layer.sliding_window_cache, layer.mosrah_cache
    assert heads.keys.shape == heads.values.shape == (3, 4, config.mosrah_cache_length, 8)
    assert window.keys.shape == window.values.shape == (3, 2, 3, 8)
    assert heads.keys.dtype == window.keys.dtype == torch.float16
    assert isinstance(window, LocalSlidingWindowLayerCache) and isinstance(heads, MoSRAHCache)


def test_layer_attributes_are_those_the_library_reads(growing):
    config = tiny_config()
    layer = ShramLayerCache(config, 2, "cpu", growing=growing)
    assert isinstance(layer, CacheLayerMixin)
    assert ShramLayerCache.is_compileable is True and ShramLayerCache.is_sliding is False
    assert layer.is_compileable is not growing
    assert ShramLayerCache.is_croppable is True and ShramLayerCache.supports_early_init is False
    assert "layer_type" not in vars(ShramLayerCache) and "_layer_type" not in vars(ShramLayerCache)
    assert layer.is_initialized is True
    layer.is_initialized = False
    assert layer.is_initialized is True
    assert layer.get_max_length() == layer.get_max_cache_shape() == config.inference_sequence_length
    assert layer.get_mask_sizes(3) == layer.get_mask_sizes(torch.arange(5)) == (config.inference_sequence_length, 0)
    assert layer.get_seq_length() == 0


def test_there_is_no_joint_update(growing):
    cache = ShramCache(tiny_config(), 2, "cpu", growing=growing)
    assert isinstance(cache, Cache) and cache.is_shram_cache is True
    k = torch.zeros(2, 2, 1, 8)
    with pytest.raises(NotImplementedError, match=r"(?s)sliding_window_cache.*mosrah_cache"):
        cache.layers[0].update(k, k)
    with pytest.raises(NotImplementedError):
        cache.update(k, k, 0)


def test_growing_is_the_default_and_a_shorter_fixed_cache_can_be_asked_for(model):
    assert not ShramCache(model.config).layers[0].is_compileable
    config = tiny_config(num_mosrah_heads=7, num_selected_heads=3, mosrah_overallocation_factor=1.5)
    for max_length, num_slots in ((20, 20), (50, 42), (None, 42)):  # 42 = ceil(64 * 3 / 7 * 1.5)
        cache = ShramCache(config, 1, "cpu", growing=False, max_length=max_length)
        assert cache.layers[0].mosrah_cache.keys.shape == (1, 7, num_slots, 8)


def test_bytes_are_counted_over_all_layers(growing):
    config = tiny_config()
    narrow, wide = (ShramCache(config, 2, "cpu", dtype=d, growing=growing) for d in (torch.float16, torch.float32))
    floats = sum(
        tensor.numel()
        for layer in wide.layers
        for part in (layer.sliding_window_cache, layer.mosrah_cache)
        for tensor in (part.keys, part.values)
    )
    assert wide.num_bytes() - narrow.num_bytes() == 2 * floats


def test_a_cache_committed_in_inference_mode_goes_on_outside(model, growing):
    cache, ids = model.new_cache(growing=growing), draw_ids(2, 20)
    with torch.no_grad():
        model(ids[:, :12], cache=cache)
        cache.activate_past_recording()
        model(ids[:, 12:16], cache=cache)
        cache.commit(torch.tensor([1, 3]))
        model(ids[:, 12:16], cache=cache)
    with torch.inference_mode():
        cache.commit(torch.tensor([1, 3]))
    copied = copy.deepcopy(cache)
    assert_near(feed(model, ids[:, 16:], cache=cache)[0], feed(model, ids[:, 16:], cache=copied)[0])
    assert not any(part.holds_inference_tensors for layer in cache.layers for part in layer.parts)


def test_a_model_whose_weights_are_elsewhere_gets_a_cache_that_follows_its_first_write(model, growing):
    cache = copy.deepcopy(model).to("meta").new_cache(growing=growing)
    ids = draw_ids(1, 9)
    assert_near(feed(model, ids, chunks=[5, 4], cache=cache)[0], feed(model, ids)[0])


def test_copies_are_independent_of_their_source(model, growing):
    _, source = feed(model, draw_ids(2, 9), cache=model.new_cache(growing=growing))
    twin = copy.deepcopy(source)
    before = contents(twin)
    feed(model, draw_ids(2, 9, seed=1), None, [1, 8], source)
    source.reset()
    assert_unchanged(twin, before)
