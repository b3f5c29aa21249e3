"""Places where models, data and checkpoints are kept: the Hugging Face hub, object stores, HTTP.

`uri` parses the addresses, `filesystem` opens them, `errors` says what went wrong. Clients are
fsspec's and the hub's own; credentials and endpoints come from the environment that these read.
"""

from sluice.stores.errors import StoreError, store_errors
from sluice.stores.filesystem import filesystem
from sluice.stores.uri import Uri, UriError, hub_id, parse_uri

__all__ = ["StoreError", "Uri", "UriError", "filesystem", "hub_id", "parse_uri", "store_errors"]
