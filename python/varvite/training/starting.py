"""The two ways to begin a run from the snapshot of another: a warm start and a fork.

A resume goes on with a run, and is the manager's. A *warm start* takes weights alone and is a new run at
step 0. A *fork* takes weights, optimizer state and whatever else is asked for, keeps the hyper-parameters
that its program has set, and goes on counting where the other run was. Both read a repository that is not
the run's own, without its lock, and neither touches the random number generators.

A snapshot that a person names is the one that is read: no reference falls back here, `latest` included.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from varvite import names
from varvite.errors import CheckpointError, InvalidInputError, MismatchError, StoreError, first_lines
from varvite.facts import make_info, read_tags, reference_text
from varvite.loading import load_objects
from varvite.module_plan import SavedName, is_extra
from varvite.objects import SavedObject, SavedTree, kind_of, labels_in, module_state, read_tree, split_labels
from varvite.plain import corrupt, type_name
from varvite.plans import Problems, may_convert
from varvite.ranks import in_step
from varvite.reading import SnapshotView
from varvite.records import Mismatched, ResumeReport, SnapshotInfo
from varvite.repository import Ref, Repository
from varvite.restore import Restored, restore_objects
from varvite.state import Json, StateDict, shown_prefix, structure_names, unflatten
from varvite.tensors import describe
from varvite.training.identity import Origin, RunIdentity, read_run
from varvite.weights.rules import KeyPlan, KeyRules, plan_keys

if TYPE_CHECKING:
    from varvite._native import Engine
    from varvite.manager import CheckpointManager
    from varvite.ranks import Alone
    from varvite.settings import Settings

__all__ = ["Source", "fork_run", "plan_warm_start", "start_warm"]

Folder = str | os.PathLike[str]


@dataclass(frozen=True)
class Source:
    """A snapshot of another repository, open for reading.

    Attributes:
        path: The repository as it was given.
        settings: How it was opened.
        engine: Its engine.
        view: The snapshot.
        info: Facts of the snapshot.
    """

    path: str
    settings: Settings
    engine: Engine
    view: SnapshotView
    info: SnapshotInfo

    def origin(self, verb: str) -> Origin:
        """Returns what a run that begins here notes of it."""
        return Origin(
            verb=verb,
            path=self.path,
            repository_id=self.engine.repository_id,
            seq=self.info.seq,
            step=self.info.step,
            digest=self.info.digest,
        )

    def report(self, verb: str, restored: Restored, **more: Any) -> ResumeReport:
        """Returns the report of a restore from here."""
        return ResumeReport(
            fresh=False,
            verb=verb,
            source=self.path,
            snapshot=self.info,
            rng="untouched",
            digest=self.info.digest,
            **{**restored.fields(), **more},
        )


@contextmanager
def _opened(
    source: Folder | Repository,
    ref: Ref,
    *,
    rank: int,
    verb: str,
    ranks: Alone | None = None,
    check: Callable[[Engine, str], None] | None = None,
) -> Iterator[Source]:
    """Opens the snapshot that a person named, for the time of a block; an open manager stays open.

    Args:
        source: The other repository.
        ref: Which snapshot of it; the coordinator decides for all ranks.
        rank: Rank of this process.
        verb: What it is opened for.
        ranks: The ranks that begin together, where there are several.
        check: What may refuse to begin, from engine and path of the other repository; on the coordinator.

    Raises:
        InvalidInputError: The check refuses.
        NotARepositoryError: There is none.
        SnapshotNotFoundError: The reference names none.
        CorruptionError: The snapshot's manifest is damaged.
    """
    from varvite.manager import CheckpointManager

    with ExitStack() as stack:
        with in_step(ranks, "open the other repository"):
            if isinstance(source, Repository):
                repository, path = source, source._settings.place  # noqa: SLF001 - its path
            else:
                # Each rank reads by itself here, whatever a launcher has left in the environment.
                alone = CheckpointManager(source, read_only=True, rank=0, world_size=1)
                repository, path = stack.enter_context(alone), os.fspath(source)
            repository._must_be_open(verb)  # noqa: SLF001 - the verbs are methods of a manager, in a file of their own
            repository._settle()  # noqa: SLF001
        engine = repository._engine  # noqa: SLF001

        def choose() -> int:
            if check is not None:
                check(engine, path)
            return engine.resolve(reference_text(ref))

        seq: int = choose() if ranks is None else ranks.decide(f"choose a snapshot to {verb} from", choose)
        with in_step(ranks, "open the snapshot"):
            view = SnapshotView(engine, seq, rank)
            info = make_info(view.header, read_tags(engine))
        yield Source(path, repository._settings, engine, view, info)  # noqa: SLF001


def _refuse_own(source: Engine, path: str, own: Engine, verb: str) -> None:
    """Refuses to begin a run from its own repository."""
    if source.repository_id != own.repository_id:
        return
    reason = "the source is the run's own repository"
    raise InvalidInputError(
        f"cannot {verb}: {reason}: {path}",
        hint="go on with a run by resume(); a new run needs a folder of its own",
        what="source",
        reason=reason,
    )


def _refuse_used(engine: Engine, verb: str, *, over_snapshots: bool) -> None:
    """Refuses to begin a run where one has been: the next resume would find either of them."""
    if over_snapshots or not engine.candidates():
        return
    reason = "this repository holds snapshots already"
    raise InvalidInputError(
        f"cannot {verb}: {reason}: {engine.root}",
        hint=f"resume first and {verb} only where its report is fresh, or pass over_snapshots=True",
        what="over_snapshots",
        reason=reason,
    )


def _may_begin(own: Engine, verb: str, source: Engine, path: str, *, over_snapshots: bool) -> None:
    """Refuses what the repositories say against a new run."""
    _refuse_used(own, verb, over_snapshots=over_snapshots)
    _refuse_own(source, path, own, verb)


def _split(objects: Mapping[str, Any]) -> tuple[dict[str, RunIdentity], dict[str, Any]]:
    """Returns the identities among objects, which begin anew, and the objects to restore."""
    labels, others = split_labels(objects)
    for identity in labels.values():
        identity.must_be_untracked()
    return labels, others


# ---- warm start --------------------------------------------------------------------------------


def plan_warm_start(
    source: Folder | Repository, ref: Ref = "latest", *, rules: KeyRules | None = None, **modules: Any
) -> KeyPlan:
    """Says what a warm start would load, from the manifest alone. Nothing is changed.

    Args:
        source: Folder or url of the other repository, or an open manager of it.
        ref: Which snapshot of it.
        rules: As for `CheckpointManager.warm_start`.
        **modules: The live modules by the keywords that names start with.

    Returns:
        The plan, to be printed.

    Raises:
        InvalidInputError: No module is given, or what is given is none, or a rule is not legal.
        MismatchError: Two saved names go to one place.
        SnapshotNotFoundError: There is no such snapshot.

    Example:
        >>> import tempfile, torch
        >>> from varvite import CheckpointManager
        >>> with CheckpointManager(tempfile.mkdtemp()) as manager:
        ...     info = manager.save_sync(0, net=torch.nn.Linear(2, 1))
        ...     print(plan_warm_start(manager, rules={"net": "model"}, model=torch.nn.Linear(2, 1)))
        2 of 2 names would be loaded
          rule `net` gives `model`: 2 names
    """
    _, given = _split(modules)
    live = _live_weights(given)
    with _opened(source, ref, rank=0, verb="plan a warm start") as opened:
        return _plan(live, _saved_weights(opened.view), rules, given)


def start_warm(
    engine: Engine,
    source: Folder | Repository,
    ref: Ref,
    objects: Mapping[str, Any],
    *,
    rank: int,
    ranks: Alone | None,
    rules: KeyRules | None,
    strict: bool,
    skip_shape_mismatches: bool,
    allow_narrowing: bool,
    over_snapshots: bool,
) -> ResumeReport:
    """Loads weights of another run; `CheckpointManager.warm_start` says the rest.

    Args:
        engine: That of the run's own repository.
        source: The other repository.
        ref: Which snapshot of it.
        objects: Modules, and the identity of the run.
        rank: Rank of this process.
        ranks: The ranks that begin together; `None` for this one alone.
        rules: Rules for names.
        strict: Names must match both ways.
        skip_shape_mismatches: What does not fit keeps its value.
        allow_narrowing: Values may be rounded.
        over_snapshots: Go on although the run's own repository holds snapshots.
    """
    verb = "warm start"
    with in_step(ranks, verb):
        identities, modules = _split(objects)
        live = _live_weights(modules)
    check = partial(_may_begin, engine, verb, over_snapshots=over_snapshots)
    with _opened(source, ref, rank=rank, verb=verb, ranks=ranks, check=check) as opened:
        with in_step(ranks, "plan the warm start"):
            saved = _saved_weights(opened.view)
            plan = _plan(live, saved, rules, modules)
        if ranks is not None:
            # Of a pipeline each rank holds a part of the names.
            plan = replace(plan, unexpected=ranks.unite(Problems(unexpected=plan.unexpected)).unexpected)
        with in_step(ranks, "check the warm start"):
            plan.check(strict=strict, skip_shape_mismatches=skip_shape_mismatches)
            _check_dtypes(live, opened.view, plan, allow_narrowing=allow_narrowing)
            view, tree = _under_live_names(live, saved, opened.view, plan)
        override = {"allow_narrowing": allow_narrowing}
        restored = restore_objects(view, modules, strict=False, override=override, tree=tree, peers=ranks)
        for identity in identities.values():
            identity.begin(opened.origin("warm_start"))
        return opened.report(
            "warm_start",
            restored,
            step=None,
            next_step=0,
            missing=plan.missing,
            unexpected=plan.unexpected,
            mismatched=[Mismatched(name, "shape", *shapes) for name, *shapes in plan.mismatched],
            dropped=plan.dropped,
            verified_bytes=view.verified_bytes,
        )


def _nothing_given(verb: str) -> InvalidInputError:
    reason = "no object is given"
    return InvalidInputError(
        f"cannot {verb}: {reason}", hint="pass it by keyword: model=model", what="objects", reason=reason
    )


class _LiveWeight(NamedTuple):
    """A tensor or extra state of a live module: keyword of the module, key in its state dict, value."""

    keyword: str
    key: str
    value: Any


class _SavedWeights(NamedTuple):
    """What a snapshot has to load weights from.

    Attributes:
        shapes: Shape by name; `None` for extra state.
        extra: Typed tree of each extra state of a module, by name.
    """

    shapes: dict[str, list[int] | None]
    extra: dict[str, Json]


def _live_weights(modules: Mapping[str, Any]) -> dict[str, _LiveWeight]:
    """Returns what can be loaded to modules, by name.

    Raises:
        InvalidInputError: No module is given, or one of the objects is none.
    """
    for keyword, module in modules.items():
        if kind_of(module) != "module":
            reason = f"a warm start loads weights alone, and {type_name(module)} is no module"
            raise InvalidInputError(
                f"invalid object `{keyword}`: {reason}",
                hint="leave it out; to take over optimizer state too, fork",
                what=keyword,
                reason=reason,
            )
    if not modules:
        raise _nothing_given("warm start")
    live = {}
    for keyword, module in modules.items():
        state = module_state(module)
        shown = names.state_dict_names(state, lambda value: isinstance(value, dict | list | tuple))
        start = shown_prefix((keyword,))
        for key, name in zip(state, shown, strict=True):
            live[names.join(start, name)] = _LiveWeight(keyword, key, state[key])
    return live


def _saved_weights(view: SnapshotView) -> _SavedWeights:
    """Returns all a snapshot has that rules can speak of: every shared entry, and modules' extra state."""
    _, objects = read_tree(view.reader.structure())
    extra: dict[str, Json] = {}
    for keyword, saved in objects.items():
        if saved.kind != "module":
            continue
        values = unflatten(saved.structure, SavedName)
        if not isinstance(values, StateDict):
            raise corrupt(f"structure of `{keyword}`", "a state dict", values)
        start = shown_prefix((keyword,))
        pairs: Any = saved.structure
        for (key, value), (_, node) in zip(values.items(), pairs["state_dict"], strict=True):
            if is_extra(key, value):
                extra[f"{start}.{key}"] = node
    inside = {name for node in extra.values() for name in structure_names(node)}
    shapes: dict[str, list[int] | None] = {
        name: row.shape for name, row in view.shared.items() if name not in inside
    }
    return _SavedWeights({**shapes, **dict.fromkeys(extra)}, extra)


