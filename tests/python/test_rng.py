"""Random number generators: captured without a draw, restored exactly or not at all."""

from __future__ import annotations

import copy
import pickle
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from varvite.errors import CorruptionError, InvalidInputError
from varvite.training import rng

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BIT_GENERATORS = ["MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64"]


@pytest.fixture(autouse=True)
def _no_generators_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(rng, "_registered", {})
    state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.set_rng_state(state[2])


def draws() -> list[float]:
    """Draws from every global generator, twice from those that keep half a pair for the next call."""
    return [
        random.random(),
        random.gauss(0, 1),
        np.random.random(),
        np.random.standard_normal(),
        torch.rand(()).item(),
        *torch.randn(3, dtype=torch.float64).tolist(),
    ]


def states() -> list[bytes]:
    return [
        pickle.dumps(random.getstate()),
        pickle.dumps(np.random.get_state()),
        torch.get_rng_state().numpy().tobytes(),
    ]


@pytest.mark.parametrize("before", [0, 1, 2, 700])
def test_global_streams_go_on_where_they_were_captured(before: int, round_trip: Any) -> None:
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    for _ in range(before):
        draws()
    saved = round_trip(rng.capture())
    expected = [draws() for _ in range(3)]
    random.seed(7)
    np.random.seed(8)
    torch.manual_seed(9)
    assert rng.restore(saved) == []
    assert [draws() for _ in range(3)] == expected


def test_capture_draws_nothing_and_later_draws_do_not_change_it() -> None:
    before = states()
    saved = rng.capture()
    assert states() == before
    kept = copy.deepcopy(saved)
    draws()
    assert saved["python"] == kept["python"]
    assert saved["numpy"]["state"]["key"].tolist() == kept["numpy"]["state"]["key"].tolist()
    assert torch.equal(saved["torch"], kept["torch"])
    rng.restore(saved)
    assert states() == before


def test_restore_does_not_tie_the_generators_to_the_nest() -> None:
    saved = rng.capture()
    rng.restore(saved)
    first = draws()
    draws()
    rng.restore(saved)
    assert draws() == first


def test_half_of_a_pair_of_normals_is_part_of_the_state(round_trip: Any) -> None:
    random.gauss(0, 1)
    np.random.standard_normal()
    torch.randn((), dtype=torch.float64)
    saved = round_trip(rng.capture())
    assert saved["python"]["gauss"] is not None
    assert saved["numpy"]["has_gauss"] == 1
    expected = random.gauss(0, 1), np.random.standard_normal()
    rng.restore(saved)
    assert (random.gauss(0, 1), np.random.standard_normal()) == expected


@pytest.mark.parametrize("name", BIT_GENERATORS)
@pytest.mark.parametrize("before", [0, 1, 3])
def test_registered_numpy_generator_goes_on(name: str, before: int, round_trip: Any) -> None:
    generator = np.random.Generator(getattr(np.random, name)(5))
    rng.register("augment", generator)
    for _ in range(before):
        generator.integers(0, 100, dtype=np.uint32)  # uses half of a 64-bit word
    saved = round_trip(rng.capture())
    expected = [int(generator.integers(0, 1 << 30, dtype=np.uint32)) for _ in range(5)]
    assert rng.restore(saved) == []
    assert [int(generator.integers(0, 1 << 30, dtype=np.uint32)) for _ in range(5)] == expected


def test_registered_torch_and_python_generators_go_on(round_trip: Any) -> None:
    shuffle, choice = torch.Generator().manual_seed(4), random.Random(5)
    rng.register("shuffle", shuffle)
    rng.register("choice", choice)
    torch.rand(3, generator=shuffle)
    saved = round_trip(rng.capture())
    expected = torch.rand(3, generator=shuffle).tolist(), choice.random(), torch.rand(()).item()
    assert rng.restore(saved) == []
    assert (torch.rand(3, generator=shuffle).tolist(), choice.random(), torch.rand(()).item()) == expected


