"""Marks of forgotten requests, and checksums of bodies and results."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

_COLUMNS = ("body_crc", "result_crc")


def upgrade() -> None:
    """Add table, columns and index; what is there has no checksum."""
    op.create_table(
        "pruned",
        sa.Column("numbered_by", sa.String, primary_key=True),
        sa.Column("up_to", sa.BigInteger, nullable=False),
    )
    for name in _COLUMNS:
        op.add_column("requests", sa.Column(name, sa.BigInteger, nullable=True))
    is_pruned = sa.text("result IS NULL AND status <> 'open'")
    op.create_index(
        "ix_requests_pruned", "requests", ["fetched_at"], sqlite_where=is_pruned, postgresql_where=is_pruned
    )


def downgrade() -> None:
    """Remove them."""
    op.drop_index("ix_requests_pruned", "requests")
    for name in _COLUMNS:
        op.drop_column("requests", name)
    op.drop_table("pruned")