def _plan(
    live: Mapping[str, _LiveWeight],
    saved: _SavedWeights,
    rules: KeyRules | None,
    modules: Mapping[str, Any],
) -> KeyPlan:
    shapes = {
        name: None if is_extra(one.key, one.value) else list(one.value.shape) for name, one in live.items()
    }
    return plan_keys(saved.shapes, shapes, rules, within=[shown_prefix((keyword,)) for keyword in modules])


def _check_dtypes(
    live: Mapping[str, _LiveWeight], view: SnapshotView, plan: KeyPlan, *, allow_narrowing: bool
) -> None:
    """Refuses dtypes that can't be loaded: a tensor that is left out for that would stay as it was made."""
    lines, rows = [], []
    for name, source in plan.mapping.items():
        one = live[name]
        if is_extra(one.key, one.value):
            continue
        expected, found = describe(name, one.value).dtype, view.description(source)[0]
        if expected != found and not may_convert(found, expected, allow_narrowing=allow_narrowing):
            rows.append((name, "dtype", expected, found))
            lines.append(f"`{name}` has another dtype: expected {expected}, but the snapshot has: {found}")
    if rows:
        raise MismatchError(
            "\n  ".join(
                ["the saved weights have other dtypes, and nothing was changed:", *first_lines(lines, 8)]
            ),
            hint="to round floats on load, pass allow_narrowing=True",
            missing=[],
            unexpected=[],
            mismatched=rows,
        )


