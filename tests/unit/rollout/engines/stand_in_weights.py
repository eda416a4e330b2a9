"""A server that receives weights as SGLang's do: it joins torch's own group, and takes what is broadcast."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tests.unit.rollout.engines.misbehaving_server import Handler, MisbehavingServer


class ReceivingServer(MisbehavingServer):
    """groups: by name; loaded: the weights; refuse_bucket: the number of the bucket that it fails on."""

    def __init__(self) -> None:
        super().__init__()
        self.RequestHandlerClass = ReceivingHandler
        self.groups: dict[str, Any] = {}
        self.buckets = 0
        self.refuse_bucket: int | None = None

    def join(self, payload: dict[str, Any]) -> None:
        """What SGLang does with its `init_custom_process_group`."""
        address = f"tcp://{payload['master_address']}:{payload['master_port']}"
        rank, size, name = payload["rank_offset"], payload["world_size"], payload["group_name"]
        limit = timedelta(seconds=20)
        store, rank, size = next(dist.rendezvous(address, rank, size, timeout=limit))
        store = dist.PrefixStore(name, store)
        assert payload["backend"] == "gloo"
        group, _ = distributed_c10d._new_process_group_helper(
            size, rank, [], "gloo", store, group_name=name, timeout=limit
        )
        distributed_c10d._world.pg_group_ranks[group] = {i: i for i in range(size)}
        self.groups[name] = group

    def receive(self, payload: dict[str, Any]) -> bool:
        self.buckets += 1
        if self.buckets == self.refuse_bucket:
            return False
        for name, kind, shape in zip(
            payload["names"], payload["dtypes"], payload["shapes"], strict=True
        ):
            tensor = torch.empty(shape, dtype=getattr(torch, kind))
            group = self.groups[payload["group_name"]]
            options = dist.BroadcastOptions()
            options.rootRank, options.rootTensor = 0, 0
            group.broadcast([tensor], options).wait()
            self.loaded[name] = tensor
        self.label = payload["weight_version"]
        return True

    def close(self) -> None:
        for group in self.groups.values():
            dist.destroy_process_group(group)
        super().close()


class ReceivingHandler(Handler):
    server: ReceivingServer  # type: ignore[assignment]

    def do_GET(self) -> None:
        if self.path == "/get_server_info":
            self.answer({"tp_size": 1})
        else:
            super().do_GET()

    def control(self, path: str) -> None:
        if path == "/init_weights_update_group":
            self.server.join(self.payload)
            self.answer({"success": True, "message": "joined"})
        elif path == "/update_weights_from_distributed":
            taken = self.server.receive(self.payload)
            self.answer({"success": taken, "message": "as told"})
        else:
            super().control(path)
