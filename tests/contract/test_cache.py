"""The cache as every release of the library sees it: a `Cache` of `CacheLayerMixin`s that moves rows and rolls back."""

import copy
import sys

import pytest
import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from tests.contract.remote import cache_of, load, prompt, write_checkpoint

IDS = prompt(3, 23)


@pytest.fixture(scope="module", params=[True, False], ids=["growing", "fixed"])
def growing(request):
    return request.param


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load(write_checkpoint(tmp_path_factory.mktemp("roomy"), mosrah_overallocation_factor=9.0)).double()


@pytest.fixture
def new_cache(model, growing):
    return lambda: model.new_cache(growing=growing)


def assert_near(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("chunks", [[23], [1] * 23, [9, 1, 13], [2, 3, 4, 5, 9]], ids=str)
def test_any_chunking_equals_the_uncached_forward(model, new_cache, chunks):
    cache = new_cache()
    logits = torch.cat([model(part, past_key_values=cache).logits for part in IDS.split(chunks, dim=1)], dim=1)
    assert_near(logits, model(IDS, use_cache=False).logits)
    assert cache.get_seq_length() == 23


def test_a_left_padded_batch_equals_each_row_alone(model, new_cache):
    mask = torch.ones_like(IDS)
    mask[0, :19], mask[1, :2] = 0, 0
    cache, logits = new_cache(), []
    for start, stop in ((0, 20), (20, 21), (21, 23)):
        logits.append(model(IDS[:, start:stop], attention_mask=mask[:, :stop], past_key_values=cache).logits)
    for row, real, actual in zip(IDS, mask.bool(), torch.cat(logits, dim=1), strict=True):
        assert_near(actual[real], model(row[real][None], use_cache=False).logits[0])


MOVES = {
    "reorder": (lambda cache: cache.reorder_cache(torch.tensor([1, 1, 0])), [1, 1, 0]),
    "repeat": (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
    "select": (lambda cache: cache.batch_select_indices(torch.tensor([2, 0])), [2, 0]),
    "deepcopy": (copy.deepcopy, [0, 1, 2]),
}


@pytest.mark.parametrize("move, rows", MOVES.values(), ids=MOVES)
def test_rows_move_as_a_whole(model, new_cache, move, rows):
    cache = new_cache()
    model(IDS[:, :17], past_key_values=cache)
    cache = move(cache) or cache
    assert_near(
        model(IDS[rows][:, 17:], past_key_values=cache).logits, model(IDS[rows], use_cache=False).logits[:, 17:]
    )


@pytest.mark.parametrize("amount", [-5, 0, 18, torch.tensor(-3)], ids=str)
def test_crop_takes_back_what_was_recorded(model, new_cache, amount):
    cache = new_cache()
    model(IDS[:, :9], past_key_values=cache)
    cache.activate_past_recording()
    model(IDS[:, 9:], past_key_values=cache)
    cache.crop(amount)
    kept = 23 + int(amount) if amount <= 0 else int(amount)
    assert cache.get_seq_length() == kept
    more = prompt(3, 6, seed=1)
    expected = model(torch.cat([IDS[:, :kept], more], dim=1), use_cache=False).logits[:, kept:]
    assert_near(model(more, past_key_values=cache).logits, expected)


def test_crop_of_what_was_not_recorded_is_refused(model, new_cache):
    cache = new_cache()
    model(IDS, past_key_values=cache)
    with pytest.raises(RuntimeError, match="activate_past_recording"):
        cache.crop(-5)
    assert cache.get_seq_length() == 23


def test_reset_makes_it_new(model, new_cache):
    cache = new_cache()
    model(IDS, past_key_values=cache)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert_near(model(IDS, past_key_values=cache).logits, model(IDS, use_cache=False).logits)


def test_the_library_recognises_it(model, growing, new_cache):
    cache = new_cache()
    assert isinstance(cache, Cache) and all(isinstance(layer, CacheLayerMixin) for layer in cache.layers)
    assert len(cache.layers) == 2 and cache.is_shram_cache
    assert cache.is_compileable is not growing
    assert list(cache.is_sliding) == [False, False]
    for layer in cache.layers:
        assert layer.get_max_length() == layer.get_max_cache_shape() == 64
        assert layer.get_mask_sizes(5) == layer.get_mask_sizes(torch.arange(5)) == (64, 0)
        assert layer.is_initialized
        layer.lazy_initialization(torch.zeros(1))
        with pytest.raises(NotImplementedError):
            layer.update(torch.zeros(1), torch.zeros(1))
    with pytest.raises(NotImplementedError):
        cache.update(torch.zeros(1), torch.zeros(1), 0)


def test_sixteen_bit_models_store_sixteen_bits(checkpoint, growing):
    model = load(checkpoint, dtype=torch.bfloat16)
    cache = model.new_cache(growing=growing)
    model(IDS[:, :9], past_key_values=cache)
    for layer in cache.layers:
        assert layer.sliding_window_cache.keys.dtype == layer.mosrah_cache.keys.dtype == torch.bfloat16


def test_a_cache_of_the_modeling_module_serves_its_model(model):
    """The loader may import a file twice, so a cache is recognised by its marker and not by its class."""
    cache = sys.modules[type(model).__module__].ShramCache(model.config)
    output = model(IDS, past_key_values=cache)
    assert cache_of(output) is cache and cache.get_seq_length() == 23
