"""`make bench`: the slot store beside fio, then volumes, and the gate before a pod's files. All in one run, one after the other.

`make bench-scale` (`--scale`): the controller under a large fleet instead, on a real API server.
"""

from __future__ import annotations

import argparse
import json
import os

from bench import gate_bench, store_bench, volume_bench


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--dir", help="a directory on the disk to be measured; default: a temporary one")
    parser.add_argument("--size-mib", type=int, default=512, help="bytes moved in each sample of the store")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=("store", "volumes", "gate"))
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    parser.add_argument("--scale", action="store_true", help="the controller under a simulated fleet, and nothing else")
    parser.add_argument(
        "--tiers", type=int, default=1000, help="of the fleet; nodes are twice, volumes ten times as many"
    )
    options = parser.parse_args()
    if options.scale:
        from bench import scale_bench  # noqa: PLC0415 (it needs the tests' tools, which the others do not)

        found = scale_bench.run(
            scale_bench.Size(tiers=options.tiers, nodes=2 * options.tiers, volumes=10 * options.tiers)
        )
        if options.output == "json":
            print(json.dumps(found, indent=1))
        else:
            scale_bench.show(found)
        return
    report: dict[str, object] = {}
    if options.only in (None, "store"):
        report["store"] = store_bench.run(options.dir, size_mib=options.size_mib, rounds=options.rounds)
    if options.only != "store":
        if os.geteuid() != 0:
            raise SystemExit("volumes and gate need root (loop devices, fscrypt, fanotify): as root, or --only store")
        if options.only in (None, "volumes"):
            report["volumes"] = volume_bench.measure(options.dir, options.rounds)
        if options.only in (None, "gate"):
            report["gate"] = gate_bench.measure(options.dir, options.rounds)
    if options.output == "json":
        print(json.dumps(report, indent=1))
        return
    if "store" in report:
        store_bench.show(report["store"])
    if "volumes" in report:
        volume_bench.show(report["volumes"])
    if "gate" in report:
        gate_bench.show(report["gate"])


if __name__ == "__main__":
    main()
