"""The plan for CUDA, run on a CPU by stand-ins of its kernels: the oracle's numbers, static shapes, no host reads."""

import inspect
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import grouped_mm
from torch.utils._python_dispatch import TorchDispatchMode

from shram import attention_shram, device_plan_shram
from shram.device_plan_shram import Kernels, device_plan_available, fits_kernels, sort_entries
from shram.plans_shram import pack
from tests import stand_in_kernels
from tests.cases import Case, assert_near, cases, contents, draw_ids, feed, masks, set_routing
from tests.reference import reference_forward
from tests.stand_in_kernels import STAND_INS
from tests.support import tiny_config, wide_model
from tests.test_attention import assert_values_and_gradients_equal_the_reference, gradients

HOST_READS = ("_local_scalar_dense", "nonzero", "unique", "masked_select", "item")


class Calls(list):
    """(kernel, args, kwargs) of every call, by which a test sees that the plan was taken."""

    def watch(self, kernel):
        def watched(*args, **kwargs):
            self.append((kernel, args, kwargs))
            return kernel(*args, **kwargs)

        return watched

    def watch_both(self, kernels: Kernels) -> Kernels:
        return Kernels(self.watch(kernels.grouped_mm), self.watch(kernels.varlen_attn))


@contextmanager
def device_plan(is_available=True, kernels=STAND_INS):
    """Every call that may take the plan takes it, or none does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_plan_shram, "KERNELS", kernels)
        patch.setattr(attention_shram, "device_plan_available", lambda *_: is_available)
        yield


@pytest.fixture
def plan():
    with device_plan():
        yield


@pytest.fixture
def kernel_calls():
    """The device plan, and the calls of its kernels."""
    calls = Calls()
    with device_plan(kernels=calls.watch_both(STAND_INS)):
        yield calls


# ---------------------------------------------------------------------------------------------------- order


@given(data=st.data(), num_rows=st.integers(1, 4), num_tokens=st.integers(1, 13), num_heads=st.integers(1, 7))
def test_real_entries_lie_as_the_packed_plan_packs_them(data, num_rows, num_tokens, num_heads):
    num_selected, seed = data.draw(st.integers(1, num_heads)), data.draw(st.integers(0, 999))
    scores = torch.rand(num_rows, num_tokens, num_heads, generator=torch.Generator().manual_seed(seed))
    heads, mask = scores.argsort(dim=-1)[..., :num_selected], data.draw(masks(num_rows, num_tokens))
    mask = torch.ones(num_rows, num_tokens).bool() if mask is None else mask.bool()
    order, packing = sort_entries(heads, mask, num_heads), pack(heads, mask, num_heads)
    num_real = len(packing.choice)
    for name in ("choice", "token", "rank"):
        assert torch.equal(getattr(order, name)[:num_real], getattr(packing, name)), name
    assert mask.flatten()[order.token].tolist() == [True] * num_real + [False] * (heads.numel() - num_real)
    assert torch.equal(order.choice[order.place], torch.arange(heads.numel()))
    assert order.head_ends.diff(prepend=torch.zeros(1, dtype=torch.int32)).tolist() == packing.head_sizes
    filled = order.group_length > 0
    assert torch.equal(order.group_length[filled], packing.group_length)
    assert torch.equal(order.group_flat[filled], packing.group_flat)
    assert torch.equal(order.group_row[filled], packing.group_row)
    assert torch.equal(order.bounds[:-1][filled].long(), packing.group_start)


# ---------------------------------------------------------------------------------------------------- numbers


@given(case=cases())
@settings(max_examples=60)
def test_values_and_gradients_equal_the_reference(case: Case):
    with device_plan():
        assert_values_and_gradients_equal_the_reference(case.model(), case)


@given(case=cases())
@settings(max_examples=60)
def test_values_and_gradients_equal_the_packed_plan(case: Case):
    model = case.model()
    embeds = model.get_input_embeddings()(case.ids).detach().requires_grad_()
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = []
    for is_available in (False, True):
        with device_plan(is_available):
            logits = model(inputs_embeds=embeds, attention_mask=case.mask, use_cache=False).logits
            found.append((logits[case.real], *gradients(logits, case.real, [embeds, *parameters])))
    for name, packed, device in zip(["logits", "inputs_embeds", *names], *found, strict=True):
        assert_near(device, packed, name)


@pytest.mark.parametrize("rope_mode", ["main_sequence", "semantic_sequence"])
@pytest.mark.parametrize("routing", ["spread", "collapsed", "one head empty"])
def test_rows_that_are_all_padding_change_nothing(plan, rope_mode, routing):
    config = tiny_config(num_mosrah_heads=5, num_selected_heads=3, rope_mode=rope_mode)
    mask = torch.tensor([[1] * 11, [0] * 11, [0] * 4 + [1] * 7, [1] * 2 + [0] * 9])
    case = Case(config, routing, draw_ids(4, 11), mask, 0)
    assert_values_and_gradients_equal_the_reference(case.model(), case)
    nothing = Case(config, routing, draw_ids(2, 3), torch.zeros(2, 3, dtype=torch.long), 0)
    assert_values_and_gradients_equal_the_reference(nothing.model(), nothing)


def test_a_layer_takes_two_products_and_one_attention(kernel_calls):
    model = wide_model(tiny_config(num_hidden_layers=1), 0, torch.float64)
    model(draw_ids(2, 13), use_cache=False)
    kernels = [kernel for kernel, _, _ in kernel_calls]
    assert kernels == [STAND_INS.grouped_mm, STAND_INS.varlen_attn, STAND_INS.grouped_mm]


def test_what_kernels_leave_behind_the_last_group_reaches_no_gradient(plan):
    model = wide_model(tiny_config(), 0, torch.float64).train()
    ids, mask = draw_ids(3, 7), torch.tensor([[1] * 7, [1] * 3 + [0] * 4, [0] * 7])
    model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.isfinite().all(), name


@given(case=cases(mosrah_overallocation_factor=99.0), data=st.data())
@torch.no_grad()
def test_a_prefill_leaves_the_cache_that_the_packed_plan_leaves(case: Case, data):
    model, growing = case.model(), data.draw(st.booleans())
    mask = torch.ones_like(case.ids) if case.mask is None else case.mask
    mask, steps = torch.cat([mask, mask.new_ones(len(mask), 3)], dim=1), draw_ids(len(case.ids), 3)
    ids, found = torch.cat([case.ids, steps], dim=1), []
    for is_available in (False, True):
        with device_plan(is_available):
            logits, cache = feed(model, ids, mask, [case.ids.shape[1], 1, 2], model.new_cache(growing=growing))
        found.append([logits[mask.bool()], *contents(cache)])
    for packed, device in zip(*found, strict=True):
        assert_near(device.double(), packed.double())
    assert_near(found[1][0], reference_forward(model, ids, mask).logits[mask.bool()])


def test_a_fixed_cache_that_is_too_small_refuses_the_prefill(plan):
    config = tiny_config(mosrah_overallocation_factor=1.0, inference_sequence_length=32)
    model = set_routing(wide_model(config, 0, torch.float64), "collapsed")
    cache = model.new_cache(1, growing=False)
    with torch.no_grad(), pytest.raises(ValueError, match="layer 0 is full"):
        model(draw_ids(1, 30), cache=cache)
    assert cache.get_seq_length() == 0


# ---------------------------------------------------------------------------------------------------- static shapes


class HostReads(TorchDispatchMode):
    """The operators seen that a GPU must finish all its work for."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name()
        if any(read in name for read in HOST_READS) or has_boolean_index(func, args):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


