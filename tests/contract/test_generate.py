"""Every mode of `generate` gives what the same call gives without a cache, and leaves a cache of the right length."""

import copy

import pytest
import torch
from transformers import DynamicCache

from tests.contract.remote import (
    GREEDY,
    RELEASE,
    Version,
    cache_of,
    left_padded,
    library_fault,
    load,
    prompt,
    write_checkpoint,
)

CACHE_NAME = "past_key_values" if Version("5.24") > RELEASE else "cache"
MODES = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 0, "temperature": 1.5},
    "beams": {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.7},
    "beam sampling": {"num_beams": 3, "num_return_sequences": 3, "do_sample": True, "top_k": 0},
    "several samples": {"num_return_sequences": 3, "do_sample": True, "top_k": 0},
    "static cache": {"cache_implementation": "static"},
    "static cache, beams": {"cache_implementation": "static", "num_beams": 3, "num_return_sequences": 2},
}
SINGLE, BATCH = {"input_ids": prompt(1, 17)}, left_padded([prompt(1, 3), prompt(1, 17, seed=1)])
REPORTS = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}


def assert_near(actual, expected):
    """To one rounding of float32, in which `generate` reports logits of any model."""
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6, check_dtype=False)


def run(model, inputs, **keywords):
    torch.manual_seed(0)
    return model.generate(**inputs, **{**GREEDY, **keywords}, **REPORTS)


def assert_equals_uncached(model, inputs, **keywords):
    """Tokens, scores and cache length against the same call with `use_cache=False`."""
    cached = run(model, inputs, **keywords)
    plain = run(model, inputs, **{k: v for k, v in keywords.items() if k != "cache_implementation"}, use_cache=False)
    assert torch.equal(cached.sequences, plain.sequences)
    for actual, expected in zip(cached.logits, plain.logits, strict=True):
        assert_near(actual, expected)
    if "sequences_scores" in plain:
        assert_near(cached.sequences_scores, plain.sequences_scores)
    assert cache_of(cached).get_seq_length() == cached.sequences.shape[1] - 1
    assert cache_of(plain) is None
    return cached


@pytest.mark.parametrize("inputs", [SINGLE, BATCH], ids=["one row", "left-padded rows"])
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_every_mode_equals_uncached(double_model, mode, inputs):
    assert_equals_uncached(double_model, inputs, **mode)


@pytest.fixture(scope="module", params=["main_sequence", "semantic_sequence"])
def model_of_mode(request, tmp_path_factory):
    return load(write_checkpoint(tmp_path_factory.mktemp("mode") / "tiny-shram", rope_mode=request.param)).double()


def test_each_left_padded_row_equals_its_own_run(model_of_mode):
    prompts = [prompt(1, 3), prompt(1, 12, seed=1), prompt(1, 7, seed=2)]
    together = run(model_of_mode, left_padded(prompts))
    for row, alone in enumerate(prompts):
        single = run(model_of_mode, {"input_ids": alone})
        assert torch.equal(together.sequences[row, 12:], single.sequences[0, alone.shape[1] :])
        for actual, expected in zip(together.logits, single.logits, strict=True):
            assert_near(actual[row], expected[0])


def test_pads_enter_neither_window_nor_heads(double_model):
    batch = left_padded([prompt(1, 3), prompt(1, 12, seed=1)])
    cache = cache_of(run(double_model, batch, max_new_tokens=1))
    for layer in cache.layers:
        assert layer.mosrah_cache.get_heads_lengths().sum(dim=1).tolist() == [2 * 3, 2 * 12]
        assert layer.sliding_window_cache.num_real_tokens.tolist() == [3, 12]


@library_fault("5.2.0", "5.2.0", "prefill_chunk_size feeds wrong position_ids")
@pytest.mark.parametrize("size", [1, 2, 5, 17])
def test_chunked_prefill_equals_uncached(double_model, size):
    chunked = run(double_model, SINGLE, prefill_chunk_size=size)
    plain = run(double_model, SINGLE, use_cache=False)
    assert torch.equal(chunked.sequences, plain.sequences)
    assert cache_of(chunked).get_seq_length() == chunked.sequences.shape[1] - 1
    assert_near(torch.stack(chunked.logits), torch.stack(plain.logits))


@pytest.mark.parametrize("growing", [True, False], ids=["growing", "fixed"])
@pytest.mark.parametrize("name", ["cache", "past_key_values"])
@pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")
def test_a_cache_carries_over_chat_turns(double_model, name, growing):
    cache, text = double_model.new_cache(growing=growing), prompt(1, 9)
    for turn in range(3):
        text = torch.cat([text, prompt(1, 4, seed=turn)], dim=1)
        answer = run(double_model, {"input_ids": text}, max_new_tokens=5, **{name: cache})
        plain = run(double_model, {"input_ids": text}, max_new_tokens=5, use_cache=False)
        assert torch.equal(answer.sequences, plain.sequences)
        assert_near(torch.stack(answer.logits), torch.stack(plain.logits))
        assert cache.get_seq_length() == answer.sequences.shape[1] - 1
        text = answer.sequences


@pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")
def test_one_prefix_serves_many_continuations(double_model):
    cache, prefix = double_model.new_cache(), prompt(1, 13)
    double_model(prefix, past_key_values=cache)
    for seed in range(3):
        text = torch.cat([prefix, prompt(1, 4, seed=seed)], dim=1)
        answer = run(double_model, {"input_ids": text}, past_key_values=copy.deepcopy(cache))
        assert torch.equal(answer.sequences, run(double_model, {"input_ids": text}, use_cache=False).sequences)
    assert cache.get_seq_length() == 13


class Collector:
    """A streamer that keeps what it is given."""

    def __init__(self):
        self.pieces = []
        self.ended = False

    def put(self, value):
        self.pieces.append(value.reshape(-1))

    def end(self):
        self.ended = True


def test_a_streamer_gets_every_token_once(double_model):
    streamer = Collector()
    output = run(double_model, SINGLE, streamer=streamer)
    assert streamer.ended and torch.equal(torch.cat(streamer.pieces), output.sequences[0])
    assert torch.equal(output.sequences, run(double_model, SINGLE, use_cache=False).sequences)


REPETITIVE = {"input_ids": torch.tensor([[5, 9, 17, 33] * 5])}


@pytest.mark.parametrize("inputs", [REPETITIVE, SINGLE], ids=["repetitive", "random"])
def test_prompt_lookup_equals_greedy(double_model, inputs):
    drafted = run(double_model, inputs, prompt_lookup_num_tokens=3)
    plain = run(double_model, inputs, max_new_tokens=20, use_cache=False).sequences
    length = drafted.sequences.shape[1]
    # up to 5.13 the library may return one token more than it was asked for
    surplus = length - inputs["input_ids"].shape[1] - 14
    assert surplus == 0 or (surplus == 1 and Version("5.14") > RELEASE)
    assert torch.equal(drafted.sequences, plain[:, :length])
    assert cache_of(drafted).get_seq_length() == length - 1


@pytest.fixture(scope="module", params=["itself", "another"])
def assistant(request, double_model, tmp_path_factory):
    if request.param == "itself":
        return copy.deepcopy(double_model)
    folder = write_checkpoint(tmp_path_factory.mktemp("assistant") / "tiny-shram", seed=3, num_hidden_layers=1)
    return load(folder).double()


def test_assisted_decoding_equals_greedy(double_model, assistant):
    assisted = run(double_model, SINGLE, assistant_model=assistant)
    assert torch.equal(assisted.sequences, run(double_model, SINGLE, use_cache=False).sequences)
    assert cache_of(assisted).get_seq_length() == assisted.sequences.shape[1] - 1


def test_assisted_sampling_reports_the_logits_of_its_text(double_model, assistant):
    sampled = run(double_model, SINGLE, assistant_model=assistant, do_sample=True, top_k=0)
    assert cache_of(sampled).get_seq_length() == sampled.sequences.shape[1] - 1
    expected = double_model(sampled.sequences, use_cache=False).logits[0, 16:-1]
    assert_near(torch.cat(sampled.logits)[: len(expected)], expected)


@library_fault("5.0.0", "5.2.0", "assistant_early_exit calls get_candidates without an argument")
def test_early_exit_drafts_equal_greedy(checkpoint):
    model = load(checkpoint).double()
    drafted = run(model, SINGLE, assistant_early_exit=1)
    assert torch.equal(drafted.sequences, run(model, SINGLE, use_cache=False).sequences)
    assert model.config.num_hidden_layers == 2


def test_a_chat_goes_on_after_assisted_decoding(double_model, assistant):
    cache, text = double_model.new_cache(), SINGLE["input_ids"]
    for keywords in ({"assistant_model": assistant}, {}, {}):
        answer = run(double_model, {"input_ids": text}, max_new_tokens=6, **{CACHE_NAME: cache}, **keywords)
        plain = run(double_model, {"input_ids": text}, max_new_tokens=6, use_cache=False)
        assert torch.equal(answer.sequences, plain.sequences)
        assert cache.get_seq_length() == answer.sequences.shape[1] - 1
        text = torch.cat([answer.sequences, prompt(1, 2)], dim=1)


def test_assisted_decoding_on_a_filled_cache_is_right_or_refused(double_model, assistant):
    """The library feeds the whole text again on top of the filled cache (Llama's cache then counts it twice)."""
    cache = double_model.new_cache()
    double_model(SINGLE["input_ids"], past_key_values=cache)
    text = torch.cat([SINGLE["input_ids"], prompt(1, 3)], dim=1)
    try:
        answer = run(double_model, {"input_ids": text}, assistant_model=assistant, **{CACHE_NAME: cache})
    except ValueError:
        assert cache.get_seq_length() == 17
    else:
        assert torch.equal(answer.sequences, run(double_model, {"input_ids": text}, use_cache=False).sequences)
        assert cache.get_seq_length() == answer.sequences.shape[1] - 1


