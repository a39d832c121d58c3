"""Pages to list, inspect, publish, expire, delete, restore and download checkpoints."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Literal

from sqlmodel import Session
from starlette.responses import Response

from skyrl_tx.apps.console import queries
from skyrl_tx.apps.console.rendering import shorten_id
from skyrl_tx.apps.console.visit import Page, PageTable, Visit, see_other
from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.ids import CheckpointKind, CheckpointPath
from skyrl_tx.contract.numbers import MAX_TTL_S
from skyrl_tx.server.errors import ApiError, bad_request, not_found
from skyrl_tx.server.identity import access
from skyrl_tx.server.routes.downloads import make_archive_url
from skyrl_tx.server.submission.validation import quote_value
from skyrl_tx.store import audit, checkpoints, models
from skyrl_tx.store.tables import CheckpointRow

NodeKind = Literal["base", "run", "checkpoint", "copy", "hidden"]

pages = PageTable()
_PAGE_ROWS = 50
_MAX_SELECTED = 500
_MAX_CHILDREN = 50
_MAX_ANCESTORS = 20
_DAY_S = 86_400
_SCOPES = ("own", "published", "deleted")
_ONE = "/checkpoints/{run_id}/{kind}/{name}"


@dataclass(frozen=True, slots=True)
class Node:
    """A base model, run or checkpoint in a lineage.

    `path` is the run's id or the checkpoint's path.
    """

    kind: NodeKind
    path: str
    title: str
    is_current: bool = False


@dataclass(frozen=True, slots=True)
class Line:
    """A node of a lineage with its depth in the tree, from 0."""

    depth: int
    node: Node


@pages.get("/checkpoints", menu="Checkpoints")
def list_checkpoints(visit: Visit) -> Page:
    """List checkpoints. `?scope=` chooses own (including projects), published or deleted ones."""
    # Check the filters
    scope, kind = visit.get_query("scope", "own"), visit.get_query("kind")
    if scope not in _SCOPES:
        raise bad_request(f"scope: {scope!r} must be one of {', '.join(_SCOPES)}")
    if kind and kind not in list(CheckpointKind):
        raise bad_request(f"kind: {kind!r} must be one of {', '.join(CheckpointKind)}")

    # Read one page of the list
    query = visit.make_list_query(_PAGE_ROWS)
    rows, total, num_bytes = visit.read(
        lambda tx: queries.read_checkpoint_page(tx, query, kind=kind, scope=scope, now=visit.now)
    )

    return Page(
        "checkpoints.jinja",
        {
            "checkpoints": [_describe(visit, row, owner, scope) for row, owner in rows],
            "pager": visit.make_pager(_PAGE_ROWS, len(rows), total),
            "num_bytes": num_bytes,
            "scope": scope,
            "kind": kind,
            "kinds": list(CheckpointKind),
            "search": query.search,
        },
    )


def _describe(visit: Visit, row: CheckpointRow, owner: str, scope: str) -> tuple[CheckpointRow, str, bool]:
    """Return a checkpoint, the name of its owner to show, and whether to link its run.

    For a published checkpoint of another owner, only the part of the owner's name before "@" is
    shown, as in the API.
    """
    is_visible = scope != "published" or visit.caller.can_act_for(owner)
    return row, owner if is_visible else owner.partition("@")[0], is_visible


@pages.get(_ONE)
def show_checkpoint(visit: Visit) -> Page:
    """Show one checkpoint, with the runs and checkpoints it comes from and those made from it."""
    path = _read_path(visit)

    def work(tx: Session) -> Page:
        row, maker = access.find_readable_checkpoint(tx, visit.caller, path)
        owner = models.get_owner(tx, path.model_id) or ""
        is_visible = access.can_see_run(tx, visit.caller, path.model_id)

        # Runs and copies made from it, if the visitor may see them
        loaded = queries.list_runs_loaded_from(tx, str(path), _MAX_CHILDREN)
        runs = [model_id for model_id in loaded if access.can_see_run(tx, visit.caller, model_id)]
        copies = [
            str(copy.path)
            for copy in queries.list_copies(tx, str(path), _MAX_CHILDREN, visit.now)
            if access.can_see_run(tx, visit.caller, copy.model_id)
        ]
        ancestors = _find_ancestors(tx, visit, row) if is_visible else []

        return Page(
            "checkpoint.jinja",
            {
                "row": row,
                "path_text": str(path),
                "owner": owner if is_visible else owner.partition("@")[0],
                "is_visible": is_visible,
                "is_editable": access.can_edit_run(tx, visit.caller, path.model_id),
                "base_model": maker.base_model,
                "rank": access.decode_spec(maker).lora.rank,
                "metadata": access.filter_metadata(row, is_visible) or {},
                "lineage": draw_lineage(maker.base_model, ancestors, row, runs, copies),
            },
        )

    return visit.read(work)


def _find_ancestors(tx: Session, visit: Visit, row: CheckpointRow) -> Sequence[Node]:
    """Return the runs and checkpoints that a checkpoint is based on, oldest first."""
    ancestors: list[Node] = []
    current: CheckpointRow | None = row
    while current is not None and len(ancestors) < _MAX_ANCESTORS:
        # A copy comes from another checkpoint, and any other checkpoint from its run
        run = models.get(tx, current.model_id)
        source = current.copied_from
        if source is None:
            ancestors.append(_make_run_node(current.model_id))
            source = None if run is None else run.loaded_from
        if source is None:
            break

        parent = _find_visible(tx, visit, source)
        ancestors.append(_make_checkpoint_node(source, is_visible=parent is not None))
        current = parent
    return ancestors[::-1]


def _find_visible(tx: Session, visit: Visit, path: str) -> CheckpointRow | None:
    try:
        row, _ = access.find_saved_weights(tx, [visit.caller], CheckpointPath.parse(path), visit.now)
    except UserError:
        return None
    return row if access.can_see_run(tx, visit.caller, row.model_id) else None


@pages.post(_ONE + "/publish")
def publish(visit: Visit) -> Response:
    """Publish or unpublish a checkpoint."""
    is_public = visit.get_field("public") == "yes"
    path = _read_path(visit)

    def work(tx: Session) -> None:
        checkpoints.set_public(tx, _find_editable(tx, visit, path), is_public)
        event = "checkpoint_publish" if is_public else "checkpoint_unpublish"
        audit.record(tx, event, visit.caller.actor, visit.now, path=path)

    visit.write(work)
    return _redirect_to(path)


@pages.post(_ONE + "/ttl")
def set_lifetime(visit: Visit) -> Response:
    """Set after how many days from now a checkpoint expires. An empty field means never."""
    text, path = visit.get_field("days"), _read_path(visit)
    try:
        days = float(text) if text else None
    except ValueError:
        days = -1.0
    if days is not None and not 0 < days * _DAY_S <= MAX_TTL_S:
        raise bad_request(f"days: {text[:30]!r} must be a number greater than 0 and at most 3650, or empty")
    expires_at = None if days is None else visit.now + days * _DAY_S

    def work(tx: Session) -> None:
        checkpoints.set_ttl(tx, _find_editable(tx, visit, path), expires_at)
        seconds = None if days is None else days * _DAY_S
        audit.record(tx, "checkpoint_ttl_set", visit.caller.actor, visit.now, path=path, ttl_seconds=seconds)

    visit.write(work)
    return _redirect_to(path)


@pages.get(_ONE + "/download")
def download(visit: Visit) -> Response:
    """Redirect to a signed URL that downloads the checkpoint as a tar file."""
    path = _read_path(visit)

    def work(tx: Session) -> CheckpointRow:
        checkpoint, _ = access.find_readable_checkpoint(tx, visit.caller, path)
        audit.record(tx, "checkpoint_read", visit.caller.actor, visit.now, path=path, purpose="download")
        return checkpoint

    row = visit.write(work)
    return see_other(make_archive_url(visit.context, visit.caller, visit.request, row))


@pages.post("/checkpoints/delete")
def delete(visit: Visit) -> Page:
    """Delete the selected checkpoints, or ask for confirmation first.

    The confirmation page shows how much disk space this frees. Deleted checkpoints can be restored
    for a day.
    """
    paths = _read_selected(visit)

    # The visitor has confirmed
    if visit.get_field("confirmed") == "yes":

        def work(tx: Session) -> None:
            for path in paths:
                checkpoints.mark_deleted(tx, _find_editable(tx, visit, path), visit.now)
                audit.record(tx, "checkpoint_delete", visit.caller.actor, visit.now, path=path)

        visit.write(work)
        return Page("deleted.jinja", {"paths": [str(path) for path in paths]})

    # Ask for confirmation
    def read_selected(tx: Session) -> tuple[list[CheckpointRow], dict[str, int]]:
        rows = [checkpoints.get(tx, _find_editable(tx, visit, path), visit.now) for path in paths]
        existing = [row for row in rows if row is not None]
        return existing, queries.count_references(tx, {row.artifact_id for row in existing}, visit.now)

    rows, references = visit.read(read_selected)
    return Page("confirm_delete.jinja", {"rows": rows, "freed": count_freed_bytes(rows, references)})


@pages.post("/checkpoints/restore")
def restore(visit: Visit) -> Response:
    """Restore the selected deleted checkpoints."""
    paths = _read_selected(visit)

    def work(tx: Session) -> None:
        for path in paths:
            access.find_editable_run(tx, visit.caller, path.model_id)
            if not checkpoints.undelete(tx, path):
                raise not_found(f"checkpoint {path} can no longer be restored; deleted checkpoints are kept for a day")
            audit.record(tx, "checkpoint_restore", visit.caller.actor, visit.now, path=path)

    visit.write(work)
    return see_other("/checkpoints")


def _read_selected(visit: Visit) -> list[CheckpointPath]:
    paths = [CheckpointPath.parse(text) for text in dict.fromkeys(visit.get_fields("path"))]
    if not paths:
        raise bad_request("no checkpoint is selected; go back and select at least one")
    if len(paths) > _MAX_SELECTED:
        raise bad_request(f"{len(paths)} checkpoints are selected; select at most {_MAX_SELECTED}")
    return paths


def _read_path(visit: Visit) -> CheckpointPath:
    try:
        return CheckpointPath.of_parts(*(visit.path_parameters[part] for part in ("run_id", "kind", "name")))
    except UserError as error:
        raise ApiError(HTTPStatus.NOT_FOUND, error.message) from error


def _find_editable(tx: Session, visit: Visit, path: CheckpointPath) -> CheckpointPath:
    """Return the path if it is a checkpoint that the visitor may change, else raise ApiError."""
    access.find_editable_run(tx, visit.caller, path.model_id)
    if checkpoints.get(tx, path, visit.now) is None:
        raise not_found(f"checkpoint {quote_value(str(path))} does not exist")
    return path


def _redirect_to(path: CheckpointPath) -> Response:
    return see_other(f"/checkpoints/{path.model_id}/{path.checkpoint_id}")


def count_freed_bytes(selected: Sequence[CheckpointRow], references: Mapping[str, int]) -> int:
    """Return the size of the artifacts that only the selected checkpoints use.

    `references` is the number of checkpoints that use each artifact.
    """
    uses: dict[str, int] = {}
    sizes: dict[str, int] = {}
    for row in selected:
        uses[row.artifact_id] = uses.get(row.artifact_id, 0) + 1
        sizes[row.artifact_id] = row.size_bytes
    return sum(size for name, size in sizes.items() if uses[name] >= references.get(name, 0))


def _make_checkpoint_node(path: str, *, is_visible: bool, is_current: bool = False, is_copy: bool = False) -> Node:
    """Return the node of a checkpoint.

    If the visitor may not see the checkpoint, the node shows no details.
    """
    if not is_visible:
        return Node("hidden", "", "a deleted checkpoint, or a checkpoint of another owner")
    try:
        parsed = CheckpointPath.parse(path)
    except UserError:
        return Node("hidden", "", path)
    return Node("copy" if is_copy else "checkpoint", path, parsed.checkpoint_id, is_current)


def _make_run_node(model_id: str) -> Node:
    return Node("run", model_id, shorten_id(model_id))


def draw_lineage(
    base_model: str,
    ancestors: Sequence[Node],
    current: CheckpointRow,
    runs: Sequence[str],
    copies: Sequence[str],
) -> list[Line]:
    """Return the lineage of a checkpoint as a tree.

    The base model is the root. Below it follow the ancestors, the checkpoint itself, and the runs
    and copies made from it.
    """
    node = _make_checkpoint_node(str(current.path), is_visible=True, is_current=True)
    children = [_make_run_node(model_id) for model_id in runs]
    children += [_make_checkpoint_node(path, is_visible=True, is_copy=True) for path in copies]
    before = [Line(depth, node) for depth, node in enumerate([Node("base", "", base_model), *ancestors, node])]
    return before + [Line(len(before), child) for child in children]
