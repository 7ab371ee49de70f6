"""Network file systems are refused as a store's place: SQLite's locks and renames fail there."""

from __future__ import annotations

import re
from pathlib import Path

from kvsnap.formats.errors import StoreError

MOUNTS = Path("/proc/self/mountinfo")
"""Linux's table of mounts; elsewhere nothing is refused."""
NETWORK = re.compile(
    r"nfs\d?|cifs|smb\w*|ncpfs|afs|ceph|glusterfs|lustre|beegfs|gpfs|orangefs|davfs|vboxsf|prl_fs|"
    r"fuse\.(sshfs|glusterfs|ceph\S*|s3fs|rclone|gcsfuse|goofys|mount-s3|juicefs|davfs2?|smbnetfs)"
)


def refuse_network_file_system(root: Path) -> None:
    """Raises `StoreError` where `root` is, or would be, on a network file system."""
    kind = file_system(root)
    if kind is not None and NETWORK.fullmatch(kind):
        raise StoreError(
            f"{root} is on a network file system ({kind}), where a store is not safe",
            "keep the store on a local disk; a network folder can be used as a remote",
        )


def file_system(path: Path) -> str | None:
    """The type of the file system that holds `path`; None where that cannot be told."""
    try:
        table = MOUNTS.read_text(encoding="utf-8", errors="replace")
        real = path.resolve()
    except (OSError, RuntimeError):  # a loop of links is the latter
        return None
    best, found = -1, None
    for line in table.splitlines():
        # 36 35 98:0 /root /mount/point options optional... - type source options
        before, _, after = line.partition(" - ")
        parts, rest = before.split(" "), after.split(" ")
        if len(parts) < 5 or not rest[0]:
            continue
        point = Path(re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), parts[4]))
        if (point == real or point in real.parents) and len(point.parts) >= best:
            best, found = len(point.parts), rest[0]
    return found
