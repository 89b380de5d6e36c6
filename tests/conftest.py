"""Test session: offline, one thread, a module cache of its own, the flat root importable as `shram`."""

import os
import tempfile

import hypothesis
import torch

import tests.support  # noqa: F401  (makes `shram` importable)

# Set before anything imports transformers, which reads them once; every xdist worker gets its own folder.
HUB_HOME = tempfile.TemporaryDirectory(prefix="shram-hub-")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HOME"] = HUB_HOME.name
os.environ["HF_MODULES_CACHE"] = os.path.join(HUB_HOME.name, "modules")

torch.set_num_threads(1)
hypothesis.settings.register_profile("shram", deadline=None, derandomize=True, max_examples=30)
hypothesis.settings.load_profile("shram")
