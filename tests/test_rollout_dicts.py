"""Workspaces over dict caches: P-steps read history, write only scratch, and share one backward."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from shram.rollout_shram import (
    Extent,
    PredictorWorkspace,
    assert_clean_history_extent,
    build_predictor_workspace,
    committed_extent,
    fork_layer,
    reset_main_caches,
    reset_predictor_workspace,
)
from tests.rollout_consumer import (
    HEADS,
    WIDTH,
    StaticBlock,
    chunk,
    empty_cache,
    full_pass,
    make_blocks,
    run,
)

HISTORY, CURRENT, LAYERS = 6, 3, (0, 2)
KEYS = ("k", "v", "global_end_index", "local_end_index")


def written_cache(history: int = HISTORY, **options) -> list[dict]:
    """A main cache with `history` tokens that a Full pass wrote, NaN behind them."""
    main = empty_cache(**options)
    dtype = main[0]["k"].dtype
    with torch.no_grad():
        full_pass(make_blocks(len(main), dtype=dtype), main, chunk(history, dtype=dtype), 0)
    return main


def numbered_cache(ids: list[int], total: int) -> list[dict]:
    """Blocks whose slot holds the number of its token."""
    main = empty_cache(slots=len(ids))
    for block in main:
        for name in ("k", "v"):
            block[name].copy_(torch.tensor(ids, dtype=torch.float64)[None, :, None, None].expand_as(block[name]))
        block["global_end_index"].fill_(total)
        block["local_end_index"].fill_(len(ids))
    return main


def held_ids(workspace, block: int = 0) -> list[int]:
    return workspace[block]["k"][0, : int(workspace[block]["local_end_index"]), 0, 0].tolist()


def build(main, history=HISTORY, current=CURRENT, ids=LAYERS):
    return build_predictor_workspace(main, source_block_ids=ids, history_tokens=history, current_tokens=current)


def state_of(blocks) -> list:
    """Identity, address, version and bytes of everything a cache holds."""
    return [
        (id(x), x.data_ptr(), x._version, x.detach().clone().nan_to_num(7.0))
        for block in blocks
        for x in block.values()
    ]


def assert_untouched(blocks, before) -> None:
    for (*marks, value), (*old_marks, old_value) in zip(state_of(blocks), before, strict=True):
        assert marks == old_marks
        assert torch.equal(value, old_value)


@pytest.fixture
def main():
    return written_cache()


@pytest.fixture
def predictor():
    return make_blocks(2, seed=1)


def extents(block) -> tuple[int, int]:
    return int(block["global_end_index"]), int(block["local_end_index"])


# ---------------------------------------------------------------------------------------------------- build


def test_history_is_bit_identical_and_the_current_region_zero(main):
    workspace = build_predictor_workspace(main, source_block_ids=(2, 0), history_tokens=6, current_tokens=3)
    assert isinstance(workspace, dict) and list(workspace) == [2, 0]
    for i, block in workspace.items():
        assert set(block) == set(KEYS)
        for name in ("k", "v"):
            assert block[name].shape == (2, 9, HEADS, WIDTH)
            assert torch.equal(block[name][:, :6], main[i][name][:, :6])
            assert (block[name][:, 6:] == 0).all()


def test_what_lies_beyond_history_in_the_main_cache_does_not_enter(main):
    assert main[0]["k"].isnan().any()
    workspace = build(main)
    assert all(block[name].isfinite().all() for block in workspace.values() for name in ("k", "v"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_dtypes_and_widths_are_kept_per_tensor(dtype):
    main = empty_cache()
    for block in main:
        block["k"] = torch.randn(2, 12, HEADS, WIDTH, dtype=dtype)
        block["v"] = torch.randn(2, 12, HEADS, WIDTH + 3, dtype=torch.float32)
        for key in KEYS[2:]:
            block[key].fill_(6)
    for block in build(main).values():
        assert block["k"].dtype == dtype and block["v"].dtype == torch.float32
        assert block["k"].shape[2:] == (HEADS, WIDTH) and block["v"].shape[2:] == (HEADS, WIDTH + 3)
        for key in KEYS[2:]:
            assert block[key].dtype == torch.long and block[key].shape == (1,) and block[key].item() == 6


def test_scratch_is_plain_memory_of_its_own(main):
    for i, block in build(main).items():
        for name in ("k", "v"):
            stored = block[name]
            assert stored.is_leaf and stored.grad_fn is None and not stored.requires_grad
            assert not stored.is_inference() and stored.is_contiguous()
            assert stored.untyped_storage().data_ptr() != main[i][name].untyped_storage().data_ptr()


def test_expanded_sources_are_copied(main):
    main[0]["k"] = main[0]["k"][:1].expand(2, -1, -1, -1)
    assert build(main)[0]["k"].is_contiguous()


def test_the_main_cache_is_untouched_by_build_steps_and_exit(main, predictor):
    before = state_of(main)
    with PredictorWorkspace(main, source_layers=LAYERS, current_tokens=CURRENT, history_tokens=HISTORY) as workspace:
        for p in workspace.steps(3):
            run(predictor, workspace.values(), chunk(seed=p))
    assert_untouched(main, before)


def test_a_graph_on_the_main_cache_stays_out_of_the_workspace(main, predictor):
    leaf = torch.ones(2, HISTORY, HEADS, WIDTH, dtype=torch.float64, requires_grad=True)
    main[0]["k"][:, :HISTORY] = leaf * 2
    workspace = build(main)
    assert workspace[0]["k"].grad_fn is None
    run(predictor, workspace.values(), chunk()).sum().backward()
    assert leaf.grad is None


@pytest.mark.parametrize(
    ("fault", "error", "pattern"),
    [
        ({"history": -1}, ValueError, "Invalid history/current token count.*history_tokens.*-1"),
        ({"current": 0}, ValueError, "Invalid history/current token count.*current_tokens.*0"),
        ({"history": 9}, RuntimeError, r"ends before committed history: block 0 holds 6.*history_tokens=9"),
        ({"history": 5.9}, TypeError, "history_tokens must be an integer, got 5.9"),
        ({"history": True}, TypeError, "history_tokens.*True"),
        ({"history": None}, TypeError, "history_tokens.*None"),
        ({"history": "6"}, TypeError, "history_tokens.*'6'"),
        ({"ids": (1, 1)}, ValueError, r"distinct.*\(1, 1\)"),
        ({"ids": ()}, ValueError, r"one or more.*\(\)"),
        ({"ids": (-1, 0)}, ValueError, r">= 0.*\(-1, 0\)"),
        ({"ids": (0, 3)}, IndexError, "block 3.*3 blocks"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_bad_arguments_are_named(main, fault, error, pattern):
    with pytest.raises(error, match=pattern):
        build(main, **fault)


@pytest.mark.parametrize("ids", [(1,), (2, 0, 1)], ids=str)
def test_any_number_of_layers_is_served(main, ids):
    assert list(build(main, ids=ids)) == list(ids)


def test_one_bad_block_and_nothing_is_allocated(main, monkeypatch):
    main[2]["global_end_index"].fill_(4)
    made = []
    monkeypatch.setattr("shram.rollout_shram.copy_slots", lambda *args: made.append(args))
    with pytest.raises(RuntimeError, match="ends before committed history: block 2 holds 4 tokens, history_tokens=6"):
        build(main)
    assert not made


def test_extents_may_be_ints_or_equal_per_row(main):
    main[0]["global_end_index"] = main[0]["local_end_index"] = 6
    main[2]["global_end_index"] = torch.tensor([6, 6])
    assert extents(build(main)[0]) == (6, 6)
    main[2]["global_end_index"] = torch.tensor([6, 5])
    with pytest.raises(ValueError, match=r"global_end_index of block 2 must be equal in all rows.*5 to 6"):
        build(main)
    del main[0]["local_end_index"]
    with pytest.raises(TypeError, match="block 0 lacks local_end_index: a dict cache needs k, v, global_end_index"):
        build(main)


def test_no_history_gives_zeros_even_over_stale_contents(main):
    workspace = build(main, history=0)
    assert all((block[name] == 0).all() for block in workspace.values() for name in ("k", "v"))
    assert extents(workspace[0]) == (0, 0)


def test_a_chunk_that_a_noisy_pass_already_wrote_is_left_out(main):
    blocks = make_blocks()
    full_pass(blocks, main, chunk(seed=1), HISTORY)
    assert committed_extent(main[0]) == Extent(9, 9)
    assert torch.equal(build(main)[0]["k"][:, :6], main[0]["k"][:, :6])


@pytest.mark.parametrize(("history", "expected"), [(10, [4, 5, 6, 7, 8, 9]), (8, [4, 5, 6, 7])], ids=str)
def test_a_rolled_buffer_gives_the_tokens_it_still_holds(history, expected):
    workspace = build(numbered_cache([4, 5, 6, 7, 8, 9], 10), history=history)
    assert held_ids(workspace) == expected and extents(workspace[0]) == (history, len(expected))


def test_history_that_was_evicted_is_refused():
    with pytest.raises(RuntimeError, match=r"committed history was evicted: block 0 keeps 6 of 10.*first 3"):
        build(numbered_cache([4, 5, 6, 7, 8, 9], 10), history=3)


def test_a_window_keeps_the_sink_and_the_newest():
    main = numbered_cache([0, 1, 6, 7, 8, 9], 10)
    workspace = PredictorWorkspace(main, source_layers=(0,), current_tokens=2, window=4, sink_tokens=2)
    assert held_ids(workspace) == [0, 1, 8, 9] and extents(workspace[0]) == (10, 4)
    reset_predictor_workspace(workspace, history_tokens=10)
    assert extents(workspace[0]) == (10, 4)
    with pytest.raises(ValueError, match="window=1, sink_tokens=2"):
        PredictorWorkspace(main, source_layers=(0,), current_tokens=2, window=1, sink_tokens=2)


# ---------------------------------------------------------------------------------------------------- a real consumer


@pytest.mark.parametrize("sink", [0, 2])
@pytest.mark.parametrize("num_chunks", [1, 2, 3, 6])
def test_a_rolling_consumer_gets_the_full_pass_outputs_on_a_workspace(sink, num_chunks):
    """Port check: after any number of chunks a block computes on the workspace what it then computes on the buffer."""
    blocks, main = make_blocks(window=8, sink=sink), empty_cache(slots=8)
    for i in range(num_chunks):
        x, start = chunk(2, seed=i), 2 * i
        with torch.no_grad():
            options = {"window": 6, "sink_tokens": sink, "source_layers": (0, 1, 2), "current_tokens": 2}
            with PredictorWorkspace(main, history_tokens=start, **options) as workspace:
                for _ in workspace.steps(2):
                    on_workspace = run(blocks, workspace.values(), x)
            full_pass(blocks, main, chunk(2, seed=100 + i), start)  # a noisy pass, then the clean one over it
            torch.testing.assert_close(full_pass(blocks, main, x, start), on_workspace, rtol=0, atol=1e-12)
    assert_clean_history_extent(main, expected_tokens=2 * num_chunks)


# ---------------------------------------------------------------------------------------------------- reset


def test_reset_keeps_history_and_clears_the_current_region_in_place(main, predictor):
    workspace = build(main)
    with torch.no_grad():
        before = workspace[0]["k"].data_ptr()
        run(predictor, workspace.values(), chunk())
        assert extents(workspace[0]) == (9, 9)
        reset_predictor_workspace(workspace, history_tokens=HISTORY)
    for i, block in workspace.items():
        assert torch.equal(block["k"][:, :6], main[i]["k"][:, :6]) and (block["v"][:, 6:] == 0).all()
        assert extents(block) == (6, 6)
    assert workspace[0]["k"].data_ptr() == before


@pytest.mark.parametrize("freeze_kv", [False, True], ids=["trained", "frozen"])
def test_reset_after_a_step_with_grad_gives_fresh_memory(main, freeze_kv):
    workspace = build(main)
    stored = workspace[0]["k"]
    loss = run(make_blocks(2, seed=1, freeze_kv=freeze_kv), workspace.values(), chunk()).sum()
    reset_predictor_workspace(workspace, history_tokens=HISTORY)
    assert workspace[0]["k"].data_ptr() != stored.data_ptr()
    assert torch.equal(workspace[0]["k"][:, :6], main[0]["k"][:, :6]) and not workspace[0]["k"].requires_grad
    loss.backward()


def losses_of(predictor, workspace, num_steps: int = 3):
    for p in workspace.steps(num_steps):
        yield run(predictor, workspace.values(), chunk(seed=p)).square().sum()


def gradients(predictor) -> dict:
    found = {name: p.grad.clone() for name, p in predictor.named_parameters() if p.grad is not None}
    predictor.zero_grad()
    return found


def stepwise_gradients(predictor, main) -> dict:
    with PredictorWorkspace(main, source_layers=LAYERS, current_tokens=CURRENT, history_tokens=HISTORY) as workspace:
        for loss in losses_of(predictor, workspace):
            loss.backward()
    return gradients(predictor)


def assert_same_gradients(actual: dict, expected: dict) -> None:
    assert actual.keys() == expected.keys() and expected
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("freeze_kv", [False, True], ids=["trained", "frozen"])
def test_one_backward_over_all_steps_equals_one_per_step(main, freeze_kv):
    predictor = make_blocks(2, seed=1, freeze_kv=freeze_kv)
    expected = stepwise_gradients(predictor, main)
    with PredictorWorkspace(main, source_layers=LAYERS, current_tokens=CURRENT, history_tokens=HISTORY) as workspace:
        sum(losses_of(predictor, workspace)).backward()
    assert_same_gradients(gradients(predictor), expected)


@pytest.mark.parametrize("freeze_kv", [False, True], ids=["trained", "frozen"])
def test_backward_may_come_after_the_full_pass_and_the_reset_of_everything(main, freeze_kv):
    predictor = make_blocks(2, seed=1, freeze_kv=freeze_kv)
    expected = stepwise_gradients(predictor, main)
    with PredictorWorkspace(main, source_layers=LAYERS, current_tokens=CURRENT, history_tokens=HISTORY) as workspace:
        loss = sum(losses_of(predictor, workspace))
    with torch.no_grad():
        full_pass(make_blocks(), main, chunk(9, seed=9), 0)
    reset_main_caches(main, None)
    loss.backward()
    assert_same_gradients(gradients(predictor), expected)


def test_steps_are_isolated_from_each_other(main, predictor):
    workspace = build(main)
    made, losses = [], []
    for p in workspace.steps(3):
        x = chunk(seed=p).requires_grad_()
        made.append(x)
        losses.append(run(predictor, workspace.values(), x).sum())
    assert torch.autograd.grad(losses[1], made[0], retain_graph=True, allow_unused=True) == (None,)
    assert torch.autograd.grad(losses[2], made[:2], retain_graph=True, allow_unused=True) == (None, None)


@pytest.mark.parametrize("history", [-2, 3, 7, 99])
def test_reset_to_another_history_is_refused_and_changes_nothing(main, predictor, history):
    workspace = build(main)
    with torch.no_grad():
        run(predictor, workspace.values(), chunk())
    before = state_of(workspace.values())
    with pytest.raises(ValueError, match=f"history_tokens must be 6.*got {history}"):
        reset_predictor_workspace(workspace, history_tokens=history)
    assert_untouched(workspace.values(), before)


@pytest.mark.parametrize("window", [None, 9], ids=["plain", "rolling"])
def test_a_chunk_longer_than_declared_is_refused_before_any_write(main, window):
    workspace = build(main, current=2)
    before = state_of(workspace.values())
    with pytest.raises(ValueError, match=r"tokens must lie in \[1, 2\].*got 3"):
        workspace.begin_step(tokens=3)
        run(make_blocks(2, window=window), workspace.values(), chunk())
    assert_untouched(workspace.values(), before)


def test_drafts_may_grow_token_by_token(main, predictor):
    whole, grown = build(main), build(main)
    causal = [chunk(1, seed=p) for p in range(3)]
    with torch.no_grad():
        for p, x in enumerate(causal):
            grown.begin_step(tokens=1, keep_tokens=p)
            assert extents(grown[0]) == (6 + p, 6 + p)
            run(predictor, grown.values(), x)
        for x in causal:
            run(predictor, whole.values(), x)
    for i in LAYERS:
        assert torch.equal(whole[i]["k"], grown[i]["k"])
    with pytest.raises(ValueError, match="keep_tokens must lie in"):
        grown.begin_step(keep_tokens=3)


def test_checkpointed_steps_give_the_same_gradients(main, predictor):
    expected = stepwise_gradients(predictor, main)
    workspace = build(main)

    def step(x):
        for block in workspace.values():  # a recomputation starts where the step started
            block["global_end_index"].fill_(HISTORY)
            block["local_end_index"].fill_(HISTORY)
        return run(predictor, workspace.values(), x).square().sum()

    for p in workspace.steps(3):
        checkpoint(step, chunk(seed=p), use_reentrant=False).backward()
    assert_same_gradients(gradients(predictor), expected)


def test_reentrant_checkpointing_of_more_than_one_step_fails_loudly(main, predictor):
    """Its recomputation hangs new graphs on the shared workspace: documented, use the other kind."""
    workspace = build(main)

    def step(x):
        for block in workspace.values():
            block["global_end_index"].fill_(HISTORY)
            block["local_end_index"].fill_(HISTORY)
        return run(predictor, workspace.values(), x).square().sum()

    loss = sum(checkpoint(step, chunk(seed=p).requires_grad_(), use_reentrant=True) for p in workspace.steps(2))
    with pytest.raises(RuntimeError):
        loss.backward()


def test_a_workspace_made_in_inference_mode_can_be_trained_on(main, predictor):
    with torch.inference_mode():
        hidden = [{name: x.clone() for name, x in block.items()} for block in main]
        workspace = build(hidden)
        for _ in workspace.steps(2):
            run(predictor, workspace.values(), chunk())
    assert not any(x.is_inference() for block in workspace.values() for x in block.values())
    reset_predictor_workspace(workspace, history_tokens=HISTORY)
    run(predictor, workspace.values(), chunk()).sum().backward()
    assert gradients(predictor)


# ---------------------------------------------------------------------------------------------------- main caches


def cross_cache() -> list[dict]:
    leaf = torch.ones(2, 3, requires_grad=True)
    return [{"k": leaf * 2, "v": leaf * 3, "is_init": True} for _ in range(2)]


def test_resetting_main_caches_keeps_bytes_and_drops_graphs(main):
    cross = cross_cache()
    main[0] |= {"pinned_start": torch.tensor([3]), "pinned_len": 2, "other": "kept"}
    before = [(block["k"], block["k"].clone().nan_to_num(7), block["global_end_index"]) for block in main]
    for _ in range(2):
        assert reset_main_caches(main, cross) is None
        for block, (stored, value, extent) in zip(main, before, strict=True):
            assert block["k"] is stored and torch.equal(stored.nan_to_num(7), value)
            assert block["global_end_index"] is extent and extents(block) == (0, 0)
        assert main[0]["pinned_start"].item() == -1 and main[0]["pinned_len"] == 0 and main[0]["other"] == "kept"
        for block in cross:
            assert block["is_init"] is False and block["k"].grad_fn is None and (block["k"] == 2).all()
    reset_main_caches(main, None)
    reset_main_caches(main, [])


def test_resetting_inference_extents_outside_inference_mode_works(main):
    with torch.inference_mode():
        for block in main:
            block["global_end_index"] = torch.full((1,), 6)
    reset_main_caches(main, None)
    assert all(extents(block) == (0, 0) for block in main)


def test_one_bad_block_and_no_main_cache_is_reset(main):
    main[2]["local_end_index"] = "six"
    with pytest.raises(TypeError, match="local_end_index of block 2"):
        reset_main_caches(main, None)
    assert extents(main[0]) == (6, 6)


def test_the_clean_extent_check_lists_every_bad_block(main):
    assert_clean_history_extent(main, expected_tokens=6)
    assert_clean_history_extent([], expected_tokens=6)
    main[1]["local_end_index"].fill_(5)
    with pytest.raises(
        RuntimeError, match=r"expected committed clean history of 6.*block 1 \(global, local\) = \(6, 5\)"
    ):
        assert_clean_history_extent(main, expected_tokens=6)
    with pytest.raises(RuntimeError, match=r"block 0 .*block 1 .*block 2 "):
        assert_clean_history_extent(main, expected_tokens=5)
    with pytest.raises(ValueError, match="expected_tokens must be >= 0, got -1"):
        assert_clean_history_extent(main, expected_tokens=-1)
    assert_clean_history_extent(numbered_cache([4, 5, 6, 7, 8, 9], 10), expected_tokens=10)


def test_the_clean_extent_check_cannot_tell_noise(main):
    full_pass(make_blocks(), main, chunk(seed=5), HISTORY)
    assert_clean_history_extent(main, expected_tokens=9)


# ---------------------------------------------------------------------------------------------------- ownership


class HostReads(TorchDispatchMode):
    """Counts values that leave the device."""

    def __init__(self):
        super().__init__()
        self.reads = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.reads += "_local_scalar_dense" in str(func) or "is_nonzero" in str(func)
        return func(*args, **(kwargs or {}))


def test_nothing_but_one_copy_of_all_extents_is_read_on_the_host(main):
    with HostReads() as mode, torch.no_grad():
        workspace = build(main)
        reset_predictor_workspace(workspace, history_tokens=HISTORY)
        workspace.begin_step(tokens=2)
        reset_main_caches(main, None)
    assert mode.reads == 0


def open_on(main, **options):
    return PredictorWorkspace(main, source_layers=LAYERS, current_tokens=CURRENT, **options)


def test_an_error_inside_passes_through_and_releases(main):
    with pytest.raises(KeyError, match="mine"), open_on(main) as workspace:
        main[0]["global_end_index"].fill_(0)
        raise KeyError("mine")
    with pytest.raises(RuntimeError, match="workspace is closed"):
        workspace[0]


@pytest.mark.parametrize("change", ["write", "rebind", "extent"])
def test_a_main_cache_that_changes_meanwhile_is_noticed(main, change):
    def change_main():
        if change == "write":
            main[0]["v"][:, 0] = 1
        elif change == "rebind":
            main[0]["k"] = main[0]["k"].flip(0)
        else:
            main[2]["local_end_index"].add_(1)

    with pytest.raises(RuntimeError, match="changed while a workspace was open"), open_on(main):
        change_main()
    with open_on(main, history_tokens=HISTORY) as workspace:
        main[0]["v"][:, 0] = 2
        with pytest.raises(RuntimeError, match="changed while a workspace was open"):
            workspace.begin_step()
        workspace.release()


def test_a_closed_workspace_says_so(main):
    with open_on(main) as workspace:
        pass
    for use in (workspace.begin_step, workspace.as_cache, workspace.check_source, lambda: workspace[0]):
        with pytest.raises(RuntimeError, match="workspace is closed"):
            use()


def test_several_workspaces_serve_one_cache(main, predictor):
    with open_on(main) as outer, open_on(main) as inner, torch.no_grad():
        first = run(predictor, outer.values(), chunk())
        assert torch.equal(run(predictor, inner.values(), chunk()), first)
    assert list(open_on(main).as_cache()[1]) == list(KEYS)


def test_scratch_dies_with_the_workspace(main, predictor):
    with open_on(main) as workspace:
        for p in workspace.steps(2):
            loss = run(predictor, workspace.values(), chunk(seed=p)).sum()
        held = [weakref.ref(block[name]) for block in workspace.values() for name in ("k", "v")]
    del loss
    gc.collect()
    assert all(reference() is None for reference in held)


def test_one_layer_can_be_forked_alone(main):
    scratch = fork_layer(main[1], history_tokens=4, current_tokens=2)
    assert extents(scratch) == (4, 4) and scratch["k"].shape[1] == 6
    with pytest.raises(ValueError, match="history_tokens must be >= 0"):
        fork_layer(main[1], history_tokens=-1, current_tokens=2)


# ---------------------------------------------------------------------------------------------------- precision, graphs


def test_precisions_meet_as_torch_lets_them():
    blocks, main = make_blocks(2, dtype=torch.float32), written_cache(dtype=torch.float32)
    workspace, x = build(main), chunk(dtype=torch.float32)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        for block in workspace.values():
            k, v = (block[name][:, :9].transpose(1, 2) for name in ("k", "v"))
            assert nn.functional.scaled_dot_product_attention(k, k, v).isfinite().all()
    half = [{n: x.bfloat16() if x.is_floating_point() else x for n, x in block.items()} for block in main]
    with pytest.raises(RuntimeError):
        run(blocks, build(half).values(), x)


@pytest.mark.parametrize(("capacity", "num_graphs"), [(24, 1), (None, 4)], ids=["fixed", "exact"])
def test_a_fixed_capacity_is_one_compiled_graph(capacity, num_graphs):
    torch._dynamo.reset()
    graphs = []

    def count(module, inputs):
        graphs.append(module)
        return module.forward

    blocks, main = make_blocks(1, kind=StaticBlock), empty_cache(1, slots=24)
    step = torch.compile(lambda x, cache: blocks[0](x, cache), backend=count, fullgraph=True, dynamic=False)
    with torch.no_grad():
        for i in range(4):
            with PredictorWorkspace(
                main, source_layers=(0,), history_tokens=3 * i, current_tokens=3, capacity=capacity
            ) as workspace:
                for p in workspace.steps(3):
                    result = step(chunk(seed=p), workspace[0])
            expected = make_blocks(1, kind=StaticBlock)[0](chunk(seed=2), copy.deepcopy(build(main, 3 * i, 3, (0,))[0]))
            torch.testing.assert_close(result, expected)
            full_pass(make_blocks(1), main, chunk(seed=10 + i), 3 * i)
    assert len(graphs) == num_graphs


def test_a_capacity_too_small_is_refused(main):
    with pytest.raises(ValueError, match=r"capacity must be at least 9.*got 8"):
        open_on(main, capacity=8)


def test_both_names_of_the_layer_ids_work_but_not_together(main):
    assert list(PredictorWorkspace(main, source_block_ids=(1,), current_tokens=1)) == [1]
    with pytest.raises(TypeError, match="once"):
        PredictorWorkspace(main, source_block_ids=(1,), source_layers=(1,), current_tokens=1)
