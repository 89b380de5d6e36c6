"""Decoding with a Predictor returns what plain greedy returns, whatever it drafts; good drafts save Full passes."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, StoppingCriteria, StoppingCriteriaList

from shram.modeling_shram import CACHE_KEY
from shram.predictor_shram import ShramPredictor, decode_with_predictor
from tests.cases import draw_ids
from tests.support import ROOT, tiny_config, wide_model
from training import train_predictor

DRAFTS, PROMPT, CONTEXT = 4, 9, 40


@pytest.fixture(scope="module")
def model():
    config = tiny_config(num_hidden_layers=3, window_size=5, inference_sequence_length=CONTEXT, pad_token_id=0)
    return wide_model(config, 0, torch.float64)


class Oracle:
    """Drafts the teacher's own continuation, each token spoilt with a given probability."""

    num_drafts = DRAFTS

    def __init__(self, model, spoil: float = 0.0):
        self.model, self.spoil, self.num_full_passes = model, spoil, 0
        self.generator = torch.Generator().manual_seed(0)

    def draft(self, anchor, feature, cache, num_drafts, num_steps):
        scratch, drafts = cache.fork(), [anchor[:, None]]
        for _ in range(num_drafts):
            token = self.model(drafts[-1], cache=scratch).logits[:, -1:].argmax(dim=-1)
            spoilt = torch.rand(token.shape, generator=self.generator) < self.spoil
            drafts.append(torch.where(spoilt, (token + 1) % 64, token))
        return torch.cat(drafts[1:], dim=1)


@pytest.fixture(params=["untrained", "oracle", "half wrong", "all wrong"], scope="module")
def drafter(request, model):
    if request.param == "untrained":
        return ShramPredictor(model, source_layers=(0, 2), num_drafts=DRAFTS)
    return Oracle(model, {"oracle": 0.0, "half wrong": 0.5, "all wrong": 1.0}[request.param])


def batch(rows: int) -> dict:
    """Prompts, the second of which is padded."""
    ids, mask = draw_ids(rows, PROMPT), torch.ones(rows, PROMPT, dtype=torch.long)
    mask[1:2, :4] = 0
    return {"input_ids": ids, "attention_mask": mask}


def both(model, drafter, inputs: dict, **options):
    """Plain greedy and the drafted output."""
    options["do_sample"] = False
    plain = model.generate(**inputs, **options)
    drafted = model.generate(**inputs, **options, custom_generate=decode_with_predictor, predictor=drafter)
    return plain, drafted


# ---------------------------------------------------------------------------------------------------- acceptance


@pytest.mark.parametrize(("spoil", "per_pass"), [(0.0, DRAFTS + 1), (1.0, 1)], ids=["oracle", "all wrong"])
def test_accepted_drafts_save_full_passes(model, spoil, per_pass):
    oracle = Oracle(model, spoil)
    plain, drafted = both(model, oracle, batch(1), max_new_tokens=21)
    assert torch.equal(drafted, plain)
    assert oracle.num_full_passes == 1 + 20 // per_pass  # the first token comes from the prompt's pass


# ---------------------------------------------------------------------------------------------------- exactness


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("num_new", [1, DRAFTS, DRAFTS + 1, CONTEXT - PROMPT])  # the last fills the context
def test_the_output_is_that_of_plain_greedy(model, drafter, rows, num_new):
    plain, drafted = both(model, drafter, batch(rows), max_new_tokens=num_new)
    assert torch.equal(drafted, plain)


def test_ten_prompts_of_48_tokens_are_identical():
    model = wide_model(tiny_config(num_hidden_layers=3, window_size=5), 0, torch.float64)
    predictor = ShramPredictor(model, source_layers=(0, 2), num_drafts=DRAFTS)
    for seed in range(2):
        inputs = {"input_ids": draw_ids(5, 7, seed), "attention_mask": torch.ones(5, 7)}
        plain, drafted = both(model, predictor, inputs, max_new_tokens=48)
        assert torch.equal(drafted, plain)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    "options",
    [
        {"eos_token_id": [5, 17, 30, 40]},
        {"eos_token_id": [5, 17], "repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 2},
        {"eos_token_id": list(range(20)), "min_new_tokens": 11},
        {"prefix_allowed_tokens_fn": lambda row, ids: [(3 + row) * len(ids) % 64, 7 + row]},
    ],
    ids=lambda options: "+".join(options),
)
def test_ends_and_processors_are_honoured(model, drafter, rows, options):
    plain, drafted = both(model, drafter, batch(rows), max_new_tokens=15, **options)
    assert torch.equal(drafted, plain)


