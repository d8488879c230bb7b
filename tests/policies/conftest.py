"""What modules of policy tests that name no precision run on."""

import pytest
from cuda_backend import backend
from policies.filled import Filled


@pytest.fixture(scope="module", params=["cpu-fp32", "cpu-int8", "cuda-fp16", "cuda-shim-fp32"])
def kv(request):
    """Caches of this backend and precision, wherever a test names none."""
    before = Filled.where, Filled.kv
    Filled.where, _, Filled.kv = request.param.rpartition("-")
    backend(Filled.where)
    yield Filled.kv
    Filled.where, Filled.kv = before
