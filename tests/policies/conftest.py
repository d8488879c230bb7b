"""What modules of policy tests that name no precision run on."""

import pytest
from policies.filled import Filled


@pytest.fixture(scope="module", params=["fp32", "int8"])
def kv(request):
    """Caches of this precision, wherever a test names none."""
    before, Filled.kv = Filled.kv, request.param
    yield request.param
    Filled.kv = before