def _under_live_names(
    live: Mapping[str, _LiveWeight], saved: _SavedWeights, view: SnapshotView, plan: KeyPlan
) -> tuple[SnapshotView, SavedTree]:
    """Returns the snapshot as if it had been saved from the live modules: as far as the plan goes."""
    sources: dict[str, str] = {}
    pairs: dict[str, list[Json]] = {one.keyword: [] for one in live.values()}
    for name, source in plan.mapping.items():
        node = saved.extra.get(source)
        if source in saved.extra:
            sources.update((leaf, leaf) for leaf in structure_names(node))
        else:
            node = {"tensor": name}
            sources[name] = source
        pairs[live[name].keyword].append([live[name].key, node])
    objects = {keyword: SavedObject("module", {"state_dict": nodes}) for keyword, nodes in pairs.items()}
    return view.renamed(sources), (None, objects)


# ---- fork --------------------------------------------------------------------------------------


def fork_run(
    engine: Engine,
    parent: Folder | Repository,
    ref: Ref,
    objects: Mapping[str, Any],
    *,
    rank: int,
    ranks: Alone | None,
    world_size: int,
    default_name: str,
    name: str | None,
    pin: bool,
    strict: bool,
    allow_narrowing: bool,
    over_snapshots: bool,
) -> ResumeReport:
    """Begins a run from a snapshot of another; `CheckpointManager.fork` says the rest.

    Args:
        engine: That of the run's own repository.
        parent: The other repository.
        ref: Which snapshot of it.
        objects: What to restore, and the identity of the run.
        rank: Rank of this process; rank 0 pins.
        ranks: The ranks that begin together; `None` for this one alone.
        world_size: How many they are.
        default_name: What the run is called in the pin where it has no name.
        name: Name of the run.
        pin: Whether the parent's snapshot is to be kept there.
        strict: Names must match both ways, in the objects given.
        allow_narrowing: Values may be rounded.
        over_snapshots: Go on although the run's own repository holds snapshots.
    """
    with in_step(ranks, "fork"):
        identities, others = _split(objects)
        if not others:
            raise _nothing_given("fork")
    check = partial(_may_begin, engine, "fork", over_snapshots=over_snapshots)
    named = next((identity.name for identity in identities.values() if identity.name), default_name)
    with (
        _opened(parent, ref, rank=rank, verb="fork", ranks=ranks, check=check) as opened,
        ExitStack() as undo,
    ):
        with in_step(ranks, "pin the parent's snapshot"):
            origins = {keyword: _origin_of_fork(opened, keyword) for keyword in identities}
            if pin and rank == 0:
                _pin(opened, _pin_name(name or named, engine.repository_id), undo)
        restored = restore_objects(
            opened.view,
            others,
            strict=strict,
            override={"allow_narrowing": allow_narrowing},
            in_part=True,
            keep_hyper_parameters=True,
            peers=ranks,
            world_size=world_size,
        )
        undo.pop_all()
        for keyword, identity in identities.items():
            identity.begin(origins[keyword])
            identity.name = name or identity.name
        return opened.report(
            "fork",
            restored,
            step=opened.info.step,
            next_step=opened.info.step + 1,
            overridden=restored.found.kept,
            verified_bytes=opened.view.verified_bytes,
        )


