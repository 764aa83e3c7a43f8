"""Kernel constants by their header names: ioctl numbers, flags and sizes that Python's own modules lack.

Values come from the uapi headers named at each block (Linux 6.1). Calls are in the neighbours.
"""

from __future__ import annotations

import platform
from typing import Final


def _ioc(direction: int, kind: str | int, number: int, size_bytes: int) -> int:
    """asm-generic/ioctl.h `_IOC` (x86-64, arm64, riscv64; not mips, powerpc, sparc)."""
    letter = ord(kind) if isinstance(kind, str) else kind
    return direction << 30 | size_bytes << 16 | letter << 8 | number


def _iow(kind: str | int, number: int, size_bytes: int) -> int:
    return _ioc(1, kind, number, size_bytes)


def _ior(kind: str | int, number: int, size_bytes: int) -> int:
    return _ioc(2, kind, number, size_bytes)


def _iowr(kind: str | int, number: int, size_bytes: int) -> int:
    return _ioc(3, kind, number, size_bytes)


# linux/fcntl.h, linux/openat2.h
AT_FDCWD: Final = -100
AT_SYMLINK_NOFOLLOW: Final = 0x100
AT_EMPTY_PATH: Final = 0x1000
O_PATH: Final = 0o10000000
RESOLVE_NO_XDEV: Final = 0x01
RESOLVE_NO_MAGICLINKS: Final = 0x02
RESOLVE_NO_SYMLINKS: Final = 0x04
RESOLVE_BENEATH: Final = 0x08
SYS_openat2: Final = 437  # one number on every architecture that `_ioc` holds for

# linux/fanotify.h, asm-generic/fcntl.h
# os.O_LARGEFILE is 0 on 64 bits: open(2) adds it by itself. fanotify_init(2) does not, and files beyond 2 GiB need it.
O_LARGEFILE: Final = 0o400000 if platform.machine() == "aarch64" else 0o100000
FAN_CLOEXEC: Final = 0x01
FAN_NONBLOCK: Final = 0x02
FAN_CLASS_CONTENT: Final = 0x04
FAN_UNLIMITED_QUEUE: Final = 0x10
FAN_REPORT_PIDFD: Final = 0x80
FAN_MARK_ADD: Final = 0x01
FAN_MARK_FILESYSTEM: Final = 0x100
FAN_OPEN_PERM: Final = 0x10000
FAN_ALLOW: Final = 1
FAN_DENY: Final = 2
FAN_EVENT_INFO_TYPE_PIDFD: Final = 4
FANOTIFY_METADATA_VERSION: Final = 3

# linux/stat.h
STATX_MNT_ID: Final = 0x1000
STATX_DIOALIGN: Final = 0x2000
STATX_ATTR_MOUNT_ROOT: Final = 0x2000

# linux/mount.h
MS_RDONLY: Final = 0x1
MS_NOSUID: Final = 0x2
MS_NODEV: Final = 0x4
MS_NOEXEC: Final = 0x8
MS_REMOUNT: Final = 0x20
MS_NOATIME: Final = 0x400
MS_BIND: Final = 0x1000
MS_MOVE: Final = 0x2000
MS_REC: Final = 0x4000
MS_PRIVATE: Final = 1 << 18
MS_SLAVE: Final = 1 << 19
MS_SHARED: Final = 1 << 20
MNT_FORCE: Final = 1
MNT_DETACH: Final = 2
UMOUNT_NOFOLLOW: Final = 8

# linux/prctl.h, asm-generic/mman.h
PR_SET_PDEATHSIG: Final = 1
PR_GET_DUMPABLE: Final = 3
PR_SET_DUMPABLE: Final = 4
PR_CAPBSET_READ: Final = 23
PR_CAPBSET_DROP: Final = 24
PR_CAP_AMBIENT: Final = 47
PR_CAP_AMBIENT_CLEAR_ALL: Final = 4
MCL_CURRENT: Final = 1
MCL_FUTURE: Final = 2

# linux/falloc.h
FALLOC_FL_KEEP_SIZE: Final = 0x01
FALLOC_FL_PUNCH_HOLE: Final = 0x02

# linux/fs.h
FS_IOC_GETFLAGS: Final = _ior("f", 1, 8)
FS_IOC_GETVERSION: Final = _ior("v", 1, 8)
FS_IOC_SETFLAGS: Final = _iow("f", 2, 8)
FS_IOC_FIEMAP: Final = _iowr("f", 11, 32)
FS_APPEND_FL: Final = 0x20
FS_IMMUTABLE_FL: Final = 0x10
FS_JOURNAL_DATA_FL: Final = 0x4000
FS_NOCOW_FL: Final = 0x00800000
BLKDISCARD: Final = _ioc(0, 0x12, 119, 0)
BLKZEROOUT: Final = _ioc(0, 0x12, 127, 0)
BLKGETSIZE64: Final = _ior(0x12, 114, 8)
BLKFLSBUF: Final = _ioc(0, 0x12, 97, 0)

