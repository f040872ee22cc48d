"""What the children of the real service run."""

from __future__ import annotations

from typing import Final

from topics.frontend import main as frontend
from topics.supervisor import resharding
from topics.supervisor.children import ChildMains
from topics.walshard import main as walshard

MAINS: Final = ChildMains(
    frontend=frontend.run, walshard=walshard.run, reshard=resharding.run, needs_reshard=resharding.is_needed
)
