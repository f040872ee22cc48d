"""Attack a service of one's own, and say what was found: `python -m tests.attack --seed 7 --rounds 30`.

Clients of each feature keep a model of what they were promised by the contract. Meanwhile processes are killed,
the service is stopped, killed, started with other counts, and loses power. After every third round all is compared.
The seed decides what is done and written; how the processes take turns is not decided by it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.attack.asking import COUNTS
from tests.attack.assault import NoCompilerError
from tests.attack.campaign import Campaign


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.attack", description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--round-s", type=float, default=0.6, help="seconds that the clients work in a round")
    parser.add_argument("--no-power-loss", action="store_true", help="needs no C compiler")
    given = parser.parse_args()
    began_s = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(prefix="topics-attack-", dir="/dev/shm") as folder:
            campaign = Campaign(given.seed, None if given.no_power_loss else Path(folder))
            findings = campaign.run(given.rounds, given.round_s, say=True)
    except NoCompilerError as error:
        print(f"{error}. Install one, or leave them out with --no-power-loss", file=sys.stderr)
        return 2
    for finding in findings:
        print("FOUND", finding)
    took_s = time.monotonic() - began_s
    print(f"seed {given.seed}: {len(findings)} findings in {took_s:.0f} s, {dict(COUNTS)}")
    return int(bool(findings))


if __name__ == "__main__":
    sys.exit(main())
