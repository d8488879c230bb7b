import pytest

from edgevlm.runtime.store import Store, StoreSettings

MB = 1 << 20


@pytest.fixture
def said():
    return []


@pytest.fixture
def opened(tmp_path, said):
    """Opens stores that are closed at the end: a file of 4 MB that holds 59 blocks, 14 in host memory, unless told."""
    stores = []

    def open_store(path=tmp_path / "store.bin", file_bytes=4 * MB, host_bytes=MB, **more):
        store = Store(path, "a stream", StoreSettings(file_bytes, host_bytes), said.append, **more)
        stores.append(store)
        return store

    yield open_store
    for store in stores:
        store.close()
