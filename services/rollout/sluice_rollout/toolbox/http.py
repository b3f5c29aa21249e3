"""Fetches pages and images of hosts that the job names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urljoin, urlsplit

import aiohttp

from sluice_rollout.toolbox.base import body_of, definition_of, shortened
from sluice_rollout.toolbox.results import is_image

_REDIRECTS = 3
_MOVED = (301, 302, 303, 307, 308)


@dataclass(slots=True)
class Http:
    """The tool `fetch`: the text or the image at an address, by GET."""

    # Allowed hosts, with a port unless it is the scheme's. Redirects to other hosts are refused.
    hosts: Sequence[str]
    name: str = "fetch"
    # Headers of all requests.
    headers: dict[str, str] = field(default_factory=dict)
    # Time limit of a call.
    seconds: float = 10.0
    # Most bytes of a body.
    most_bytes: int = 1 << 20
    # Most characters of an answer.
    longest: int = 8192
    definition: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        text = f"Fetch the text or the image at an address. Hosts: {', '.join(self.hosts)}."
        self.definition = definition_of(self.name, text, url="The address.")

    def session(self) -> Callable[..., Any]:
        """Return the function of the tool. It keeps no state, and no cookies."""
        return self.fetch

    async def fetch(self, url: str) -> str | bytes:
        """Return the text or the file of an image at an address, or why there is none."""
        limit = aiohttp.ClientTimeout(total=self.seconds)
        jar = aiohttp.DummyCookieJar()
        try:
            async with aiohttp.ClientSession(
                timeout=limit, headers=self.headers, cookie_jar=jar
            ) as session:
                found = await self._get(session, str(url))
                return found if isinstance(found, bytes) else shortened(found, self.longest)
        except TimeoutError:
            return f"error: no answer after {self.seconds:g} s"
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return f"error: {type(error).__name__}: {error}"

    async def _get(self, session: aiohttp.ClientSession, url: str) -> str | bytes:
        for _ in range(_REDIRECTS + 1):
            if refusal := self._refusal(url):
                return refusal
            async with session.get(url, allow_redirects=False) as response:
                if response.status in _MOVED and "Location" in response.headers:
                    url = urljoin(url, response.headers["Location"])
                    continue
                data = await body_of(response, self.most_bytes + 1)
                if response.ok and is_image(data):
                    if len(data) > self.most_bytes:
                        return f"error: an image of more than {self.most_bytes} bytes"
                    return data
                data = data[: self.most_bytes]
                text = data.decode(response.charset or "utf-8", "replace")
                return text if response.ok else f"error: HTTP {response.status}: {text}"
        return f"error: more than {_REDIRECTS} redirects"

    def _refusal(self, url: str) -> str:
        """Return why an address is refused; empty if it is not."""
        address = urlsplit(url)
        if address.scheme not in ("http", "https") or "@" in address.netloc:
            return "error: expected an address http://HOST/... or https://HOST/..."
        if address.netloc.lower() not in {host.lower() for host in self.hosts}:
            return f"error: {address.netloc} is not allowed; allowed hosts: {', '.join(self.hosts)}"
        return ""