class StopAt(StoppingCriteria):
    """Row i stops when it ends in a multiple of 5 + i."""

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] % (5 + torch.arange(len(input_ids))) == 0


@pytest.mark.parametrize("eos", [None, [11]], ids=["without eos", "with eos"])
def test_stopping_criteria_of_the_caller_are_honoured(model, drafter, eos):
    options = {"stopping_criteria": StoppingCriteriaList([StopAt()]), "eos_token_id": eos}
    for rows in (1, 3):
        plain, drafted = both(model, drafter, batch(rows), max_new_tokens=15, **options)
        assert torch.equal(drafted, plain)


def test_a_cache_is_carried_over_turns(model, drafter):
    outputs = []
    for options in ({}, {"custom_generate": decode_with_predictor, "predictor": drafter}):
        cache, ids = model.new_cache(), torch.empty(1, 0, dtype=torch.long)
        for turn in range(3):
            ids = torch.cat([ids, draw_ids(1, 5, turn)], dim=1)
            ids = model.generate(ids, **{CACHE_KEY: cache}, max_new_tokens=8, do_sample=False, **options)
            assert cache.get_seq_length() == ids.shape[1] - 1
            assert not cache.layers[0].record_past
        outputs.append(ids)
    assert torch.equal(*outputs)


@pytest.mark.parametrize("implementation", [None, "static"])
def test_both_cache_policies_serve(implementation):
    model = wide_model(tiny_config(num_hidden_layers=3, mosrah_overallocation_factor=99.0), 0, torch.float64)
    for drafter in (ShramPredictor(model, source_layers=(0, 2), num_drafts=DRAFTS), Oracle(model, 0.5)):
        plain, drafted = both(model, drafter, batch(3), max_new_tokens=20, cache_implementation=implementation)
        assert torch.equal(drafted, plain)


def test_stock_drafting_works_beside_it(model):
    ids, options = draw_ids(1, PROMPT), {"max_new_tokens": 20, "do_sample": False, "eos_token_id": 63}
    plain = model.generate(ids, **options)
    assert torch.equal(model.generate(ids, prompt_lookup_num_tokens=3, **options), plain)
    assistant = wide_model(tiny_config(eos_token_id=None, pad_token_id=0), 1, torch.float64)
    assert torch.equal(model.generate(ids, assistant_model=assistant, **options), plain)


def test_tokens_can_be_streamed(model, drafter):
    class Collector:
        def __init__(self):
            self.tokens, self.ended = [], False

        def put(self, tokens):
            self.tokens += tokens.tolist()

        def end(self):
            self.ended = True

    collector = Collector()
    call = {"custom_generate": decode_with_predictor, "predictor": drafter, "stream_to": collector}
    out = model.generate(draw_ids(1, PROMPT), max_new_tokens=13, do_sample=False, **call)
    assert collector.ended and out[0, PROMPT:].tolist() == collector.tokens


