"""What few tokens cost less by: products by columns and sums of rows in place give what plain loops give."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shram import plans_shram
from shram.plans_shram import Entries, apply_linear, attend_few, combine_few, multiply_columns, project_few
from tests.cases import assert_near, draw_ids
from tests.support import tiny_config, wide_model


@pytest.fixture(params=["sums in place", "sums of gathered rows"], scope="module")
def sums(request):
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "sums of gathered rows":
            patch.setattr(plans_shram, "SUMS_IN_PLACE", ())
        yield


def draw(*shape, dtype=torch.float64, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def draw_heads(tokens: int, heads: int, chosen: int):
    return torch.rand(tokens, heads, generator=torch.Generator().manual_seed(1)).argsort(dim=-1)[:, :chosen]


sizes = st.integers(1, 7)


@given(tokens=st.integers(1, 5), num_heads=st.integers(2, 7), data=st.data(), width=sizes, hidden=sizes)
def test_products_of_few_tokens_are_those_of_each_token_in_each_of_its_heads(
    sums, tokens, num_heads, data, width, hidden
):
    heads = draw_heads(tokens, num_heads, data.draw(st.integers(1, num_heads)))
    x, weight = draw(tokens, hidden), draw(num_heads, hidden, 3 * width)
    expected = [x[t] @ weight[h] for t in range(tokens) for h in heads[t]]
    assert_near(project_few(x, weight, heads.flatten()), torch.stack(expected))
    attended, weight, mix = draw(heads.numel(), width), draw(num_heads, width, hidden), draw(*heads.shape)
    rows = attended.view(*heads.shape, width)
    terms = [[mix[t, i] * rows[t, i] @ weight[h] for i, h in enumerate(heads[t])] for t in range(tokens)]
    expected = torch.stack([torch.stack(row).sum(0) for row in terms])
    assert_near(combine_few(attended, weight, heads.flatten(), mix), expected)


@pytest.mark.parametrize("limit", [0, 512], ids=["views", "gathered"])
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6), gap=st.integers(0, 3), width=sizes)
def test_few_queries_attend_to_their_own_histories_and_never_read_dead_slots(sums, limit, lengths, gap, width):
    num_keys = torch.tensor(lengths)
    first = (num_keys + gap).cumsum(0) - num_keys  # gap dead slots before each history, and some behind the last
    k, v = draw(int(first[-1]) + 20, width), draw(int(first[-1]) + 20, width, seed=1)
    live = torch.zeros(len(k), dtype=torch.bool)
    for start, length in zip(first, lengths, strict=True):
        live[start : start + length] = True
    k[~live] = v[~live] = torch.nan
    q, entries = draw(len(lengths), width, seed=2), Entries(first, first, first + num_keys - 1, num_keys)
    expected = [
        torch.softmax(0.3 * k[s : s + n] @ x, dim=0) @ v[s : s + n] for x, s, n in zip(q, first, lengths, strict=True)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plans_shram, "MAX_GATHERED_KEYS", limit)
        assert_near(attend_few(q, k, v, entries, 0.3, is_one_each=True), torch.stack(expected))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@given(shape=st.lists(st.integers(0, 3), max_size=2), width=sizes, out=sizes, strided=st.booleans())
def test_a_product_by_columns_is_the_product_by_rows(dtype, shape, width, out, strided):
    x, weight = draw(*shape, width, dtype=dtype), draw(out, width, dtype=dtype)
    x = draw(*shape, 2 * width, dtype=dtype)[..., ::2] if strided else x
    product, doubled = multiply_columns(x, weight, 2 * weight)
    assert product.is_contiguous() and product.dtype == dtype
    assert_near(product, F.linear(x, weight))
    assert_near(doubled, 2 * product)


@pytest.fixture
def taken(monkeypatch):
    """Shapes of what is multiplied by columns, up to three rows of five."""
    taken, multiply = [], plans_shram.multiply_columns
    monkeypatch.setattr(plans_shram, "multiply_columns", lambda x, *w: taken.append(tuple(x.shape)) or multiply(x, *w))
    monkeypatch.setattr(plans_shram, "HAS_MKL", True)
    monkeypatch.setattr(plans_shram, "FEW_COLUMNS_BYTES", 3 * 5 * 8)
    return taken


class Quantized(torch.Tensor):
    """A weight that knows how to multiply itself, as those of quantization libraries."""


class Doubling(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def quantize(layer):
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Quantized), requires_grad=False)


def replace_forward(layer):
    layer.forward = lambda x: F.linear(x, 2 * layer.weight)


@pytest.mark.parametrize(
    "change",
    [
        quantize,
        replace_forward,
        lambda layer: layer.register_forward_hook(lambda module, args, out: 2 * out),
        lambda layer: layer.register_forward_pre_hook(lambda module, args: 2 * args[0]),
        lambda layer: nn.utils.parametrizations.weight_norm(layer),
        lambda layer: setattr(layer, "__class__", Doubling),
        lambda layer: setattr(layer, "bias", nn.Parameter(torch.ones(2, dtype=torch.float64))),
    ],
    ids=["quantized weight", "own forward", "hook", "pre-hook", "parametrization", "subclass", "bias"],
)
def test_a_layer_that_is_more_than_a_product_is_called_as_it_is(taken, change):
    layer, x = nn.Linear(5, 2, bias=False, dtype=torch.float64), draw(3, 5)
    with torch.no_grad():
        apply_linear(x, layer)
        assert taken == [(3, 5)]
        change(layer)
        assert torch.equal(apply_linear(x, layer)[0], layer(x))
    assert taken == [(3, 5)]


def test_one_watched_layer_among_several_keeps_all_of_them_whole(taken):
    plain, watched = (nn.Linear(5, 2, bias=False, dtype=torch.float64) for _ in range(2))
    watched.register_forward_hook(lambda module, args, out: 2 * out)
    x = draw(3, 5)
    with torch.no_grad():
        products = apply_linear(x, plain, watched)
        assert [torch.equal(out, layer(x)) for out, layer in zip(products, (plain, watched), strict=True)] == [True] * 2
    assert not taken


def test_logits_made_without_gradients_may_be_changed_in_place_with_them():
    model = wide_model(tiny_config()).eval()
    for num_tokens in (1, 3):
        with torch.no_grad():
            logits = model(draw_ids(1, num_tokens)).logits
        logits.mul_(nn.Parameter(torch.ones(())))


def test_linear_layers_are_of_the_one_type_that_libraries_quantize():
    layers = [module for module in wide_model(tiny_config()).modules() if isinstance(module, nn.Linear)]
    assert layers and {type(layer) for layer in layers} == {nn.Linear}


def test_global_hooks_see_every_layer(taken):
    layer, seen = nn.Linear(5, 2, bias=False, dtype=torch.float64), []
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, out: seen.append(module))
    with torch.no_grad():
        apply_linear(draw(1, 5), layer)
    handle.remove()
    assert seen == [layer] and not taken


def test_columns_are_for_few_rows_of_wide_floats_without_gradients(taken, monkeypatch):
    layer = nn.Linear(5, 2, bias=False, dtype=torch.float64)
    apply_linear(draw(3, 5), layer)
    with torch.no_grad():
        apply_linear(draw(4, 5), layer)
        apply_linear(draw(1, 5).bfloat16(), layer.to(torch.bfloat16))
        assert not taken
        layer.to(torch.float32)
        for shape in ((1, 5), (3, 1, 5)):
            x = draw(*shape).float()
            assert_near(apply_linear(x, layer)[0], layer(x))
        assert taken == [(1, 5), (3, 1, 5)]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            apply_linear(draw(1, 5).float(), layer)
        monkeypatch.setattr(plans_shram, "FEW_COLUMNS_BYTES", 2 * 5 * 4 - 1)  # a single row is taken twice
        apply_linear(draw(1, 5).float(), layer)
        monkeypatch.setattr(plans_shram, "FEW_COLUMNS_BYTES", 2**20)
        monkeypatch.setattr(plans_shram, "FEW_COLUMNS", 4)
        apply_linear(draw(5, 5).float(), layer)
        apply_linear(draw(4, 5).float(), layer)
        assert taken == [(1, 5), (3, 1, 5), (4, 5)]
        monkeypatch.setattr(plans_shram, "HAS_MKL", False)
        apply_linear(draw(4, 5).float(), layer)
    assert len(taken) == 3


def test_a_step_by_columns_and_one_by_rows_give_the_same_logits(monkeypatch):
    model, ids = wide_model(tiny_config(), 0, torch.float64).eval(), draw_ids(2, 30)
    with torch.no_grad():
        monkeypatch.setattr(plans_shram, "HAS_MKL", False)
        expected = model(ids, use_cache=False).logits
        by_columns = []
        multiply = plans_shram.multiply_columns
        monkeypatch.setattr(plans_shram, "multiply_columns", lambda *a: by_columns.append(a) or multiply(*a))
        monkeypatch.setattr(plans_shram, "HAS_MKL", True)
        cache = model.new_cache()
        logits = [model(part, cache=cache).logits for part in ids.split(1, dim=1)]
    assert_near(torch.cat(logits, dim=1), expected)
    assert by_columns
