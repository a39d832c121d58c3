"""What the engine holds of samples that wait."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column."""
    op.add_column("engine_state", sa.Column("load", sa.JSON))


def downgrade() -> None:
    """Remove the column."""
    op.drop_column("engine_state", "load")
