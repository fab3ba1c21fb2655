"""The part of a traceback that is code of the user: what people look for when their reward or loss fails."""

from __future__ import annotations

import os
import sysconfig
import traceback

_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_LIBRARY = sysconfig.get_path("stdlib") + os.sep
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


def user_frames(error: BaseException) -> traceback.StackSummary:
    """Return the frames of an error from the user's first one on; none where only our own code ran."""
    frames = traceback.extract_tb(error.__traceback__)
    while frames and (frames[0].filename.startswith(_PACKAGE) or _is_library(frames[0].filename)):
        del frames[0]
    return frames


def place(error: BaseException) -> str:
    """Return `` (FILE.py:LINE)`` of the user's last line that an error came through; "" without any.

    Lines of installed packages, which the user's code has called, do not count where there is another.
    """
    frames = user_frames(error)
    user_code_frames = [
        f for f in frames if not _is_library(f.filename) and not _is_installed(f.filename)
    ]
    for frame in (user_code_frames or frames)[-1:]:
        return f" ({os.path.basename(frame.filename)}:{frame.lineno})"
    return ""


def _is_library(filename: str) -> bool:
    is_frozen = filename.startswith("<frozen ")
    return is_frozen or (filename.startswith(_LIBRARY) and not _is_installed(filename))


def _is_installed(filename: str) -> bool:
    return any(part in filename for part in _INSTALLED)
