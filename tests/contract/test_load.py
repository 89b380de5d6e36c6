"""Loading from a folder gives the model that was written: code, weights, dtypes, ties, standard names."""

import json
import os
import shutil
import subprocess
import sys
import textwrap

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)
from transformers.dynamic_module_utils import check_imports

from tests.contract.remote import CODE, library_fault, load, prompt
from tests.support import TINY, tiny_config, wide_model

IDS = prompt(2, 17)


@pytest.mark.parametrize("file", CODE, ids=lambda file: file.name)
def test_import_scan_needs_nothing_but_torch_and_transformers(file):
    check_imports(file)
    assert "from . import" not in file.read_text()


@pytest.mark.parametrize("keywords", [{}, {"device_map": "cpu"}, {"low_cpu_mem_usage": True}], ids=str)
def test_loaded_model_equals_the_written_one(checkpoint, keywords):
    model, info = AutoModelForCausalLM.from_pretrained(
        checkpoint, trust_remote_code=True, output_loading_info=True, **keywords
    )
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    written = wide_model(tiny_config())
    assert not model.training and not any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    for (name, buffer), (expected_name, expected) in zip(model.named_buffers(), written.named_buffers(), strict=True):
        assert name == expected_name and torch.equal(buffer, expected)
    assert torch.equal(model(IDS).logits, written(IDS).logits)


def test_bfloat16_loading_keeps_the_router_wide(checkpoint):
    model = load(checkpoint, dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        assert parameter.dtype == (torch.float32 if ".router." in name else torch.bfloat16), name
    written = wide_model(tiny_config()).to(torch.bfloat16)
    with torch.no_grad():
        for name, parameter in written.named_parameters():
            if ".router." in name:
                parameter.data = load_file(checkpoint / "model.safetensors")[name]
    assert torch.equal(model(IDS).logits, written(IDS).logits)
    assert model(IDS).logits.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_positions_survive_loading_in_any_dtype(checkpoint, dtype):
    """A text far out reads like the same text at the start; broken angle tables would tear it apart."""
    model = load(checkpoint, dtype=dtype)
    places = torch.arange(17).expand(2, -1)
    near, far = (model(IDS, position_ids=places + start, use_cache=False).logits.double() for start in (0, 2048))
    expected = load(checkpoint).double()(IDS, use_cache=False).logits
    assert (far - expected).abs().mean() <= 2 * (near - expected).abs().mean() + 1e-3


def dirty_the_allocator():
    for size in (2**6, 2**10, 2**14, 2**18):
        kept = [torch.full((size,), 3e30) for _ in range(40)]
        del kept


def test_from_config_initialises_every_parameter(checkpoint):
    config = AutoConfig.from_pretrained(checkpoint, trust_remote_code=True)
    models = []
    for _ in range(2):
        dirty_the_allocator()
        torch.manual_seed(0)
        models.append(AutoModelForCausalLM.from_config(config, trust_remote_code=True))
    for (name, first), second in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert torch.equal(first, second), name
        if name.endswith("norm.weight"):
            assert (first == 1).all(), name
        elif name.endswith("expert_bias"):
            assert not first.any(), name
        else:
            assert 0.8 < first.std() / config.initializer_range < 1.2, name
    assert torch.equal(models[0].eval()(IDS).logits, models[1].eval()(IDS).logits)


@library_fault("5.2.0", "5.2.0", "a module with one loaded parameter never initialises its missing ones")
def test_missing_expert_weights_are_initialised_and_reported(make_checkpoint):
    folder = make_checkpoint()
    weights = load_file(folder / "model.safetensors")
    dropped = [name for name in weights if "mosrah" in name and "expert_bias" not in name]
    assert len(dropped) == 6
    save_file({k: v for k, v in weights.items() if k not in dropped}, folder / "model.safetensors", {"format": "pt"})
    dirty_the_allocator()
    model, info = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, output_loading_info=True)
    assert set(info["missing_keys"]) == set(dropped)
    for name, parameter in model.named_parameters():
        if name in dropped:
            assert 0.7 < parameter.std() / model.config.initializer_range < 1.3, name
        else:
            assert torch.equal(parameter, weights[name]), name


@pytest.mark.parametrize("tied", [True, False])
def test_ties_follow_the_config(make_checkpoint, tmp_path, tied):
    model = load(make_checkpoint(tie_word_embeddings=tied))
    head, embedding = model.lm_head.weight, model.get_input_embeddings().weight
    assert (head.data_ptr() == embedding.data_ptr()) is tied and not head.is_meta
    model.save_pretrained(tmp_path / "again")
    again, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "again", trust_remote_code=True, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert (again.lm_head.weight is again.get_input_embeddings().weight) is tied
    assert torch.equal(again(IDS).logits, model(IDS).logits)


def test_untying_at_load_reports_the_head_that_the_file_lacks(make_checkpoint):
    model, info = AutoModelForCausalLM.from_pretrained(
        make_checkpoint(tie_word_embeddings=True),
        trust_remote_code=True,
        tie_word_embeddings=False,
        output_loading_info=True,
    )
    assert set(info["missing_keys"]) == {"lm_head.weight"}
    assert model.lm_head.weight is not model.get_input_embeddings().weight
    assert 0 < model.lm_head.weight.std() < 2 * model.config.initializer_range


