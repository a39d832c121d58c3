"""Which base weights a model is trained on."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column; models made before are not known."""
    op.add_column("models", sa.Column("base_model_hash", sa.String, nullable=True))


def downgrade() -> None:
    """Remove the column."""
    op.drop_column("models", "base_model_hash")
