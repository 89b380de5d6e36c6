"""Checkpoint folders for the contract tests."""

import pytest

from tests.contract.remote import load, write_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """The folder of the usual tiny model; nobody writes into it."""
    return write_checkpoint(tmp_path_factory.mktemp("hub") / "tiny-shram")


@pytest.fixture
def make_checkpoint(tmp_path):
    """Write a folder for a configuration of one's own."""
    return lambda name="tiny-shram", **overrides: write_checkpoint(tmp_path / name, **overrides)


@pytest.fixture(scope="session")
def double_model(checkpoint):
    """The usual model in float64, so that equal means equal; nobody changes it."""
    return load(checkpoint).double()
