"""What a folder or a bucket is like as a place for a repository, and how the repository in it is.

Example:
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     checks = examine(folder)
    >>> [check.name for check in checks][:3]
    ['folder', 'file system', 'free space']
"""

from __future__ import annotations

from varvite.doctor.bucket import examine_bucket
from varvite.doctor.checks import Check
from varvite.doctor.folder import PROBE_COUNT, examine, existing_folder
from varvite.doctor.repository import examine_repository

__all__ = ["PROBE_COUNT", "Check", "examine", "examine_bucket", "examine_repository", "existing_folder"]