# ---------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        ({"predictor": None}, "predictor="),
        ({"do_sample": True}, "do_sample"),
        ({"num_beams": 2}, "num_beams"),
        ({"prompt_lookup_num_tokens": 2}, "prompt lookup"),
        ({"return_dict_in_generate": True}, "return_dict_in_generate"),
        ({"guidance_scale": 1.5}, "guidance_scale"),
        ({"prefill_chunk_size": 2}, "prefill_chunk_size"),
        ({"use_cache": False}, "use_cache"),
        ({"predictor_steps": 0}, "predictor_steps must be an integer >= 1, got 0"),
        ({"stream_to": object()}, "stream_to"),
        ({"attention_mask": torch.ones(3, PROMPT).index_fill(1, torch.tensor([PROMPT - 1]), 0)}, "padding behind"),
        ({"position_ids": torch.arange(3, 3 + PROMPT).expand(3, -1)}, "position_ids"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
def test_what_it_cannot_do_is_refused_by_name(model, options, pattern):
    call = {"predictor": Oracle(model), "do_sample": False, **options}
    with pytest.raises(ValueError, match=pattern):
        model.generate(**batch(3) | call, max_new_tokens=5, custom_generate=decode_with_predictor)


@pytest.mark.parametrize(
    ("options", "pattern"),
    [({"source_layers": (0, 9)}, r"source_layers.*\(0, 9\)"), ({"num_drafts": 0}, "num_drafts.*got 0")],
    ids=["layers", "drafts"],
)
def test_bad_settings_are_named(model, options, pattern):
    with pytest.raises(ValueError, match=pattern):
        ShramPredictor(model, **{"source_layers": (0, 2), **options})


# ---------------------------------------------------------------------------------------------------- files, training


def test_a_predictor_is_saved_and_loaded_beside_its_teacher(tmp_path, model):
    predictor = ShramPredictor(model, source_layers=(0, 2), num_drafts=DRAFTS, num_steps=2)
    train_predictor.save(predictor, tmp_path / "predictor")
    loaded = ShramPredictor.load(model, tmp_path)
    assert loaded.settings == {"source_layers": (0, 2), "num_drafts": DRAFTS, "num_steps": 2, "reads_history": True}
    for name, value in predictor.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value.to(torch.bfloat16).to(value.dtype))
    assert not any("embed_tokens" in name or "lm_head" in name for name in loaded.state_dict())


def test_a_short_training_run_learns_and_resumes_as_if_never_stopped(tmp_path, monkeypatch):
    teacher = wide_model(tiny_config(num_hidden_layers=3), 0)
    rows = train_predictor.continue_greedily(teacher, draw_ids(12, 6), 32)
    recipe = json.loads(train_predictor.DEFAULT.read_text(encoding="utf-8"))
    recipe |= {"predictor": {"source_layers": [0, 2], "num_drafts": 3}, "rows_per_batch": 6, "first_tokens": 8}
    recipe["num_walks"] = 12
    checkpoint = tmp_path / "checkpoint.pt"
    saved, save = [], torch.save
    monkeypatch.setattr(torch, "save", lambda state, path: (saved.append(state["walk"]), save(state, path)))
    whole = train_predictor.train(teacher, rows, recipe, checkpoint)
    assert saved == [10, 12]

    def stop_after_ten(state, path):
        save(state, path)
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", stop_after_ten)
    with pytest.raises(KeyboardInterrupt):
        train_predictor.train(teacher, rows, recipe, checkpoint)
    monkeypatch.setattr(torch, "save", save)
    resumed = train_predictor.train(teacher, rows, recipe, checkpoint, resume=True)
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(resumed.state_dict()[name], value)

    fresh = ShramPredictor(teacher, **recipe["predictor"])
    assert loss_of(whole, rows) < loss_of(fresh, rows)


@torch.no_grad()
def loss_of(predictor, rows) -> float:
    teacher, cache = predictor.teacher[0], predictor.teacher[0].new_cache()
    hidden = teacher.model(rows[:, :20], cache=cache).last_hidden_state[:, -1]
    with predictor.open(cache) as workspace:
        logits = next(predictor.roll_out(rows[:, 20], hidden, workspace, 1))
    target = teacher(rows[:, 20:23], cache=cache).logits
    return train_predictor.distillation_loss(logits, target, 0.85).item()


def test_the_shipped_predictor_saves_full_passes_exactly():
    """In float64, on a sentence of its own."""
    tokenizer = AutoTokenizer.from_pretrained(ROOT, trust_remote_code=True)
    model = AutoModelForCausalLM.from_pretrained(ROOT, trust_remote_code=True, dtype=torch.float64)
    predictor = model.load_predictor()
    inputs = tokenizer("The king said to his servants, that they should go to the house", return_tensors="pt")
    plain = model.generate(**inputs, max_new_tokens=48, do_sample=False)
    drafted = model.generate(
        **inputs, max_new_tokens=48, do_sample=False, custom_generate=predictor.decode, predictor=predictor
    )
    assert torch.equal(drafted, plain)
    assert (drafted.shape[1] - inputs["input_ids"].shape[1]) / predictor.num_full_passes >= 1.5
