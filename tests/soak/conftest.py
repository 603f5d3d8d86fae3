"""One fork server for all tests of this folder."""

import pytest

from .fork_server import ForkServer, fork_server

# A mount that only this process and its children see, and that ends with them.
SMALL_DISK = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
os.mkdir("small")
CLONE_NEWNS, MS_REC, MS_PRIVATE = 0x20000, 0x4000, 0x40000
refused = libc.unshare(CLONE_NEWNS) or libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None)
refused = refused or libc.mount(b"tmpfs", b"small", b"tmpfs", 0, b"size=600k")
if refused:
    open("refused", "w").close()
"""


@pytest.fixture(scope="package")
def server(tmp_path_factory) -> ForkServer:
    with fork_server(tmp_path_factory.mktemp("runs"), SMALL_DISK) as started:
        yield started
