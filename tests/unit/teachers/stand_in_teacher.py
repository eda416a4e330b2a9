"""A teacher on loopback, in the dialect of vLLM or SGLang, that misbehaves on demand.

Its log-probs are those of a fixed table: the log-softmax of `logits[last token]`. vLLM's fields are those of 0.32
(`tests/vllm_rollouts/test_stand_ins.py`), SGLang's those of `GenerateReqInput` and `meta_info` of v0.5.18.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from typing import Any

import torch

VOCAB = 12
Spoil = Callable[[Any], Any]


def table(seed: int = 0, vocab: int = VOCAB) -> torch.Tensor:
    """[V, V] log-probs of the next token by the last one."""
    generator = torch.Generator().manual_seed(seed)
    return torch.log_softmax(torch.randn(vocab, vocab, generator=generator), -1)


class StandInTeacher(ThreadingHTTPServer):
    """Scores tokens by its table.

    spoil: what becomes of the answers to come, one each; a number is an HTTP status instead
    asked: the bodies of the calls; tokenize: text -> ids, None = the server does not tell
    """

    daemon_threads = True

    def __init__(self, dialect: str, *, seed: int = 0, vocab: int = VOCAB, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.dialect, self.table = dialect, table(seed, vocab)
        self.spoil: deque[Spoil | int] = deque()
        self.asked: list[dict[str, Any]] = []
        self.tokenize: Callable[[str], list[int]] | None = None
        self._thread = threading.Thread(target=self.serve_forever, args=(0.02,))
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def close(self) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: StandInTeacher

    def log_message(self, *args: Any) -> None:
        """Silence."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        if self.path == "/tokenize":
            if server.tokenize is None:
                self.answer({"error": "no such path"}, 404)
            else:
                self.answer({"tokens": server.tokenize(body["prompt"])})
            return
        server.asked.append(body)
        spoil = server.spoil.popleft() if server.spoil else None
        if isinstance(spoil, int):
            self.answer({"error": "spoiled"}, spoil)
            return
        tokens = body["prompt"] if server.dialect == "vllm" else body["input_ids"]
        if max(tokens) >= len(server.table):
            self.answer({"error": f"token {max(tokens)} is out of vocabulary"}, 400)
            return
        answer = vllm_answer(server.table, body) if server.dialect == "vllm" else sglang_answer(server.table, body)  # fmt: skip
        self.answer(answer if spoil is None else spoil(answer))

    def answer(self, body: Any, status: int = 200) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


def vllm_answer(log_probs: torch.Tensor, body: dict[str, Any]) -> Any:
    tokens, k = body["prompt"], body["prompt_logprobs"]
    rows: list[Any] = [None]
    for before, token in pairwise(tokens):
        ids = [*log_probs[before].topk(k).indices.tolist()]
        ids += [] if token in ids else [token]
        rows.append({str(i): {"logprob": float(log_probs[before, i]), "rank": 1} for i in ids})
    return {"choices": [{"prompt_logprobs": rows, "prompt_token_ids": tokens, "text": "x"}]}


def sglang_answer(log_probs: torch.Tensor, body: dict[str, Any]) -> Any:
    tokens, first, k = body["input_ids"], body["logprob_start_len"], body["top_logprobs_num"]
    own: list[Any] = [[None, tokens[first], None]]
    top: list[Any] = [None]
    for before, token in pairwise(tokens[first:]):
        own.append([float(log_probs[before, token]), token, None])
        best = log_probs[before].topk(k)
        top.append([[v, i, None] for v, i in zip(best.values.tolist(), best.indices.tolist(), strict=True)])  # fmt: skip
    meta = {"prompt_tokens": len(tokens), "input_token_logprobs": own, "input_top_logprobs": top}
    return {"text": "", "meta_info": meta}