@pytest.mark.parametrize("with_ids", [True, False])
def test_inputs_embeds_equal_input_ids(double_model, with_ids):
    embeds = {"inputs_embeds": double_model.get_input_embeddings()(SINGLE["input_ids"]).detach()}
    output = run(double_model, {**SINGLE, **embeds} if with_ids else embeds)
    expected = run(double_model, SINGLE, use_cache=False).sequences
    assert torch.equal(output.sequences, expected if with_ids else expected[:, 17:])
    assert cache_of(output).get_seq_length() == expected.shape[1] - 1


def test_a_callable_takes_over_generation(double_model):
    """A recipe that steps through the prepared cache by hand gets the greedy tokens."""

    def recipe(model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs):
        cache, fed = model_kwargs[CACHE_NAME], 0
        for _ in range(5):
            logits = model(input_ids[:, fed:], **{CACHE_NAME: cache}).logits
            fed = input_ids.shape[1]
            assert cache.get_seq_length() == fed
            input_ids = torch.cat([input_ids, logits[:, -1:].argmax(dim=-1)], dim=1)
        return input_ids

    tokens = double_model.generate(**SINGLE, **GREEDY, custom_generate=recipe)
    assert torch.equal(tokens, run(double_model, SINGLE, max_new_tokens=5, use_cache=False).sequences)


@pytest.mark.parametrize("implementation", ["offloaded", "quantized", "sliding_window", "offloaded_static"])
def test_other_cache_implementations_are_refused(double_model, implementation):
    with pytest.raises(ValueError) as error:
        run(double_model, SINGLE, cache_implementation=implementation)
    known_here = "ShramCache" in str(error.value)
    assert known_here or (implementation in str(error.value) and "cache_implementation" in str(error.value))


def test_a_foreign_cache_is_refused(double_model):
    with pytest.raises(TypeError, match="SHRAM needs a ShramCache, got DynamicCache"):
        run(double_model, SINGLE, **{CACHE_NAME: DynamicCache()})


@pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")
def test_a_cache_and_an_implementation_together_are_refused(double_model):
    with pytest.raises(ValueError, match="cache_implementation"):
        run(double_model, SINGLE, cache_implementation="static", **{CACHE_NAME: double_model.new_cache()})


def test_chunked_prefill_on_a_filled_cache_is_refused(double_model):
    cache = double_model.new_cache()
    double_model(SINGLE["input_ids"][:, :9], past_key_values=cache)
    with pytest.raises(ValueError, match="prefill_chunk_size"):
        run(double_model, SINGLE, prefill_chunk_size=2, **{CACHE_NAME: cache})
    assert cache.get_seq_length() == 9


@pytest.mark.parametrize("tokens, new", [(60, 10), (70, 1)])
def test_running_past_the_context_is_refused_before_the_first_forward(double_model, tokens, new):
    calls = []
    hook = double_model.model.register_forward_pre_hook(lambda *call: calls.append(call))
    with pytest.raises(ValueError, match=r"(?s)64") as error:
        run(double_model, {"input_ids": prompt(1, tokens)}, max_new_tokens=new)
    hook.remove()
    assert not calls
    assert any(str(n) in str(error.value) for n in (tokens + new, tokens + new - 1))


def test_the_whole_context_can_be_used(double_model):
    assert_equals_uncached(double_model, {"input_ids": prompt(1, 55)}, max_new_tokens=10, do_sample=False)


def test_continuous_batching_is_refused(double_model):
    with pytest.raises(NotImplementedError):
        double_model.generate_batch([[1, 2, 3]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_narrower_models_generate_and_carry_a_cache(checkpoint, dtype):
    model = load(checkpoint, dtype=dtype)
    output = run(model, BATCH)
    assert output.sequences.shape == (2, 31)
    assert cache_of(output).layers[0].mosrah_cache.keys.dtype == dtype
    if dtype == torch.float32:
        assert torch.equal(output.sequences, run(model, BATCH, use_cache=False).sequences)


def test_four_dimensional_masks_are_refused(double_model):
    with pytest.raises(ValueError, match="attention_mask"):
        double_model(SINGLE["input_ids"], attention_mask=torch.ones(1, 1, 17, 17))


def test_generate_reports_maps_and_hidden_states(checkpoint):
    model = load(checkpoint, attn_implementation="eager").double()
    output = run(model, BATCH, output_hidden_states=True, output_attentions=True)
    assert len(output.hidden_states) == len(output.attentions) == 14
    assert output.attentions[-1][0].shape == (2, 2, 1, 30)
    assert torch.equal(output.sequences, run(model, BATCH, use_cache=False).sequences)


def test_guidance_and_transition_scores_run_on_the_cache(double_model):
    guided = run(double_model, SINGLE, guidance_scale=1.5)
    assert torch.equal(guided.sequences, run(double_model, SINGLE, guidance_scale=1.5, use_cache=False).sequences)
    plain = run(double_model, SINGLE)
    scores = double_model.compute_transition_scores(plain.sequences, plain.scores, normalize_logits=True)
    assert (scores <= 0).all() and scores.shape == (1, 14)


def test_train_mode_generates_like_its_uncached_self(checkpoint):
    model = load(checkpoint).double().train()
    model.gradient_checkpointing_enable()
    assert_equals_uncached(model, BATCH)
