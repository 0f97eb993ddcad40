"""How long two ranks take to say that the other's host is lost: their link is taken down while one
makes a plan and the other waits for it. Each stands in a network namespace of its own (needs root).

    python benchmarks/lost_host.py

Prints what each rank raised, and how many seconds after the link went down (*measured*).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.lab import NotPermitted, ShapedPair

WITHIN_S = 10.0


def on_rank(folder: Path) -> None:
    import torch.distributed as dist

    from overlapc.core.errors import RankError
    from overlapc.ranks.exchange import Exchange

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    try:
        with Exchange([0, 1]) as exchange:
            exchange.agree("trace", "8c1f", "use one model")
            (folder / f"waits-{rank}").touch()
            exchange.broadcast("plan", lambda: time.sleep(60) or "too late")
        said = "nothing"
    except RankError as error:
        said = str(error)
    record = json.dumps([said, time.monotonic()])
    (folder / f"said-{rank}").write_text(record)
    os._exit(0)  # the process group would wait for the other host


def main() -> int:
    if "RANK" in os.environ:
        on_rank(Path(sys.argv[1]))
    try:
        with tempfile.TemporaryDirectory() as name, ShapedPair(None) as pair:
            folder = Path(name)
            ranks = threading.Thread(target=pair.run, args=([__file__, name],))
            ranks.start()
            while not all((folder / f"waits-{rank}").exists() for rank in range(2)):
                assert ranks.is_alive(), "a rank has ended"
                time.sleep(0.05)
            down = ["ip", "-n", pair.names[1], "link", "set", pair.links[1], "down"]
            subprocess.run(down, check=True)
            lost = time.monotonic()
            ranks.join()
            late = False
            for rank in range(2):
                said, when = json.loads((folder / f"said-{rank}").read_text())
                print(f"rank {rank}, {when - lost:.1f} s: {said}")
                late |= when - lost > WITHIN_S or f"rank {1 - rank}" not in said
            return int(late)
    except NotPermitted as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
