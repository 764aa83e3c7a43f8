"""What runs in short-lived children (`kernel.bounded.call`): calls that can hang in the kernel, and all handling of keys.

Each function takes `fds` (name to descriptor) and plain arguments, and returns a dict. The modules here import only what
they need: such a child must start in tens of milliseconds.
"""
