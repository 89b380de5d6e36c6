"""The configuration refuses what cannot work, by field and value; what it accepts builds a model that runs."""

import inspect
import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shram.configuration_shram import ShramConfig
from shram.modeling_shram import ShramForCausalLM
from tests.support import TINY, tiny_config

DEFAULTS = {
    "vocab_size": 50277,
    "hidden_size": 512,
    "intermediate_size": 1366,
    "num_hidden_layers": 12,
    "num_sliding_window_heads": 16,
    "window_size": 128,
    "num_mosrah_heads": 64,
    "num_selected_heads": 16,
    "head_dim": 16,
    "rope_mode": "main_sequence",
    "local_rope_theta": 10000.0,
    "mosrah_rope_theta": 10000.0,
    "training_sequence_length": 1024,
    "inference_sequence_length": 1024,
    "yarn_alpha": 1.0,
    "yarn_beta": 32.0,
    "mosrah_overallocation_factor": 2.0,
    "load_balance_coef": 0.01,
    "attention_dropout": 0.0,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.02,
    "use_cache": True,
    "tie_word_embeddings": False,
}
ALIASES = {
    "num_attention_heads": "num_sliding_window_heads",
    "num_key_value_heads": "num_sliding_window_heads",
    "max_position_embeddings": "inference_sequence_length",
    "num_experts": "num_mosrah_heads",
    "num_experts_per_tok": "num_selected_heads",
}
SIZES = [name for name, value in DEFAULTS.items() if type(value) is int]
NUMBERS = [name for name, value in DEFAULTS.items() if type(value) is float]
TOKEN_IDS = ["pad_token_id", "bos_token_id", "eos_token_id"]
NAN, INF = math.nan, math.inf
BROKEN = [
    *((name, value) for name in SIZES for value in (0, -3, 1.5, 8.0, True, "8", NAN, [4], 10**12, 10**400)),
    *((name, None) for name in SIZES if name != "inference_sequence_length"),
    *((name, value) for name in NUMBERS for value in (-0.5, "0.5", None, NAN, INF, [0.5], True, 1e300)),
    ("head_dim", 7),
    ("num_selected_heads", 5),
    ("mosrah_overallocation_factor", 0.99),
    ("attention_dropout", 1.0),
    ("rope_mode", "main"),
    ("rope_mode", None),
    ("rope_mode", ["main_sequence"]),
    ("yarn_alpha", 32.0),
    ("yarn_beta", 1.0),
    ("local_rope_theta", 0.0),
    ("mosrah_rope_theta", 0.0),
    ("rms_norm_eps", 0.0),
    *((name, value) for name in ("use_cache", "tie_word_embeddings") for value in ("yes", None, 1, NAN)),
    *((name, value) for name in TOKEN_IDS for value in (-1, 64, 1.5, "0", True, NAN)),
    ("eos_token_id", [3, 64]),
]


def build(**fields) -> ShramConfig:
    """The tiny configuration with these fields; a field named by its standard name is left to that name."""
    plain = {name: value for name, value in TINY.items() if name not in {ALIASES.get(given) for given in fields}}
    return ShramConfig(**{**plain, **fields})


def test_defaults_are_the_documented_ones():
    config = ShramConfig()
    assert {name: getattr(config, name) for name in DEFAULTS} == DEFAULTS
    declared = {name for name, p in inspect.signature(ShramConfig).parameters.items() if p.kind is not p.VAR_KEYWORD}
    assert declared == {*DEFAULTS, *TOKEN_IDS}
    assert config.model_type == "shram"


@pytest.mark.parametrize("field, value", BROKEN, ids=lambda part: repr(part)[:30])
def test_a_broken_rule_names_field_and_value(field, value):
    with pytest.raises(ValueError) as error:
        build(**{field: value})
    message = str(error.value)
    assert field in message
    assert repr(value) in message or str(value) in message or "10**" in message


@pytest.mark.parametrize(
    "fields",
    [
        {"head_dim": 7, "vocab_size": 0, "rope_mode": "none", "yarn_alpha": NAN},
        {"head_dim": 7, "num_selected_heads": 5, "window_size": -1},
        {"yarn_alpha": 40.0, "attention_dropout": 2.0, "use_cache": "no"},
    ],
    ids=lambda fields: "+".join(fields),
)
def test_every_broken_rule_is_listed_at_once(fields):
    with pytest.raises(ValueError) as error:
        build(**fields)
    assert all(field in str(error.value) and str(value) in str(error.value) for field, value in fields.items())


@pytest.mark.parametrize("name", [*DEFAULTS, *ALIASES, *TOKEN_IDS])
def test_names_one_letter_off_are_reported(name):
    for wrong in (name[:-1], name + "s", name.replace("_", "", 1), name[0] + name[2:]):
        with pytest.raises(ValueError, match=wrong):
            build(**{wrong: 4})


def test_other_keywords_are_kept_as_the_library_does():
    assert build(id2label={0: "no"}, note="hand-made").note == "hand-made"


@pytest.mark.parametrize("alias, field", ALIASES.items())
def test_standard_names_read_write_and_construct(alias, field):
    config = build(**{alias: 3})
    assert getattr(config, alias) == getattr(config, field) == 3
    setattr(config, alias, 4)
    assert getattr(config, field) == 4
    with pytest.raises(ValueError, match=field):
        build(**{alias: -1})


