"""Weight transports, one module each with sender and receiver side by side.

group: what the members of a transfer have in common; broadcast (over lanes, as manifests say), ipc:
from rank to worker; delta: what has changed, in place of tensors; announced: to servers; buckets:
through the object store; directory: on a disk that servers share.
"""

from plugin.weights.announced import ServerSender
from plugin.weights.broadcast import BroadcastReceiver, BroadcastSender
from plugin.weights.group import Receiver, Sender, WeightGroup
from plugin.weights.ipc import IpcReceiver, IpcSender


def make_sender(group: WeightGroup, number: int) -> Sender:
    """The sender of a trainer rank.

    number: with IPC its rank, otherwise its number among the ranks that send
    """
    if group.ipc_ranks:
        return IpcSender(group, number)
    return (ServerSender if group.to_servers else BroadcastSender)(group, number)


def make_receiver(group: WeightGroup, number: int, *, keeps: bool = False) -> Receiver:
    """The receiver of engine worker `number`; `keeps`: its consumer keeps the tensors."""
    return (IpcReceiver if group.ipc_ranks else BroadcastReceiver)(group, number, keeps=keeps)
