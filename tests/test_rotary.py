"""Rotary angles: exact frequencies, YaRN as published, and no loss of precision far out."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from shram.attention_shram import (
    KEPT_CONSTANTS,
    ROTARY_FIELDS,
    RotaryConstants,
    rotary_constants,
    rotary_frequencies,
    yarn_frequencies,
    yarn_logit_factor,
)
from tests import reference
from tests.cases import assert_near, draw_ids
from tests.support import tiny_config, wide_model

# Within 256 tokens the frequencies of head width 8 turn 40.7, 4.07, 0.41 and 0.04 times: none turns 6 to 6.5 times.
NO_BLEND = {"yarn_alpha": 6.0, "yarn_beta": 6.5}


@pytest.fixture(params=[1.5, 4.0, 32.0], ids=lambda scale: f"scale {scale}")
def stretched(request):
    return lambda **fields: tiny_config(
        training_sequence_length=256, inference_sequence_length=int(256 * request.param), **fields
    )


def library_yarn(config):
    """Frequencies and logit factor of the library's own helper, which multiplies both q and k."""
    rope = {
        "rope_type": "yarn",
        "rope_theta": config.mosrah_rope_theta,
        "factor": config.yarn_scale,
        "beta_fast": config.yarn_beta,
        "beta_slow": config.yarn_alpha,
        "original_max_position_embeddings": config.training_sequence_length,
    }
    llama = LlamaConfig(
        head_dim=config.head_dim,
        max_position_embeddings=config.inference_sequence_length,
        rope_theta=config.mosrah_rope_theta,
        rope_parameters=rope,
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS["yarn"](llama, torch.device("cpu"))
    return frequencies.double(), factor**2


@given(half=st.integers(1, 64), base=st.floats(1.0, 1e6))
def test_plain_frequencies_are_exact(half, base):
    actual = rotary_frequencies(2 * half, base)
    assert all(isinstance(frequency, float) for frequency in actual)
    assert actual == pytest.approx(reference.rotary_frequencies(2 * half, base).tolist(), rel=1e-14)


@given(
    lengths=st.tuples(st.integers(1, 4096), st.integers(1, 65536)),
    head_dim=st.sampled_from([2, 6, 16, 64]),
    alpha=st.floats(0.0, 4.0),
    span=st.floats(0.1, 64.0),
)
def test_yarn_equals_the_reference(lengths, head_dim, alpha, span):
    training, inference = lengths
    config = tiny_config(
        training_sequence_length=training,
        inference_sequence_length=inference,
        head_dim=head_dim,
        yarn_alpha=alpha,
        yarn_beta=alpha + span,
    )
    assert yarn_frequencies(config) == pytest.approx(reference.yarn_frequencies(config).tolist(), rel=1e-12)
    assert yarn_logit_factor(config) == pytest.approx(reference.yarn_logit_factor(config), rel=1e-12)


def test_without_a_longer_context_yarn_is_plain_rotary():
    config = tiny_config(inference_sequence_length=None)
    assert yarn_frequencies(config) == rotary_frequencies(config.head_dim, config.mosrah_rope_theta)
    assert yarn_logit_factor(config) == 1.0


def wide(frequencies) -> torch.Tensor:
    return torch.tensor(frequencies, dtype=torch.float64)


def test_yarn_equals_the_library_where_no_frequency_is_blended(stretched):
    config = stretched(**NO_BLEND)
    theirs, logit_factor = library_yarn(config)
    ours, plain = wide(yarn_frequencies(config)), wide(rotary_frequencies(8, 10000.0))
    assert (ours / theirs - 1).abs().max() < 1e-6
    assert (plain / ours).tolist() == pytest.approx([1.0] + 3 * [config.yarn_scale])
    assert yarn_logit_factor(config) == pytest.approx(logit_factor)


@pytest.mark.parametrize("head_dim", [16, 64])
def test_yarn_equals_the_library_outside_the_blend(stretched, head_dim):
    """The library blends linearly in the index, the paper in the turns: they must agree where neither blends."""
    config = stretched(head_dim=head_dim)
    theirs, _ = library_yarn(config)
    ours, plain = wide(yarn_frequencies(config)), wide(rotary_frequencies(head_dim, 10000.0))
    turns = config.training_sequence_length * plain / (2 * math.pi)
    kept, fully_stretched = turns >= config.yarn_beta, turns <= config.yarn_alpha
    # the library rounds its borders outwards to whole indices
    outside = (kept & kept.roll(-1)) | (fully_stretched & fully_stretched.roll(1))
    assert outside.sum() > head_dim // 8
    assert (ours / theirs - 1)[outside].abs().max() < 1e-6
    assert (ours <= plain).all() and (ours >= plain / config.yarn_scale * (1 - 1e-12)).all()


@pytest.mark.parametrize("start", [257, 4093])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_precision_does_not_fall_with_the_position(dtype, start):
    """Rotary attention depends on distance alone: a text moved far out reads as exactly as one at the start."""
    model = wide_model(tiny_config(num_hidden_layers=1), 0, torch.float32).to(dtype)
    ids, places = draw_ids(2, 13), torch.arange(13).expand(2, -1)
    expected = reference.reference_logits(model, ids)
    near, far = (
        (model(ids, position_ids=places + first, use_cache=False).logits - expected).abs().mean()
        for first in (0, start)
    )
    # angles are float32 in narrower models: exact to position / 2^24
    angle = 0 if dtype == torch.float64 else start / 2**24
    assert far <= 1.5 * near + 1e-12 + angle


@given(case=st.integers(0, 2**20), start=st.integers(0, 10**5))
def test_local_angles_depend_on_distance_alone(case, start):
    model = wide_model(tiny_config(rope_mode="semantic_sequence"), case, torch.float64)
    ids = draw_ids(1, 9, case)
    far = model(ids, position_ids=torch.arange(start, start + 9)[None], use_cache=False).logits
    assert_near(far, model(ids, use_cache=False).logits, dtype=torch.float32)


def test_kept_constants_follow_every_field_of_the_configuration():
    config = tiny_config(training_sequence_length=16, inference_sequence_length=64)
    followed = set()
    for field, value in list(vars(config).items()):
        if type(value) not in (int, float):
            continue
        before = rotary_constants(config)
        setattr(config, field, 2 * value + 2)
        expected = RotaryConstants.of(config)
        assert rotary_constants(config) == expected, field
        if expected != before:
            followed.add(field)
        setattr(config, field, value)
    assert followed == set(ROTARY_FIELDS)


def test_kept_constants_do_not_pile_up():
    config = tiny_config()
    for i in range(200):
        config.local_rope_theta = 100.0 + i
        assert rotary_constants(config) == RotaryConstants.of(config)
    assert len(KEPT_CONSTANTS) <= 64
