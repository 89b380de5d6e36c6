"""The cache changes speed and nothing else: any chunking, padding, gap, beam or rollback gives the uncached logits."""

import copy
from typing import NamedTuple

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
    contents,
    draw_ids,
    feed,
    poison,
    row_contents,
)
from tests.reference import reference_forward, reference_logits
from tests.support import tiny_config, wide_model

POLICIES = (True, False)
ROOMY = {"mosrah_overallocation_factor": 99.0}


@pytest.fixture(params=POLICIES, ids=["growing", "fixed"], scope="module")
def growing(request):
    return request.param


@pytest.fixture(scope="module")
def model():
    return wide_model(tiny_config(**ROOMY, num_mosrah_heads=5), 0, torch.float64)


@pytest.fixture
def new_cache(model, growing):
    return lambda: model.new_cache(growing=growing)


@st.composite
def chunkings(draw, tokens: int) -> list[int]:
    chunks = []
    while sum(chunks) < tokens:
        chunks.append(draw(st.integers(1, tokens - sum(chunks))))
    return chunks


def assert_same(actual: list, expected: list, exact: bool = True) -> None:
    for a, b in zip(actual, expected, strict=True):
        if exact or not a.is_floating_point():
            assert torch.equal(a, b)
        else:
            assert_near(a, b)


@pytest.fixture(params=IMPLEMENTATIONS, scope="module")
def implementation(request):
    with chosen_implementation(request.param) as name:
        yield name


@given(case=cases(max_tokens=19, **ROOMY), gradients=st.booleans(), data=st.data())
def test_any_chunking_equals_the_uncached_forward(growing, implementation, case: Case, gradients, data):
    """With and without gradients, which take ways of their own."""
    model, num_tokens = case.model(implementation=implementation), case.ids.shape[1]
    expected = model(case.ids, attention_mask=case.mask, use_cache=False).logits[case.real]
    for chunks in ([num_tokens], data.draw(chunkings(num_tokens)), [1] * num_tokens):
        with torch.set_grad_enabled(gradients):
            logits, _ = feed(model, case.ids, case.mask, chunks, model.new_cache(growing=growing))
        assert_near(logits[case.real], expected)


