"""The systems that are compared: one class each, all with the five methods of `Peer`."""

from __future__ import annotations

from comparison.peers.base import Peer
from comparison.peers.dcp import DcpAsync, DcpSync
from comparison.peers.moonclip_store import Moonclip
from comparison.peers.safetensors_file import Safetensors
from comparison.peers.torch_file import TorchSave
from comparison.peers.varvite_repository import Varvite

PEERS: dict[str, type[Peer]] = {
    peer.name: peer for peer in (Varvite, TorchSave, DcpSync, DcpAsync, Safetensors, Moonclip)
}

__all__ = ["PEERS", "Peer"]
