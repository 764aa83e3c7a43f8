"""A consumer of a volume: fills its slot files with the lines it is given, by plain writes, and keeps them open.

`python agent_consumer.py UID SLOT...`. Standard input: lines, then an empty line; then it waits for a line before it writes.
Prints `written` when every byte is on the disk (fsync), and ends with its standard input. After a line `eat` there it takes
memory until it is killed.
"""

import os
import sys

lines = []
while (line := sys.stdin.buffer.readline()) not in (b"\n", b""):
    lines.append(line)
data = b"".join(lines)
if sys.stdin.buffer.readline() == b"":
    sys.exit("the guardian died before the consumer was on record")
# Here and not at the start: the interpreter may lie where only root can run it.
os.setgroups([])
os.setresgid(*[int(sys.argv[1])] * 3)
os.setresuid(*[int(sys.argv[1])] * 3)
held = []
for path in sys.argv[2:]:
    fd = os.open(path, os.O_RDWR)
    size = os.fstat(fd).st_size
    content = (data * (size // len(data) + 1))[:size]
    done = 0
    while done < size:
        done += os.pwrite(fd, content[done : done + 262144], done)
    os.fsync(fd)
    held.append(fd)
print("written", flush=True)
if sys.stdin.buffer.readline() == b"eat\n":
    eaten = []
    while True:
        eaten.append(b"x" * (1 << 20))