def has_boolean_index(func, args) -> bool:
    indices = args[1] if func.overloadpacket in (torch.ops.aten.index, torch.ops.aten.index_put) else ()
    return any(index is not None and index.dtype == torch.bool for index in indices)


def routed_path(mask):
    """The routed path alone, and what it takes: x (3, 9, D) and the tokens."""
    config = tiny_config(num_mosrah_heads=5, rope_mode="semantic_sequence")
    heads = wide_model(config, 0, torch.float64).model.layers[0].self_attn.mosrah
    index = torch.arange(9).expand(3, -1)
    tokens = attention_shram.TokenRows(mask, index, index, 9).with_rotary(config, torch.float64)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 9, config.hidden_size, dtype=torch.float64, generator=generator)
    return heads, x.requires_grad_(), tokens


@pytest.mark.parametrize("lengths", [None, [9, 4, 0]], ids=["no padding", "padding"])
def test_the_host_reads_nothing_forward_or_backward(lengths):
    mask = None if lengths is None else torch.arange(9) < torch.tensor(lengths)[:, None]
    heads, x, tokens = routed_path(mask)
    for is_available in (True, False):  # the packed plan does read: the count is no dead letter
        with device_plan(is_available), HostReads() as reads:
            heads(x, tokens)[0].square().sum().backward()
        assert bool(reads.found) is not is_available


