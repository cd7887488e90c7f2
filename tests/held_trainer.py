"""The real trainer with the saboteur's gate: SABOTEUR_GATE is a file with a number, and after that
step it is held until the file says more. It says when it has heard that it is to pause.

Run by the supervisor as `trainer.command`, without arguments.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from supervisor import contract
from supervisor.contract import Entry, Receipt
from supervisor.link import Life, Link
from trainer import __main__ as program

HELD_SECONDS = 0.005


class HeldLink(Link):
    def __init__(self, life: Life) -> None:
        super().__init__(life)
        self.told: str | None = None

    def record(self, receipt: Receipt) -> None:
        super().record(receipt)
        gate = os.environ.get("SABOTEUR_GATE")
        if not isinstance(receipt, Entry) or gate is None:
            return
        while receipt.step >= int(Path(gate).read_text()) and not self.stop_wanted():
            self.tell()
            time.sleep(HELD_SECONDS)
        self.tell()

    def tell(self) -> None:
        if self._pause not in (None, self.told):
            self.told = self._pause
            print(f"asked to pause: {self.told}", flush=True)


if __name__ == "__main__":
    program.Link = HeldLink  # type: ignore[attr-defined]
    sys.argv[1:] = ["--run", os.environ[contract.ENV_RUN_DIRECTORY]]
    sys.exit(program.main())
