"""Every error this package raises on purpose.

A message states the value that was found, the constraint it broke and what to do about it. The
classes hold nothing but their message, so they survive pickling between Ray actors and the driver.
"""

import re


def shortened(message: str) -> str:
    """A message for a person, in which a value of thousands of digits is cut."""
    return re.sub(
        r"\S{500,}", lambda long: f"{long[0][:60]}...({len(long[0])} characters)", message
    )


class MegatronTisError(Exception):
    """Base of all errors of this package."""


class ConfigError(MegatronTisError, ValueError):
    """A flag, a YAML key or a combination of them cannot work."""


class HookLoadError(MegatronTisError):
    """A function named by import path cannot be found, imported, called or trusted."""


class BatchError(MegatronTisError, ValueError):
    """Data of a batch breaks its contract; names the field, the sample and the position.

    on_every_rank: all ranks that share the work at hand raise one, so nobody waits for another
    """

    on_every_rank = False


class ReplayError(MegatronTisError):
    """Routes of a MoE replay would be ignored or misaligned."""


class ParallelError(MegatronTisError, RuntimeError):
    """A rank failed; carries the traceback of the rank that failed first."""


class ActorLost(ParallelError):
    """A process of the job died or stopped answering; its work can be done again elsewhere."""


class SenderLost(ActorLost):
    """Data did not arrive because the process that sent it is gone."""


class BatchLost(SenderLost):
    """Samples, or what was computed of them, were on a node that is gone."""


class TransferError(MegatronTisError):
    """Weights on their way were cut off by a lost or hung process; they can be sent again."""


class DeltaError(TransferError):
    """A delta did not lead to the trainer's weights; a full version does."""


class TrainingError(MegatronTisError):
    """Training would go on without changing the weights."""


class FindingError(MegatronTisError):
    """The job found an unmistakable fault of its own and ended; the message is the finding."""


class WeightError(MegatronTisError):
    """Weights do not fit the model, or carry an unexpected version."""


class CheckpointError(MegatronTisError):
    """A checkpoint is missing, incomplete, foreign or corrupt."""


class EngineError(MegatronTisError):
    """A rollout engine failed, timed out or answered something unusable."""


class ClusterError(MegatronTisError):
    """The cluster cannot hold the job that was asked for."""
