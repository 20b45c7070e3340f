"""Two ranks that agree on an error and end by it: ``torchrun … leaving.py DIRECTORY``."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from gar import UserError
from gar.distributed import joined
from support.torchrun import leave


def threads() -> list[str]:
    """Names of this process's threads that are not Python's (Linux)."""
    names = [path.read_text(encoding="ascii").strip() for path in Path("/proc/self/task").glob("*/comm")]
    return [name for name in names if name.startswith(("gloo", "pt_gloo"))]


def main(out: Path) -> None:
    inside: list[str] = []
    try:
        with joined() as job:
            job.use(torch.device("cpu"))
            job.ranks.gather(torch.ones(2))

            def fails_on_the_second() -> None:
                if not job.is_first:
                    raise UserError("no such thing")

            inside += threads()
            job.each(fails_on_the_second)
    except UserError as error:
        found = {"message": str(error), "inside": inside, "after": threads(), "rank": job.control.rank}
    torch.save(found, out / f"left-{found['rank']}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    leave()
