"""Every rank raises or none does.

A rank that raises alone leaves the others waiting in their next collective until a watchdog ends
them, without a traceback. Errors of our own code are therefore caught, the rank continues with a
loss of zero, and all ranks exchange errors at the next safe point.

That works only where nobody waits for the rest of the body that failed. An error between two
collectives of one body (out of memory on one tensor parallel rank) is raised: the driver sees
it at once and stops the other ranks.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from plugin.errors import BatchError, ParallelError


class ErrorCollector:
    """Keeps the first error of this rank until `agree` is called.

    group: of all ranks, on `device`; None = the default one
    """

    def __init__(
        self, device: torch.device | str = "cpu", group: dist.ProcessGroup | None = None
    ) -> None:
        self.device, self.group = torch.device(device), group
        self.error: Exception | None = None
        self._trace = ""

    @contextmanager
    def collecting(self, peers: int = 1) -> Iterator[None]:
        """Catch an error of the body and remember it.

        peers: ranks that meet in collectives of the body. If there are several, an error that only
            this rank may have is raised instead, as the others could be waiting for it.
        """
        try:
            yield
        except Exception as error:
            if peers > 1 and not self.is_shared(error):
                raise
            if self.error is None:
                self.error, self._trace = error, traceback.format_exc()

    def is_shared(self, error: Exception) -> bool:
        """Return whether all ranks of a collective raise this error when one does."""
        return isinstance(error, BatchError) and error.on_every_rank

    def agree(self, what: str, digest: int | None = None) -> None:
        """Raise on every rank if any has an error, or if digests differ; one small collective.

        A rank with an error of its own raises that one; the others raise a `ParallelError` with its
        traceback. Ranks that have no digest pass None.
        """
        error, trace = self.error, self._trace
        self.error, self._trace = None, ""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            if error is not None:
                raise error
            return
        status = torch.tensor(
            [error is not None, -1 if digest is None else digest],
            dtype=torch.int64,
            device=self.device,
        )
        rows = status.new_empty(dist.get_world_size() * 2)
        dist.all_gather_into_tensor(rows, status, group=self.group)
        failed, digests = rows.view(-1, 2).unbind(1)
        if bool(failed.any()):
            _raise_everywhere(what, error, trace, self.group)
        present = {int(value) for value in digests.tolist() if value >= 0}
        if len(present) > 1:
            raise ParallelError(
                f"{what}: ranks recorded different metrics; a hook must return the same metric "
                "names on every rank and for every microbatch"
            )


def _raise_everywhere(
    what: str, error: Exception | None, trace: str, group: dist.ProcessGroup | None
) -> None:
    traces: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(traces, trace, group=group)
    if error is not None:
        raise error
    rank, first = next((rank, text) for rank, text in enumerate(traces) if text)
    others = sum(bool(text) for text in traces) - 1
    also = f" ({others} more ranks failed too)" if others else ""
    raise ParallelError(f"{what} failed on rank {rank}{also}:\n{first}")