def test_ranks_have_streams_of_their_own(round_trip: Any) -> None:
    # NVIDIA/Megatron-LM#6858: one rank's stream was kept for all.
    saved, expected = [], []
    for rank in range(3):
        random.seed(100 + rank)
        torch.manual_seed(100 + rank)
        saved.append(round_trip(rng.capture()))
        expected.append((random.random(), torch.rand(()).item()))
    assert len(set(expected)) == 3
    for rank in (2, 0, 1):
        rng.restore(saved[rank])
        assert (random.random(), torch.rand(()).item()) == expected[rank]


# What is not there


def test_generators_of_one_side_only_are_listed(round_trip: Any) -> None:
    rng.register("gone", random.Random(1))
    rng.register("other", random.Random(1))
    saved = round_trip(rng.capture())
    rng.unregister("gone")
    rng.register("other", torch.Generator())
    rng.register("new", random.Random(1))
    assert rng.restore(saved) == [
        "generator `gone`: not registered here",
        "generator `other`: here it is one of torch, and was saved as one of python",
        "generator `new`: the snapshot has no state of it",
    ]


def test_generator_over_another_algorithm_is_listed_and_left(round_trip: Any) -> None:
    rng.register("g", np.random.Generator(np.random.PCG64(1)))
    saved = round_trip(rng.capture())
    replacement = np.random.Generator(np.random.Philox(1))
    rng.register("g", replacement)
    expected = copy.deepcopy(replacement).random()
    assert rng.restore(saved) == ["generator `g`: here it is a `Philox`, and was a `PCG64`"]
    assert replacement.random() == expected


def test_device_that_is_not_there_is_listed() -> None:
    saved = rng.capture()
    saved["devices"] = {"cuda:97": torch.zeros(16, dtype=torch.uint8)}
    assert rng.restore(saved)[:1] == ["cuda:97: no such device here"]


class FakeAccelerator:
    """Two devices with a state of 16 bytes each, as the library modules of torch offer them."""

    def __init__(self, *, used: bool) -> None:
        self.used = used
        self.states = [torch.full((16,), index, dtype=torch.uint8) for index in range(2)]

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return self.used

    def device_count(self) -> int:
        return len(self.states)

    def get_rng_state(self, index: int) -> torch.Tensor:
        self.used = True
        return self.states[index].clone()

    def set_rng_state(self, state: torch.Tensor, index: int) -> None:
        self.states[index] = state.clone()


def test_every_device_in_use_is_captured_and_restored(monkeypatch: Any, round_trip: Any) -> None:
    accelerator = FakeAccelerator(used=True)
    monkeypatch.setattr(torch, "xpu", accelerator)
    saved = round_trip(rng.capture())
    assert {name: saved["devices"][name].unique().tolist() for name in ("xpu:0", "xpu:1")} == {
        "xpu:0": [0],
        "xpu:1": [1],
    }
    accelerator.states = [torch.full((16,), 9, dtype=torch.uint8) for _ in range(2)]
    assert [line for line in rng.restore(saved) if line.startswith("xpu")] == []
    assert [state.unique().tolist() for state in accelerator.states] == [[0], [1]]


def test_device_that_the_snapshot_lacks_is_listed(monkeypatch: Any) -> None:
    saved = rng.capture()
    monkeypatch.setattr(torch, "xpu", FakeAccelerator(used=True))
    assert [line for line in rng.restore(saved) if line.startswith("xpu")] == [
        "xpu:0: the snapshot has no state of it",
        "xpu:1: the snapshot has no state of it",
    ]


def test_accelerator_that_is_not_in_use_is_left_alone(monkeypatch: Any) -> None:
    accelerator = FakeAccelerator(used=False)
    monkeypatch.setattr(torch, "xpu", accelerator)
    assert not any(name.startswith("xpu") for name in rng.capture().get("devices", {}))
    assert not accelerator.used


def test_damaged_state_of_a_device_is_corrupt(monkeypatch: Any) -> None:
    accelerator = FakeAccelerator(used=True)
    monkeypatch.setattr(torch, "xpu", accelerator)
    saved = rng.capture()
    saved["devices"]["xpu:1"] = torch.zeros(15, dtype=torch.uint8)
    with pytest.raises(CorruptionError, match="xpu:1"):
        rng.restore(saved)
    assert accelerator.states[0].unique().tolist() == [0]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_streams_go_on(round_trip: Any) -> None:
    torch.rand(3, device="cuda")
    saved = round_trip(rng.capture())
    expected = torch.rand(3, device="cuda").tolist()
    assert rng.restore(saved) == []
    assert torch.rand(3, device="cuda").tolist() == expected


