"""Links between devices: within a node and between nodes, with their sources.

Rates are those of one direction, by device, as their makers give them: predictions from them are
upper bounds. The time of one exchange is an assumption and is printed as such. Knows no model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from quire.base.errors import SettingError
from quire.sim.hardware import THIS, Device


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """What a device receives: in 10^9 bytes per second, from its node and from other nodes.

    per_node: devices of a node. exchange_us, message_us: the time of one exchange within a node,
    and of one message between nodes, beside their bytes.
    """

    about: str
    per_node: int
    node_gb_per_s: float
    network_gb_per_s: float
    exchange_us: float
    message_us: float

    def with_rates(
        self,
        *,
        per_node: int | None = None,
        node_gb_per_s: float | None = None,
        network_gb_per_s: float | None = None,
    ) -> Links:
        """Return other links where a number is given. Raises SettingError by the flags' names."""
        for flag, value in (
            ("devices-per-node", per_node),
            ("link-gb-per-s", node_gb_per_s),
            ("network-gb-per-s", network_gb_per_s),
        ):
            if value is not None and not 0 < value < math.inf:
                raise SettingError(f"--{flag} is {value}; it must be above 0")
        if (per_node, node_gb_per_s, network_gb_per_s) == (None, None, None):
            return self
        return replace(
            self,
            about="links as given",
            per_node=per_node or self.per_node,
            node_gb_per_s=node_gb_per_s or self.node_gb_per_s,
            network_gb_per_s=network_gb_per_s or self.network_gb_per_s,
        )


def links_of(device: Device) -> Links:
    """Return the usual links of a device."""
    if device.name == THIS:
        return _THIS
    if not device.is_gpu:
        return _SOCKETS
    return next((links for name, links in _GPUS.items() if device.name.startswith(name)), _PCIE_4)


# NVIDIA H100 data sheet: NVLink 900 GB/s in both directions, 450 in one; HGX: 8 GPUs. DGX H100 data
# sheet: a 400 Gb/s InfiniBand port for each GPU.
_NVLINK_4 = Links(
    about="8 GPUs a node, NVLink 4 (450 GB/s), 400 Gb/s InfiniBand for each",
    per_node=8,
    node_gb_per_s=450.0,
    network_gb_per_s=50.0,
    exchange_us=10.0,
    message_us=10.0,
)
# NVIDIA A100 data sheet: NVLink 600 GB/s in both directions. DGX A100: a 200 Gb/s port for each.
_NVLINK_3 = Links(
    about="8 GPUs a node, NVLink 3 (300 GB/s), 200 Gb/s InfiniBand for each",
    per_node=8,
    node_gb_per_s=300.0,
    network_gb_per_s=25.0,
    exchange_us=10.0,
    message_us=10.0,
)
# PCI Express 4.0 and 5.0, 16 lanes: 31.5 and 63 GB/s in one direction; a port of 100 Gb/s a node,
# shared by its GPUs.
_PCIE_4 = Links(
    about="4 GPUs a node, PCIe 4.0 (31.5 GB/s), 100 Gb/s network for all",
    per_node=4,
    node_gb_per_s=31.5,
    network_gb_per_s=3.1,
    exchange_us=20.0,
    message_us=20.0,
)
_PCIE_5 = replace(
    _PCIE_4, about="4 GPUs a node, PCIe 5.0 (63 GB/s), 100 Gb/s network for all", node_gb_per_s=63.0
)
# Assumed: memory of the other socket is read at 60 GB/s, and nodes have a port of 100 Gb/s.
_SOCKETS = Links(
    about="2 sockets a node (60 GB/s assumed), 100 Gb/s network for both",
    per_node=2,
    node_gb_per_s=60.0,
    network_gb_per_s=6.2,
    exchange_us=3.0,
    message_us=20.0,
)
_THIS = Links(
    about="20 GB/s between ranks of this machine, a 10 Gb/s network to others like it (assumed)",
    per_node=1,
    node_gb_per_s=20.0,
    network_gb_per_s=1.25,
    exchange_us=5.0,
    message_us=50.0,
)
_GPUS = {"h100": _NVLINK_4, "h200": _NVLINK_4, "a100": _NVLINK_3, "rtx-5090": _PCIE_5}
