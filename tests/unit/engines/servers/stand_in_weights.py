"""A server that answers as SGLang's does, joins torch's own group, and takes what is broadcast.

Routes, fields and status codes follow `python/sglang/srt/entrypoints/http_server.py` of SGLang v0.5.18
(requests: `managers/io_struct.py`). What that server does not know, this one answers with 404.
"""

from __future__ import annotations

from datetime import timedelta
from http import HTTPStatus
from typing import Any

from tests.unit.engines.servers.misbehaving_server import Handler, MisbehavingServer

# torch is imported where it is needed: a server process that receives nothing starts without it.


class ReceivingServer(MisbehavingServer):
    """groups: by name; loaded: the weights; refuse_bucket: the number of the bucket that it fails on.

    arguments: its `ServerArgs`, as far as they are known here
    """

    def __init__(
        self, port: int = 0, handler: type[ReceivingHandler] | None = None, **arguments: Any
    ) -> None:
        self.arguments = {"model_path": "", "tp_size": 1, "pp_size": 1, "dp_size": 1} | arguments
        self.groups: dict[str, Any] = {}
        self.buckets = self.broadcasts = 0
        self.refuse_bucket: int | None = None
        super().__init__(port=port, handler=handler or ReceivingHandler)

    def join(self, payload: dict[str, Any]) -> None:
        """What SGLang does with its `init_custom_process_group`."""
        import torch.distributed as dist
        from torch.distributed import distributed_c10d

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
        import torch
        import torch.distributed as dist

        self.buckets += 1
        if self.buckets == self.refuse_bucket:
            return False
        tensors = {
            name: torch.empty(shape, dtype=getattr(torch, kind))
            for name, kind, shape in zip(
                payload["names"], payload["dtypes"], payload["shapes"], strict=True
            )
        }
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        if payload.get("load_format") == "flattened_bucket":
            # Their bytes one after the other, each read where it is.
            sizes = [tensor.nbytes for tensor in tensors.values()]
            parts = torch.empty(sum(sizes), dtype=torch.uint8)
            self.groups[payload["group_name"]].broadcast([parts], options).wait()
            self.broadcasts += 1
            for (name, like), part in zip(tensors.items(), parts.split(sizes), strict=True):
                tensors[name] = part.view(like.dtype).reshape(like.shape)
        else:
            for tensor in tensors.values():
                self.groups[payload["group_name"]].broadcast([tensor], options).wait()
                self.broadcasts += 1
        self.loaded |= tensors
        self.label = payload["weight_version"]
        return True

    def close(self) -> None:
        import torch.distributed as dist

        for group in self.groups.values():
            dist.destroy_process_group(group)
        super().close()


class ReceivingHandler(Handler):
    server: ReceivingServer  # type: ignore[assignment]

    def do_GET(self) -> None:
        server = self.server
        if self.is_refused():
            return
        # Since v0.5.6 the names with "get_" are aliases, which log that they are deprecated.
        if self.path in ("/get_server_info", "/server_info"):
            scheduler = {"internal_states": [{}], "version": "0.5.18", "kv_events": None}
            self.answer(server.arguments | scheduler)
        elif self.path in ("/get_model_info", "/model_info"):
            path = server.arguments["model_path"]
            about = {"model_path": path, "served_model_name": path, "is_generation": True}
            self.answer(about | {"weight_version": server.label})
        elif self.path == "/health":
            super().do_GET()
        else:
            self.answer({"detail": "Not Found"}, status=HTTPStatus.NOT_FOUND)

    def control(self, path: str) -> None:
        server, payload = self.server, self.payload
        if server.refuse_updates:
            super().control(path)
        elif path == "/init_weights_update_group":
            server.join(payload)
            self.answer_update(True, "Succeeded to initialize custom process group.")
        elif path == "/update_weights_from_distributed":
            taken = server.receive(payload)
            self.answer_update(taken, "Succeeded." if taken else "Failed, as told.")
        elif path == "/update_weights_from_disk":
            self.load(payload["model_path"])
            server.label = payload["weight_version"]
            self.answer_update(True, "Succeeded to update model weights.", num_paused_requests=0)
        elif path == "/update_weight_version":
            server.label = version = payload["new_version"]
            self.answer_update(True, f"Weight version updated to {version}", new_version=version)
        elif path == "/pause_generation":
            server.paused.set()
            self.answer({"message": "Generation paused successfully.", "status": "ok"})
        elif path == "/continue_generation":
            server.paused.clear()
            self.answer({"message": "Generation continued successfully.", "status": "ok"})
        else:
            self.answer({"detail": "Not Found"}, status=HTTPStatus.NOT_FOUND)

    def answer_update(self, success: bool, message: str, **more: Any) -> None:
        status = HTTPStatus.OK if success else HTTPStatus.BAD_REQUEST
        self.answer({"success": success, "message": message} | more, status=status)
