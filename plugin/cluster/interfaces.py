"""Over which interfaces, and how, gloo and NCCL of an actor talk to those of other actors."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct

from plugin.config import JobConfig
from plugin.config.device_defaults import nccl_environment

#: Linux's question for the address of an interface (netdevice(7)).
_SIOCGIFADDR = 0x8915
_GLOO, _NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


def interface_of(address: str) -> str | None:
    """The name of this machine's interface with the IPv4 address `address`, if there is one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None


def set_network(config: JobConfig, address: str, *, gloo_stays_here: bool) -> None:
    """Set the variables of gloo and NCCL that all members of a group must agree on.

    What the environment already says stays. gloo would take the interface that this machine's name
    resolves to, which often is loopback.

    address: of this node in Ray
    gloo_stays_here: whether gloo's groups do not leave the node
    """
    for name, value in nccl_environment(config).items():
        os.environ.setdefault(name, value)
    if config.network_interface is not None:
        os.environ.update(named_interfaces(config.network_interface))
        return
    found = interface_of(address)
    # NCCL chooses once per process, and weights may travel between nodes.
    chosen = {
        _GLOO: "lo" if gloo_stays_here else found,
        _NCCL: "lo" if config.address is None else found,
    }
    for name, interface in chosen.items():
        if interface is not None:
            os.environ.setdefault(name, named_interfaces(interface)[name])


def named_interfaces(interface: str) -> dict[str, str]:
    """The variables that have gloo and NCCL use `interface`, or several, comma-separated."""
    # NCCL takes names for beginnings of names (eth1 for eth10, too), unless told otherwise.
    exact = interface if interface.startswith(("=", "^")) else f"={interface}"
    return {_GLOO: interface, _NCCL: exact}
