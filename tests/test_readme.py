"""The model card is true: its code runs, its table is the configuration, its head parses."""

import inspect
import re

import pytest
from huggingface_hub import ModelCard

from shram.configuration_shram import ShramConfig
from tests.support import ROOT

CARD = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", CARD, flags=re.DOTALL)


def test_the_head_parses_and_names_library_task_and_licence():
    head = ModelCard(CARD).data
    assert (head.library_name, head.pipeline_tag, head.license) == ("transformers", "text-generation", "apache-2.0")


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.splitlines()[0][:40])
def test_code_runs_as_printed(block, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    for name in ("runs/mine",):
        block = block.replace(name, str(tmp_path / "mine"))
    exec(compile(block, "README.md", "exec"), {"__name__": "__main__"})


def test_the_configuration_table_is_the_declared_fields():
    rows = re.findall(r"^\| `(\w+)` \| `(.*?)` \|", CARD, flags=re.MULTILINE)
    declared = {
        name: parameter.default
        for name, parameter in inspect.signature(ShramConfig).parameters.items()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    }
    assert dict(rows) == {name: str(value) for name, value in declared.items()}
