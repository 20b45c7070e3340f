"""Every test starts from the same random state, and draws the same examples every time."""

import pytest
import torch
from hypothesis import settings

# A failing example must not come and go between runs, nor a slow machine fail a test.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
