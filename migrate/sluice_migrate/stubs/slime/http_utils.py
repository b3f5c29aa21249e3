"""slime.utils.http_utils: the requests of a generate function."""

from sluice_migrate.stubs.http import get, post

__all__ = ["get", "post"]
