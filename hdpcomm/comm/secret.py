"""The job's secret: who knows it is one of the job's ranks. Handshakes prove that both ends do; it is never sent.

Source: HMAC, RFC 2104, with SHA-256; challenge and response with a nonce of either side (ISO/IEC 9798-4, three passes).
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import stat
import struct
import tempfile
from pathlib import Path

from hdpcomm import _core
from hdpcomm.errors import InvalidUsage
from hdpcomm.files import user_folder

__all__ = ["MAC_BYTES", "NONCE_BYTES", "SAME_SECRET", "Secret", "job_secret", "new_secret"]

MAC_BYTES = 32
NONCE_BYTES = 32
#: What to do about ranks that do not know the same secret.
SAME_SECRET = (
    "set HDPCOMM_SECRET or HDPCOMM_SECRET_FILE to the same one on all ranks (without them each user has one in "
    "~/.local/state/hdpcomm, so ranks of several users, and hosts that share no home, need one)"
)
_LEAST_CHARACTERS = 16


class Secret:
    """Signs and verifies with the job's secret. It shows itself in no text."""

    __slots__ = ("_key",)

    def __init__(self, text: str) -> None:
        self._key = text.encode()

    def sign(self, purpose: str, *parts: bytes) -> bytes:
        """The MAC (32 bytes) of the parts; ``purpose`` keeps what was signed for one thing from serving for another."""
        mac = hmac.new(self._key, digestmod="sha256")
        for part in (purpose.encode(), *parts):
            mac.update(struct.pack(">Q", len(part)) + part)
        return mac.digest()

    def verify(self, mac: bytes, purpose: str, *parts: bytes) -> bool:
        """Whether the parts were signed with this secret for this purpose, in a time that tells nothing."""
        return hmac.compare_digest(mac, self.sign(purpose, *parts))

    def __repr__(self) -> str:
        return "<Secret>"


def new_secret() -> str:
    """A secret for a new job, as text for ``HDPCOMM_SECRET``."""
    return secrets.token_hex(32)


def job_secret() -> Secret:
    """The secret of ``HDPCOMM_SECRET`` or ``HDPCOMM_SECRET_FILE``; where neither is set, this user's own. Local.

    The user's own is made once, in a file that only he can read: ``hdpcomm/secret`` in ``XDG_STATE_HOME`` or
    ``~/.local/state``, so hosts with a shared home have the same one (:func:`hdpcomm.files.user_folder`).

    Raises: InvalidUsage when both are set, the secret is short, others may read its file, or no file can be made.
    """
    settings = _core.settings()
    text, name, source = settings.secret, settings.secret_file, "HDPCOMM_SECRET"
    if text and name:
        raise InvalidUsage("HDPCOMM_SECRET and HDPCOMM_SECRET_FILE are both set; set one of them")
    if name:
        source = f"HDPCOMM_SECRET_FILE={name}"
        text = _from_file(Path(name), source)
    elif not text:
        path = _users_file()
        source = f"the file {path}"
        text = _from_file(path, source)
    if len(text) < _LEAST_CHARACTERS:
        raise InvalidUsage(
            f"the secret of {source} has {len(text)} characters; give at least {_LEAST_CHARACTERS} that nobody can "
            "guess, the same on all ranks (python -c 'import secrets; print(secrets.token_hex(32))')"
        )
    return Secret(text)


def _users_file() -> Path:
    """Where this user's own secret is, made if it is not there. Ranks that come at once get the same one."""
    folder = user_folder("XDG_STATE_HOME", ".local", "state")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        wrong = "is another user's, or others may write there" if _others_write(folder) else ""
        if not wrong and not (folder / "secret").exists():
            _make(folder / "secret")
    except OSError as error:
        wrong = str(error.strerror)
    if wrong:
        raise InvalidUsage(
            f"no file for this user's secret can be made ({folder}: {wrong}); set HDPCOMM_SECRET to the same one on "
            "all ranks (python -c 'import secrets; print(secrets.token_hex(32))')"
        )
    return folder / "secret"


def _others_write(folder: Path) -> bool:
    status = folder.lstat()
    return not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or bool(status.st_mode & 0o022)


def _make(path: Path) -> None:
    """Writes a new secret, unless another process has done so: whole or not at all."""
    handle, name = tempfile.mkstemp(prefix=".secret-", dir=path.parent)  # 0600
    try:
        with open(handle, "w") as file:
            file.write(new_secret() + "\n")
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(name, path)
    finally:
        os.unlink(name)


def _from_file(path: Path, where: str) -> str:
    try:
        # O_NONBLOCK: a named pipe in its place must not make the rank wait.
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(handle, "rb") as file:
            status = os.fstat(handle)
            if not stat.S_ISREG(status.st_mode):
                raise InvalidUsage(f"{where} is no regular file; write the secret into one")
            if status.st_mode & 0o077 or status.st_uid not in (os.geteuid(), 0):
                raise InvalidUsage(
                    f"{where} may be read by others than user {os.geteuid()} (owner {status.st_uid}, mode "
                    f"{stat.S_IMODE(status.st_mode):o}); make it yours alone: chmod 600"
                )
            return file.read(65536).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidUsage(f"{where} cannot be read: {error}; name a file with the job's secret") from error
