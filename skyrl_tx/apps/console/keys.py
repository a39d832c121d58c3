"""The pages for API keys and for the audit log."""

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
    """Return the scopes that the visitor may give to a new key.

    Only admins can create keys of scope admin.
    """
    if visit.caller.is_admin:
        return cast(tuple[KeyScope, ...], get_args(KeyScope))
    return _OWN_SCOPES if visit.visitor.may_change else ()


@pages.get("/keys", menu="Keys")
def list_keys(visit: Visit) -> Page:
    """List the visitor's keys. Admins see the keys of all owners."""
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
            # `tinker auth login` prints a link to this page with these two parameters
            "is_open": visit.get_query("new_key") == "true",
            "key_name": visit.get_query("key_name"),
        },
    )


@pages.post("/keys")
def create_key(visit: Visit) -> Response | Page:
    """Create a key and show it. It cannot be shown again, because only its digest is stored.

    The key of a user ends with the key that created it.
    """
    # Check the fields of the form
    scope = cast(KeyScope, visit.get_field("scope", "user"))
    name, days = visit.get_field("name"), visit.get_field("days")
    owner = visit.get_field("owner") if visit.caller.is_admin else visit.caller.owner
    if scope not in _list_scopes(visit):
        raise bad_request(f"scope: {scope[:30]!r} must be one of {', '.join(_list_scopes(visit))}")
    if not _OWNER.fullmatch(owner) or owner == LOCAL_OWNER:
        raise bad_request(
            f"owner: {owner[:80]!r} must have 1 to 64 letters, digits, or any of '._@+-', must begin with a letter or "
            f"digit, and must not be {LOCAL_OWNER!r}"
        )

    if len(name) > _MAX_NAME or not name.isprintable():
        raise bad_request(f"name: must have at most {_MAX_NAME} characters, all printable")
    if days and not (days.isascii() and days.isdigit() and 0 < int(days[:9]) <= _MAX_DAYS):
        raise bad_request(f"days: {days[:30]!r} must be a whole number from 1 to {_MAX_DAYS}, or empty")
    if visit.context.settings.no_auth:
        raise bad_request("this server runs with --no-auth, so keys would have no effect; restart it without --no-auth")

    maker = visit.caller.key_id

    def work(tx: Session) -> tuple[str, int | None]:
        key, row = keys.create(
            tx,
            owner=owner,
            scope=scope,
            name=name or owner,
            note="made in the console" + ("" if maker is None else f" with key {maker}"),
            now=visit.now,
            expires_at=visit.now + int(days) * _DAY_S if days else None,
            parent_id=None if visit.caller.is_admin else maker,
        )
        actor = visit.caller.actor
        audit.record(tx, "organization_key_created", actor, visit.now, key=row.key_id, owner=owner, scope=scope)
        return key, row.key_id

    if visit.visitor.is_keyless and scope != "admin":
        raise bad_request("scope: must be admin for the first key, because this key turns on authentication")

    # Create the key
    key, key_id = visit.write(work)
    values = {"key": key, "key_id": key_id, "owner": owner, "scope": scope, "url": str(visit.request.base_url)}
    page = Page("new_key.jinja", values)
    if not visit.visitor.is_keyless:
        return page

    # The first key turns on authentication, so log this browser in with it
    visit.context.authenticator.clear_cache()
    principal = Principal(owner, scope, key_id)
    response = Response()
    visit.sessions.set_cookie(visit.request, response, principal)
    return Page(page.template, values, headers={"set-cookie": response.headers["set-cookie"]})


@pages.post("/keys/{key_id}/revoke")
def revoke_key(visit: Visit) -> Response:
    """Revoke a key permanently."""
    text = visit.path_parameters["key_id"]
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise not_found(f"key {text[:30]!r} does not exist")
    key_id = int(text)

    def work(tx: Session) -> None:
        row = keys.get(tx, key_id)
        if row is None or not visit.caller.can_act_for(row.owner):
            raise not_found(f"key {key_id} does not exist, or is revoked already")
        # A key of scope user must not revoke an admin key of the same owner
        if row.scope == "admin" and not visit.caller.is_admin:
            raise ApiError(HTTPStatus.FORBIDDEN, "only an admin can revoke a key of scope admin")
        keys.revoke(tx, key_id, visit.now)
        actor = visit.caller.actor
        audit.record(tx, "organization_key_revoked", actor, visit.now, key=key_id, owner=row.owner)

    visit.write(work)
    visit.context.authenticator.clear_cache()
    return see_other("/keys")


@pages.get("/audit", menu="Audit", is_for_admins=True)
def show_audit_log(visit: Visit) -> Page:
    """List the entries of the audit log, newest first.

    Raises ApiError 403 if the visitor is not an admin.
    """
    visit.require_admin("only admins can read the audit log")
    resource, before = visit.get_query("resource"), visit.get_int("before", 0, maximum=2**53)
    rows = visit.read(
        lambda tx: audit.list_entries(
            tx,
            resources=[resource] if resource in _RESOURCES else None,
            before=before or None,
            limit=_AUDIT_ROWS + 1,
            newest_first=True,
        )
    )

    # One more row was read to find out whether there is an older page
    shown = rows[:_AUDIT_ROWS]
    return Page(
        "audit.jinja",
        {
            "entries": shown,
            "resource": resource,
            "resources": _RESOURCES,
            "first": visit.make_url(before=None) if before else None,
            "older": visit.make_url(before=shown[-1].position) if len(rows) > _AUDIT_ROWS else None,
        },
    )
