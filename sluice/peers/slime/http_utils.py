"""slime.utils.http_utils: the requests of a generate function."""

from sluice.peers.asking import get, post

__all__ = ["get", "post"]
