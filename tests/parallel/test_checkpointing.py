"""A resumed run is the unbroken run: on other layouts, after kill -9, and never from a damaged directory."""

from __future__ import annotations

import json
import logging
import os
import pickle
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from plugin.batch_types import RolloutBatch
from plugin.config import TrainerConfig
from plugin.errors import CheckpointError, ParallelError
from plugin.megatron_backend.checkpoint import directory as checkpoint_directory
from plugin.megatron_backend.checkpoint import saving as checkpointing
from plugin.megatron_backend.parallel_groups import ParallelGroups
from plugin.megatron_backend.trainer import MegatronTrainer, StepResult
from tests.parallel.rank_pool import RankError, RankPool
from tests.parallel.tiny_models import hf_state_dict, tiny_qwen3, tiny_qwen3_moe
from tests.parallel.training_jobs import uneven_batch

TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
VPP2 = {**PP2, "virtual_pipeline_model_parallel_size": 2}
DP2: dict[str, int] = {}
EP2 = {"expert_model_parallel_size": 2}
SHARDED = {"use_distributed_optimizer": True}
BF16 = {"train_dtype": "bfloat16"}

# Names of what is saved: a model, the layout and settings of the save, and the layouts to resume on.
DENSE = tiny_qwen3()
ODD_VOCAB = tiny_qwen3(vocab_size=97)  # padded to 98 rows under TP2
TIED = tiny_qwen3(tie_word_embeddings=True)
MOE = tiny_qwen3_moe(mlp_only_layers=[0, 1])  # under PP2 the first stage owns no expert
SOURCES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "TP2": (DENSE, TP2, {}),
    "DP2 distributed optimizer": (ODD_VOCAB, DP2, SHARDED),
    "DP2 distributed optimizer bf16": (TIED, DP2, SHARDED | BF16),
    "EP2": (MOE, EP2, SHARDED),
}
USER_STATE = {"cursor": 17, "queue": [3, 1], "note": "é", "rate": 0.5, "none": None}


def batch() -> RolloutBatch:
    filled = uneven_batch(5)
    return filled.with_column("log_probs", filled.columns["rollout_log_probs"])


def new_trainer(
    groups: ParallelGroups, hf_config: Any, settings: dict[str, Any], seed: int = 1234
) -> MegatronTrainer:
    config = TrainerConfig(lr=1e-2, weight_decay=0.1, **settings)
    return MegatronTrainer(config, hf_config, groups, seed=seed)


def draws() -> list[float]:
    """One number of every generator, and two of those that keep a second Gaussian in store."""
    with get_cuda_rng_tracker().fork():
        tracked = torch.rand(()).item()
    gauss = [random.gauss(0, 1), np.random.standard_normal()]
    return [tracked, torch.rand(()).item(), random.random(), float(np.random.rand()), *gauss]


def summary(result: StepResult) -> dict[str, float]:
    return {"loss": result.metrics["loss"], "grad_norm": result.grad_norm}


def train_save_train(
    groups: ParallelGroups,
    hf_config: Any,
    weights: dict[str, Tensor],
    settings: dict[str, Any],
    root: str,
) -> dict[str, Any]:
    """Two steps, a checkpoint, two more steps: the unbroken run."""
    trainer = new_trainer(groups, hf_config, settings)
    trainer.load_hf_weights(weights)
    for _ in range(2):
        trainer.train_step(batch())
    random.gauss(0, 1), np.random.standard_normal()  # each keeps the other half of a pair in store
    # Written while the next steps are made, which must not be in it.
    saved = trainer.save_checkpoint(root, 2, USER_STATE, async_save=True)
    assert saved == Path(root) / "step_0000002"
    after = draws()
    # The first loss shows the weights, the second one Adam's moments and its count of steps.
    steps = [summary(trainer.train_step(batch())) for _ in range(2)]
    trainer.finish_checkpoint()
    return {"next": steps, "draws": after}