@pytest.mark.parametrize("rope_mode", ["main_sequence", "semantic_sequence"])
def test_one_graph_holds_a_training_step_for_any_routing(plan, rope_mode):
    graphs, compile_graph = [], torch._dynamo.lookup_backend("aot_eager")

    def keep_graph(graph, inputs):
        graphs.append(graph.print_readable(print_output=False))
        return compile_graph(graph, inputs)

    torch.compiler.reset()
    model = wide_model(tiny_config(rope_mode=rope_mode), 0, torch.float64).train()
    run = torch.compile(model, fullgraph=True, backend=keep_graph)
    ids, mask = draw_ids(2, 11), torch.tensor([[1] * 11, [1] * 6 + [0] * 5])
    for routing in ("spread", "one head empty", "collapsed"):
        set_routing(model, routing)
        all_logits = (call(ids, attention_mask=mask, use_cache=False).logits for call in (model, run))
        found = [(x[mask.bool()], *gradients(x, mask.bool(), list(model.parameters()))) for x in all_logits]
        for eager, compiled in zip(*found, strict=True):
            assert_near(compiled, eager)
    (graph,) = graphs
    assert "shram_stand_in" in graph


def test_an_exported_program_serves_other_lengths(plan):
    model = wide_model(tiny_config(), 0, torch.float64)
    length = torch.export.Dim("length", min=2, max=64)
    program = torch.export.export(
        model, (draw_ids(2, 9),), {"use_cache": False}, dynamic_shapes={"input_ids": {1: length}, "use_cache": None}
    )
    assert any("shram_stand_in" in str(node.target) for node in program.graph.nodes)
    for num_tokens in (9, 31):
        ids = draw_ids(2, num_tokens)
        assert_near(program.module()(ids, use_cache=False).logits, model(ids, use_cache=False).logits)


# ---------------------------------------------------------------------------------------------------- real kernels


def test_torchs_grouped_product_agrees_with_its_stand_in():
    generator = torch.Generator().manual_seed(0)
    rows, weight = (torch.randn(shape, generator=generator) for shape in ((11, 16), (4, 16, 24)))
    offs = torch.tensor([3, 3, 8, 9], dtype=torch.int32)
    found = []
    for kernel in (grouped_mm, stand_in_kernels.grouped_mm):
        sources = rows.clone().requires_grad_(), weight.clone().requires_grad_()
        out = kernel(*sources, offs=offs)[:9]
        grad_rows, grad_weight = torch.autograd.grad(out.square().sum(), sources)
        found.append((out, grad_rows[:9], grad_weight))
    for actual, expected in zip(*found, strict=True):
        assert_near(actual, expected)


