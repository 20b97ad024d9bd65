"""Fixtures of core's tests."""

import pytest

from revzoo import Step


@pytest.fixture(params=[Step.close_checks, 0], ids=["", "together"])
def couplings_alone_or_together(request, monkeypatch):
    """Each test once with a function for each coupling, and once with functions that they share."""
    monkeypatch.setattr(Step, "close_checks", request.param)
