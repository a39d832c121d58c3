"""The page of projects: what is in them and who sees it, and for admins the forms that set and remove members."""

from http import HTTPStatus
from typing import get_args

from starlette.responses import RedirectResponse, Response

from skyrl_tx.apps.console.visit import Page, PageTable, Visit
from skyrl_tx.server.errors import ApiError, bad_request, not_found
from skyrl_tx.store import projects
from skyrl_tx.store.tables import ProjectRole

pages = PageTable()
_MAX_SHOWN = 200
_ROLES: tuple[ProjectRole, ...] = get_args(ProjectRole)


@pages.get("/projects")
def list_projects(visit: Visit) -> Page:
    """Show the projects that the visitor works in or is a member of, to admins all."""
    found = visit.read(lambda tx: projects.visible(tx, visit.caller.owner_filter, _MAX_SHOWN))
    return Page("projects.jinja", {"projects": found, "is_cut": len(found) == _MAX_SHOWN, "roles": _ROLES})


@pages.post("/projects")
def set_member(visit: Visit) -> Response:
    """Give an owner a role in a project."""
    role = visit.field("role")
    if role not in _ROLES:
        raise bad_request(f"role: {role[:50]!r} is not one of {', '.join(_ROLES)}")
    _put(visit, role)
    return RedirectResponse("/projects", HTTPStatus.SEE_OTHER)


@pages.post("/projects/remove")
def remove_member(visit: Visit) -> Response:
    """Take a member out of a project."""
    if not _put(visit, None):
        raise not_found(f"{visit.field('owner')[:80]!r} is no member of project {visit.field('project')[:80]!r}")
    return RedirectResponse("/projects", HTTPStatus.SEE_OTHER)


def _put(visit: Visit, role: ProjectRole | None) -> bool:
    if not visit.caller.is_admin:
        raise ApiError(HTTPStatus.FORBIDDEN, "members of projects are set by an admin")
    project_id, owner, actor = visit.field("project"), visit.field("owner"), visit.caller.actor
    return visit.write(lambda tx: projects.put_member(tx, project_id, owner, role, actor, visit.now))