def _origin_of_fork(source: Source, keyword: str) -> Origin:
    """Returns where a fork begins, with what the parent's own identity says where it was saved."""
    origin = source.origin("fork")
    if keyword not in labels_in(source.view.header["metadata"]):
        return origin
    state = load_objects(source.view, [keyword], device=None, mmap=False)[keyword]
    run_id, trackers = read_run(state)
    return replace(origin, run_id=run_id, trackers=trackers)


def _pin_name(name: str, repository_id: str) -> str:
    """Returns the name that a run pins its parent by: always the same for one run, and no other's.

    Example:
        >>> _pin_name("high lr", "0123456789abcdef0123456789abcdef")
        'fork.high-lr.0123456789ab'
    """
    legal = re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-")[:60]
    return ".".join(part for part in ("fork", legal, repository_id[:12]) if part)


def _pin(source: Source, name: str, undo: ExitStack) -> None:
    """Has the parent's repository keep the snapshot, before its bytes are read.

    A pin of this name is of this run, from a start that did not reach its first save: it is moved.
    """
    seq = source.info.seq
    try:
        with _open_tags(source) as tags:
            if name in source.info.tags:
                return
            if any(name in named for named in read_tags(tags._engine).values()):  # noqa: SLF001 - as above
                tags.unpin(name)
            tags.pin(f"seq:{seq}", name)
    except StoreError as error:
        raise StoreError(
            f"cannot pin snapshot {seq} of the parent: {error.message}",
            hint="pass pin=False to fork without; then the parent's retention may remove the snapshot",
            **error.facts,
        ) from error
    undo.callback(_unpin, source, name)


def _unpin(source: Source, name: str) -> None:
    """Takes a pin back after a fork that failed, which is what its caller has to hear of."""
    with suppress(CheckpointError), _open_tags(source) as tags:
        tags.unpin(name)


def _open_tags(source: Source) -> CheckpointManager:
    """Opens the parent's repository to add and remove names; one that is read in its bucket, there."""
    from varvite.manager import open_for_tags

    remote = source.settings.remote
    if remote is not None and source.settings.is_direct:
        return open_for_tags(remote.url, remote.options)
    return open_for_tags(source.settings.path)
