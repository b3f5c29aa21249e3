"""Records of a run's files, as a client gets them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sluice.runtime.extras import install_command
from sluice_client.errors import ClientError

if TYPE_CHECKING:
    import pandas as pd


class Records(list[dict[str, Any]]):
    """A list of records, which is plain data; `to_pandas()` makes a data frame of it."""

    def to_pandas(self) -> pd.DataFrame:
        """The records as rows of a data frame. Raises ClientError if pandas is not installed."""
        try:
            import pandas as pd
        except ModuleNotFoundError as error:
            raise ClientError(f"a data frame needs pandas: {install_command('client')}") from error
        return pd.DataFrame(list(self))
