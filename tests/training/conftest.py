from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def same_weights() -> None:
    torch.manual_seed(0)