def test_only_imported_libraries_are_captured(run_python: Any) -> None:
    program = """
import sys
from varvite.training import rng
saved = rng.capture()
print(sorted(saved), sorted({"torch", "numpy"} & set(sys.modules)))
"""
    assert run_python(program) == "['python'] []"


def test_library_that_is_not_installed_is_listed(run_python: Any) -> None:
    program = """
import sys
sys.modules["torch"] = sys.modules["numpy"] = sys.modules["numpy.random"] = None
from varvite.training import rng
saved = {**rng.capture(), "numpy": {"bit_generator": "MT19937"}, "torch": None, "devices": {"cuda:0": None}}
print(*rng.restore(saved), sep="\\n")
"""
    assert run_python(program).splitlines() == [
        "numpy: the library is not installed",
        "torch: the library is not installed",
        "cuda:0: torch is not installed",
    ]


# Damage


def put(*path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def damage(nest: dict[str, Any]) -> None:
        for part in path[:-1]:
            nest = nest[part]
        nest[path[-1]] = value

    return damage


DAMAGE = {
    "unknown entry": put("more", value=1),
    "python is no dict": put("python", value=[1]),
    "python lacks words": lambda nest: nest["python"].pop("words"),
    "python version": put("python", "version", value=9),
    "python words are short": put("python", "words", value=b"\0" * 2496),
    "python words are text": put("python", "words", value="x" * 2500),
    "python position": put("python", "words", value=b"\xff" * 2500),
    "python gauss": put("python", "gauss", value="x"),
    "numpy is no dict": put("numpy", value=3),
    "numpy algorithm": put("numpy", "bit_generator", value="os.system"),
    "numpy algorithm is a list": put("numpy", "bit_generator", value=["MT19937"]),
    "numpy position": put("numpy", "state", "pos", value=625),
    "numpy position below": put("numpy", "state", "pos", value=-1),
    "numpy position is a float": put("numpy", "state", "pos", value=1.0),
    "numpy key is short": put("numpy", "state", "key", value=np.zeros(10, np.uint32)),
    "numpy key is wide": put("numpy", "state", "key", value=np.zeros(624, np.uint64)),
    "numpy state": put("numpy", "state", value=None),
    "numpy gauss": put("numpy", "gauss", value=None),
    "numpy has_gauss": put("numpy", "has_gauss", value=2),
    "torch is bytes": put("torch", value=b"x"),
    "torch is short": put("torch", value=torch.zeros(10, dtype=torch.uint8)),
    "torch is zeros": lambda nest: nest["torch"].zero_(),
    "torch dtype": lambda nest: nest.update(torch=nest["torch"].to(torch.int32)),
    "devices are a list": put("devices", value=[1]),
    "generators are a list": put("generators", value=[1]),
    "generator has no state": put("generators", "t", value={}),
    "generator of another library": put("generators", "t", value={"jax": 1}),
    "torch generator": put("generators", "t", "torch", value=torch.zeros(10, dtype=torch.uint8)),
    "python generator": put("generators", "p", "python", "words", value=b""),
    "pcg state is too large": put("generators", "PCG64", "numpy", "state", "state", value=1 << 128),
    "pcg state is negative": put("generators", "PCG64", "numpy", "state", "inc", value=-1),
    "pcg spare": put("generators", "PCG64", "numpy", "uinteger", value=1 << 32),
    "pcg has_uint32": put("generators", "PCG64", "numpy", "has_uint32", value=7),
    "philox position": put("generators", "Philox", "numpy", "buffer_pos", value=-1),
    "philox position above": put("generators", "Philox", "numpy", "buffer_pos", value=5),
    "philox buffer": put("generators", "Philox", "numpy", "buffer", value=np.zeros(3, np.uint64)),
    "philox key": put("generators", "Philox", "numpy", "state", "key", value=np.zeros(3, np.uint64)),
    "sfc state": put("generators", "SFC64", "numpy", "state", "state", value=np.zeros(4, np.int64)),
    "twister position": put("generators", "MT19937", "numpy", "state", "pos", value=700),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_found_before_anything_is_touched(case: str) -> None:
    for name in BIT_GENERATORS:
        rng.register(name, np.random.Generator(getattr(np.random, name)(5)))
    rng.register("t", torch.Generator())
    rng.register("p", random.Random(1))
    saved = rng.capture()
    assert rng.restore(saved) == []
    DAMAGE[case](saved)
    draws()
    before = states()
    with pytest.raises(CorruptionError) as caught:
        rng.restore(saved)
    assert caught.value.object == "structure"
    assert caught.value.expected
    assert states() == before


def test_nest_that_is_no_dict_is_corrupt() -> None:
    with pytest.raises(CorruptionError):
        rng.restore([1])  # type: ignore[arg-type]


# Registering


@pytest.mark.parametrize(
    ("name", "generator", "what"),
    [
        ("", random.Random(1), "name"),
        (3, random.Random(1), "name"),
        ("g", object(), "generator"),
        ("g", None, "generator"),
        ("g", random.SystemRandom(), "generator"),
        ("g", np.random.PCG64(1), "generator"),
    ],
)
def test_only_generators_whose_state_can_be_saved_are_registered(
    name: Any, generator: Any, what: str
) -> None:
    with pytest.raises(InvalidInputError) as caught:
        rng.register(name, generator)
    assert caught.value.what == what
    assert "generators" not in rng.capture()


def test_unknown_generator_can_not_be_unregistered() -> None:
    rng.register("a", random.Random(1))
    with pytest.raises(InvalidInputError, match="unknown generator `b`: registered are a"):
        rng.unregister("b")
    rng.unregister("a")
    assert "generators" not in rng.capture()


# Derived states, and draws that leave no trace


def test_derived_streams_differ_by_seed_rank_step_and_generator() -> None:
    rng.register("shuffle", torch.Generator())
    rng.register("augment", np.random.default_rng())
    rng.register("choice", random.Random())

    def numbers(*arguments: int) -> list[float]:
        names = rng.derive(*arguments)
        assert names == [*("python", "numpy", "torch"), *_GENERATORS]
        shuffle, augment, choice = (rng._registered[name] for name in ("shuffle", "augment", "choice"))
        drawn = torch.rand((), generator=shuffle).item()
        return [*draws(), drawn, augment.random(), choice.random()]

    rows = [numbers(*arguments) for arguments in ((0, 0, 1), (0, 1, 0), (1, 0, 0), (0, 0, 0))]
    assert all(len(set(column)) == 4 for column in zip(*rows, strict=True))
    assert len(set(rows[0])) == len(rows[0])
    np.random.standard_normal()  # a half of a pair that is kept must not survive
    random.gauss(0, 1)
    assert numbers(0, 0, 0) == rows[3]


_GENERATORS = ["generators.shuffle", "generators.augment", "generators.choice"]


@pytest.mark.parametrize("arguments", [(-1, 0, 0), (0, True, 0), (0, 0, 1.5)])
def test_derive_refuses_what_is_no_number(arguments: Any) -> None:
    before = states()
    with pytest.raises(InvalidInputError):
        rng.derive(*arguments)
    assert states() == before


def test_what_is_drawn_unmoved_leaves_no_trace() -> None:
    generator = torch.Generator()
    rng.register("shuffle", generator)
    before = states(), generator.get_state().tolist()

    def fail() -> None:
        draws()
        torch.rand(3, generator=generator)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), rng.unmoved():
        fail()
    assert (states(), generator.get_state().tolist()) == before


def test_only_the_one_draw_after_a_restore_is_taken_back() -> None:
    def draw(generator: torch.Generator | None = None) -> int:
        return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())

    own = torch.Generator().manual_seed(3)
    rng.register("loader", own)
    rng.restore(rng.capture())
    before = states(), own.get_state().tolist()
    value = draw()
    assert not rng.take_back_draw(value + 1)
    assert rng.take_back_draw(value)
    assert rng.take_back_draw(draw(own))
    assert (states(), own.get_state().tolist()) == before
    value = draw()
    torch.rand(())
    moved = states()
    assert not rng.take_back_draw(value)
    assert states() == moved
    rng.unregister("loader")
    assert not rng.take_back_draw(draw(own))
