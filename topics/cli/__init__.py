"""Commands."""

from typing import Final

EXIT_USAGE: Final = 2
EXIT_BROKEN_PIPE: Final = 141
