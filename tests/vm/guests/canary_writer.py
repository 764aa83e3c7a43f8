"""Fills a file with canary lines on /dev/ubdb, plain or through dm-crypt, makes it durable, and waits to be cut.

args: encrypted (bool), lines (list of str), copies. Reports the key, which exists in this machine's memory only, so
that the test can look for it on the disk. With `attach` it only tries to mount what is there, under a fresh key.
"""

from __future__ import annotations

import os
import subprocess
import time

from umlguest import blockdev, channel

DISK = "/dev/ubdb"


def open_crypt(key: bytes) -> str:
    blockdev.load("dm-crypt")
    # The key goes through a pipe: no argument, no environment, no file. Without `--hash plain` cryptsetup hashes what
    # comes from a pipe, and the key that a test then looks for on the disk is not the one in use.
    cipher = ("--type", "plain", "--hash", "plain", "--cipher", "aes-xts-plain64", "--key-size", "512")
    pipe = ("--key-file", "-", "--keyfile-size", "64", "--batch-mode")
    blockdev.run("cryptsetup", "open", *cipher, *pipe, DISK, "vault", data=key)
    if key_in_table() != key.hex():
        raise RuntimeError("the kernel uses another key than it was given")
    return "/dev/mapper/vault"


def key_in_table() -> str:
    return blockdev.run("dmsetup", "table", "--showkeys", "vault").split()[4]


def main() -> None:
    device = DISK
    if channel.args["encrypted"]:
        key = os.urandom(64)
        channel.report("key", hex=key.hex())
        device = open_crypt(key)
    if channel.args.get("attach"):
        os.makedirs("/mnt/volume")
        done = subprocess.run(
            ["mount", "-t", "ext4", device, "/mnt/volume"], capture_output=True, text=True, check=False
        )
        channel.report("attached", mounted=done.returncode == 0, said=done.stderr.strip())
        return
    blockdev.make_file_system("ext4", device)
    data = "".join(channel.args["lines"]).encode()
    with blockdev.mounted(device) as volume:
        for number in range(channel.args["copies"]):
            blockdev.write_durably(volume / f"slot.{number}", data)
        again = (volume / "slot.0").read_bytes()
        channel.report("written", reads_back=again == data)
        time.sleep(3600)


if __name__ == "__main__":
    main()
