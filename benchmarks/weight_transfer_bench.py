"""Weights by broadcast between processes: seconds, CPU seconds, messages, copies and peak memory.

Every sender and every engine is a process; an engine copies what arrives into a model's memory. `share` is the
effective bandwidth as a share of that of one plain broadcast of the same bytes by the same processes in the same
run. With `--old TREE` a checkout of another commit takes turns with this one. On a loaded machine compare within a
row only.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[1]
_MB = 1 << 20

#: Megabytes: hidden size, layers, vocabulary of a dense model in float32.
_DENSE = {
    17: (256, 4, 4096),
    134: (512, 8, 16_384),
    540: (768, 14, 24_576),
    1070: (1024, 15, 32_768),
}
#: Hidden size, width of an expert, experts, layers, vocabulary.
_MOE = {70: (256, 96, 64, 3, 4096), 530: (512, 192, 64, 6, 8192), 1020: (512, 384, 64, 6, 16_384)}


def shapes_of(
    kind: str, size: int, sender: int, senders: int
) -> Iterator[tuple[str, tuple[int, ...]] | None]:
    """What a sender sends: a dense model's stages have layers each, an MoE model's ranks experts each."""
    if kind == "dense":
        hidden, layers, vocabulary = _DENSE[size]
        per = -(-layers // senders)
        if sender == 0:
            yield "model.embed_tokens.weight", (vocabulary, hidden)
        for layer in range(layers)[sender * per : (sender + 1) * per]:
            yield from _attention(f"model.layers.{layer}", hidden)
            for name, shape in (
                ("gate", (3 * hidden, hidden)),
                ("up", (3 * hidden, hidden)),
                ("down", (hidden, 3 * hidden)),
            ):
                yield f"model.layers.{layer}.mlp.{name}_proj.weight", shape
        return
    hidden, width, experts, layers, vocabulary = _MOE[size]
    if sender == 0:
        yield "model.embed_tokens.weight", (vocabulary, hidden)
    for layer in range(layers):
        if sender == 0:
            yield from _attention(f"model.layers.{layer}", hidden)
            yield f"model.layers.{layer}.mlp.gate.weight", (experts, hidden)
        if senders > 1:
            yield None
        for expert in range(experts)[
            sender * experts // senders : (sender + 1) * experts // senders
        ]:
            for name, shape in (
                ("gate", (width, hidden)),
                ("up", (width, hidden)),
                ("down", (hidden, width)),
            ):
                yield f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj.weight", shape
        if senders > 1:
            yield None


def _attention(layer: str, hidden: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name in "qkvo":
        yield f"{layer}.self_attn.{name}_proj.weight", (hidden, hidden)
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield f"{layer}.{name}.weight", (hidden,)


class _Member:
    """A process of one side; its commands come from stdin, its answers go to stdout."""

    def __init__(self, place: dict[str, Any]) -> None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        self._place, self._torch, self._dist = place, torch, dist
        self.calls, self.copied = 0, 0
        for name in ("add", "set", "get", "check", "wait", "delete_key"):
            self._count(dist.TCPStore, name)
        plain_copy = torch.Tensor.copy_

        def copy(target: Any, source: Any, *more: Any) -> Any:
            self.copied += source.nbytes
            return plain_copy(target, source, *more)

        torch.Tensor.copy_ = copy  # type: ignore[method-assign]
        from plugin.weights import make_receiver, make_sender
        from plugin.weights.group import WeightGroup

        self._number, self._sends = place["number"], place["role"] == "sender"
        senders, engines = place["senders"], place["engines"]
        moe = {"per_stage": senders} if place["kind"] == "moe" else {}
        group = WeightGroup("127.0.0.1", place["port"], "bench", senders, engines, 120.0, **moe)
        self._tensors: list[Any] = []
        owners = [self._number] if self._sends else range(senders)
        for sender in owners:
            for entry in shapes_of(place["kind"], place["size"], sender, senders):
                make = torch.ones if self._sends else torch.zeros
                self._tensors.append(entry and (entry[0], make(entry[1])))
        self._targets = dict(filter(None, self._tensors))
        self.nbytes = sum(tensor.nbytes for tensor in self._targets.values())
        store = dist.TCPStore("127.0.0.1", place["port"], is_master=False)
        if self._sends:
            self._member: Any = make_sender(group, self._number)
            self._manifest = self._make_manifest(group)
        else:
            self._member = make_receiver(group, self._number)
        self._plain: Any = None
        if not self._sends or self._number == 0:
            rank = 0 if self._sends else 1 + self._number
            options = dist.ProcessGroupGloo._Options()
            options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
            self._plain = dist.ProcessGroupGloo(
                dist.PrefixStore("plain", store), rank, 1 + engines, options
            )
            self._bytes = torch.ones(place["total"], dtype=torch.uint8)

    def _count(self, owner: Any, name: str) -> None:
        plain = getattr(owner, name)

        def call(store: Any, *arguments: Any) -> Any:
            self.calls += 1
            return plain(store, *arguments)

        setattr(owner, name, call)

    def _make_manifest(self, group: Any) -> Any:
        try:
            from plugin.weights.lane import bucket_sizes
            from plugin.weights.manifest import Manifest
        except ImportError:  # a checkout from before there were any
            return None
        sizes = bucket_sizes(group.lanes, on_gpu=False)
        if self._place.get("bucket"):
            sizes = (self._place["bucket"],) * 2
        return Manifest.of(self._tensors, *sizes)

    def plain(self) -> None:
        if self._plain is not None:
            options = self._dist.BroadcastOptions()
            options.rootRank, options.rootTensor = 0, 0
            self._plain.broadcast([self._bytes], options).wait()

    def transfer(self, version: int) -> None:
        if self._sends:
            more = () if self._manifest is None else (self._manifest,)
            self._member.send(version, list(self._tensors), *more)
            return
        self._member.barrier(version)

        def take(bucket: Any) -> None:
            for name, tensor in bucket:
                self._targets[name].copy_(tensor)

        self._member.receive(version, take)

    def answer(self, command: list[Any]) -> dict[str, Any]:
        Path("/proc/self/clear_refs").write_text("5")
        before, cpu, began = _memory("VmRSS"), time.process_time(), time.perf_counter()
        self.calls = self.copied = 0
        self.plain() if command[0] == "plain" else self.transfer(command[1])
        seconds = time.perf_counter() - began
        found = {
            "seconds": seconds,
            "cpu": time.process_time() - cpu,
            "calls": self.calls,
            "copied": self.copied,
        }
        return found | {"grown": _memory("VmHWM") - before}


def _memory(field: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    raise KeyError(field)


def _serve(place: dict[str, Any]) -> None:
    member = _Member(place)
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(member.answer(json.loads(line))), flush=True)


class _Side:
    """The processes of one tree: senders, then engines."""

    def __init__(
        self, tree: Path, kind: str, size: int, engines: int, senders: int, bucket: int
    ) -> None:
        import torch.distributed as dist

        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.total = 0
        for sender in range(senders):
            for entry in filter(None, shapes_of(kind, size, sender, senders)):
                self.total += 4 * _product(entry[1])
        place = {
            "port": self._store.port,
            "kind": kind,
            "size": size,
            "engines": engines,
            "senders": senders,
        }
        place |= {"total": self.total, "bucket": bucket}
        roles = [("sender", n) for n in range(senders)] + [("engine", n) for n in range(engines)]
        self._members = [
            subprocess.Popen(
                [
                    sys.executable,
                    __file__,
                    "--member",
                    json.dumps(place | {"role": role, "number": number}),
                ],
                env=os.environ
                | {"PYTHONPATH": str(tree), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for role, number in roles
        ]
        self._senders = senders
        for member in self._members:
            assert member.stdout is not None and member.stdout.readline().strip() == "ready"

    def measure(self, *command: Any) -> dict[str, float]:
        """Seconds until the last member is done; CPU seconds, messages of all, copies and peaks by side."""
        for member in self._members:
            assert member.stdin is not None
            member.stdin.write(json.dumps(command) + "\n")
            member.stdin.flush()
        answers = [
            json.loads(member.stdout.readline()) for member in self._members if member.stdout
        ]
        sent, received = answers[: self._senders], answers[self._senders :]
        return {
            "seconds": max(a["seconds"] for a in answers),
            "cpu": sum(a["cpu"] for a in answers),
            "messages": sum(a["calls"] for a in answers),
            "sender_copies": sum(a["copied"] for a in sent) / self.total,
            "sender_mb": max(a["grown"] for a in sent),
            "engine_mb": max(a["grown"] for a in received),
        }

    def close(self) -> None:
        for member in self._members:
            assert member.stdin is not None
            member.stdin.close()
            member.wait(60)


def _product(shape: tuple[int, ...]) -> int:
    result = 1
    for size in shape:
        result *= size
    return result


def measure(
    kind: str,
    size: int,
    engines: int,
    senders: int,
    *,
    old: Path | None = None,
    rounds: int = 5,
    bucket: int = 0,
) -> list[dict[str, Any]]:
    """One row per tree; the median of some transfers after a first one, which also makes connections."""
    trees = {"new": _ROOT} | ({} if old is None else {"old": old})
    sides = {
        name: _Side(tree, kind, size, engines, senders, bucket) for name, tree in trees.items()
    }
    found: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    plain: list[dict[str, float]] = []
    for version in range(1 + rounds):
        for name, side in sides.items():
            found[name].append(side.measure("transfer", version))
            plain.append(side.measure("plain"))
    total = next(iter(sides.values())).total
    for side in sides.values():
        side.close()
    plain = plain[len(sides) :]
    rows = []
    for name, several in found.items():
        first, later = several[0], several[1:]
        row = {key: statistics.median(one[key] for one in later) for key in first}
        row |= {key: max(one[key] for one in several) for key in ("sender_mb", "engine_mb")}
        for key in ("seconds", "cpu"):
            base = statistics.median(one[key] for one in plain)
            row[f"plain_{key}"], row[f"share_{key}"] = base, base / row[key]
        shape = {
            "kind": kind,
            "mb": round(total / _MB),
            "engines": engines,
            "senders": senders,
            "tree": name,
        }
        rows.append(shape | row)
    return rows


#: Kind, size, engines, senders.
_ROWS = [
    *(("dense", size, 1, 1) for size in _DENSE),
    *(("dense", 540, engines, 1) for engines in (2, 4)),
    *(("dense", 540, 1, senders) for senders in (2, 4)),
    ("dense", 540, 4, 4),
    *(("moe", size, 1, 1) for size in _MOE),
    *(("moe", 530, 1, senders) for senders in (2, 4)),
    ("moe", 530, 4, 4),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--member", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--old", type=Path, help="checkout of another commit")
    parser.add_argument("--only", help="kind:mb:engines:senders, several with commas")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bucket", type=int, default=0, help="bytes of a bucket")
    options = parser.parse_args()
    if options.member is not None:
        _serve(options.member)
        return
    rows: Any = _ROWS
    if options.only:
        rows = [
            (k, int(a), int(b), int(c))
            for k, a, b, c in (one.split(":") for one in options.only.split(","))
        ]
    for row in rows:
        for found in measure(*row, old=options.old, rounds=options.rounds, bucket=options.bucket):
            print(
                json.dumps(
                    {k: round(v, 4) if isinstance(v, float) else v for k, v in found.items()}
                ),
                flush=True,
            )


if __name__ == "__main__":
    main()
