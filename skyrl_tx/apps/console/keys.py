"""The pages about access: API keys, and the audit log of what was done with them."""

import re
from http import HTTPStatus
from typing import cast, get_args

from sqlmodel import Session
from starlette.responses import Response

from skyrl_tx.apps.console import queries
from skyrl_tx.apps.console.visit import Page, PageTable, Visit, see_other
from skyrl_tx.server.errors import ApiError, bad_request, not_found
from skyrl_tx.server.identity.authentication import Principal
from skyrl_tx.store import audit, keys
from skyrl_tx.store.keys import LOCAL_OWNER
from skyrl_tx.store.tables import KeyScope

pages = PageTable()
_PAGE_ROWS = 50
_DAY_S = 86_400
_MAX_DAYS = 3650
_MAX_NAME = 100
_OWNER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,63}")
_OWN_SCOPES: tuple[KeyScope, ...] = ("user", "sample", "read")
_AUDIT_ROWS = 100
_RESOURCES = ("checkpoint", "run", "project", "organization")


def _list_scopes(visit: Visit) -> tuple[KeyScope, ...]:
    """Return the scopes that the visitor's new keys may have: none beyond its own."""
    if visit.caller.is_admin:
        return cast(tuple[KeyScope, ...], get_args(KeyScope))
    return _OWN_SCOPES if visit.visitor.may_change else ()


@pages.get("/keys", menu="Keys")
def list_keys(visit: Visit) -> Page:
    """Show the keys of the visitor, to admins those of all owners."""
    query = visit.make_list_query(_PAGE_ROWS)
    rows, total = visit.read(lambda tx: queries.read_key_page(tx, query))
    return Page(
        "keys.jinja",
        {
            "keys": [(row, keys.get_status(row, visit.now)) for row in rows],
            "pager": visit.make_pager(_PAGE_ROWS, len(rows), total),
            "scopes": _list_scopes(visit),
            "is_first": visit.visitor.is_keyless and not total,
            "is_disabled": visit.context.settings.no_auth,
            # `tinker auth login` prints the address of this page with these two.
            "is_open": visit.get_query("new_key") == "true",
            "key_name": visit.get_query("key_name"),
        },
    )


@pages.post("/keys")
def create_key(visit: Visit) -> Response | Page:
    """Create a key and show it, for the only time."""
    scope = cast(KeyScope, visit.get_field("scope", "user"))
    name, days = visit.get_field("name"), visit.get_field("days")
    owner = visit.get_field("owner") if visit.caller.is_admin else visit.caller.owner
    if scope not in _list_scopes(visit):
        raise bad_request(f"scope: {scope[:30]!r} is not one of {', '.join(_list_scopes(visit))}")
    if not _OWNER.fullmatch(owner) or owner == LOCAL_OWNER:
        raise bad_request(
            f"owner: {owner[:80]!r} must be 1 to 64 letters, digits or '.', '_', '@', '+', '-', and not {LOCAL_OWNER!r}"
        )
    if len(name) > _MAX_NAME or not name.isprintable():
        raise bad_request(f"name: at most {_MAX_NAME} printable characters")
    if days and not (days.isascii() and days.isdigit() and 0 < int(days[:9]) <= _MAX_DAYS):
        raise bad_request(f"days: {days[:30]!r} is not a whole number from 1 to {_MAX_DAYS}")
    if visit.context.settings.no_auth:
        raise bad_request("authentication is disabled on this server (--no-auth): keys have no effect")

    def work(tx: Session) -> tuple[str, int | None]:
        key, row = keys.create(
            tx,
            owner=owner,
            scope=scope,
            name=name or owner,
            note="made in the console",
            now=visit.now,
            expires_at=visit.now + int(days) * _DAY_S if days else None,
        )
        actor = visit.caller.actor
        audit.record(tx, "organization_key_created", actor, visit.now, key=row.key_id, owner=owner, scope=scope)
        return key, row.key_id

    if visit.visitor.is_keyless and scope != "admin":
        raise bad_request("scope: the first key turns authentication on, so it must be one of scope admin")
    key, key_id = visit.write(work)
    values = {"key": key, "key_id": key_id, "owner": owner, "scope": scope, "url": str(visit.request.base_url)}
    page = Page("new_key.jinja", values)
    if not visit.visitor.is_keyless:
        return page
    # From now on the server asks for keys, this browser too.
    visit.context.authenticator.clear_cache()
    principal = Principal(owner, scope, key_id)
    holder = Response()
    visit.sessions.set_cookie(visit.request, holder, principal)
    return Page(page.template, values, headers={"set-cookie": holder.headers["set-cookie"]})


@pages.post("/keys/{key_id}/revoke")
def revoke_key(visit: Visit) -> Response:
    """Revoke a key permanently."""
    text = visit.path["key_id"]
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise not_found(f"key {text[:30]!r} does not exist")
    key_id = int(text)

    def work(tx: Session) -> None:
        row = keys.get(tx, key_id)
        if row is None or not visit.caller.can_act_for(row.owner):
            raise not_found(f"key {key_id} does not exist, or has been revoked")
        # A key of scope user must not end an admin key of the same owner.
        if row.scope == "admin" and not visit.caller.is_admin:
            raise ApiError(HTTPStatus.FORBIDDEN, "a key of scope admin is revoked by an admin")
        keys.revoke(tx, key_id, visit.now)
        actor = visit.caller.actor
        audit.record(tx, "organization_key_revoked", actor, visit.now, key=key_id, owner=row.owner)

    visit.write(work)
    visit.context.authenticator.clear_cache()
    return see_other("/keys")


@pages.get("/audit", menu="Audit", is_for_admins=True)
def show_audit_log(visit: Visit) -> Page:
    """Show who did what, the newest first. Raises ApiError 403 for visitors who are no admins."""
    visit.require_admin("the audit log is for admins")
    resource, before = visit.get_query("resource"), visit.get_whole("before", 0, most=2**53)
    rows = visit.read(
        lambda tx: audit.list_entries(
            tx,
            resources=[resource] if resource in _RESOURCES else None,
            before=before or None,
            limit=_AUDIT_ROWS + 1,
            newest_first=True,
        )
    )

    # One more row was read, to know whether there are older ones.
    shown = rows[:_AUDIT_ROWS]
    return Page(
        "audit.jinja",
        {
            "entries": shown,
            "resource": resource,
            "resources": _RESOURCES,
            "first": visit.make_address(before=None) if before else None,
            "older": visit.make_address(before=shown[-1].position) if len(rows) > _AUDIT_ROWS else None,
        },
    )
