"""A small inference server on loopback that misbehaves on demand, in the dialect of vLLM or SGLang.

vLLM's fields and paths are those of 0.32, against which `tests/vllm_rollouts/test_stand_ins.py` holds them; of SGLang see
`stand_in_weights.py`.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

#: A response: three tokens, the last of them the stop token of the tests.
TOKENS, STOP = [11, 12, 3], 3
LOG_PROBS = [-0.5, -1.5, -0.25]

Behavior = Callable[["Handler"], None]


class MisbehavingServer(ThreadingHTTPServer):
    """Answers generation calls with `script`, one behavior per call, and well when the script is used up.

    key: without which calls are refused; None = everybody may call
    label: of the weights; updates: directories that were loaded; asked: bodies of the generation calls
    authorizations: what the calls of any kind carried; paused: set while responses are aborted
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(
        self, *script: Behavior, port: int = 0, handler: type[Handler] | None = None
    ) -> None:
        super().__init__(("127.0.0.1", port), handler or Handler)
        self.script = deque(script)
        self.always: Behavior | None = None
        self.key: str | None = None
        self.label = "default"
        self.updates: list[str] = []
        self.loaded: dict[str, Any] = {}
        self.asked: list[dict[str, Any]] = []
        self.authorizations: set[str | None] = set()
        self.raw_log_probs = self.silent = False
        self.refuse_updates = False
        self.hung_up = self.health_answers = 0
        self.paused = threading.Event()
        self.ending = threading.Event()
        self._thread = threading.Thread(target=self.serve_forever, args=(0.02,))
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hung up is expected."""
        self.hung_up += 1

    def close(self) -> None:
        """Ends the server and everything it still serves."""
        self.ending.set()
        self.shutdown()
        self.server_close()
        self._thread.join()


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    server: MisbehavingServer
    payload: dict[str, Any]

    def log_message(self, *args: Any) -> None:
        """Silence."""

    def do_GET(self) -> None:
        self.server.authorizations.add(self.headers.get("Authorization"))
        if self.path in ("/weight_info", "/get_model_info"):
            self.answer({"weight_version": self.server.label})
        elif self.path == "/health" and not self.server.silent:
            self.answer(b"")
            self.server.health_answers += 1
        elif self.path == "/health":
            self.server.ending.wait(30)
        else:
            self.answer({}, status=404)

    def is_refused(self) -> bool:
        """Answers 401 where the server has a key and the call does not."""
        key, given = self.server.key, self.headers.get("Authorization")
        if key is None or given == f"Bearer {key}" or self.path == "/health":
            return False
        self.answer({"error": "Unauthorized"}, status=401)
        return True

    def do_POST(self) -> None:
        self.server.authorizations.add(self.headers.get("Authorization"))
        text = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.is_refused():
            return
        self.payload = json.loads(text) if text else {}
        path = self.path.split("?")[0]
        if path in ("/v1/completions", "/generate"):
            self.generate()
        else:
            self.control(path)

    def generate(self) -> None:
        server = self.server
        if self.payload.get("top_k") == 1:  # the client's test of what log-probs mean
            self.answer(completion([11], [-0.7 if server.raw_log_probs else 0.0], "length"))
            return
        server.asked.append(self.payload)
        if server.script:
            server.script.popleft()(self)
        elif server.always is not None:
            server.always(self)
        else:
            well(self)

    def control(self, path: str) -> None:
        server = self.server
        if server.refuse_updates:
            self.answer({"error": "not in development mode"}, status=404)
            return
        if path == "/update_weight_version":
            server.label = self.payload["new_version"]
        elif path == "/collective_rpc":
            self.load(self.payload["kwargs"]["weights_path"])
        elif path == "/update_weights_from_disk":
            self.load(self.payload["model_path"])
            server.label = self.payload["weight_version"]
        elif path in ("/pause", "/pause_generation"):
            server.paused.set()
        elif path in ("/resume", "/continue_generation"):
            server.paused.clear()
        self.answer({"success": True})

    def load(self, directory: str) -> None:
        import safetensors.torch  # not at the top: a server that loads nothing starts without torch

        self.server.updates.append(directory)
        self.server.loaded = {}
        for file in sorted(Path(directory).glob("*.safetensors")):
            self.server.loaded |= safetensors.torch.load_file(file)

    @property
    def is_sglang(self) -> bool:
        return self.path == "/generate"

    def answer(self, body: Any, status: int = 200) -> None:
        text = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def answer_with(self, tokens: list[int], log_probs: Any, reason: str) -> None:
        """A response in the dialect that was spoken."""
        make = sglang_response if self.is_sglang else completion
        body = make(tokens, log_probs, reason)
        if self.is_sglang:
            body["meta_info"]["prompt_tokens"] = len(self.payload["input_ids"])
            body["meta_info"]["weight_version"] = self.server.label
        self.answer(body)


def completion(tokens: list[int], log_probs: Any, reason: str) -> dict[str, Any]:
    """An answer of vLLM's /v1/completions."""
    choice = {"index": 0, "text": "", "token_ids": tokens, "finish_reason": reason}
    choice["logprobs"] = None if log_probs is None else {"token_logprobs": log_probs}
    return {"choices": [choice]}


def sglang_response(tokens: list[int], log_probs: Any, reason: str) -> dict[str, Any]:
    """An answer of SGLang's /generate, without what depends on the server."""
    meta: dict[str, Any] = {"finish_reason": {"type": reason}}
    if log_probs is not None:
        rows = zip(log_probs, tokens, strict=False)
        meta["output_token_logprobs"] = [[number, token, None] for number, token in rows]
    return {"output_ids": tokens, "meta_info": meta}


def well(handler: Handler) -> None:
    handler.answer_with(TOKENS, LOG_PROBS, "stop")


def saying(tokens: list[int], log_probs: Any, reason: str) -> Behavior:
    """Answers in time, with this."""
    return lambda handler: handler.answer_with(tokens, log_probs, reason)


def status(code: int) -> Behavior:
    return lambda handler: handler.answer({"error": "as told"}, status=code)


def text(body: bytes) -> Behavior:
    return lambda handler: handler.answer(body)


def hang(handler: Handler) -> None:
    """Says nothing until the test is over."""
    handler.server.ending.wait(30)
    handler.close_connection = True


def trickle(handler: Handler) -> None:
    """A byte now and then: never silent for long, never finished."""
    handler.send_response(200)
    handler.send_header("Content-Length", "100000")
    handler.end_headers()
    while not handler.server.ending.wait(0.05):
        handler.wfile.write(b" ")


def die_midstream(handler: Handler) -> None:
    """Half an answer, then the connection closes."""
    body = json.dumps(completion(TOKENS, LOG_PROBS, "stop")).encode()
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body[: len(body) // 2])
    handler.close_connection = True


def until_paused(tokens: list[int], log_probs: Any) -> Behavior:
    """Generates until the server is paused, and answers with what it has."""

    def behavior(handler: Handler) -> None:
        assert handler.server.paused.wait(20)
        handler.answer_with(tokens, log_probs, "abort")

    return behavior


def late(handler: Handler) -> None:
    """Comes while the server is paused, and is answered by the weights after it."""
    assert handler.server.paused.wait(20)
    while handler.server.paused.is_set():
        handler.server.ending.wait(0.01)
    well(handler)


def forget_weights(handler: Handler) -> None:
    """Restarts between two calls: answers well, with the weights it was started with."""
    handler.server.label = "default"
    well(handler)