def resume_train(
    groups: ParallelGroups, hf_config: Any, settings: dict[str, Any], root: str, copy: str | None
) -> dict[str, Any]:
    """Load into a trainer of other weights, save again at once if asked, and take the next two steps."""
    trainer = new_trainer(groups, hf_config, settings, seed=99)
    warnings = _Recorded()
    logging.getLogger("plugin").addHandler(warnings)
    step, user_state = trainer.load_checkpoint(root)
    logging.getLogger("plugin").removeHandler(warnings)
    after = draws()
    if copy is not None:
        trainer.save_checkpoint(copy, step, user_state)
    version = trainer.version
    return {
        "next": [summary(trainer.train_step(batch())) for _ in range(2)],
        "draws": after,
        "step": step,
        "version": version,
        "user_state": user_state,
        "warnings": warnings.messages,
    }


class _Recorded(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@pytest.fixture(scope="module")
def unbroken(
    rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Path, list[dict[str, Any]]]]:
    """Directory and results of a source, computed when first asked for."""
    done: dict[str, tuple[Path, list[dict[str, Any]]]] = {}

    def compute(name: str) -> tuple[Path, list[dict[str, Any]]]:
        if name not in done:
            config, layout, settings = SOURCES[name]
            root = tmp_path_factory.mktemp("unbroken") / "checkpoints"
            arguments = (config, hf_state_dict(config), settings, str(root))
            done[name] = (root, rank_pool.run_ranks(train_save_train, 2, *arguments, **layout))
        return done[name]

    return compute


def tensors_of(root: Path, scratch: Path) -> dict[str, Tensor]:
    """Every tensor of the checkpoint of step 2, whole, by its name."""
    dcp_to_torch_save(root / "step_0000002" / "model", scratch)
    return torch.load(scratch, weights_only=True)


