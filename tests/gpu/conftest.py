"""These tests need an NVIDIA GPU; without one they are skipped, and `make test` does not collect them."""

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if "tests/gpu" in str(item.path):
                item.add_marker(pytest.mark.skip(reason="torch.cuda.is_available() is False"))


@pytest.fixture(autouse=True)
def exact_float32() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
