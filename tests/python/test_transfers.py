"""Device tensors on their way to the engine: order of copies, waits and reads, on a stand-in for a device.

The stand-in counts tensors that are not contiguous as its own, and works as devices are allowed to: work on
a stream is done only when somebody waits for it.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
import torch

from varvite import CheckpointManager
from varvite.errors import StoreError
from varvite.staging import LEAST_LATER_BYTES, CowStaging, OverlapStaging, Staging
from varvite.transfers import PinnedPool, Transfers

if TYPE_CHECKING:
    from collections.abc import Iterator

LARGE = LEAST_LATER_BYTES // 4


class Stream:
    """Work in order; nothing of it is done before somebody waits."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.work: list[Any] = []
        self.done_count = 0

    def run_until(self, count: int) -> None:
        while self.done_count < count:
            self.done_count += 1
            self.work[self.done_count - 1]()

    def record_event(self) -> Event:
        return Event(self, len(self.work))

    def wait_event(self, event: Event) -> None:
        self.work.append(event.synchronize)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())


class Event:
    def __init__(self, stream: Stream, count: int) -> None:
        self.stream = stream
        self.count = count

    def synchronize(self) -> None:
        self.stream.run_until(self.count)


class FakeDevice:
    """A device that has two streams."""

    def __init__(self) -> None:
        self.training = Stream("training")
        self.side: Stream | None = None
        self.stream = self.training
        self.pinned_bytes: list[int] = []
        self.fails = False

    def has(self, tensor: torch.Tensor) -> bool:
        return getattr(tensor, "on_device", False)

    def pinned(self, length_bytes: int) -> torch.Tensor:
        self.pinned_bytes.append(length_bytes)
        return torch.zeros(length_bytes, dtype=torch.uint8)

    def current_stream(self, device: torch.device) -> Stream:
        return self.stream

    def new_stream(self, device: torch.device) -> Stream:
        assert self.side is None, "one side stream is enough"
        self.side = Stream("side")
        return self.side

    @contextlib.contextmanager
    def on_stream(self, stream: Stream) -> Iterator[None]:
        self.stream = stream
        yield
        self.stream = self.training

    def train(self, work: Any) -> None:
        """Has the training stream do something, and nobody wait for it."""
        self.training.work.append(work)

    def finish_training(self) -> None:
        self.training.run_until(len(self.training.work))


class OnDevice(torch.Tensor):
    """Marks the tensors of the stand-in; its copies are work of the current stream."""

    device_layer: Any = None
    on_device = True

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.copy_ and isinstance(args[1], OnDevice):
            target, source = args[0], args[1].as_subclass(torch.Tensor)
            assert (kwargs or {}).get("non_blocking"), "a copy that blocks"
            cls.device_layer.stream.work.append(lambda: target.copy_(source))
            return target
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    layer = FakeDevice()
    monkeypatch.setattr(OnDevice, "device_layer", layer)
    return layer


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_subclass(OnDevice)


def test_the_training_stream_waits_only_for_what_nobody_promised(device):
    transfers = Transfers(device)
    parameter, buffer = on_device(torch.ones(8)), on_device(torch.ones(6))
    device.train(lambda: parameter.as_subclass(torch.Tensor).fill_(2))
    transfers.begin([parameter])
    brought = {name: transfers._bring(value) for name, value in (("p", parameter), ("b", buffer))}
    transfers.launch()
    assert brought["b"].tolist() == [0] * 6, "nobody has waited"

    # The next step: the forward pass writes the buffer, and the parameter after the hook has joined.
    device.train(lambda: buffer.as_subclass(torch.Tensor).fill_(9))
    device.finish_training()
    assert brought["b"].tolist() == [1] * 6
    assert brought["p"].tolist() == [0] * 8, "what is promised is not waited for"
    transfers.join()
    device.train(lambda: parameter.as_subclass(torch.Tensor).fill_(9))
    device.finish_training()
    transfers.arrive()
    assert brought["p"].tolist() == [2] * 8
    assert brought["b"].tolist() == [1] * 6
    assert parameter.tolist() == [9] * 8


def test_sources_are_held_until_they_have_arrived(device):
    transfers = Transfers(device)
    transfers.begin()
    transfers._bring(on_device(torch.ones(4)))
    transfers.launch()
    assert [copy.source.nbytes for copy in transfers._copies] == [16]
    transfers.arrive()
    assert transfers._copies == []
    # A save whose thread never asked for them: the next one does.
    target = transfers._bring(on_device(torch.full((4,), 3.0)))
    transfers.launch()
    transfers.begin()
    assert target.tolist() == [3.0] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e5m2])