# linux/fiemap.h
FIEMAP_FLAG_SYNC: Final = 0x01
FIEMAP_MAX_OFFSET: Final = 2**64 - 1
FIEMAP_EXTENT_LAST: Final = 0x0001
FIEMAP_EXTENT_UNKNOWN: Final = 0x0002
FIEMAP_EXTENT_DELALLOC: Final = 0x0004
FIEMAP_EXTENT_ENCODED: Final = 0x0008
FIEMAP_EXTENT_DATA_ENCRYPTED: Final = 0x0080
FIEMAP_EXTENT_NOT_ALIGNED: Final = 0x0100
FIEMAP_EXTENT_DATA_INLINE: Final = 0x0200
FIEMAP_EXTENT_UNWRITTEN: Final = 0x0800
FIEMAP_EXTENT_SHARED: Final = 0x2000

# linux/loop.h
LOOP_MAJOR: Final = 7
LO_FLAGS_READ_ONLY: Final = 1
LO_FLAGS_AUTOCLEAR: Final = 4
LO_FLAGS_DIRECT_IO: Final = 16
LOOP_CLR_FD: Final = 0x4C01
LOOP_SET_STATUS64: Final = 0x4C04
LOOP_GET_STATUS64: Final = 0x4C05
LOOP_CONFIGURE: Final = 0x4C0A
LOOP_CTL_GET_FREE: Final = 0x4C82

# linux/dm-ioctl.h
_DM_IOCTL: Final = 0xFD
_DM_IOCTL_SIZE: Final = 312
DM_DEV_SUSPEND: Final = _iowr(_DM_IOCTL, 6, _DM_IOCTL_SIZE)
DM_TABLE_LOAD: Final = _iowr(_DM_IOCTL, 9, _DM_IOCTL_SIZE)
DM_TABLE_CLEAR: Final = _iowr(_DM_IOCTL, 10, _DM_IOCTL_SIZE)
DM_TABLE_STATUS: Final = _iowr(_DM_IOCTL, 12, _DM_IOCTL_SIZE)
DM_TARGET_MSG: Final = _iowr(_DM_IOCTL, 14, _DM_IOCTL_SIZE)
DM_SUSPEND_FLAG: Final = 1 << 1
DM_STATUS_TABLE_FLAG: Final = 1 << 4
DM_INACTIVE_PRESENT_FLAG: Final = 1 << 6
DM_BUFFER_FULL_FLAG: Final = 1 << 8
DM_SKIP_LOCKFS_FLAG: Final = 1 << 10
DM_NOFLUSH_FLAG: Final = 1 << 11
DM_SECURE_DATA_FLAG: Final = 1 << 15

# linux/fscrypt.h
FSCRYPT_POLICY_V1: Final = 0
FSCRYPT_POLICY_V2: Final = 2
FSCRYPT_POLICY_FLAGS_PAD_32: Final = 0x03
FSCRYPT_MODE_AES_256_XTS: Final = 1
FSCRYPT_MODE_AES_256_CTS: Final = 4
FSCRYPT_KEY_SPEC_TYPE_DESCRIPTOR: Final = 1
FSCRYPT_KEY_SPEC_TYPE_IDENTIFIER: Final = 2
FSCRYPT_KEY_DESCRIPTOR_SIZE: Final = 8
FSCRYPT_KEY_IDENTIFIER_SIZE: Final = 16
FSCRYPT_MAX_KEY_SIZE: Final = 64
FSCRYPT_KEY_STATUS_ABSENT: Final = 1
FSCRYPT_KEY_STATUS_PRESENT: Final = 2
FSCRYPT_KEY_STATUS_INCOMPLETELY_REMOVED: Final = 3
FSCRYPT_KEY_REMOVAL_STATUS_FLAG_FILES_BUSY: Final = 1
FSCRYPT_KEY_REMOVAL_STATUS_FLAG_OTHER_USERS: Final = 2
FS_IOC_SET_ENCRYPTION_POLICY: Final = _ior("f", 19, 12)
FS_IOC_GET_ENCRYPTION_POLICY_EX: Final = _iowr("f", 22, 9)
FS_IOC_ADD_ENCRYPTION_KEY: Final = _iowr("f", 23, 80)
FS_IOC_REMOVE_ENCRYPTION_KEY: Final = _iowr("f", 24, 64)
FS_IOC_REMOVE_ENCRYPTION_KEY_ALL_USERS: Final = _iowr("f", 25, 64)
FS_IOC_GET_ENCRYPTION_KEY_STATUS: Final = _iowr("f", 26, 128)

# linux/magic.h and the file systems' own headers. 0xEF53 is ext2, ext3 and ext4 alike.
EXT_SUPER_MAGIC: Final = 0xEF53
FILE_SYSTEM_NAMES: Final = {
    0x58465342: "xfs",
    0x9123683E: "btrfs",
    0xF2F52010: "f2fs",
    0x01021994: "tmpfs",
    0x858458F6: "ramfs",
    0x794C7630: "overlay",
    0x2FC12FC1: "zfs",
    0xCA451A4E: "bcachefs",
    0x6969: "nfs",
    0xFF534D42: "cifs",
    0x65735546: "fuse",
    0x00C36400: "ceph",
    0x4D44: "vfat",
    0x2011BAB0: "exfat",
    0x9FA0: "proc",
    0x62656572: "sysfs",
    0x1CD1: "devpts",
    0x73717368: "squashfs",
    0x00C0FFEE: "hostfs",
    0x01021997: "9p",
}