def test_code_is_not_run_without_consent(checkpoint):
    with pytest.raises(ValueError, match="trust_remote_code"):
        AutoModelForCausalLM.from_pretrained(checkpoint, trust_remote_code=False)


@pytest.mark.parametrize(
    "auto, field",
    [
        (AutoModel, "last_hidden_state"),
        (AutoModelForSequenceClassification, "logits"),
        (AutoModelForTokenClassification, "logits"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_every_head_loads_its_own_class_and_the_same_body(checkpoint, auto, field):
    model = load(checkpoint, auto, pad_token_id=0) if auto is not AutoModel else load(checkpoint, auto)
    assert model(IDS)[field].isfinite().all()
    body = model if auto is AutoModel else model.model
    expected = load(checkpoint).model(IDS).last_hidden_state
    assert torch.equal(body(IDS).last_hidden_state, expected)


def test_sequence_classification_reads_the_last_real_token(checkpoint):
    model = load(checkpoint, AutoModelForSequenceClassification, pad_token_id=0)
    padded = torch.nn.functional.pad(IDS, (0, 4))
    mask = (padded != 0).long()
    torch.testing.assert_close(model(padded, attention_mask=mask).logits, model(IDS).logits, rtol=1e-4, atol=1e-4)


STANDARD = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 64,
}


def test_standard_names_resolve_and_survive_a_round_trip(checkpoint, tmp_path):
    config = AutoConfig.from_pretrained(checkpoint, trust_remote_code=True)
    config.save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path, trust_remote_code=True)
    for name, value in STANDARD.items():
        assert getattr(config, name) == getattr(again, name) == value
    stored = json.loads((tmp_path / "config.json").read_text())
    assert {name: stored[name] for name in TINY} == TINY
    assert load(checkpoint).can_generate()


def test_a_misspelt_field_is_reported(checkpoint):
    with pytest.raises(ValueError, match="num_hidden_layer"):
        AutoConfig.from_pretrained(checkpoint, trust_remote_code=True).__class__(num_hidden_layer=3)


def test_a_broken_config_file_is_refused_at_load(make_checkpoint):
    folder = make_checkpoint()
    stored = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**stored, "window_size": -4}))
    with pytest.raises(ValueError, match=r"window_size.*-4"):
        load(folder)


LOAD_AND_PRINT = """
    import sys, torch
    assert not any("shram" in name for name in sys.modules), "the project must not be importable"
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
    if len(sys.argv) > 2:
        model.save_pretrained(sys.argv[2])
    print(repr(model(torch.arange(1, 18)[None]).logits.double().sum().item()))
"""


@pytest.fixture
def load_elsewhere(tmp_path):
    """Load in a fresh process, away from the project, with an empty module cache; the sum of the logits."""

    def run(name, *arguments, cwd=tmp_path, **environment):
        environment = {"HF_HOME": str(tmp_path / "home"), **environment}
        kept = {k: v for k, v in os.environ.items() if k != "PYTHONPATH" and not k.startswith("HF_")}
        command = [sys.executable, "-c", textwrap.dedent(LOAD_AND_PRINT), str(name), *map(str, arguments)]
        done = subprocess.run(
            command,
            cwd=cwd,
            env={**kept, **environment, "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return float(done.stdout.split()[-1])

    return run


def hub_snapshot(folder, home):
    """Lay the folder out as a downloaded repository."""
    repository = home / "hub" / "models--acme--tiny-shram"
    commit = "0123456789abcdef0123456789abcdef01234567"
    shutil.copytree(folder, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)


def test_fresh_processes_load_folder_dot_snapshot_and_saved_copy(checkpoint, tmp_path, load_elsewhere):
    saved = tmp_path / "saved"
    expected = load_elsewhere(checkpoint, saved)
    assert {file.name for file in CODE if "rollout" not in file.name} <= {file.name for file in saved.iterdir()}
    stored = json.loads((saved / "config.json").read_text())["auto_map"]
    assert stored["AutoModelForCausalLM"] == "modeling_shram.ShramForCausalLM"
    assert not any("--" in str(place) for place in stored.values())
    hub_snapshot(checkpoint, tmp_path / "home")
    assert load_elsewhere(".", cwd=checkpoint) == expected
    assert load_elsewhere("acme/tiny-shram") == expected
    assert load_elsewhere(saved) == expected


def test_an_unsupported_release_is_one_clear_import_error(checkpoint, tmp_path):
    script = f"""
        import transformers
        transformers.__version__ = "4.40.0"
        from transformers import AutoModelForCausalLM
        try:
            AutoModelForCausalLM.from_pretrained({str(checkpoint)!r}, trust_remote_code=True)
        except ImportError as error:
            print(error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=tmp_path,
        env={**os.environ, "HF_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "4.40.0" in done.stdout and "4.57" in done.stdout


@pytest.mark.parametrize("implementation", ["flash_attention_2", "flex_attention"])
def test_attention_kernels_we_lack_are_refused(checkpoint, implementation):
    with pytest.raises((ValueError, ImportError)):
        load(checkpoint, attn_implementation=implementation)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_attention_implementation_is_chosen_at_load(checkpoint, implementation):
    model = load(checkpoint, attn_implementation=implementation)
    assert model.config._attn_implementation == implementation
    torch.testing.assert_close(model(IDS).logits, load(checkpoint)(IDS).logits, rtol=1e-4, atol=1e-4)
