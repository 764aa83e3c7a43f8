"""`make bench`: the slot store beside fio, then volumes. Both in one run, one after the other, on a quiet machine."""

from __future__ import annotations

import argparse
import json
import os

from bench import store_bench, volume_bench


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--dir", help="a directory on the disk to be measured; default: a temporary one")
    parser.add_argument("--size-mib", type=int, default=512, help="bytes moved in each sample of the store")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=("store", "volumes"))
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    options = parser.parse_args()
    report: dict[str, object] = {}
    if options.only != "volumes":
        report["store"] = store_bench.run(options.dir, size_mib=options.size_mib, rounds=options.rounds)
    if options.only != "store":
        if os.geteuid() != 0:
            raise SystemExit("the volumes need root (loop devices, fscrypt): run as root, or with --only store")
        report["volumes"] = volume_bench.measure(options.dir, options.rounds)
    if options.output == "json":
        print(json.dumps(report, indent=1))
        return
    if "store" in report:
        store_bench.show(report["store"])
    if "volumes" in report:
        volume_bench.show(report["volumes"])


if __name__ == "__main__":
    main()
