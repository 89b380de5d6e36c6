"""Documents packed into one row (`position_ids` that restart) are kept apart in both paths, or refused."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shram.modeling_shram import CACHE_KEY
from tests.cases import assert_near
from tests.support import tiny_config, wide_model

LENGTHS = st.lists(st.lists(st.integers(1, 13), min_size=1, max_size=4), min_size=1, max_size=3)


@pytest.fixture(scope="module", params=["main_sequence", "semantic_sequence"])
def model(request):
    return wide_model(tiny_config(rope_mode=request.param), dtype=torch.float64)


def pack_rows(lengths):
    """Rows of documents of the given lengths, all rows as long as the first: ids and restarting positions."""
    width = sum(lengths[0])
    rows = [[*row, max(width - sum(row), 0)] for row in lengths]
    positions = [torch.cat([torch.arange(n) for n in row])[:width] for row in rows]
    generator = torch.Generator().manual_seed(width)
    return torch.randint(0, 64, (len(rows), width), generator=generator), torch.stack(positions)


def documents(ids, positions):
    starts = [*(positions == 0).nonzero().flatten().tolist(), len(ids)]
    return [ids[first:last] for first, last in itertools.pairwise(starts)]


@given(lengths=LENGTHS)
def test_every_document_equals_its_own_run(model, lengths):
    ids, positions = pack_rows(lengths)
    out = model(ids, position_ids=positions, output_hidden_states=True, output_router_logits=True)
    for row in range(len(ids)):
        alone = [
            model(one[None], output_hidden_states=True, output_router_logits=True)
            for one in documents(ids[row], positions[row])
        ]
        assert_near(out.logits[row], torch.cat([o.logits[0] for o in alone]))
        assert_near(out.hidden_states[1][row], torch.cat([o.hidden_states[1][0] for o in alone]))
        assert_near(out.router_logits[1][row], torch.cat([o.router_logits[1][0] for o in alone]))


def test_padding_around_packed_documents_changes_nothing(model):
    ids, positions = pack_rows([[5, 9, 4]])
    mask = torch.ones(1, 22, dtype=torch.long)
    mask[:, :3] = mask[:, 21:] = 0
    padded = torch.cat([torch.zeros(1, 3).long(), ids, torch.zeros(1, 1).long()], dim=1)
    padded_positions = torch.cat([torch.ones(1, 3).long(), positions, torch.zeros(1, 1).long()], dim=1)
    out = model(padded, attention_mask=mask, position_ids=padded_positions).logits[:, 3:21]
    assert_near(out, model(ids, position_ids=positions).logits)


def test_packed_rows_make_no_cache_and_refuse_one(model):
    ids, positions = pack_rows([[5, 9]])
    assert getattr(model(ids, position_ids=positions), CACHE_KEY) is None
    cache = model.new_cache()
    with pytest.raises(ValueError, match="position_ids restart"):
        model(ids, position_ids=positions, past_key_values=cache)
    assert cache.get_seq_length() == 0


def test_positions_that_restart_on_a_warm_cache_are_refused(model):
    cache = model.new_cache()
    model(torch.ones(1, 7, dtype=torch.long), past_key_values=cache)
    with pytest.raises(ValueError, match="position_ids restart"):
        model(torch.ones(1, 3, dtype=torch.long), position_ids=torch.arange(3)[None], past_key_values=cache)
    assert cache.get_seq_length() == 7
