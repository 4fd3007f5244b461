"""The systems that are compared: one class each, all with the methods of `Peer`."""

from __future__ import annotations

from comparison.peers.base import Peer
from comparison.peers.dcp import DcpAsync, DcpSync
from comparison.peers.moonclip_store import Moonclip
from comparison.peers.safetensors_file import Safetensors
from comparison.peers.torch_file import TorchSave
from comparison.peers.varvite_repository import (
    CompressionFast,
    CompressionMax,
    CompressionNone,
    OptimizerCast,
    StagingCow,
    StagingOverlap,
    Varvite,
)


def _by_name(*systems: type[Peer]) -> dict[str, type[Peer]]:
    return {system.name: system for system in systems}


CONFIGURATIONS = _by_name(
    StagingCow, StagingOverlap, CompressionNone, CompressionFast, CompressionMax, OptimizerCast
)
OTHERS = _by_name(TorchSave, DcpSync, DcpAsync, Safetensors, Moonclip)
# All of them, in the order of the tables.
PEERS = _by_name(Varvite) | CONFIGURATIONS | OTHERS

__all__ = ["CONFIGURATIONS", "OTHERS", "PEERS", "Peer"]
