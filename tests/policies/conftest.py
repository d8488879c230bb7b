"""What modules of policy tests that name no precision run on."""

import pytest
from cuda_backend import BACKENDS, backend
from policies.filled import Filled

STORES = {"cpu": ("cpu-fp32", "cpu-int8"), "cuda": ("cuda-fp16",), "cuda-shim": ("cuda-shim-fp32",)}


@pytest.fixture(scope="module", params=[store for where in BACKENDS for store in STORES[where]])
def kv(request):
    """Caches of this backend and precision, wherever a test names none."""
    before = Filled.where, Filled.kv
    Filled.where, _, Filled.kv = request.param.rpartition("-")
    backend(Filled.where)
    yield Filled.kv
    Filled.where, Filled.kv = before
