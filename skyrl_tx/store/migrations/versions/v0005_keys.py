"""Keys that callers show."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make the table."""
    op.create_table(
        "api_keys",
        sa.Column("key_id", sa.Integer, primary_key=True),
        sa.Column("digest", sa.String, nullable=False, unique=True),
        sa.Column("hint", sa.String, nullable=False),
        sa.Column("owner", sa.String, nullable=False),
        sa.Column("scope", sa.String, nullable=False),
        sa.Column("name", sa.String, nullable=False),
        sa.Column("note", sa.String, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("revoked_at", sa.Float),
        sqlite_autoincrement=True,
    )


def downgrade() -> None:
    """Remove the table."""
    op.drop_table("api_keys")
