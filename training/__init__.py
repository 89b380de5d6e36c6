"""Training of the shipped checkpoint: text, tokenizer, rows, runs. Nothing here is needed to load the model."""

import sys
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# The model's files lie flat at the root and import each other relatively, as the Hub's loader wants them:
# an empty package whose path is the root makes them importable as shram.<file>.
if "shram" not in sys.modules:
    package = types.ModuleType("shram")
    package.__path__ = [str(ROOT)]
    sys.modules["shram"] = package
