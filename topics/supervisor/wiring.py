"""What the children of the real service run."""

from __future__ import annotations

from typing import Final

from topics.compactor.main import run as run_compactor
from topics.frontend.main import run as run_frontend
from topics.supervisor import resharding
from topics.supervisor.children import ChildMains
from topics.walshard.main import run as run_walshard

MAINS: Final = ChildMains(
    frontend=run_frontend,
    walshard=run_walshard,
    compactor=run_compactor,
    reshard=resharding.run,
    needs_reshard=resharding.is_needed,
)