@pytest.mark.parametrize("chunk", [1, 3, 13, 41])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("gradients", [True, False], ids=["gradients", "no gradients"])
def test_every_precision_agrees_with_its_uncached_forward(growing, dtype, chunk, gradients):
    model = wide_model(tiny_config(**ROOMY, num_hidden_layers=1), 0, dtype)
    ids = draw_ids(2, 41)
    chunks = [chunk] * (41 // chunk) + [41 % chunk] * (41 % chunk > 0)
    with torch.set_grad_enabled(gradients):
        logits, _ = feed(model, ids, None, chunks, model.new_cache(growing=growing))
    assert_near(logits, model(ids, use_cache=False).logits)


@given(case=cases(max_tokens=13, **ROOMY), gradients=st.booleans(), data=st.data())
@settings(max_examples=20)
def test_contents_depend_on_the_tokens_not_on_the_chunks(growing, implementation, case: Case, gradients, data):
    model, tokens = case.model(implementation=implementation), case.ids.shape[1]
    with torch.set_grad_enabled(gradients):
        _, whole = feed(model, case.ids, case.mask, cache=model.new_cache(growing=growing))
    _, parts = feed(model, case.ids, case.mask, data.draw(chunkings(tokens)), model.new_cache(growing=growing))
    assert whole.get_seq_length() == parts.get_seq_length() == tokens
    assert_same(contents(parts), contents(whole), exact=False)


@given(case=cases(max_tokens=13, **ROOMY))
@settings(max_examples=20)
def test_histories_equal_the_reference(growing, case: Case):
    """Counts, values and key norms: whether a key is stored before or after its rotation is the cache's choice."""
    model = case.model()
    _, cache = feed(model, case.ids, case.mask, cache=model.new_cache(growing=growing))
    expected = reference_forward(model, case.ids, case.mask).histories
    for layer, histories in zip(cache.layers, expected, strict=True):
        for (row, head), (keys, values) in histories.items():
            actual_keys, actual_values = layer.mosrah_cache.history(row, head)
            assert layer.mosrah_cache.get_heads_lengths()[row, head] == len(keys)
            assert_near(actual_values, values)
            assert_near(actual_keys.norm(dim=-1), keys.norm(dim=-1))
        assert torch.equal(layer.sliding_window_cache.num_real_tokens, case.real.sum(dim=1))


def test_pads_inside_a_warm_cache_are_skipped(model, new_cache):
    """Two chunks of unequal lengths, each left-padded: a gap in the middle of the rows."""
    ids = draw_ids(2, 9)
    mask = torch.tensor([[0, 0, 1, 1, 1, 0, 0, 0, 1], [1, 1, 1, 1, 1, 1, 1, 1, 1]])
    logits, cache = feed(model, ids, mask, [5, 4], new_cache())
    assert_near(logits[mask.bool()], reference_logits(model, ids, mask)[mask.bool()])
    alone = model(ids[:1][mask[:1].bool()][None], use_cache=False).logits
    assert_near(logits[0][mask[0].bool()], alone[0])
    for layer in cache.layers:
        assert layer.mosrah_cache.get_heads_lengths().sum(dim=1).tolist() == [2 * 4, 2 * 9]


def test_a_mask_may_cover_the_new_tokens_alone(model, new_cache):
    ids, mask = draw_ids(2, 9), torch.tensor([[0, 1, 1, 1, 0, 1, 1, 0, 1], [1] * 9])
    cache = new_cache()
    narrow = [model(ids[:, s], attention_mask=mask[:, s], cache=cache).logits for s in (slice(0, 5), slice(5, 9))]
    wide, _ = feed(model, ids, mask, [5, 4], new_cache())
    assert_near(torch.cat(narrow, dim=1)[mask.bool()], wide[mask.bool()])


def test_a_chunk_of_pads_evicts_nothing(model, new_cache):
    ids = draw_ids(2, 21)
    mask = torch.ones_like(ids)
    mask[0, 8:19] = 0
    _, cache = feed(model, ids[:, :8], None, [8], new_cache())
    before = row_contents(cache, 0)
    feed(model, ids[:, 8:19], mask, [11], cache)
    assert_same(row_contents(cache, 0), before)
    assert cache.get_seq_length() == 19
    logits, _ = feed(model, ids[:, 19:], mask, [2], cache)
    assert_near(logits, reference_logits(model, ids, mask)[:, 19:])


LIFECYCLE = {
    "reorder": (lambda cache: cache.reorder_cache(torch.tensor([1, 1, 0])), [1, 1, 0]),
    "repeat": (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
    "select": (lambda cache: cache.batch_select_indices(torch.tensor([2, 0])), [2, 0]),
    "deepcopy": (copy.deepcopy, [0, 1, 2]),
    "offload and prefetch": (lambda cache: offload_and_prefetch(cache), [0, 1, 2]),
}


def offload_and_prefetch(cache):
    for layer in cache.layers:
        layer.offload()
        layer.prefetch()


@pytest.fixture
def filled(model, new_cache):
    """Three rows routed differently, one of them gapped; the tokens, their mask and how to fill a cache with them."""
    ids = draw_ids(3, 17)
    mask = torch.ones_like(ids)
    mask[1, [0, 1, 6, 7]] = 0
    _, cache = feed(model, ids, mask, [9, 8], new_cache())
    return cache, ids, mask


@pytest.mark.parametrize("operation, rows", LIFECYCLE.values(), ids=LIFECYCLE)
def test_rows_move_as_a_whole(model, new_cache, filled, operation, rows):
    cache, ids, mask = filled
    before = [row_contents(cache, row) for row in range(3)]
    cache = operation(cache) or cache
    for new, old in enumerate(rows):
        assert_same(row_contents(cache, new), before[old])
    assert cache.get_seq_length() == 17
    more = draw_ids(len(rows), 5, seed=7)
    full = torch.nn.functional.pad(mask[rows], (0, 5), value=1)
    logits, _ = feed(model, more, full, [1, 4], cache)
    _, never_moved = feed(model, ids[rows], mask[rows], [17], new_cache())
    assert_near(logits, feed(model, more, full, [1, 4], never_moved)[0])


@pytest.mark.parametrize("operation, rows", LIFECYCLE.values(), ids=LIFECYCLE)
def test_moved_rows_share_no_memory(model, filled, operation, rows):
    """Writing to the first row alone leaves all others, and a copied cache's source, bit-equal."""
    source, _, mask = filled
    source_before = contents(source)
    cache = operation(source) or source
    before = [row_contents(cache, row) for row in range(len(rows))]
    only_first = torch.nn.functional.pad(mask[rows], (0, 5))
    only_first[0, -5:] = 1
    feed(model, draw_ids(len(rows), 5), only_first, [5], cache)
    for row in range(1, len(rows)):
        assert_same(row_contents(cache, row), before[row])
    if cache is not source:
        assert_same(contents(source), source_before)


@pytest.mark.parametrize("copies", ["deepcopy", "repeat", "reorder"])
def test_slots_freed_by_a_crop_are_not_shared_either(model, filled, copies):
    source = filled[0]
    source.activate_past_recording()
    feed(model, draw_ids(3, 4), None, [4], source)
    source.crop(-3)
    other = copy.deepcopy(source)
    operation, rows = LIFECYCLE[copies]
    cache = operation(other) or other
    expected = [row_contents(source, row) for row in rows]
    feed(model, draw_ids(3, 6, seed=3), None, [6], source)
    for row, content in enumerate(expected):
        assert_same(row_contents(cache, row), content)


def test_reset_forgets_everything(model, new_cache, filled):
    cache, ids, _ = filled
    cache.reset()
    assert cache.get_seq_length() == 0
    for layer in cache.layers:
        assert not layer.mosrah_cache.get_heads_lengths().any()
        assert not layer.sliding_window_cache.alive.any() and not layer.sliding_window_cache.num_real_tokens.any()
    assert_near(feed(model, ids, None, [4, 13], cache)[0], model(ids, use_cache=False).logits)


@pytest.mark.parametrize("chunks", [[11], [4, 7], [1] * 11], ids=str)
def test_nan_in_dead_slots_changes_nothing(model, new_cache, chunks):
    ids = draw_ids(3, 11)
    mask = torch.ones_like(ids)
    mask[0, :9], mask[1, 2:5] = 0, 0
    expected = model(ids, attention_mask=mask, use_cache=False).logits
    cache, start = new_cache(), 0
    for size in chunks:
        poison(cache)
        logits, _ = feed(model, ids[:, start : start + size], mask, [size], cache)
        real = mask[:, start : start + size].bool()
        assert_near(logits[real], expected[:, start : start + size][real])
        start += size


class Shadow(NamedTuple):
    """The tokens that a cache should act as if it had seen."""

    ids: torch.Tensor
    mask: torch.Tensor

    def rows(self, rows):
        return Shadow(self.ids[rows], self.mask[rows])

    def keep(self, tokens):
        return Shadow(self.ids[:, :tokens], self.mask[:, :tokens])

    def extended(self, tokens, seed):
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(64, (len(self.ids), tokens), generator=generator)
        mask = (torch.rand(ids.shape, generator=generator) < 0.8).long()
        return Shadow(torch.cat([self.ids, ids], dim=1), torch.cat([self.mask, mask], dim=1))


def crop_or_refuse(cache, shadow, amount, sign):
    """Crop if the cache can; a refusal must leave it as it was."""
    tokens = shadow.ids.shape[1]
    kept = tokens - min(amount, tokens)
    before = contents(cache)
    try:
        cache.crop(kept if sign and kept else kept - tokens)
    except RuntimeError:
        assert_same(contents(cache), before)
        return shadow
    return shadow.keep(kept)


def act(model, cache, shadow, name, amount, seed):
    """One step in the life of a cache, and what its tokens are afterwards."""
    rows = torch.randint(len(shadow.ids), (1 + amount % 4,), generator=torch.Generator().manual_seed(seed))
    if name == "feed" and shadow.ids.shape[1] + amount < 50:
        before, shadow = shadow.ids.shape[1], shadow.extended(amount + 1, seed)
        logits, _ = feed(model, shadow.ids[:, before:], shadow.mask, [amount + 1], cache)
        expected = model(shadow.ids, attention_mask=shadow.mask, use_cache=False).logits[:, before:]
        real = shadow.mask[:, before:].bool()
        assert_near(logits[real], expected[real])
    elif name == "reorder":
        rows = rows.repeat(4)[: len(shadow.ids)]
        cache.reorder_cache(rows)
        shadow = shadow.rows(rows)
    elif name == "select":
        cache.batch_select_indices(rows)
        shadow = shadow.rows(rows)
    elif name == "repeat" and len(shadow.ids) < 3:
        cache.batch_repeat_interleave(2)
        shadow = shadow.rows(torch.arange(len(shadow.ids)).repeat_interleave(2))
    elif name == "crop":
        shadow = crop_or_refuse(cache, shadow, amount, seed % 2)
    elif name == "reset":
        cache.reset()
        shadow = shadow.keep(0)
    elif name == "poison":
        poison(cache)
    elif name == "record":
        cache.activate_past_recording()
    elif name == "copy":
        cache = copy.deepcopy(cache)
    return cache, shadow


STEPS = ["feed"] * 4 + ["crop"] * 2 + ["reorder", "select", "repeat", "reset", "poison", "record", "copy"]


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(STEPS), st.integers(0, 9), st.integers(0, 2**20)), min_size=4, max_size=14
    ),
    recording=st.booleans(),
)
@settings(max_examples=60)
def test_any_life_of_a_cache_equals_the_uncached_forward(model, growing, steps, recording):
    cache = model.new_cache(growing=growing)
    if recording:
        cache.activate_past_recording()
    shadow = Shadow(torch.zeros(2, 0, dtype=torch.long), torch.zeros(2, 0, dtype=torch.long))
    for name, amount, seed in [("feed", 5, 0), *steps, ("feed", 3, 1)]:
        cache, shadow = act(model, cache, shadow, name, amount, seed)
        assert cache.get_seq_length() == shadow.ids.shape[1]