def assert_same_tensors(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        rows = min(len(tensor), len(second[name]))
        if len(tensor) != len(second[name]):
            assert "embedding" in name or "output_layer" in name, name
            assert rows == ODD_VOCAB.vocab_size
        assert torch.equal(tensor[:rows], second[name][:rows]), name


def assert_same_steps(
    resumed: dict[str, Any],
    expected: dict[str, Any],
    tolerances: tuple[float, float] = (1e-6, 1e-5),
) -> None:
    """Equal next steps; what layouts round differently in the first one is in the weights of the second."""
    steps = zip(resumed["next"], expected["next"], tolerances, strict=True)
    for found, wanted, tolerance in steps:
        assert found == pytest.approx(wanted, rel=tolerance, abs=0)


@pytest.mark.parametrize(
    ("source", "layout", "settings"),
    [
        pytest.param("TP2", PP2, {}, marks=pytest.mark.slow),
        ("TP2", VPP2, SHARDED),
        pytest.param("TP2", DP2, SHARDED, marks=pytest.mark.slow),
        ("DP2 distributed optimizer", TP2, {}),
        pytest.param("DP2 distributed optimizer", PP2, SHARDED, marks=pytest.mark.slow),
        pytest.param("EP2", EP2, SHARDED, marks=pytest.mark.slow),
        ("EP2", PP2, {}),
    ],
    ids=[
        "TP2 to PP2",
        "TP2 to VPP2 with the distributed optimizer",
        "TP2 to DP2 with the distributed optimizer",
        "DP2 distributed to TP2 without",
        "DP2 distributed to PP2 distributed",
        "EP2 to EP2",
        "EP2 to PP2 with a stage without experts",
    ],
)
def test_the_step_after_a_resume_is_the_step_of_the_unbroken_run(
    rank_pool: RankPool,
    unbroken: Callable[[str], tuple[Path, list[dict[str, Any]]]],
    tmp_path: Path,
    source: str,
    layout: dict[str, int],
    settings: dict[str, Any],
) -> None:
    root, expected = unbroken(source)
    arguments = (SOURCES[source][0], settings, str(root), str(tmp_path / "copy"))
    resumed = rank_pool.run_ranks(resume_train, 2, *arguments, **layout)
    for rank in (0, 1):
        assert_same_steps(resumed[rank], expected[rank])
        assert resumed[rank]["user_state"] == USER_STATE
        assert (resumed[rank]["step"], resumed[rank]["version"]) == (2, 2)
    assert_same_tensors(
        tensors_of(root, tmp_path / "a"), tensors_of(tmp_path / "copy", tmp_path / "b")
    )


@pytest.mark.parametrize("source", ["TP2", "DP2 distributed optimizer bf16"])
def test_a_resume_on_the_same_layout_is_exact_to_the_last_bit_and_random_number(
    rank_pool: RankPool,
    unbroken: Callable[[str], tuple[Path, list[dict[str, Any]]]],
    source: str,
) -> None:
    root, expected = unbroken(source)
    config, layout, settings = SOURCES[source]
    resumed = rank_pool.run_ranks(resume_train, 2, config, settings, str(root), None, **layout)
    for rank in (0, 1):
        assert resumed[rank]["next"] == expected[rank]["next"]
        assert resumed[rank]["draws"] == expected[rank]["draws"]
        assert resumed[rank]["warnings"] == []


def test_bf16_weights_and_their_float32_copies_move_to_another_layout_unchanged(
    rank_pool: RankPool,
    unbroken: Callable[[str], tuple[Path, list[dict[str, Any]]]],
    tmp_path: Path,
) -> None:
    source = "DP2 distributed optimizer bf16"
    root, expected = unbroken(source)
    arguments = (SOURCES[source][0], BF16, str(root), str(tmp_path / "copy"))
    resumed = rank_pool.run_ranks(resume_train, 2, *arguments, **PP2)
    before = tensors_of(root, tmp_path / "a")
    assert_same_tensors(before, tensors_of(tmp_path / "copy", tmp_path / "b"))
    weights = {name: tensor for name, tensor in before.items() if not name.startswith("optimizer")}
    for name, tensor in weights.items():
        copy = before[f"optimizer.state.fp32_param.{name}"]
        assert (tensor.dtype, copy.dtype) == (torch.bfloat16, torch.float32)
        # The copies carry bits that bfloat16 cannot hold, and round to the weights.
        assert torch.equal(copy.bfloat16(), tensor)
    # bfloat16 sums in another order on other stages, so the next steps agree to its precision only.
    assert_same_steps(resumed[0], expected[0], (2e-2, 2e-2))


def test_generators_on_another_layout_are_seeded_from_the_checkpoint_and_it_says_so(
    rank_pool: RankPool,
    unbroken: Callable[[str], tuple[Path, list[dict[str, Any]]]],
) -> None:
    root, expected = unbroken("TP2")
    arguments = (resume_train, 2, DENSE, {}, str(root), None)
    first, second = (rank_pool.run_ranks(*arguments, **PP2)[0] for _ in range(2))
    assert first["draws"] == second["draws"] != expected[0]["draws"]
    assert "random generators start anew" in first["warnings"][0]


def save_twice_and_stop(
    groups: ParallelGroups, weights: dict[str, Tensor], root: str, where: str, async_save: bool
) -> None:
    """Save steps 2 and 3; the second save stops at a point and waits there to be killed.

    async_save: it does so in the background, and the trainer goes on
    """
    trainer = new_trainer(groups, DENSE, {})
    trainer.load_hf_weights(weights)
    for _ in range(2):
        trainer.train_step(batch())
    trainer.save_checkpoint(root, 2, USER_STATE)
    trainer.train_step(batch())
    Path(root, f"pid_{groups.rank}").write_text(str(os.getpid()))
    module, _, name = where.rpartition(".")
    original = getattr(STOPS[module], name)

    def stop(*args: Any, **kwargs: Any) -> Any:
        if where.endswith("_write_item"):  # half of the tensors of this shard are in the file
            original(*args, **kwargs)
        Path(root, f"reached_{groups.rank}").touch()
        time.sleep(600)

    setattr(STOPS[module], name, stop)
    trainer.save_checkpoint(root, 3, USER_STATE, async_save=async_save)
    assert async_save
    trainer.train_step(batch())
    Path(root, f"trained_{groups.rank}").touch()
    time.sleep(600)


STOPS: dict[str, Any] = {
    "torch": torch.distributed.checkpoint.filesystem,
    "directories": checkpoint_directory,
}


def kill_when_reached(root: Path, async_save: bool) -> None:
    """kill -9 both ranks as soon as rank 0 stands at its stop, and both have trained on."""
    awaited = ["reached_0", *(["trained_0", "trained_1"] if async_save else [])]
    while not all((root / name).exists() for name in awaited):
        time.sleep(0.05)
    for file in root.glob("pid_*"):
        os.kill(int(file.read_text()), signal.SIGKILL)


@pytest.mark.parametrize(
    ("where", "async_save", "told"),
    [
        ("torch._write_item", True, "step_0000003.incomplete is incomplete"),
        pytest.param(
            *("directories.publish", False, "step_0000003.incomplete is incomplete"),
            marks=pytest.mark.slow,
        ),
        ("directories._mark", False, "step_0000003 is newer and complete"),
    ],
    ids=["in the background, in the middle of a shard", "before the rename", "before the marker"],
)
def test_a_save_killed_with_signal_9_leaves_the_checkpoint_before_it_usable(
    rank_pool: RankPool,
    unbroken: Callable[[str], tuple[Path, list[dict[str, Any]]]],
    tmp_path: Path,
    where: str,
    async_save: bool,
    told: str,
) -> None:
    _, expected = unbroken("TP2")
    killer = threading.Thread(target=kill_when_reached, args=(tmp_path, async_save), daemon=True)
    killer.start()
    with pytest.raises(RankError, match="died without an answer"):
        rank_pool.run_ranks(
            *(save_twice_and_stop, 2, hf_state_dict(DENSE), str(tmp_path), where, async_save), **TP2
        )
    killer.join(timeout=5)
    assert (tmp_path / "latest").read_text() == "step_0000002\n"
    copy = str(tmp_path)  # saving step 2 again replaces it, and cleans up
    resumed = rank_pool.run_ranks(resume_train, 2, DENSE, {}, str(tmp_path), copy, **TP2)
    assert resumed[0]["next"] == expected[0]["next"]
    assert told in resumed[0]["warnings"][0]
    assert not list(tmp_path.glob("*.incomplete"))


def load_each(
    groups: ParallelGroups, directories: list[str], good: str
) -> tuple[list[tuple[str, str]], dict[str, float]]:
    """(class, message) of what loading each directory raises; then a step from the good checkpoint."""
    trainer = new_trainer(groups, DENSE, {})
    raised = []
    for directory in directories:
        try:
            trainer.load_checkpoint(directory)
            raised.append(("", "loaded"))
        except Exception as error:
            raised.append((type(error).__name__, str(error)))
    trainer.load_checkpoint(good)
    return raised, summary(trainer.train_step(batch()))


class Intruder:
    """What an attacker would pickle."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, ("touch intruded",))


def reseal(directory: Path) -> None:
    """Make sizes and checksums right again, as somebody would who forges a checkpoint."""
    path = directory / "metadata.json"
    content = json.loads(path.read_text())
    names = [str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file()]
    names.remove("metadata.json")
    content["files"] = checkpoint_directory.seal_files(directory, names)
    path.write_text(json.dumps(content))


def _edit(name: str, value: Any) -> Callable[[Path], None]:
    def edit(directory: Path) -> None:
        path = directory / "metadata.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))

    return edit


def _truncate_shard(directory: Path) -> None:
    path = directory / "model" / "__1_0.distcp"
    os.truncate(path, path.stat().st_size // 2)


def _flip_a_bit(directory: Path) -> None:
    path = directory / "model" / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _foreign(directory: Path) -> None:
    """A checkpoint as Megatron-LM leaves it: its own metadata.json at the top."""
    shutil.copy(directory / "model" / "metadata.json", directory / "metadata.json")


def _intrude(directory: Path) -> None:
    (directory / "model" / ".metadata").write_bytes(pickle.dumps(Intruder()))
    reseal(directory)


def _intrude_beside_the_tensors(directory: Path) -> None:
    torch.save({"args": Intruder()}, directory / "model" / "common.pt")
    reseal(directory)


def _list_megatrons_own_object(directory: Path) -> None:
    """Without common.pt, megatron-core 0.19 unpickles an object of this name from a shard."""
    (directory / "model" / "common.pt").unlink()
    _list_an_object(directory, "common_state/shard_0_1")


def _list_an_object(directory: Path, name: str = "rng") -> None:
    path = directory / "model" / ".metadata"
    index = pickle.loads(path.read_bytes())
    index.state_dict_metadata[name] = torch.distributed.checkpoint.metadata.BytesStorageMetadata()
    path.write_bytes(pickle.dumps(index))
    reseal(directory)


def _lose_a_tensor(directory: Path) -> None:
    path = directory / "model" / ".metadata"
    index = pickle.loads(path.read_bytes())
    del index.state_dict_metadata["optimizer.state.exp_avg.output_layer.weight"]
    path.write_bytes(pickle.dumps(index))
    reseal(directory)


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no metadata": (lambda path: (path / "metadata.json").unlink(), "has no metadata.json"),
    "half metadata": (lambda path: os.truncate(path / "metadata.json", 99), "is not valid JSON"),
    "another version": (_edit("format_version", 7), "has format version 7; this release reads"),
    "another program": (_foreign, "has format None instead of"),
    "another model": (_edit("model", {"model_type": "llama"}), "model_type llama (here qwen3)"),
    "another precision": (_edit("dtype", "bfloat16"), "bfloat16 weights but the model has float32"),
    "no optimizer": (_edit("optimizer_step", None), "was saved without an optimizer"),
    "a shard too short": (_truncate_shard, "it was cut off or overwritten"),
    "a shard missing": (lambda path: (path / "model/__1_0.distcp").unlink(), "is missing"),
    "a bit flipped": (_flip_a_bit, "CRC-32 differs"),
    "no user state": (lambda path: (path / "user_state.json").unlink(), "user_state.json"),
    "code in the index": (_intrude, "cannot be read safely: it wants to build posix.system"),
    "code beside the tensors": (
        _intrude_beside_the_tensors,
        "cannot be read safely: Weights only load failed",
    ),
    "nothing beside the tensors": (_list_megatrons_own_object, "common.pt"),
    "a pickled object": (_list_an_object, "lists pickled objects (rng)"),
    "a tensor missing": (_lose_a_tensor, "optimizer.state.exp_avg.output_layer.weight"),
}


def test_a_damaged_or_foreign_directory_is_an_error_on_every_rank_and_the_trainer_survives_it(
    rank_pool: RankPool,
    unbroken: Callable[[str], tuple[Path, list[dict[str, Any]]]],
    tmp_path: Path,
) -> None:
    root, expected = unbroken("TP2")
    for name, (damage, _) in DAMAGES.items():
        damage(Path(shutil.copytree(root / "step_0000002", tmp_path / name / "step_0000002")))
    copies = [str(tmp_path / name / "step_0000002") for name in DAMAGES]
    results = rank_pool.run_ranks(load_each, 2, copies, str(root), **TP2)
    for index, (name, (_, text)) in enumerate(DAMAGES.items()):
        kinds = [raised[index][0] for raised, _ in results]
        # A rank that saw nothing wrong itself raises a ParallelError with the other's traceback.
        assert CheckpointError.__name__ in kinds, (name, results[0][0][index])
        assert set(kinds) <= {CheckpointError.__name__, ParallelError.__name__}, name
        assert all(text in raised[index][1] for raised, _ in results), (name, results[0][0][index])
    assert results[0][1] == expected[0]["next"][0]
    assert not Path("intruded").exists()


def save_with_faults(groups: ParallelGroups, root: str) -> list[str]:
    """What is raised for user states that would not come back and for a full disk; then saves that work."""
    trainer = new_trainer(groups, DENSE, {})
    messages = []

    def try_to_save(user_state: dict[str, Any]) -> None:
        try:
            trainer.save_checkpoint(root, 5, user_state)
        except (CheckpointError, ParallelError) as error:
            messages.append(str(error))

    for user_state in ({"queue": (1, 2)}, {"loss": float("nan")}, {"tensor": torch.zeros(1)}):
        try_to_save(user_state)
    for module, name in (
        (torch.distributed.checkpoint.filesystem, "_write_item"),
        (checkpointing, "save_file"),
    ):
        original = getattr(module, name)
        if groups.rank == 1:
            setattr(module, name, full_disk)
        try_to_save({})
        setattr(module, name, original)
    for step in (5, 5, 6, 7):
        trainer.save_checkpoint(root, step, {"step": step}, keep_last=2)
    # In the background it is reported by the next save, which does not begin, or when asked.
    original = torch.distributed.checkpoint.filesystem._write_item
    for report in (lambda: try_to_save({}), trainer.finish_checkpoint):
        if groups.rank == 1:
            torch.distributed.checkpoint.filesystem._write_item = full_disk
        trainer.save_checkpoint(root, 8, {}, keep_last=2, async_save=True)
        try:
            report()
        except (CheckpointError, ParallelError) as error:
            messages.append(str(error))
        torch.distributed.checkpoint.filesystem._write_item = original
    trainer.finish_checkpoint()  # nothing is under way
    # Also before the first update the optimizer's state is whole.
    assert trainer.load_checkpoint(root) == (7, {"step": 7})
    return messages


def full_disk(*_: Any, **__: Any) -> None:
    raise OSError(28, "No space left on device")


def test_a_failed_save_is_an_error_on_every_rank_and_old_checkpoints_go_when_new_ones_are_complete(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    # TP2, so that rank 1 has something to write.
    for messages in rank_pool.run_ranks(save_with_faults, 2, str(tmp_path), **TP2):
        assert "tuples become lists" in messages[0]
        assert "not JSON compliant" in messages[1]
        assert "Tensor is not JSON serializable" in messages[2]
        assert "No space left on device" in messages[3]
        assert all("No space left on device" in message for message in messages[4:])
        lines = [line for line in messages[3].splitlines() if line.startswith("writing ")]
        assert lines[0].endswith("rank 1: [Errno 28] No space left on device"), messages[3]
        assert len(messages) == 7
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["latest", "step_0000006", "step_0000007"]


def staged_bytes(groups: ParallelGroups, root: str) -> tuple[int, int]:
    """Bytes that this rank copies for a checkpoint, and those of all of its tensor files."""
    trainer = new_trainer(groups, DENSE, SHARDED | BF16)
    staged = trainer.stage_checkpoint(root, 1, {})
    copied = sum(t.data.nbytes for shards in staged.tensors.values() for t in shards)
    directory = staged.write()
    return copied, sum(file.stat().st_size for file in directory.rglob("*.distcp"))


def test_a_data_parallel_rank_copies_and_writes_its_own_share_and_gathers_nothing(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    # 2 bytes of a weight and 12 of its main weight and moments: all of it once, half on each rank.
    weights = sum(tensor.numel() for tensor in hf_state_dict(DENSE).values())
    copies = rank_pool.run_ranks(staged_bytes, 2, str(tmp_path), **DP2)
    assert sum(copied for copied, _ in copies) == 14 * weights
    assert all(copied == pytest.approx(7 * weights, rel=0.02) for copied, _ in copies)
    assert copies[0][1] >= 14 * weights