def test_the_attention_stand_in_has_right_gradients():
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 9, 1, 4, dtype=torch.float64, generator=generator).requires_grad_().unbind()
    bounds = torch.tensor([0, 4, 4, 9], dtype=torch.int32)
    torch.autograd.gradcheck(lambda *qkv: stand_in_kernels.attention(*qkv, bounds, 9, 0.3), (q, k, v))


def test_torchs_attention_takes_the_arguments_of_its_stand_in(kernel_calls):
    wide_model(tiny_config(num_hidden_layers=1), 0, torch.float64)(draw_ids(2, 13), use_cache=False)
    ((_, args, kwargs),) = (call for call in kernel_calls if call[0] is STAND_INS.varlen_attn)
    inspect.signature(varlen_attn).bind(*args, **kwargs)


@pytest.mark.parametrize("has_padding", [False, True])
def test_torchs_kernels_take_the_shapes_and_strides_of_a_training_step(has_padding):
    """On tensors without contents torch's own checks of its kernels' arguments run all the same."""
    calls, config = Calls(), tiny_config(num_mosrah_heads=5)
    with device_plan(kernels=calls.watch_both(Kernels(grouped_mm, varlen_attn))), FakeTensorMode():
        heads = attention_shram.MosrahHeads(config)
        for name in ("qkv_proj", "out_proj"):  # the router stays float32
            setattr(heads, name, torch.nn.Parameter(getattr(heads, name).detach().bfloat16()))
        index, mask = torch.arange(7).expand(3, -1), torch.ones(3, 7).bool() if has_padding else None
        tokens = attention_shram.TokenRows(mask, index, index, 7).with_rotary(config, torch.bfloat16)
        x = torch.randn(3, 7, config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
        y = heads(x, tokens)[0]
        y.sum().backward()
    assert len(calls) == 3 and y.dtype == torch.bfloat16
    assert x.grad.shape == x.shape and heads.qkv_proj.grad.shape == heads.qkv_proj.shape


# ---------------------------------------------------------------------------------------------------- choice


@pytest.fixture
def fake_cuda(monkeypatch):
    """Tensors without contents on a GPU that is not there; yields what torch says about it."""
    device = SimpleNamespace(major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with FakeTensorMode():
        yield device


def serves(dtype=torch.bfloat16, device="cuda", training=False, rows=2, **overrides) -> bool:
    config = tiny_config(**overrides)
    return device_plan_available(torch.empty(rows, 3, 32, dtype=dtype, device=device), config, training)


def test_bf16_on_a_gpu_takes_the_device_plan(fake_cuda, monkeypatch):
    assert serves() and serves(training=True)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device_type: device_type == "cuda")
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda _: torch.bfloat16)
    assert serves(torch.float32)


def test_what_the_kernels_do_not_serve_falls_back(fake_cuda, monkeypatch):
    assert not serves(device="cpu")
    assert not serves(torch.float32) and not serves(torch.float16)
    assert not serves(training=True, attention_dropout=0.1) and serves(attention_dropout=0.1)
    assert not serves(head_dim=12) and not serves(head_dim=264) and not serves(hidden_size=36)
    assert not serves(rows=16384)
    fake_cuda.major = 7
    assert not serves()
    fake_cuda.major = 9
    monkeypatch.setattr(torch.version, "cuda", None)
    assert not serves()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(device_plan_shram, "KERNELS", None)
    assert not serves()


def test_eager_attention_falls_back():
    config = tiny_config()
    assert fits_kernels(2, config, False)
    config._attn_implementation = "eager"
    assert not fits_kernels(2, config, False)


@torch.no_grad()
def test_only_a_call_that_begins_its_sequences_takes_the_device_plan(kernel_calls):
    model = wide_model(tiny_config(), 0, torch.float64)
    cache = model.new_cache()
    for ids, is_taken in ((draw_ids(1, 5), True), (draw_ids(1, 1), False), (draw_ids(1, 3), False)):
        kernel_calls.clear()
        model(ids, cache=cache)
        assert bool(kernel_calls) is is_taken
