"""Read and write the Hugging Face hub, object stores and web servers.

`filesystem` opens a URI (`sluice.uri`), `errors` says what went wrong, and `cache` keeps what was
fetched. The clients are those of fsspec and of the hub, which read credentials and endpoints from
the environment.
"""

from sluice.stores.errors import StoreError, store_errors
from sluice.stores.filesystem import filesystem
from sluice.uri import Uri, UriError, hub_id, parse_uri

__all__ = ["StoreError", "Uri", "UriError", "filesystem", "hub_id", "parse_uri", "store_errors"]
