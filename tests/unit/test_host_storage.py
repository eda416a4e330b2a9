"""Memory that is lent and comes back with the same bits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from plugin.host_storage import HostStorage, _host_memory
from tests.held_bytes import bytes_held


def test_values_views_and_bytes_come_back_exactly() -> None:
    whole = torch.randn(1000)
    view, other = whole[10:20], torch.arange(7, dtype=torch.int16)
    before, address = whole.clone(), whole.untyped_storage()._cdata
    lent = HostStorage(lambda: [whole, view, other])
    for _ in range(5):
        assert bytes_held([whole, view, other]) == 4000 + 14
        assert lent.park() == 4000 + 14 and lent.is_parked
        assert bytes_held([whole, view, other]) == 0 and whole.shape == (1000,)
        assert lent.park() == 0  # twice does no harm
        lent.restore()
        lent.restore()
        assert not lent.is_parked
    assert torch.equal(whole, before) and torch.equal(view, before[10:20])
    assert other.tolist() == list(range(7)) and whole.untyped_storage()._cdata == address
    view.fill_(3)
    assert whole[12] == 3  # still one memory


def test_values_that_are_not_kept_come_back_as_zero() -> None:
    gradient = torch.ones(8)
    lent = HostStorage(lambda: [gradient], keeps_values=False)
    lent.park()
    lent.restore()
    assert gradient.tolist() == [0.0] * 8


def test_tensors_that_appear_later_are_lent_too() -> None:
    tensors = [torch.ones(4)]
    lent = HostStorage(lambda: tensors)
    assert lent.park() == 16
    lent.restore()
    tensors.append(torch.ones(2))
    assert lent.park() == 24
    lent.restore()


def test_a_copy_that_fails_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = torch.ones(4), torch.ones(8)
    lent = HostStorage(lambda: [first, second])
    copies: list[int] = []

    def copy(storage: torch.UntypedStorage) -> torch.Tensor:
        copies.append(storage.nbytes())
        if len(copies) == 2:
            raise MemoryError("no host memory")
        return torch.empty(storage.nbytes(), dtype=torch.uint8)

    monkeypatch.setattr(lent, "_copy", copy)
    with pytest.raises(MemoryError):
        lent.park()
    assert not lent.is_parked and first.sum() == 4 and second.sum() == 8


def test_memory_that_cannot_be_had_again_leaves_all_parked(monkeypatch: pytest.MonkeyPatch) -> None:
    class Storage:
        """Refuses to grow once."""

        def __init__(self, of: torch.UntypedStorage) -> None:
            self.of, self.refusals, self.device = of, 1, of.device

        def resize_(self, size: int) -> None:
            if size and self.refusals:
                self.refusals -= 1
                raise RuntimeError("CUDA out of memory")
            self.of.resize_(size)

    first, second = torch.full((4,), 2.0), torch.full((8,), 3.0)
    lent = HostStorage(lambda: [first, second])
    lent.park()
    lent._parked[1].storage = Storage(lent._parked[1].storage)  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="out of memory"):
        lent.restore()
    assert lent.is_parked and bytes_held([first, second]) == 0
    lent._parked[1].storage = lent._parked[1].storage.of  # type: ignore[attr-defined]
    lent.restore()
    assert first.tolist() == [2.0] * 4 and second.tolist() == [3.0] * 8


def test_pinned_memory_is_as_large_as_the_values_and_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    locked: dict[int, int] = {}

    class Runtime:
        def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
            locked[address] = size
            return 0

        def cudaHostUnregister(self, address: int) -> int:
            del locked[address]
            return 0

    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    storage: Any = SimpleNamespace(nbytes=lambda: 33, device=SimpleNamespace(type="cuda"))
    host = _host_memory(storage)
    # torch's allocator of pinned memory would take 64.
    assert host.numel() == 33 and list(locked.items()) == [(host.data_ptr(), 33)]
    del host
    assert not locked
