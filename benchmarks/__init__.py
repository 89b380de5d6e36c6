"""Benchmarks, one script a question: parity first, then medians; machine, table and a JSON line are printed."""

from training import ROOT

__all__ = ["ROOT"]