def test_dtypes_and_shapes_come_through(device, dtype):
    transfers = Transfers(device)
    transfers.begin()
    values = torch.arange(12).reshape(3, 1, 4).to(dtype)
    brought = transfers._bring(on_device(values))
    scalar = transfers._bring(on_device(values[0, 0, 1].clone()))
    assert transfers._bring(on_device(torch.zeros(3, 0))) is None
    assert transfers._bring(torch.zeros(3)) is None
    transfers.launch()
    transfers.arrive()
    assert (brought.dtype, brought.shape) == (dtype, (3, 1, 4))
    assert torch.equal(brought.view(torch.uint8), values.view(torch.uint8))
    assert (scalar.shape, scalar.item()) == ((), values[0, 0, 1].item())


def test_pinned_memory_is_used_again_and_bounded_by_the_state(device):
    pool = PinnedPool(device, slab_bytes=1000)
    for _ in range(3):
        pool.restart()
        taken = [pool.take(length) for length in (400, 500, 100, 3000, 1)]
        for value, block in enumerate(taken):
            block.fill_(value)
        assert [(block.numel(), int(block.max()), int(block.min())) for block in taken] == [
            (400, 0, 0),
            (500, 1, 1),
            (100, 2, 2),
            (3000, 3, 3),
            (1, 4, 4),
        ]
    assert device.pinned_bytes == [1000, 1000, 3000]
    pool.restart()
    pool.take(10)
    assert pool.held_bytes == 5000
    pool.restart()
    assert pool.held_bytes == 1000


class NotContiguous(FakeDevice):
    """Tensors that are not contiguous in CPU memory stand for those of a device."""

    def __init__(self) -> None:
        super().__init__()
        self.copied: list[str] = []

    def has(self, tensor: torch.Tensor) -> bool:
        return tensor.dim() == 2 and tensor.is_contiguous() and tensor.shape[1] == LARGE

    @contextlib.contextmanager
    def on_stream(self, stream: Stream) -> Iterator[None]:
        yield


@pytest.mark.parametrize("kind", [Staging, CowStaging, OverlapStaging])
def test_the_engine_reads_what_arrived_in_place(tmp_path, kind):
    with CheckpointManager(tmp_path) as manager:
        manager._staging = kind(Transfers(NotContiguous()))
        columns = torch.randn(LARGE, 4)
        for step in range(3):
            columns.add_(1)
            expected = columns.clone()
            manager.save(step, {"columns": columns.t(), "other": torch.ones(3)})
            columns.mul_(2)
            assert torch.equal(manager.load(step)["columns"], expected.t())
        assert manager.verify().ok


def test_a_copy_that_fails_on_the_device_fails_the_save_and_no_step(tmp_path):
    class Lost(Transfers):
        def arrive(self) -> None:
            if self._copies:
                self._copies = []
                raise RuntimeError("the device is gone")

    with CheckpointManager(tmp_path) as manager:
        manager._staging = OverlapStaging(Lost(NotContiguous()))
        handle = manager.save(0, {"columns": torch.randn(LARGE, 4).t()})
        handle.wait_copied(60)
        with pytest.raises(StoreError, match=r"copy tensors from.*the device is gone"):
            manager.flush()


cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@cuda
@pytest.mark.parametrize("staging", ["copy", "cow", "overlap"])
def test_training_on_a_gpu_goes_on_at_once(tmp_path, staging):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.BatchNorm1d(4096)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        model(torch.randn(64, 1024, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with CheckpointManager(tmp_path, staging=staging) as manager:
        for number in range(10):
            expected = {name: value.clone() for name, value in model.state_dict().items()}
            manager.save(number, model=model, optimizer=optimizer)
            for _ in range(3):
                step()
            loaded = manager.load(number)["model"]
            for name, value in expected.items():
                assert torch.equal(loaded[name], value.cpu()), (number, name)


@cuda
def test_pinned_memory_of_a_gpu_is_pinned_and_used_again(tmp_path):
    state = {"t": torch.arange(1 << 20, device="cuda"), "column": torch.ones(4, 1 << 16, device="cuda").t()}
    with CheckpointManager(tmp_path, staging="overlap") as manager:
        for step in range(3):
            manager.save(step, state)
            assert torch.equal(manager.load(step)["t"], torch.arange(1 << 20))
        pool = manager._staging._transfers._pool
        blocks = [block for kept in (pool._idle, pool._used) for rows in kept.values() for block in rows]
        assert blocks
        assert all(block.is_pinned() for block in blocks)
        assert len({block.data_ptr() for block in blocks}) == len(blocks)


@cuda
def test_a_save_inside_of_a_capture_is_refused(tmp_path):
    from varvite.errors import InvalidInputError

    with CheckpointManager(tmp_path, staging="overlap") as manager:
        graph, tensor = torch.cuda.CUDAGraph(), torch.zeros(8, device="cuda")
        with torch.cuda.graph(graph):
            tensor.add_(1)
            with pytest.raises(InvalidInputError, match="captured"):
                manager.save(0, {"t": tensor})