@pytest.mark.parametrize("fields", [{}, {"eos_token_id": [3, 5], "pad_token_id": 0, "num_experts": 8}], ids=str)
def test_json_round_trip_keeps_every_field(tmp_path, fields):
    config = build(rope_mode="semantic_sequence", inference_sequence_length=None, **fields)
    config.save_pretrained(tmp_path)
    again = ShramConfig.from_pretrained(tmp_path)
    names = [*DEFAULTS, *TOKEN_IDS, *ALIASES, "mosrah_cache_length", "yarn_scale"]
    assert {n: getattr(again, n) for n in names} == {n: getattr(config, n) for n in names}
    stored = json.loads((tmp_path / "config.json").read_text())
    assert not {"mosrah_cache_length", "yarn_scale", *ALIASES} & stored.keys()


@pytest.mark.parametrize("field, value", [("window_size", "4"), ("rms_norm_eps", NAN), ("num_mosrah_heads", -2)])
def test_a_hostile_file_is_refused(tmp_path, field, value):
    (tmp_path / "config.json").write_text(json.dumps({**TINY, "model_type": "shram", field: value}))
    with pytest.raises(ValueError, match=field):
        ShramConfig.from_pretrained(tmp_path)


def test_values_broken_after_construction_are_refused_by_the_model():
    config = tiny_config()
    config.num_selected_heads = 9
    with pytest.raises(ValueError, match=r"num_selected_heads.*9"):
        ShramForCausalLM(config)


@pytest.mark.parametrize(
    "length, heads, selected, factor, slots",
    [(64, 4, 2, 2.0, 64), (64, 4, 2, 1.0, 32), (65, 7, 3, 1.5, 42), (10, 64, 1, 2.0, 1), (1000, 64, 16, 1.25, 313)],
)
def test_cache_length_is_the_overallocated_share(length, heads, selected, factor, slots):
    config = build(
        inference_sequence_length=length,
        num_mosrah_heads=heads,
        num_selected_heads=selected,
        mosrah_overallocation_factor=factor,
    )
    assert config.mosrah_cache_length == slots
    assert config.yarn_scale == length / 32


def test_the_inference_context_can_be_set_and_derived_values_follow():
    config = build(inference_sequence_length=None)
    assert config.inference_sequence_length == 32 and config.yarn_scale == 1.0
    config.set_inference_context(128)
    assert config.max_position_embeddings == 128 and config.yarn_scale == 4.0 and config.mosrah_cache_length == 128
    for wrong in (0, -5, "128", 1.5, None):
        with pytest.raises(ValueError, match="inference_sequence_length"):
            config.set_inference_context(wrong)
    assert config.inference_sequence_length == 128


SMALL = st.integers(1, 9)
HOSTILE = st.one_of(
    st.integers(-3, 9),
    st.sampled_from([10**9, 10**30, -(10**20), 1e300, NAN, INF, -INF, None, True, False, "", "8", "NaN", [], [3], {}]),
    st.floats(width=32),
    st.text(max_size=4),
)


@st.composite
def hostile_fields(draw):
    """A few fields replaced by anything, the rest valid and small."""
    sizes = {name: draw(SMALL) for name in draw(st.lists(st.sampled_from(SIZES), max_size=4, unique=True))}
    names = draw(st.lists(st.sampled_from([*DEFAULTS, *TOKEN_IDS]), max_size=3, unique=True))
    return {**sizes, **{name: draw(HOSTILE) for name in names}}


@given(fields=hostile_fields())
@settings(max_examples=300)
def test_what_is_accepted_runs_and_what_is_refused_is_named(fields):
    try:
        config = build(**fields)
    except ValueError as error:
        assert any(name in str(error) for name in fields)
        return
    model = ShramForCausalLM(config).eval()
    ids = torch.arange(7)[None] % config.vocab_size
    assert model(ids, use_cache=False).logits.isfinite().all()


def test_two_names_of_one_field_must_agree():
    with pytest.raises(ValueError, match=r"num_key_value_heads \(8\).*num_attention_heads \(4\)"):
        build(num_attention_heads=4, num_key_value_heads=8)
    with pytest.raises(ValueError, match=r"max_position_embeddings \(128\).*inference_sequence_length \(64\)"):
        build(inference_sequence_length=64, max_position_embeddings=128)
    assert build(num_attention_heads=4, num_key_value_heads=4).num_sliding_window_heads == 4
    assert build(max_position_embeddings=None).inference_sequence_length == 32


def test_overrides_at_load_are_checked_too(tmp_path):
    tiny_config().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"num_selected_heads.*99"):
        ShramConfig.from_pretrained(tmp_path, num_selected_heads=99)
    with pytest.raises(ValueError, match="window_size"):
        ShramConfig.from_pretrained(tmp_path, window_sise=3)
    assert ShramConfig.from_pretrained(tmp_path, window_size=3).window_size == 3


def test_an_integer_beyond_every_float_is_refused_by_name():
    with pytest.raises(ValueError, match="local_rope_theta"):
        tiny_config(local_rope_theta=10**400)
